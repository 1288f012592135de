"""Whole requests through a real Triton on a GPU, beside a model written by hand: goal G8.

    python benchmarks/gpu_triton.py [--rows 10000000] [--rounds 3]

The model: 26 keys x dim 128 of one table with random int64 keys, 13 dense features, MLP 512-256-1. The peer is a
Python model that is given row numbers, takes rows with a plain CUDA kernel and runs the same network by ONNX Runtime's
CUDA provider, inputs bound on the device. `null` answers zeros: the least that a Python model costs. perf_analyzer
sends over gRPC; rounds are interleaved, medians shown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import onnx
import tritonclient.grpc
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from perf_analyzer import measure, perf_analyzer

from inference_session.model_spec import DENSE_FILE, TABLES_FOLDER, LookupSpec, ModelSpec, TableSpec, TensorSpec
from inference_session.version_directory import manifest
from triton_backend.launcher.server import ServerOptions, TritonServer
from triton_backend.repository.model_config import write_model_config

FEATURES, DENSE, DIM, HIDDEN = 26, 13, 128, (512, 256)
MODELS = ("null", "by_hand", "hotrow")
CONFIG = """
backend: "python"
max_batch_size: 1024
input [ { name: "keys" data_type: TYPE_INT64 dims: [ 26 ] }, { name: "dense" data_type: TYPE_FP32 dims: [ 13 ] } ]
output [ { name: "click" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
dynamic_batching { }
"""
PEER = '''
import cupy
import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils
from triton_backend.backend.tensors import read_array, write_tensor

TAKE = """
extern "C" __global__ void take(const float4* rows, const long long* numbers, float4* out, int count) {
  const int i = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (i < count) out[i * 32 + threadIdx.x % 32] = rows[numbers[i] * 32 + threadIdx.x % 32];
}
"""

class TritonPythonModel:
    def initialize(self, args):
        self.is_null = KIND == "null"
        if self.is_null:
            return
        self.stream = cupy.cuda.Stream(non_blocking=True)
        rows = np.memmap(ROWS, np.float32, "r").reshape(-1, 128)
        self.rows = cupy.asarray(rows)
        self.take = cupy.RawKernel(TAKE, "take")
        onnxruntime.preload_dlls()
        settings = {"user_compute_stream": str(self.stream.ptr), "use_tf32": "0"}
        self.network = onnxruntime.InferenceSession(DENSE_FILE, providers=[("CUDAExecutionProvider", settings)])
        assert self.network.get_providers()[0] == "CUDAExecutionProvider"

    def predict(self, numbers, dense):
        if self.is_null:
            return np.zeros((len(numbers), 1), np.float32)
        with self.stream:
            count = numbers.size
            vectors = cupy.empty((len(numbers), 26 * 128), np.float32)
            on_device, features = cupy.asarray(numbers), cupy.asarray(dense)
            self.take((-(-count // 8),), (256,), (self.rows, on_device, vectors, np.int32(count)))
            binding = self.network.io_binding()
            for name, array in (("vectors", vectors), ("dense", features)):
                binding.bind_input(name, "cuda", 0, np.float32, array.shape, array.data.ptr)
            binding.bind_output("click", "cpu")
            self.network.run_with_iobinding(binding)
            return binding.copy_outputs_to_cpu()[0]

    def execute(self, requests):
        responses = []
        for request in requests:
            arrays = {tensor.name(): read_array(tensor) for tensor in request.inputs()}
            answer = self.predict(arrays["keys"], arrays["dense"])
            responses.append(pb_utils.InferenceResponse([write_tensor("click", answer)]))
        return responses
'''


def main() -> None:
    """Serve the models, measure them in turn, print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    perf_analyzer()
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        repository = Path(folder) / "repository"
        keys = write_models(repository, arguments.rows)
        options = ServerOptions(repository, http_port=0, grpc_port=0, metrics_port=0)
        with TritonServer.start(options) as server:
            print(f"{arguments.rows} rows written and served after {time.monotonic() - begin:.0f} s", flush=True)
            url = server.endpoints["gRPC"]
            check_answers(url, keys)
            run_rounds(url, Path(folder), keys, arguments.rounds)


def write_models(repository: Path, num_rows: int) -> NDArray[np.int64]:
    """All models, of the same weights; returns the key of each row."""
    version = repository / "hotrow" / "1"
    table = version / TABLES_FOLDER / "item"
    table.mkdir(parents=True)
    rng = np.random.default_rng(0)
    keys = rng.permutation(np.unique(rng.integers(-(2**63), 2**63 - 1, num_rows)))
    keys.tofile(table / "key")
    with (table / "emb_vector").open("wb") as file:
        for begin in range(0, len(keys), 1 << 20):
            rows = min(1 << 20, len(keys) - begin)
            file.write(cupy.asnumpy(cupy.random.standard_normal((rows, DIM), np.float32)))
    spec = model_spec(len(keys))
    onnx.save(network(rng), version / DENSE_FILE)
    spec.write(version)
    manifest.write_manifest(version)
    write_model_config(version, spec, "hotrow")
    for kind in ("null", "by_hand"):
        folder = repository / kind / "1"
        folder.mkdir(parents=True)
        names = {"KIND": kind, "ROWS": str(table / "emb_vector"), "DENSE_FILE": str(version / DENSE_FILE)}
        constants = "\n".join(f"{name} = {value!r}" for name, value in names.items())
        (folder / "model.py").write_text(constants + PEER, encoding="utf-8")
        (folder.parent / "config.pbtxt").write_text(CONFIG, encoding="utf-8")
    return keys


def model_spec(num_rows: int) -> ModelSpec:
    """What the model is."""
    return ModelSpec(
        inputs=(TensorSpec("keys", "int64", (-1, FEATURES)), TensorSpec("dense", "float32", (-1, DENSE))),
        outputs=(TensorSpec("click", "float32", (-1, 1)),),
        tables=(TableSpec("item", "item", num_rows, DIM, keys="stored"),),
        lookups=(LookupSpec("item", "keys", "vectors", joined=True),),
        labels=("click",),
        label_outputs=("click",),
    )


def network(rng: np.random.Generator) -> onnx.ModelProto:
    """The dense part."""
    widths = (FEATURES * DIM + DENSE, *HIDDEN, 1)
    weights = {}
    nodes = [helper.make_node("Concat", ["vectors", "dense"], ["activated"], axis=1)]
    activated = "activated"
    for i, shape in enumerate(itertools.pairwise(widths)):
        weights[f"w{i}"] = rng.standard_normal(shape, np.float32) / math.sqrt(shape[0])
        weights[f"b{i}"] = np.zeros(shape[1], np.float32)
        nodes.append(helper.make_node("Gemm", [activated, f"w{i}", f"b{i}"], [f"layer{i}"]))
        is_last = i + 2 == len(widths)
        activated = "click" if is_last else f"activated{i}"
        nodes.append(helper.make_node("Sigmoid" if is_last else "Relu", [f"layer{i}"], [activated]))

    def tensor(name: str, width: int) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width])

    constants = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()]
    inputs = [tensor("vectors", FEATURES * DIM), tensor("dense", DENSE)]
    whole = helper.make_graph(nodes, "dense", inputs, [tensor("click", 1)], constants)
    return helper.make_model(whole, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def requests_of(model: str, keys: NDArray[np.int64], samples: int, rng: np.random.Generator) -> dict[str, Any]:
    """One random request: keys that are held, or for the others the numbers of their rows."""
    numbers = rng.integers(0, len(keys), (samples, FEATURES))
    return {
        "keys": keys[numbers] if model == "hotrow" else numbers,
        "dense": rng.random((samples, DENSE), np.float32),
    }


def check_answers(url: str, keys: NDArray[np.int64]) -> None:
    """The model and its peer must agree before they are timed."""
    answers = []
    with tritonclient.grpc.InferenceServerClient(url) as client:
        for model in ("hotrow", "by_hand"):
            request = requests_of(model, keys, 1000, np.random.default_rng(1))
            tensors = []
            for name, array in request.items():
                tensors.append(tritonclient.grpc.InferInput(name, list(array.shape), _TYPES[array.dtype.name]))
                tensors[-1].set_data_from_numpy(array)
            answers.append(client.infer(model, tensors).as_numpy("click"))
    np.testing.assert_allclose(*answers, atol=1e-5)


_TYPES = {"int64": "INT64", "float32": "FP32"}


def run_rounds(url: str, folder: Path, keys: NDArray[np.int64], rounds: int) -> None:
    """Measure all models with small and large requests, round by round, and report."""
    for samples, model in itertools.product((64, 1024), MODELS):
        write_requests(
            folder / f"{model}{samples}.json", requests_of(model, keys, 8 * samples, np.random.default_rng())
        )
    seen: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for samples, model in itertools.product((64, 1024), MODELS):
            data = folder / f"{model}{samples}.json"
            result = measure(model, url, "grpc", data=data, batch=samples, concurrency=1, seconds=1.0, timeout_s=60)
            seen[model, samples].append(result["p50"])
    for samples in (64, 1024):
        p50 = {model: statistics.median(seen[model, samples]) for model in MODELS}
        ratio = p50["hotrow"] / p50["by_hand"]
        print(
            f"G8 {samples:4d} samples: null {p50['null']:.0f} us, by hand {p50['by_hand']:.0f} us, "
            f"hotrow {p50['hotrow']:.0f} us, ratio {ratio:.2f}, goal <= 0.8",
            flush=True,
        )


def write_requests(file: Path, request: dict[str, Any]) -> None:
    """One entry per sample, of which perf_analyzer sends as many as one request holds."""
    entries = [
        {name: {"content": row.tolist(), "shape": [len(row)]} for name, row in zip(request, rows, strict=True)}
        for rows in zip(*request.values(), strict=True)
    ]
    file.write_text(json.dumps({"data": entries}), encoding="utf-8")


if __name__ == "__main__":
    main()
