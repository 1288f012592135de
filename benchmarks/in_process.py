"""Requests in process, compared with the whole network in plain ONNX Runtime: goal G7c.

    python benchmarks/in_process.py            4 M rows, forty rounds
    python benchmarks/in_process.py --quick    400 k rows, ten rounds

The model of triton.py: 26 features, a table each, dim 16, one packed input, MLP 64-1, one thread. In a round each way
answers random requests for some milliseconds, in turns; each round begins with another way. Requests come again only
after all others: with 4 M rows, their vectors are then no longer in the processor's caches, except those of single
samples, which are too few.

arrays    `FastPath.run`, as the Triton backend calls it
requests  `InferenceSession.run` or `run_many`, as a program calls it
plain     ONNX Runtime on the original; several requests are joined by NumPy and their answers split

The lines that begin with `modulo` are of the same model with ids of any size, of which it takes the remainder by the
number of rows, feature by feature: hotrow computes these keys by a graph of their own.

A line shows the best and the median time of a call. Then, for `arrays` and `requests`, plain's time over theirs: of
the best times, and as median and range over the rounds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from triton import FEATURES, Network, write_models, write_ours

from inference_session import InferenceSession, Request
from inference_session.requests.outputs import JoinedAnswer

CASES = ((1, 1, "5"), (1, 64, "3"), (8, 64, "2.8"), (1, 1024, "2.5"))
"""Requests, samples of each, and how often faster than plain they should be."""
ROUND_S = 0.01
"""Seconds that a way is repeated in a round."""
KEYS, MAX_BATCHES = 1 << 20, 1024
"""Of all batches of a case together, at least four: their vectors take 64 MiB."""

NUM_ROWS, NUM_ROWS_QUICK = 4_000_000, 400_000
MAX_ID = 1 << 40

Arrays = list[NDArray[Any]]
"""The requests of a batch: int64 [samples, features] each."""
Ways = dict[str, Callable[[Arrays], Any]]


def main() -> None:
    """Write the model, and measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rows_per_table = (NUM_ROWS_QUICK if quick else NUM_ROWS) // FEATURES
    with tempfile.TemporaryDirectory(prefix="hotrow-in-process-") as name:
        folder = Path(name)
        write_models(folder / "repository", folder / "model", Network(rows_per_table), ())
        model = folder / "model" / "plain.onnx"
        rounds = 10 if quick else 40
        write_ours(folder / "repository", model, "hotrow", precision="float32")
        measure_all(folder / "repository" / "hotrow" / "1", model, "", rows_per_table, rounds)
        onnx.save(with_remainders(onnx.load(model), rows_per_table), model)
        write_ours(folder / "repository", model, "modulo", precision="float32")
        measure_all(folder / "repository" / "modulo" / "1", model, "modulo ", MAX_ID, rounds)


def measure_all(version: Path, model: Path, prefix: str, largest_id: int, rounds: int) -> None:
    """Measure all cases of a model, and print them behind the prefix."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    plain = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    with InferenceSession.open(version, dense_threads=1) as session:
        for num_requests, num_samples, goal in CASES:
            batches = random_batches(num_requests, num_samples, largest_id)
            ways = ways_to_answer(session, plain, num_requests)
            check_answers(ways, batches[0])
            seconds = measure(ways, batches, rounds)
            print(line(f"{prefix}{num_requests} x {num_samples}", seconds, goal), flush=True)


def with_remainders(model: onnx.ModelProto, num_rows: int) -> onnx.ModelProto:
    """The same with a Mod behind each column of ids."""
    graph = model.graph
    for column in [node for node in graph.node if node.input[0] == "ids"]:
        (ids,) = column.output
        column.output[0] = f"{ids}_of_any_size"
        mod = onnx.helper.make_node("Mod", [column.output[0], "num_rows"], [ids])
        graph.node.insert(list(graph.node).index(column) + 1, mod)
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(num_rows), "num_rows"))
    return model


def random_batches(num_requests: int, num_samples: int, largest_id: int) -> list[Arrays]:
    """Batches of so many requests and samples of each, of ids below `largest_id`."""
    rng = np.random.default_rng(num_samples)
    count = min(max(KEYS // (num_requests * num_samples * FEATURES), 4), MAX_BATCHES)
    shape = (num_samples, FEATURES)
    return [[rng.integers(0, largest_id, shape) for _ in range(num_requests)] for _ in range(count)]


def ways_to_answer(session: InferenceSession, plain: Any, num_requests: int) -> Ways:
    """Each answers the requests of a batch with a list of arrays."""

    def arrays(batch: Arrays) -> Any:
        return split(session.fast_path.run(batch, num_requests, ("click",)))

    if num_requests == 1:
        return {
            "arrays": arrays,
            "requests": lambda batch: [session.run({"ids": batch[0]}, ("click",))["click"]],
            "plain": lambda batch: [plain.run(["click"], {"ids": batch[0]})[0]],
        }

    def requests(batch: Arrays) -> Any:
        answers = session.run_many([Request({"ids": ids}, ("click",)) for ids in batch])
        return [each["click"] for each in answers]  # type: ignore[index]

    def joined(batch: Arrays) -> Any:
        ends = np.cumsum([len(ids) for ids in batch])[:-1]
        return np.split(plain.run(["click"], {"ids": np.concatenate(batch)})[0], ends)

    return {"arrays": arrays, "requests": requests, "plain": joined}


def split(joined: JoinedAnswer | None) -> list[NDArray[Any]]:
    """The array of each request."""
    return [each["click"] for each in joined.split()] if joined else []


def check_answers(ways: Ways, batch: Arrays) -> None:
    """All ways must agree before they are timed."""
    expected = ways["plain"](batch)
    for answer in ways.values():
        for found, wanted in zip(answer(batch), expected, strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-6)


def measure(ways: Ways, batches: list[Arrays], rounds: int) -> dict[str, list[float]]:
    """Seconds of one call, by way and round."""
    turns = {name: (answer, itertools.cycle(batches)) for name, answer in ways.items()}
    repetitions = {name: max(3, int(ROUND_S / seconds_of_one(*turn, 20))) for name, turn in turns.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds_of_one(*turns[name], max(3, repetitions[name] // 5))  # code and memory of another way were in use
            seconds[name].append(seconds_of_one(*turns[name], repetitions[name]))
    return seconds


def seconds_of_one(answer: Callable[[Arrays], Any], batches: Iterator[Arrays], repetitions: int) -> float:
    """The mean over this many calls."""
    begin = time.perf_counter()
    for _ in range(repetitions):
        answer(next(batches))
    return (time.perf_counter() - begin) / repetitions


def line(name: str, seconds: dict[str, list[float]], goal: str) -> str:
    """The line of one case in the table."""
    parts = [f"{way} {1e6 * min(s):.1f} / {1e6 * statistics.median(s):.1f} us" for way, s in seconds.items()]
    for way in ("arrays", "requests"):
        best = min(seconds["plain"]) / min(seconds[way])
        ratios = np.array(seconds["plain"]) / np.array(seconds[way])
        parts.append(f"{way} x {best:.2f} / {np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})")
    return f"{name:>16}  {'  '.join(parts)}  goal {goal}"


if __name__ == "__main__":
    main()
