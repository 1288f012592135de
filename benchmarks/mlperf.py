"""MLPerf Inference's recommender DLRM-DCNv2 on hotrow, driven by MLPerf's LoadGen: goal G14.

    python benchmarks/mlperf.py                            CPU, tables of at most 200,000 rows
    python benchmarks/mlperf.py --quick                    small tables, seconds
    python benchmarks/mlperf.py --triton                   through a real Triton as well
    python benchmarks/mlperf.py --device cuda:0 --rows-cap 0 --dense-precision float16
                                                           all 204 M rows on one GPU: 28 GB of int8 files

The network is written by `onnx.helper` and imported as any model; rows and weights are random, keys are skewed. A
sample is one user with 100 to 700 items, a pair each: of 214 look-ups and 32 MFLOP. Answers are compared with a
plain NumPy oracle before anything is timed. Plain ONNX Runtime and PyTorch (where it is installed) answer the same
samples in the same process, in turns; they are left out where their tables would need more than --peer-bytes.

LoadGen comes from PyPI: pip install mlcommons-loadgen. Without it, a loop of this program measures Offline alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlperf_model as model
import numpy as np
from mlperf_driver import HAS_LOADGEN, Result, Run, measure, offline_loop
from mlperf_peers import Hotrow, Peer, PlainOnnxRuntime, PyTorch, Triton, stored_rows
from mlperf_samples import Samples
from numpy.typing import NDArray

from inference_session.version_directory.session_file import read_spec
from triton_backend.repository.config_writer import write_model_config

DISCLAIMER = "unofficial, not verified by MLCommons, random weights, no accuracy run"
NAME = "dlrm_dcnv2"
_SOURCE = "MLPerf Inference v5.1, closed, 99.9 %"
_RECORDS: dict[str, dict[str, tuple[float, str]]] = {
    "gpu": {"Offline": (48_666, "one H200 SXM of 8"), "Server": (46_258, "one H200 SXM of 8")},
    "cpu": {
        "Offline": (18_929 / 256, "one core of 2 x Xeon 6980P"),
        "Server": (18_704 / 256, "one core of 2 x Xeon 6980P"),
    },
}
"""Published samples/s."""
_CHECKED_ROWS = 1000
_TOLERANCE = {"float32": 1e-5, "tf32": 2e-3, "float16": 2e-3, "bfloat16": 2e-2}
_BATCH_PAIRS = {"cpu": {"Offline": 2_048, "Server": 2_048}, "gpu": {"Offline": 204_800, "Server": 51_200}}
"""Pairs of a batch at most. A GPU is idle for about a millisecond between batches, so that Offline takes large ones."""
_SERVER_LOADS = (0.9, 0.8, 0.7, 0.5, 0.3)
"""Fractions of the Offline rate, tried one after the other until LoadGen calls the run valid."""


def main() -> None:
    """Check, then run the selected measurements."""
    options = _options()
    print(f"MLPerf DLRM-DCNv2: {DISCLAIMER}")
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="hotrow-mlperf-") as name:
        folder = Path(name)
        checked, sizes = (
            model.Sizes(model.capped_rows(cap), options.tables) for cap in (_CHECKED_ROWS, options.rows_cap)
        )
        version_dir = _import(folder / "checked", checked)
        _check_answers(folder / "checked", version_dir, options)
        if sizes != checked:
            version_dir = _import(folder / "model", sizes)
        _describe(version_dir, options)
        samples = Samples(sizes.rows, options.samples, options.pool_pairs)
        _in_process(folder, version_dir, samples, options)
        if options.triton:
            _through_triton(version_dir, samples, options)
    print(f"All figures: {DISCLAIMER}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="small tables and batches, one second a run")
    add("--device", default="cpu", help="cpu or cuda:N")
    add("--tables", choices=("int8", "float16", "float32"), default="int8", help="how rows are stored")
    add("--rows-cap", type=int, help="most rows of a table, 0: all (default: 200,000; 1,000 with --quick)")
    add("--dense-precision", default="float32", choices=tuple(_TOLERANCE), help="of hotrow's dense network")
    add("--batch-pairs", type=int, help="most pairs in a batch (default: 2,048; on a GPU 204,800, Server 51,200)")
    add("--inputs", choices=("host", "device"), default="host", help="where samples lie when a run begins")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine on a CPU")
    add("--seconds", type=float, help="least duration of a run (default: 10; MLPerf asks for 600)")
    add("--scenario", choices=("Offline", "Server"), action="append", help="this one alone; may be given again")
    add("--server-qps", type=float, help="samples a second of Server (default: found from Offline)")
    add("--samples", type=int, help="different samples")
    add("--rounds", type=int, default=1, help="measured in turns")
    add("--triton", action="store_true", help="through a real Triton as well")
    add("--no-peers", action="store_true", help="hotrow alone")
    add("--peer-bytes", type=int, help="most bytes of the peers' float32 tables")
    add("--folder", type=Path, help="where to write the tables (default: the temporary folder)")
    return _completed(parser.parse_args())


def _completed(options: argparse.Namespace) -> argparse.Namespace:
    """The options with defaults that depend on others."""
    on_gpu = options.device != "cpu"
    defaults = {
        "rows_cap": _CHECKED_ROWS if options.quick else 200_000,
        "seconds": 1.0 if options.quick else 10.0,
        "samples": 64 if options.quick else 20_480 if on_gpu else 2_048,
        "peer_bytes": (16 if on_gpu else 2) << 30,
        "scenario": ["Offline", "Server"],
    }
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.pool_pairs = 4_096 if options.quick else 262_144 if on_gpu else 65_536
    return options


def _batch_pairs(options: argparse.Namespace, scenario: str) -> int:
    return options.batch_pairs or _BATCH_PAIRS["cpu" if options.device == "cpu" else "gpu"][scenario]


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of hotrow's session."""
    return {
        "device": options.device,
        "dense_precision": options.dense_precision,
        "dense_threads": options.threads,
        "lookup_threads": options.threads,
        "max_keys_per_request": 1 << 30,
    }


def _import(folder: Path, sizes: model.Sizes) -> Path:
    folder.mkdir()
    return model.import_model(folder, NAME, sizes)


def _check_answers(folder: Path, version_dir: Path, options: argparse.Namespace) -> None:
    """Compare every engine with NumPy in float64 on small tables."""
    tables = stored_rows(version_dir)
    pairs = model.random_pairs(np.random.default_rng(), 300, tuple(map(len, tables)))
    expected = model.expected_answers(model.random_weights(), tables, pairs).reshape(-1)
    for peer in _peers(folder, version_dir, None if options.no_peers else tables, options):
        largest = float(np.abs(peer.answer(pairs) - expected).max())
        print(f"  {peer.name}: answers within {largest:.1e} of the oracle", flush=True)
        assert largest <= _TOLERANCE[peer.precision], f"{peer.name} answers wrongly"
        peer.close()


def _torch_precisions(options: argparse.Namespace) -> list[str]:
    """PyTorch's types: float32, and the type of hotrow's network if PyTorch supports it."""
    return ["float32", *({options.dense_precision} & {"float16", "bfloat16"})]


def _peers(
    folder: Path, version_dir: Path, tables: Sequence[NDArray[np.float32]] | None, options: argparse.Namespace
) -> Iterator[Peer]:
    """The engines one after the other, each opened when it is requested. No tables: hotrow alone."""
    yield Hotrow(version_dir, _settings(options))
    if tables is None:
        return
    yield PlainOnnxRuntime(folder, tables, options.device, options.threads)
    if importlib.util.find_spec("torch") is None:
        print("  PyTorch is left out: it is not installed")
        return
    for precision in _torch_precisions(options):
        yield PyTorch(tables, options.device, options.threads, precision)


def _tables_of_peers(version_dir: Path, options: argparse.Namespace) -> list[NDArray[np.float32]] | None:
    num_bytes = sum(4 * model.DIM * table.num_rows for table in read_spec(version_dir).tables)
    if options.no_peers:
        return None
    if num_bytes > options.peer_bytes:
        print(f"  plain ONNX Runtime and PyTorch are left out: their float32 tables have {num_bytes / 1e9:.1f} GB")
        return None
    return stored_rows(version_dir)


def _describe(version_dir: Path, options: argparse.Namespace) -> None:
    spec = read_spec(version_dir)
    rows, num_bytes = (sum(getattr(table, what) for table in spec.tables) for what in ("num_rows", "num_bytes"))
    print(
        f"{rows:,} rows x {model.DIM} in {options.tables}, {num_bytes / 1e9:.2f} GB; {options.device}, "
        f"{options.threads} threads, dense network in {options.dense_precision}, batches of "
        f"{_batch_pairs(options, 'Offline'):,} pairs, inputs on the {options.inputs}; {_LOADGEN}",
        flush=True,
    )


_LOADGEN = (
    "measured by LoadGen"
    if HAS_LOADGEN
    else "LoadGen is not installed (pip install mlcommons-loadgen): a loop of this program measures Offline alone"
)


def _in_process(folder: Path, version_dir: Path, samples: Samples, options: argparse.Namespace) -> None:
    """Every engine in turn."""
    with ExitStack() as opened:
        peers = []
        for peer in _peers(folder, version_dir, _tables_of_peers(version_dir, options), options):
            opened.callback(peer.close)
            peers.append(peer)
        if options.inputs == "device":
            samples.move_to_device()
        for _ in range(options.rounds):
            for peer in peers:
                _measure(peer.name, lambda batch, peer=peer: peer.answer(samples.pairs_of(batch)), samples, options)


def _through_triton(version_dir: Path, samples: Samples, options: argparse.Namespace) -> None:
    from serving import add_settings, serve

    write_model_config(version_dir, read_spec(version_dir), NAME, max_batch_size=_batch_pairs(options, "Offline"))
    add_settings(version_dir.parent / "config.pbtxt", _settings(options))
    with serve(version_dir.parents[1], NAME) as server:
        peer = Triton(server.endpoints["gRPC"], NAME)
        _measure(peer.name, lambda batch: peer.answer_each([samples.pairs_of([i]) for i in batch]), samples, options)
        peer.close()


def _measure(name: str, run: Run, samples: Samples, options: argparse.Namespace) -> None:
    """One engine in the selected scenarios."""
    settings = {"batch_pairs": _batch_pairs(options, "Offline"), "seconds": options.seconds}
    if not HAS_LOADGEN:
        _report(name, "Offline", offline_loop(run, samples, **settings), samples, options)
        return
    offline = measure(run, samples, server_qps=None, **settings)
    if "Offline" in options.scenario:
        _report(name, "Offline", offline, samples, options)
    if "Server" not in options.scenario:
        return
    settings["batch_pairs"] = _batch_pairs(options, "Server")
    rates = [options.server_qps] if options.server_qps else [load * offline.samples_per_s for load in _SERVER_LOADS]
    for rate in rates:
        found = measure(run, samples, server_qps=rate, **settings)
        if not found.violated:
            break
    _report(name, "Server", found, samples, options)


def _report(name: str, scenario: str, found: Result, samples: Samples, options: argparse.Namespace) -> None:
    published, machine = _RECORDS["cpu" if options.device == "cpu" else "gpu"][scenario]
    rate = found.samples_per_s / (options.threads if options.device == "cpu" else 1)
    pairs_per_s = found.samples_per_s * samples.counts.mean()
    remark = f"; not valid by LoadGen's rules: {found.violated}" if found.violated else ""
    print(
        f"{scenario:<8}{name:<28}{found.samples_per_s:>10,.1f} samples/s {pairs_per_s:>12,.0f} pairs/s"
        f"  p99 {found.p99_ms:8.1f} ms{' of a batch' if scenario == 'Offline' else ''}  "
        f"{rate / published:.3f} of {published:,.0f} samples/s ({machine}, {_SOURCE}){remark}",
        flush=True,
    )


if __name__ == "__main__":
    main()
