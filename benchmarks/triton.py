"""Whole requests through a real Triton, beside three peers in the same server and run: goal G7.

    python benchmarks/triton.py            4 M rows, a few minutes
    python benchmarks/triton.py --quick    400 k rows, one round

The model: 26 features x 64 samples, a table each, dim 16, MLP 64-1. Its peers are Python models as well:
`null` answers zeros, `take` is written by hand (NumPy's take and ONNX Runtime), `plain` runs the whole graph. As in
the Python backend's examples they answer request by request; `take_joined` joins those of one call.
perf_analyzer sends over gRPC; rounds are interleaved, medians shown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import tritonclient.grpc
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from perf_analyzer import input_data, measure, perf_analyzer

from inference_session.importers.onnx import import_onnx
from triton_backend.launcher.server import ServerOptions, TritonServer
from triton_backend.repository.model_config import write_model_config

FEATURES, SAMPLES = 26, 64
MODELS = ("null", "hotrow", "take", "take_joined", "plain")


class Network(NamedTuple):
    """The model that is measured."""

    rows_per_table: int
    dim: int = 16
    hidden: tuple[int, ...] = (64,)
    """Widths of the layers between the vectors and the one output."""


CONFIG = """
backend: "python"
max_batch_size: 1024
input [ { name: "ids" data_type: TYPE_INT64 dims: [ 26 ] } ]
output [ { name: "click" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
dynamic_batching { }
"""
PEER = """
import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils
from triton_backend.backend.tensors import read_array, write_tensor

class TritonPythonModel:
    def initialize(self, args):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        folder = {folder!r}
        kind = {kind!r}
        kind, _, joins = kind.partition("_")
        self.joins = bool(joins)
        if kind == "take":
            self.tables = [np.load(f"{{folder}}/{{i}}.npy", mmap_mode="r") for i in range(26)]
        if kind != "null":
            self.network = onnxruntime.InferenceSession(f"{{folder}}/{{kind}}.onnx", options)
        self.predict = getattr(self, kind)

    def null(self, ids):
        return np.zeros((len(ids), 1), np.float32)

    def take(self, ids):
        vectors = np.concatenate([table.take(ids[:, i], axis=0) for i, table in enumerate(self.tables)], axis=1)
        return self.network.run(None, {{"vectors": vectors}})[0]

    def plain(self, ids):
        return self.network.run(None, {{"ids": ids}})[0]

    def execute(self, requests):
        arrays = [read_array(request.inputs()[0]) for request in requests]
        if not self.joins:
            return [self.respond(self.predict(array)) for array in arrays]
        answer = self.predict(np.concatenate(arrays) if len(arrays) > 1 else arrays[0])
        ends = np.cumsum([len(array) for array in arrays])
        return [self.respond(part) for part in np.split(answer, ends[:-1])]

    def respond(self, answer):
        return pb_utils.InferenceResponse([write_tensor("click", answer)])
"""


def write_models(repository: Path, folder: Path, network: Network) -> None:
    """All models, of the same weights."""
    rng = np.random.default_rng(0)
    tables = [rng.standard_normal((network.rows_per_table, network.dim), np.float32) for _ in range(FEATURES)]
    for i, table in enumerate(tables):
        np.save(folder / f"{i}.npy", table)
    widths = (FEATURES * network.dim, *network.hidden, 1)
    layers = [rng.standard_normal(shape, np.float32) / math.sqrt(shape[0]) for shape in itertools.pairwise(widths)]
    onnx.save(graph(tables, layers), folder / "plain.onnx")
    onnx.save(graph(None, layers), folder / "take.onnx")
    report = import_onnx(folder / "plain.onnx", repository, "hotrow")
    write_model_config(report.version_dir, report.spec, "hotrow")
    for kind in [model for model in MODELS if model != "hotrow"]:
        version = repository / kind / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(PEER.format(folder=str(folder), kind=kind), encoding="utf-8")
        (version.parent / "config.pbtxt").write_text(CONFIG, encoding="utf-8")


def graph(tables: list[NDArray[np.float32]] | None, layers: list[NDArray[np.float32]]) -> onnx.ModelProto:
    """The whole model, or without tables the part behind the look-ups."""
    mlp, weights, activated = [], {}, "vectors"
    for i, layer in enumerate(layers):
        weights |= {f"w{i}": layer, f"b{i}": np.zeros(layer.shape[1], np.float32)}
        mlp.append(helper.make_node("Gemm", [activated, f"w{i}", f"b{i}"], [f"layer{i}"]))
        is_last = i + 1 == len(layers)
        activated = "click" if is_last else f"activated{i}"
        mlp.append(helper.make_node("Sigmoid" if is_last else "Relu", [f"layer{i}"], [activated]))
    nodes = []
    inputs = [helper.make_tensor_value_info("vectors", TensorProto.FLOAT, ["n", len(layers[0])])]
    if tables is not None:
        inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", FEATURES])]
        for i, table in enumerate(tables):
            weights |= {f"column{i}": np.array(i), f"table{i}": table}
            nodes.append(helper.make_node("Gather", ["ids", f"column{i}"], [f"ids{i}"], axis=1))
            nodes.append(helper.make_node("Gather", [f"table{i}", f"ids{i}"], [f"vectors{i}"], axis=0))
        nodes.append(helper.make_node("Concat", [f"vectors{i}" for i in range(FEATURES)], ["vectors"], axis=1))
    outputs = [helper.make_tensor_value_info("click", TensorProto.FLOAT, ["n", 1])]
    constants = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    whole = helper.make_graph([*nodes, *mlp], "benchmark", inputs, outputs, constants)
    return helper.make_model(whole, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def check_answers(url: str, rows_per_table: int, models: Sequence[str] = MODELS) -> None:
    """All models but the null one must agree before they are timed."""
    ids = np.random.default_rng(1).integers(0, rows_per_table, (SAMPLES, FEATURES))
    with tritonclient.grpc.InferenceServerClient(url) as client:
        tensor = tritonclient.grpc.InferInput("ids", list(ids.shape), "INT64")
        tensor.set_data_from_numpy(ids)
        answers = [client.infer(model, [tensor]).as_numpy("click") for model in models if model != "null"]
    for answer in answers:
        np.testing.assert_allclose(answer, answers[-1], atol=1e-6)


def main() -> None:
    """Serve the models, measure them in turn, and print the ratios of the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rows_per_table = (400_000 if quick else 4_000_000) // FEATURES
    perf_analyzer()
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "repository"
        write_models(repository, Path(folder), Network(rows_per_table))
        options = ServerOptions(repository, http_port=0, grpc_port=0, metrics_port=0)
        with TritonServer.start(options) as server:
            url = server.endpoints["gRPC"]
            check_answers(url, rows_per_table)
            run_rounds(url, Path(folder) / "requests.json", rows_per_table, rounds=1 if quick else 5)


def write_requests(data: Path, rows_per_table: int, samples: int) -> None:
    """Random requests for perf_analyzer."""
    metadata = {"inputs": [{"name": "ids", "datatype": "INT64", "shape": [-1, FEATURES]}]}
    requests = input_data(metadata, samples=samples, length=1, max_key=rows_per_table, batched=True)
    data.write_text(json.dumps(requests), encoding="utf-8")


def run_rounds(url: str, data: Path, rows_per_table: int, *, rounds: int) -> None:
    """Measure all models at all concurrencies, round by round, and report."""
    write_requests(data, rows_per_table, SAMPLES)
    seen: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for concurrency in (1, 16, 64):
            for model in MODELS:
                result = measure(model, url, "grpc", data=data, batch=SAMPLES, concurrency=concurrency, seconds=1.5)
                for name, value in result.items():
                    seen[model, concurrency, name].append(value)
    report({key: statistics.median(values) for key, values in seen.items()})


def report(median: dict[tuple[str, int, str], float]) -> None:
    """The figures and the ratios of the goal."""
    print(f"{'model':<12}{'concurrency':>12}{'requests/s':>12}{'p50 us':>9}{'p99 us':>9}")
    for concurrency in (1, 16, 64):
        for model in MODELS:
            row = [median[model, concurrency, name] for name in ("requests/s", "p50", "p99")]
            print(f"{model:<12}{concurrency:>12}{row[0]:>12.0f}{row[1]:>9.0f}{row[2]:>9.0f}")

    def ratio(model: str, concurrency: int, other: str, other_concurrency: int) -> float:
        return median[model, concurrency, "requests/s"] / median[other, other_concurrency, "requests/s"]

    above = median["hotrow", 1, "p50"] - median["null", 1, "p50"]
    print(f"p50 above the null model                     {above:6.0f} us  goal <= 150")
    print(f"requests/s at 16, of the null model          {ratio('hotrow', 16, 'null', 16):6.2f}     goal >= 0.65")
    print(f"requests/s at 16, of take + ONNX Runtime     {ratio('hotrow', 16, 'take', 16):6.2f}     goal >= 1.5")
    print(f"requests/s at 16, of the same, joined        {ratio('hotrow', 16, 'take_joined', 16):6.2f}")
    print(f"requests/s at 16, of plain ONNX Runtime      {ratio('hotrow', 16, 'plain', 16):6.2f}     goal >= 2")
    print(
        f"requests/s at 64 over 16                     {ratio('hotrow', 64, 'hotrow', 16):6.2f}     "
        f"goal >= the null model's {ratio('null', 64, 'null', 16):.2f}"
    )


if __name__ == "__main__":
    main()
