"""Ranking many candidates for one context: goals C1 to C5.

    python benchmarks/context.py                    all kinds, 500,000 rows a table, a few minutes
    python benchmarks/context.py --quick            two kinds, small tables
    python benchmarks/context.py --kind din         one kind
    python benchmarks/context.py --triton           through a real Triton as well, over gRPC (C2)
    python benchmarks/context.py --device cuda:0    16 x 1,000 on a GPU (C5)

Each model of context_models.py is asked in three ways, in turns in one process with the same number of threads: ONNX
Runtime on the original and the request tiled (`plain`), the model imported without `--context` and the request tiled
(`tiled`), and the model imported with it and the request as it is (`context`). Medians of all rounds are shown, and how
often more pairs of a context and a candidate `context` ranks per second. On a CPU the time is that of the processor, of
all threads of the process, so that what else runs on the machine counts less: pairs per second and core. Each kind is
measured in a process of its own, so that only one model is held at a time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
from context_models import KINDS, RankingModel
from numpy.typing import NDArray

from inference_session import InferenceSession, Request
from inference_session.importers.onnx import import_onnx
from inference_session.model_spec import CANDIDATES
from triton_backend.repository.config_writer import write_model_config

Arrays = dict[str, NDArray[Any]]
GOALS = {"din": 3.5, "mmoe": 4.0, "self_attention": 7.0, "dcn": 2.0, "dlrm": 1.5, "two_towers": 1.5}
NUM_USERS = 16
_RUNS_OF_A_TURN = 3


class Case(NamedTuple):
    """One kind of model, imported and opened in all ways."""

    kind: str
    ranking: RankingModel
    plain: Any
    tiled: InferenceSession
    context: InferenceSession


def main() -> None:
    """Run the selected measurements, and print them."""
    options = _options()
    print(
        f"C1: 1 context x 1,000 candidates; C3, C5: {NUM_USERS} contexts x 1,000; C2: 1 x 500 through Triton over gRPC"
    )
    print(
        "ms of one core, or of the GPU; how often more pairs per second `context` ranks than `plain` and than `tiled`"
    )
    ratios = [_of_its_own(kind, options) for kind in options.kinds]
    found = [ratio for ratio in ratios if ratio is not None]
    if found:
        print(f"C2: mean {statistics.mean(found):.2f} (goal 0.55; 0.4 where a history is attended to)")


def _of_its_own(kind: str, options: argparse.Namespace) -> float | None:
    """Measure one kind in a new process; returns its p50 through Triton and the tiled request's, if selected."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, kind, options).result()


def _measure(kind: str, options: argparse.Namespace) -> float | None:
    ranking = next(make for make in KINDS if make.__name__ == kind)(options.rows)
    with tempfile.TemporaryDirectory(prefix="hotrow-context-") as folder, ExitStack() as opened:
        repository = Path(folder) / "repository"
        _import(ranking, Path(folder) / f"{kind}.onnx", repository, kind)
        case = _open(opened, Path(folder), kind, ranking, options)
        print(ranking.name, flush=True)
        if options.device == "cpu":
            _rank_for_one(case, options.rounds)
        _rank_for_many(case, options.rounds, time.process_time if options.device == "cpu" else time.perf_counter)
        _compare_answers(case)
        return _through_triton(case, repository, options.rounds) if options.triton else None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two kinds, small tables, few rounds")
    parser.add_argument("--kind", action="append", choices=list(GOALS), help="this kind; may be given again")
    parser.add_argument("--triton", action="store_true", help="through a real Triton as well")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N")
    parser.add_argument("--threads", type=int, default=1, help="of each network and look-up")
    parser.add_argument("--rows", type=int, help="of each table")
    parser.add_argument("--rounds", type=int, help="measured in turns")
    options = parser.parse_args()
    names = [kind.__name__ for kind in KINDS]
    options.kinds = options.kind or (names[:2] if options.quick else names)
    options.rows = options.rows or (20_000 if options.quick else 500_000)
    options.rounds = options.rounds or (5 if options.quick else 30)
    return options


def _import(ranking: RankingModel, path: Path, repository: Path, kind: str) -> None:
    """As `<kind>_tiled` and as `<kind>_context`."""
    onnx.save(ranking.model, path)
    for name, context in ((f"{kind}_tiled", ()), (f"{kind}_context", ranking.context)):
        report = import_onnx(path, repository, name, context=context)
        write_model_config(report.version_dir, report.spec, name)


def _open(opened: ExitStack, folder: Path, kind: str, ranking: RankingModel, options: argparse.Namespace) -> Case:
    settings = {"dense_threads": options.threads, "lookup_threads": options.threads, "device": options.device}
    settings |= {} if options.device == "cpu" else {"warm_up_s": 10}  # as in Triton: CUDA graphs are recorded then
    tiled, context = (
        opened.enter_context(InferenceSession.open(folder / "repository" / f"{kind}_{way}" / "1", **settings))
        for way in ("tiled", "context")
    )
    network = onnxruntime.SessionOptions()
    network.intra_op_num_threads = options.threads
    network.log_severity_level = 3
    # ONNX Runtime rounds factors to TF32 unless told otherwise; the versions of hotrow here do not.
    gpu = "CUDAExecutionProvider", {"use_tf32": "0"}
    providers = ["CPUExecutionProvider"] if options.device == "cpu" else [gpu]
    plain = onnxruntime.InferenceSession(str(folder / f"{kind}.onnx"), network, providers=providers)
    return Case(kind, ranking, plain, tiled, context)


def _medians(
    ways: Mapping[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Seconds of each way. They take turns of a few runs each: in the first run the caches hold other data."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, run in ways.items():
            run()
            for _ in range(_RUNS_OF_A_TURN):
                begin = clock()
                run()
                seconds[name].append(clock() - begin)
    return {name: statistics.median(found) for name, found in seconds.items()}


def _ways(case: Case, request: Arrays, counts: NDArray[np.int32]) -> dict[str, Callable[[], Any]]:
    tiled = case.ranking.tiled(request, counts)
    ranked = {**request, CANDIDATES: counts}
    return {
        "plain": lambda: case.plain.run(None, tiled),
        "tiled": lambda: case.tiled.run(tiled),
        "context": lambda: case.context.run(ranked),
    }


def _rank_for_one(case: Case, rounds: int) -> None:
    request, counts = case.ranking.request(1, 1000), np.array([1000], np.int32)
    found = _medians(_ways(case, request, counts), rounds, time.process_time)
    num_bytes = sum(array.nbytes for array in request.values()) + counts.nbytes
    tiled_bytes = sum(array.nbytes for array in case.ranking.tiled(request, counts).values())
    print(
        f"  C1  {_in_ms(found)}  x {found['plain'] / found['context']:.2f} x {found['tiled'] / found['context']:.2f} "
        f"(goal {GOALS[case.kind]})  bytes sent 1/{tiled_bytes / num_bytes:.0f}"
    )


def _rank_for_many(case: Case, rounds: int, clock: Callable[[], float]) -> None:
    request, counts = case.ranking.request(NUM_USERS, NUM_USERS * 1000), np.full(NUM_USERS, 1000, np.int32)
    requests = [Request(case.ranking.request(1, 1000, seed=seed)) for seed in range(NUM_USERS)]
    ways = _ways(case, request, counts)
    ways["joined"] = lambda: case.context.run_many(requests)
    found = _medians(ways, max(3, rounds // 5), clock)
    print(
        f"  C3  {_in_ms(found)}  x {found['plain'] / found['context']:.2f} x {found['tiled'] / found['context']:.2f}  "
        f"{NUM_USERS} requests joined: {found['context'] / found['joined']:.2f} of one request"
    )


def _in_ms(seconds: Mapping[str, float]) -> str:
    return "".join(f"{name} {value * 1e3:8.2f}  " for name, value in seconds.items())


def _compare_answers(case: Case) -> None:
    largest = 0.0
    for counts in ([1000], [1], [7, 0, 500, 3], [40] * 16):
        request = case.ranking.request(len(counts), sum(counts), seed=sum(counts))
        names = [output.name for output in case.plain.get_outputs()]
        expected = case.plain.run(names, case.ranking.tiled(request, np.array(counts)))
        found = case.context.run({**request, CANDIDATES: np.array(counts, np.int32)}, names)
        differences = [np.abs(found[name] - array).max() for name, array in zip(names, expected, strict=True)]
        largest = max(largest, *map(float, differences))
    print(f"  C4  largest difference from the original on tiled inputs, all outputs: {largest:.1e}")


def _through_triton(case: Case, repository: Path, rounds: int) -> float:
    import tritonclient.grpc as triton
    from serving import serve, tensors

    names = tuple(f"{case.kind}_{way}" for way in ("tiled", "context"))
    with serve(repository, *names) as server, triton.InferenceServerClient(server.endpoints["gRPC"]) as client:
        request = case.ranking.request(1, 500)
        tiled = case.ranking.tiled(request, np.array([500]))
        ways = {
            way: partial(client.infer, f"{case.kind}_{way}", tensors(triton, arrays))
            for way, arrays in (("tiled", tiled), ("context", request))
        }
        found = _medians(ways, 5 * rounds)
    ratio = found["context"] / found["tiled"]
    print(f"  C2  p50 {_in_ms(found)}  {ratio:.2f} of the tiled request's")
    return ratio


if __name__ == "__main__":
    main()
