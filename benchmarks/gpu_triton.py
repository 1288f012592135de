"""Whole requests through a real Triton on a GPU, compared with models written by hand: goals G8 and G12.

    python benchmarks/gpu_triton.py [--rows 10000000] [--rounds 3] [--layouts native,hugectr]

The model: 26 keys x dim 128 of one table with random int64 keys, 13 dense features, MLP 512-256-1. Its requests carry
the model's own inputs (`native`), or DES, CATCOLUMN and ROWINDEX with one key per slot (`hugectr`). The peer is a
Python model that is given row numbers, joins requests, takes rows with a plain CUDA kernel and runs the same network by
ONNX Runtime's CUDA provider, inputs bound on the device. `null` answers zeros: the least that a Python model costs.
perf_analyzer sends single requests over gRPC, and processes of their own send many at once; rounds are interleaved,
medians shown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import onnx
import tritonclient.grpc
from client_load import measure_load
from networks import mlp, network_of
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from perf_analyzer import measure, perf_analyzer
from serving import serve, tensors

from inference_session.model_spec import DENSE_FILE, TABLES_FOLDER, LookupSpec, ModelSpec, TableSpec, TensorSpec
from inference_session.version_directory import manifest
from triton_backend.repository.config_writer import write_model_config

FEATURES, DENSE, DIM, HIDDEN = 26, 13, 128, (512, 256)
MODELS = ("null", "by_hand", "hotrow")
SIZES = (64, 1024)
CONCURRENT = 16
_NATIVE = """
input [ { name: "keys" data_type: TYPE_INT64 dims: [ 26 ] }, { name: "dense" data_type: TYPE_FP32 dims: [ 13 ] } ]
output [ { name: "click" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
_HUGECTR = """
input [ { name: "DES" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "CATCOLUMN" data_type: TYPE_INT64 dims: [ -1 ] },
        { name: "ROWINDEX" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
TENSORS = {"native": _NATIVE, "hugectr": _HUGECTR}
MAX_BATCH_SIZE = 16384
"""Triton joins up to this many samples; with HugeCTR's layout, this many requests."""
CONFIG = f"""
backend: "python"
max_batch_size: {MAX_BATCH_SIZE}
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
dynamic_batching {{ }}
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

    def decode(self, arrays):
        if LAYOUT == "native":
            return arrays["keys"], arrays["dense"]
        keys, offsets = arrays["CATCOLUMN"].reshape(-1, 26), arrays["ROWINDEX"].reshape(-1)
        assert np.array_equal(offsets, np.arange(keys.size + 1)), "this model takes one key per slot"
        return keys, arrays["DES"].reshape(len(keys), 13)

    def execute(self, requests):
        read = [{tensor.name(): read_array(tensor) for tensor in request.inputs()} for request in requests]
        numbers, dense = zip(*map(self.decode, read))
        if len(read) == 1:
            answers = [self.predict(numbers[0], dense[0])]
        else:
            joined = self.predict(np.concatenate(numbers), np.concatenate(dense))
            answers = np.split(joined, np.cumsum([len(each) for each in numbers])[:-1])
        if LAYOUT == "native":
            return [pb_utils.InferenceResponse([write_tensor("click", each)]) for each in answers]
        return [pb_utils.InferenceResponse([write_tensor("OUTPUT0", each.reshape(-1))]) for each in answers]
'''


def main() -> None:
    """Serve the models, measure them in turn, print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one measurement")
    parser.add_argument(
        "--at-once", default=[1024], type=_sizes, help="samples of requests of which 16 are sent at once"
    )
    parser.add_argument("--layouts", default=",".join(TENSORS), type=lambda text: text.split(","))
    arguments = parser.parse_args()
    perf_analyzer()
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        repository = Path(folder) / "repository"
        keys = write_models(repository, arguments.rows, arguments.layouts)
        with serve(repository) as server:
            print(f"{arguments.rows} rows written and served after {time.monotonic() - begin:.0f} s", flush=True)
            url = server.endpoints["gRPC"]
            check_answers(url, keys, arguments.layouts)
            for layout in arguments.layouts:
                run_rounds(url, Path(folder), keys, layout, arguments)


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def name_of(model: str, layout: str) -> str:
    """The name of a model that takes requests in a layout."""
    return f"{model}_{layout}"


def write_models(repository: Path, num_rows: int, layouts: Sequence[str] = ("native",)) -> NDArray[np.int64]:
    """All models, of the same weights; returns the key of each row."""
    version = repository / name_of("hotrow", layouts[0]) / "1"
    table = version / TABLES_FOLDER / "item"
    table.mkdir(parents=True)
    rng = np.random.default_rng(0)
    keys = rng.permutation(np.unique(rng.integers(-(2**63), 2**63 - 1, num_rows)))
    keys.tofile(table / "key")
    with (table / "emb_vector").open("wb") as file:
        for begin in range(0, len(keys), 1 << 20):
            rows = min(1 << 20, len(keys) - begin)
            file.write(cupy.asnumpy(cupy.random.standard_normal((rows, DIM), np.float32)))
    dense = network(rng)
    network_file = repository.parent / DENSE_FILE
    onnx.save(dense, network_file)
    for layout in layouts:
        write_hotrow(repository / name_of("hotrow", layout) / "1", version, layout, len(keys), dense)
        for kind in ("null", "by_hand"):
            folder = repository / name_of(kind, layout) / "1"
            folder.mkdir(parents=True)
            files = {"ROWS": str(table / "emb_vector"), "DENSE_FILE": str(network_file)}
            names = {"KIND": kind, "LAYOUT": layout, **files}
            constants = "\n".join(f"{name} = {value!r}" for name, value in names.items())
            (folder / "model.py").write_text(constants + PEER, encoding="utf-8")
            (folder.parent / "config.pbtxt").write_text(CONFIG + TENSORS[layout], encoding="utf-8")
    return keys


def write_hotrow(version: Path, first: Path, layout: str, num_rows: int, dense: onnx.ModelProto) -> None:
    """The model as hotrow serves it; `first` has the table's files."""
    if version != first:
        shutil.copytree(first / TABLES_FOLDER, version / TABLES_FOLDER, copy_function=os.link)
    spec = model_spec(num_rows)
    if layout == "hugectr":
        spec, dense = hugectr_spec(spec), with_slots(dense)
    onnx.save(dense, version / DENSE_FILE)
    manifest.describe_version(spec, version)
    write_model_config(version, spec, version.parent.name, max_batch_size=MAX_BATCH_SIZE)


def model_spec(num_rows: int) -> ModelSpec:
    """The spec of the model."""
    return ModelSpec(
        inputs=(TensorSpec("keys", "int64", (-1, FEATURES)), TensorSpec("dense", "float32", (-1, DENSE))),
        outputs=(TensorSpec("click", "float32", (-1, 1)),),
        tables=(TableSpec("item", "item", num_rows, DIM, keys="stored"),),
        lookups=(LookupSpec("item", "keys", "vectors", joined=True),),
        labels=("click",),
        label_outputs=("click",),
    )


def hugectr_spec(spec: ModelSpec) -> ModelSpec:
    """The same model, as the import of one of HugeCTR's describes it."""
    return replace(
        spec,
        inputs=(
            TensorSpec("DES", "float32", (-1,)),
            TensorSpec("CATCOLUMN", "int64", (-1,)),
            TensorSpec("ROWINDEX", "int32", (-1,)),
        ),
        lookups=(LookupSpec("item", "CATCOLUMN/0", "slots", pooling="sum"),),
        layout="hugectr",
        layout_options={"dense_input": "dense", "dense_dim": DENSE, "slots": [FEATURES], "key_type": "int64"},
    )


def with_slots(dense: onnx.ModelProto) -> onnx.ModelProto:
    """The dense part with separate vectors per slot, as HugeCTR's layers return them."""
    changed = onnx.ModelProto()
    changed.CopyFrom(dense)
    slots = helper.make_tensor_value_info("slots", TensorProto.FLOAT, ["n", FEATURES, DIM])
    changed.graph.input[0].CopyFrom(slots)
    changed.graph.initializer.append(numpy_helper.from_array(np.array([-1, FEATURES * DIM], np.int64), "flat"))
    changed.graph.node.insert(0, helper.make_node("Reshape", ["slots", "flat"], ["vectors"]))
    return changed


def network(rng: np.random.Generator) -> onnx.ModelProto:
    """The dense part."""
    shapes = itertools.pairwise((FEATURES * DIM + DENSE, *HIDDEN, 1))
    layers = [(rng.standard_normal(shape, np.float32) / math.sqrt(shape[0])).astype(np.float32) for shape in shapes]
    text, constants = mlp("joined", "click", layers)
    inputs = f"float[n, {FEATURES * DIM}] vectors, float[n, {DENSE}] dense"
    concat = "joined = Concat<axis = 1>(vectors, dense)"
    return network_of(f"dense ({inputs}) => (float[n, 1] click) {{ {concat} {text} }}", constants)


def request_of(
    model: str, layout: str, keys: NDArray[np.int64], samples: int, rng: np.random.Generator
) -> dict[str, Any]:
    """A random request: keys that the model holds, or for the peers their row numbers."""
    numbers = rng.integers(0, len(keys), (samples, FEATURES))
    asked, dense = keys[numbers] if model == "hotrow" else numbers, rng.random((samples, DENSE), np.float32)
    if layout == "native":
        return {"keys": asked, "dense": dense}
    offsets = np.arange(samples * FEATURES + 1, dtype=np.int32)
    return {"DES": dense.reshape(1, -1), "CATCOLUMN": asked.reshape(1, -1), "ROWINDEX": offsets[None]}


def check_answers(url: str, keys: NDArray[np.int64], layouts: Sequence[str]) -> None:
    """The models and their peers must agree before they are timed."""
    answers = []
    with tritonclient.grpc.InferenceServerClient(url) as client:
        for layout, model in itertools.product(layouts, ("hotrow", "by_hand")):
            request = request_of(model, layout, keys, 1000, np.random.default_rng(1))
            output = "click" if layout == "native" else "OUTPUT0"
            answer = client.infer(name_of(model, layout), tensors(tritonclient.grpc, request)).as_numpy(output)
            answers.append(answer.reshape(-1))
    for answer in answers[1:]:
        np.testing.assert_allclose(answer, answers[0], atol=1e-5)


def run_rounds(url: str, folder: Path, keys: NDArray[np.int64], layout: str, arguments: argparse.Namespace) -> None:
    """Measure all models with small and large requests, alone and many at once, round by round, and report."""
    requests: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for samples, model in itertools.product({*SIZES, *arguments.at_once}, MODELS):
        drawn = [request_of(model, layout, keys, samples, np.random.default_rng()) for _ in range(8)]
        requests[model, samples] = drawn
        write_requests(folder / f"{model}{samples}.json", drawn, layout)
    seen: dict[tuple[str, int, int], list[dict[str, float]]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for samples, model in itertools.product(SIZES, MODELS):
            result = measure(
                name_of(model, layout),
                url,
                "grpc",
                data=folder / f"{model}{samples}.json",
                batch=samples if layout == "native" else 1,
                concurrency=1,
                seconds=arguments.seconds,
                timeout_s=60,
            )
            seen[model, samples, 1].append(result)
        for samples, model in itertools.product(arguments.at_once, MODELS):
            sent = requests[model, samples]
            result = measure_load(
                name_of(model, layout), url, sent, num_clients=CONCURRENT, seconds=2 * arguments.seconds
            )
            seen[model, samples, CONCURRENT].append(result)
    for samples in SIZES:
        report_latency(layout, samples, {m: _median(seen[m, samples, 1], "p50") for m in MODELS})
    for samples in arguments.at_once:
        rates = {m: _median(seen[m, samples, CONCURRENT], "requests/s") * samples / 1e6 for m in MODELS}
        report_rate(layout, samples, rates)


def _median(results: Sequence[dict[str, float]], figure: str) -> float:
    return statistics.median(result[figure] for result in results)


def report_latency(layout: str, samples: int, p50: dict[str, float]) -> None:
    """G8."""
    print(
        f"G8  {layout:7s} {samples:4d} samples: null {p50['null']:.0f} us, by hand {p50['by_hand']:.0f} us, "
        f"hotrow {p50['hotrow']:.0f} us, ratio {p50['hotrow'] / p50['by_hand']:.2f}, goal <= 0.75",
        flush=True,
    )


def report_rate(layout: str, samples: int, rates: dict[str, float]) -> None:
    """G12."""
    print(
        f"G12 {layout:7s} {CONCURRENT} x {samples:4d} samples at once, M samples/s: null {rates['null']:.3f}, by hand "
        f"{rates['by_hand']:.3f}, hotrow {rates['hotrow']:.3f}; {rates['hotrow'] / rates['by_hand']:.2f} of by hand, "
        f"goal >= 1.2; {rates['hotrow'] / rates['null']:.2f} of null, goal >= 0.75",
        flush=True,
    )


def write_requests(file: Path, requests: Sequence[dict[str, Any]], layout: str) -> None:
    """perf_analyzer's input: one entry per request, or per sample, which it joins into requests."""
    if layout == "native":
        rows = [row for request in requests for row in zip(*request.values(), strict=True)]
    else:
        rows = [tuple(array[0] for array in request.values()) for request in requests]
    names = [*requests[0]]
    entries = [
        {name: {"content": values.tolist(), "shape": [len(values)]} for name, values in zip(names, row, strict=True)}
        for row in rows
    ]
    file.write_text(json.dumps({"data": entries}), encoding="utf-8")


if __name__ == "__main__":
    main()
