"""Whole requests through a real Triton, in rounds, compared with peers on the same server: goal G7.

    python benchmarks/triton.py            4 M rows, four rounds, seven minutes and more
    python benchmarks/triton.py --quick    400 k rows, one round, about a minute

The model: 26 features x 64 samples, a table each, dim 16, MLP 64-1, with one packed input and with 26 separate ones;
and the packed model with an MLP of 512-256-1, where hotrow computes in bfloat16 as well if this machine can. Peers are
Python models with one thread, and answer the same two outputs as hotrow: `click`, and the same values as `OUTPUT0`.
`null` reads all inputs and answers zeros, request by request. `plain` joins the requests of a call and runs the whole
graph in ONNX Runtime. `take` (NumPy's take, then ONNX Runtime) answers one by one, `take_joined` joins.
perf_analyzer sends over gRPC and HTTP. In a round each combination is measured once, peers next to each other. What is
printed are the medians over the rounds, the best, and the spread, in Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import tritonclient.grpc
from networks import mlp, network_of
from numpy.typing import NDArray
from perf_analyzer import measure, perf_analyzer
from serving import add_settings, serve, tensors

from inference_session.dense_engine.openvino import unusable_bfloat16
from inference_session.importers.onnx import import_onnx
from triton_backend.launcher.server import TritonServer
from triton_backend.repository.config_writer import write_model_config

FEATURES, SAMPLES = 26, 64
MODELS = ("null", "hotrow", "take", "take_joined", "plain")
BFLOAT16 = "hotrow_bfloat16"
NUM_REQUESTS = 20
"""That perf_analyzer sends in turn."""
MAX_PREPARED = 21_000
"""Inputs of samples in a file of requests: all 20 requests of one input, 12 of 26."""
QUIET_FRACTION = 0.1
"""Share of the processors that other processes may use on a quiet machine."""


class Network(NamedTuple):
    """The model that is measured."""

    rows_per_table: int
    dim: int = 16
    hidden: tuple[int, ...] = (64,)
    """Widths of the layers between the vectors and the one output."""
    separate: bool = False
    """Whether each feature is a separate input."""


NUM_ROWS, NUM_ROWS_QUICK = 4_000_000, 400_000
QUICK_CONCURRENCIES = {"grpc": (1, 16), "http": (16,)}


class Series(NamedTuple):
    """Models of one network that are measured next to each other, and the requests to them."""

    name: str
    models: tuple[str, ...]
    protocol: str
    concurrencies: tuple[int, ...]


SERIES = (
    Series("packed", ("null", "hotrow", "plain", "take_joined"), "grpc", (1, 16, 64)),
    Series("separate", ("null", "hotrow", "plain"), "grpc", (1, 16)),
    Series("wide", ("null", "hotrow", BFLOAT16, "plain"), "grpc", (16,)),
    Series("packed", ("null", "hotrow", "plain"), "http", (1, 16)),
)

CONFIG = """
backend: "python"
max_batch_size: 1024
input [ %s ]
output [
  { name: "click" data_type: TYPE_FP32 dims: [ 1 ] }, { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
]
instance_group [ { count: 1 kind: KIND_CPU } ]
dynamic_batching { }
"""
PEER = """
import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils
from triton_backend.backend.tensors import knows_numpy, read_array, write_tensor

class TritonPythonModel:
    def initialize(self, args):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        folder = {folder!r}
        kind = {kind!r}
        kind, _, joined = kind.partition("_")
        self.joins = bool(joined) or kind == "plain"
        if kind == "take":
            self.tables = [np.load(f"{{folder}}/{{i}}.npy", mmap_mode="r") for i in range(26)]
        if kind != "null":
            self.network = onnxruntime.InferenceSession(f"{{folder}}/{{kind}}.onnx", options)
        self.predict = getattr(self, kind)
        # A stub that does not know this NumPy needs a detour.
        self.read = pb_utils.Tensor.as_numpy if knows_numpy() else read_array
        self.write = pb_utils.Tensor if knows_numpy() else write_tensor
        self.zeros = np.zeros((1024, 1), np.float32)

    def null(self, inputs):
        return self.zeros[: len(next(iter(inputs.values())))]

    def take(self, inputs):
        ids = inputs["ids"]
        vectors = np.concatenate([table.take(ids[:, i], axis=0) for i, table in enumerate(self.tables)], axis=1)
        return self.network.run(["click"], {{"vectors": vectors}})[0]

    def plain(self, inputs):
        return self.network.run(["click"], inputs)[0]

    def execute(self, requests):
        given = [{{tensor.name(): self.read(tensor) for tensor in request.inputs()}} for request in requests]
        if len(given) == 1 or not self.joins:
            return [self.respond(self.predict(inputs)) for inputs in given]
        answer = self.predict({{name: np.concatenate([inputs[name] for inputs in given]) for name in given[0]}})
        ends = np.cumsum([len(next(iter(inputs.values()))) for inputs in given])
        return [self.respond(part) for part in np.split(answer, ends[:-1])]

    def respond(self, answer):
        return pb_utils.InferenceResponse([self.write("click", answer), self.write("OUTPUT0", answer)])
"""


def input_names(network: Network) -> dict[str, int]:
    """The inputs of a model, with their widths."""
    return {f"ids{i}": 1 for i in range(FEATURES)} if network.separate else {"ids": FEATURES}


def write_models(
    repository: Path, folder: Path, network: Network, models: Sequence[str] = MODELS, suffix: str = ""
) -> None:
    """These models, of the same weights; their names end in `suffix`."""
    rng = np.random.default_rng(0)
    tables = [rng.standard_normal((network.rows_per_table, network.dim), np.float32) for _ in range(FEATURES)]
    folder.mkdir(exist_ok=True)
    for i, table in enumerate(tables):
        np.save(folder / f"{i}.npy", table)
    widths = (FEATURES * network.dim, *network.hidden, 1)
    layers = [rng.standard_normal(shape, np.float32) / math.sqrt(shape[0]) for shape in itertools.pairwise(widths)]
    onnx.save(graph(tables, layers, separate=network.separate), folder / "plain.onnx")
    onnx.save(graph(None, layers), folder / "take.onnx")
    wanted = ", ".join(
        f'{{ name: "{name}" data_type: TYPE_INT64 dims: [ {width} ] }}' for name, width in input_names(network).items()
    )
    for kind in models:
        name = kind + suffix
        if kind in ("hotrow", BFLOAT16):
            write_ours(repository, folder / "plain.onnx", name, precision="bfloat16" if kind == BFLOAT16 else "float32")
            continue
        version = repository / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(PEER.format(folder=str(folder), kind=kind), encoding="utf-8")
        (version.parent / "config.pbtxt").write_text(CONFIG % wanted, encoding="utf-8")


def write_ours(repository: Path, source: Path, name: str, *, precision: str) -> None:
    """An imported model with one thread for its network, as its peers have."""
    report = import_onnx(source, repository, name)
    write_model_config(report.version_dir, report.spec, name)
    add_settings(repository / name / "config.pbtxt", {"dense_threads": "1", "dense_precision": precision})


def graph(
    tables: list[NDArray[np.float32]] | None, layers: list[NDArray[np.float32]], *, separate: bool = False
) -> onnx.ModelProto:
    """The whole model, or without tables the part behind the look-ups."""
    text, constants = mlp("vectors", "click", layers)
    inputs = f"float[n, {len(layers[0])}] vectors"
    if tables is not None:
        constants |= {f"table{i}": table for i, table in enumerate(tables)}
        lookups = [f"vectors{i} = Gather(table{i}, ids{i})" for i in range(FEATURES)]
        parts = ", ".join(f"vectors{i}" for i in range(FEATURES))
        if separate:
            inputs = ", ".join(f"int64[n, 1] ids{i}" for i in range(FEATURES))
            lookups.append(f"stacked = Concat<axis = 1>({parts}) vectors = Flatten(stacked)")
        else:
            inputs = f"int64[n, {FEATURES}] ids"
            constants |= {f"column{i}": np.array(i) for i in range(FEATURES)}
            lookups = [f"ids{i} = Gather<axis = 1>(ids, column{i}) {lookup}" for i, lookup in enumerate(lookups)]
            lookups.append(f"vectors = Concat<axis = 1>({parts})")
        text = f"{' '.join(lookups)} {text}"
    return network_of(f"benchmark ({inputs}) => (float[n, 1] click) {{ {text} }}", constants)


def check_answers(
    url: str, rows_per_table: int, models: Sequence[str] = MODELS, suffix: str = "", *, separate: bool = False
) -> None:
    """All models send the same outputs, and all but the null one must agree, before they are timed."""
    ids = np.random.default_rng(1).integers(0, rows_per_table, (SAMPLES, FEATURES))
    given = {f"ids{i}": ids[:, i : i + 1] for i in range(FEATURES)} if separate else {"ids": ids}
    inputs = tensors(tritonclient.grpc, given)
    with tritonclient.grpc.InferenceServerClient(url) as client:
        answers = {model: client.infer(model + suffix, inputs) for model in models}
    expected = answers["plain"].as_numpy("click")
    for model, answer in answers.items():
        outputs = {tensor.name: answer.as_numpy(tensor.name) for tensor in answer.get_response().outputs}
        if sorted(outputs) != ["OUTPUT0", "click"]:
            raise SystemExit(f"{model} sends other outputs than its peers: {sorted(outputs)}")
        for found in outputs.values() if model != "null" else ():
            np.testing.assert_allclose(found, expected, atol=1e-2 if model == BFLOAT16 else 1e-6)


def write_requests(data: Path, rows_per_table: int, samples: int, names: Mapping[str, int] | None = None) -> None:
    """Random requests for perf_analyzer; `names`: the inputs with their widths."""
    widths = names or {"ids": FEATURES}
    rng = np.random.default_rng(0)
    # perf_analyzer prepares every input of every entry for each of its connections before it begins.
    num_requests = min(NUM_REQUESTS, MAX_PREPARED // len(widths) // samples)
    entries = [
        {
            n: {"content": rng.integers(0, rows_per_table, width).tolist(), "shape": [width]}
            for n, width in widths.items()
        }
        for _ in range(num_requests * samples)
    ]
    data.write_text(json.dumps({"data": entries}), encoding="utf-8")


Key = tuple[str, str, str, int, str]
"""Series, protocol, model, concurrency and what was measured."""


class Figures:
    """The measurements, round by round."""

    def __init__(self) -> None:
        self._seen: dict[Key, list[float]] = defaultdict(list)

    def add(self, series: Series, model: str, concurrency: int, found: Mapping[str, float]) -> None:
        """Record one run."""
        for name, value in found.items():
            self._seen[series.name, series.protocol, model, concurrency, name].append(value)

    def has(self, *key: Any) -> bool:
        """Whether a model of a series was measured."""
        return (*key, "requests/s") in self._seen

    def median(self, *key: Any) -> float:
        """Over the rounds."""
        return float(np.median(self._seen[key]))

    def row(self, series: Series, model: str, concurrency: int) -> str:
        """A line of the table."""
        rates, p50, p99 = (
            self._seen[series.name, series.protocol, model, concurrency, name] for name in ("requests/s", "p50", "p99")
        )
        spread = (max(rates) - min(rates)) / float(np.median(rates))
        cells = (series.name, series.protocol, model, concurrency)
        return (
            f"| {' | '.join(map(str, cells))} | {np.median(rates):,.0f} | {max(rates):,.0f} | {spread:.0%} |"
            f" {np.median(p50):,.0f} | {min(p50):,.0f} | {np.median(p99):,.0f} |"
        )

    def ratio(self, series: str, protocol: str, first: str, second: str, concurrency: int = 16) -> str:
        """Ratio of two models' requests/s: the median of the rounds' ratios, and their range."""
        ours, others = (
            self._seen.get((series, protocol, model, concurrency, "requests/s"), []) for model in (first, second)
        )
        if not ours or not others:
            return "not measured"
        ratios = np.array(ours) / np.array(others)
        return f"{np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})"


def networks(rows_per_table: int) -> dict[str, Network]:
    """The networks to serve, by series."""
    return {
        "packed": Network(rows_per_table),
        "separate": Network(rows_per_table, separate=True),
        "wide": Network(rows_per_table, hidden=(512, 256)),
    }


def used_by_others(seconds: float = 2.0) -> float:
    """How much of the processors is in use while this process sleeps."""

    def times() -> NDArray[np.int64]:
        first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
        return np.array(first.split()[1:9], np.int64)

    before = times()
    time.sleep(seconds)
    spent = times() - before
    return float(1 - (spent[3] + spent[4]) / max(spent.sum(), 1))  # idle, and waiting for disks


def main() -> None:
    """Serve the models, measure them in turn, and print the ratios of the goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--only", action="append", metavar="PROTOCOL/SERIES", help="such as grpc/packed; may be repeated"
    )
    parser.add_argument("--rounds", type=int, help="how often each is measured")
    arguments = parser.parse_args()
    quick, rounds = arguments.quick, arguments.rounds or (1 if arguments.quick else 4)
    rows_per_table = (NUM_ROWS_QUICK if quick else NUM_ROWS) // FEATURES
    perf_analyzer()
    others = used_by_others()
    all_series = chosen_series(arguments.only, quick=quick)
    names = {series.name for series in all_series}
    wanted = {name: network for name, network in networks(rows_per_table).items() if name in names}
    kinds = ("null", "hotrow", "plain", "take_joined")
    lacking = unusable_bfloat16()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for series, network in wanted.items():
            models = [kind for kind in kinds if series == "packed" or kind != "take_joined"]
            if series == "wide" and lacking is None:
                models.append(BFLOAT16)
            write_models(folder / "repository", folder / series, network, models, f"_{series}")
            write_requests(folder / f"{series}.json", rows_per_table, SAMPLES, input_names(network))
        with serve(folder / "repository") as server:
            for series, network in wanted.items():
                served = [k for k in (*kinds, BFLOAT16) if (folder / "repository" / f"{k}_{series}").exists()]
                check_answers(server.endpoints["gRPC"], rows_per_table, served, f"_{series}", separate=network.separate)
            figures = run_rounds(server, folder, all_series, rounds=rounds, seconds=0.5 if quick else 0.7)
    print(f"{os.cpu_count()} processors, {rows_per_table * FEATURES:,} rows; others used {others:.0%} of them before,")
    print(f"{used_by_others():.0%} after: {'quiet' if others < QUIET_FRACTION else 'NOT quiet'}.", end="\n\n")
    if lacking is not None:
        print(f"bfloat16 was not measured: {lacking}", end="\n\n")
    report(figures, all_series)


def chosen_series(only: Sequence[str] | None, *, quick: bool) -> list[Series]:
    """The series to measure; `only`: those of these protocols and names."""
    chosen = [series for series in SERIES if only is None or f"{series.protocol}/{series.name}" in only]
    return [shortened(series) for series in chosen] if quick else chosen


def shortened(series: Series) -> Series:
    """The part that a quick run measures."""
    kept = [each for each in series.concurrencies if each in QUICK_CONCURRENCIES[series.protocol]]
    return series._replace(concurrencies=tuple(kept))


def run_rounds(
    server: TritonServer, folder: Path, all_series: Sequence[Series], *, rounds: int, seconds: float
) -> Figures:
    """Measure everything once a round."""
    figures = Figures()
    urls = {"grpc": server.endpoints["gRPC"], "http": server.endpoints["HTTP"].removeprefix("http://")}
    for turn in range(rounds):
        for series in all_series:
            models = [m for m in series.models if (folder / "repository" / f"{m}_{series.name}").exists()]
            for concurrency in series.concurrencies:
                for model in models[turn % len(models) :] + models[: turn % len(models)]:
                    found = measure(
                        f"{model}_{series.name}",
                        urls[series.protocol],
                        series.protocol,
                        data=folder / f"{series.name}.json",
                        batch=SAMPLES,
                        concurrency=concurrency,
                        seconds=seconds,
                    )
                    figures.add(series, model, concurrency, found)
    return figures


def report(figures: Figures, all_series: Sequence[Series]) -> None:
    """All figures, and the ratios of the goals."""
    print("| model | protocol | served by | concurrency | requests/s | best | spread | p50 us | best | p99 us |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for series in all_series:
        for concurrency in series.concurrencies:
            for model in series.models:
                if figures.has(series.name, series.protocol, model, concurrency):
                    print(figures.row(series, model, concurrency))
    print("\n| goal | reached | wanted |\n| --- | --- | --- |")
    for name, wanted in (("packed", 75), ("separate", 60)):
        if not figures.has(name, "grpc", "hotrow", 1):
            continue
        above = figures.median(name, "grpc", "hotrow", 1, "p50") - figures.median(name, "grpc", "null", 1, "p50")
        print(f"| p50 above null, {name}, gRPC | {above:.0f} us | {wanted} us |")
    for other, key, goal in (
        ("null, packed", ("packed", "grpc", "hotrow", "null"), "0.70"),
        ("plain ONNX Runtime, packed", ("packed", "grpc", "hotrow", "plain"), "1.35"),
        ("take + ONNX Runtime, joined, packed", ("packed", "grpc", "hotrow", "take_joined"), "-"),
        ("plain ONNX Runtime, 26 inputs", ("separate", "grpc", "hotrow", "plain"), "1.9"),
        ("plain ONNX Runtime, packed, HTTP", ("packed", "http", "hotrow", "plain"), "-"),
        ("plain ONNX Runtime, 512-256", ("wide", "grpc", "hotrow", "plain"), "-"),
        ("plain ONNX Runtime, 512-256, bfloat16", ("wide", "grpc", BFLOAT16, "plain"), "1.7"),
    ):
        print(f"| requests/s at 16 beside {other} | {figures.ratio(*key)} | {goal} |")
    for model in ("hotrow", "null") if figures.has("packed", "grpc", "hotrow", 64) else ():
        rates = [figures.median("packed", "grpc", model, c, "requests/s") for c in (64, 16)]
        print(f"| requests/s at 64 beside 16, {model}, packed | {rates[0] / rates[1]:.2f} | no fall beyond null's |")


if __name__ == "__main__":
    main()
