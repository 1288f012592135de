"""Random models whose network begins with a Concat of vectors and inputs of requests, and their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from inference_session.model_spec import DENSE_FILE, TABLES_FOLDER, LookupSpec, ModelSpec, TableSpec, TensorSpec
from inference_session.version_directory import manifest

Arrays = dict[str, NDArray[Any]]
CONCAT_SEED = 22
"""Of a model with most kinds of look-ups, two given inputs, one of single numbers, two products of a concat input."""
ROWS = 40
TABLES = (
    TableSpec("wide", "wide", ROWS, 16, keys="row_number", default_vector=2.0),
    TableSpec("odd", "odd", ROWS, 5, dtype="float16", keys="stored"),
    TableSpec("small", "small", ROWS, 8, keys="stored", default_vector=-1.0),
)
_INPUTS = {
    "packed": TensorSpec("packed", "int64", (-1, 3)),
    "bag": TensorSpec("bag", "int32", (-1, -1)),
    "pairs": TensorSpec("pairs", "int64", (-1, 2)),
    "factors": TensorSpec("factors", "float32", (-1, 2)),
    "ids": TensorSpec("ids", "int32", (-1,)),
    "several_ids": TensorSpec("several_ids", "int64", (-1, 4)),
}
LOOKUPS = {
    "matrix": (
        LookupSpec("small", "packed", "matrix", columns=(0, 2), joined=True),
        LookupSpec("odd", "packed", "matrix", columns=(2, 3), joined=True),
    ),
    "pooled": (LookupSpec("wide", "bag", "pooled", pooling="mean"),),
    "weighted": (LookupSpec("small", "pairs", "weighted", pooling="sum", weights="factors"),),
    "single": (LookupSpec("odd", "ids", "single"),),
    "several": (LookupSpec("small", "several_ids", "several"),),
}
WIDTHS = {"matrix": 2 * 8 + 5, "pooled": 16, "weighted": 8, "single": 5, "several": 4 * 8}
_SHAPES = {"several": (4, 8)}
"""Of a sample, where it is not the width."""


class ConcatModel(NamedTuple):
    """A version directory, and what its answers are made of."""

    directory: Path
    spec: ModelSpec
    tables: dict[str, dict[int, NDArray[np.float32]]]
    """Rows by table and key."""
    network: Any
    """ONNX Runtime on the original network."""

    def inputs(self, num_samples: int, rng: np.random.Generator, *, length: int = 3) -> Arrays:
        """A request of known and unknown keys, with duplicates."""
        return {
            tensor.name: (
                rng.standard_normal((num_samples, *_sizes(tensor, length))).astype(np.float32)
                if tensor.dtype == "float32"
                else rng.integers(-3, ROWS + 5, (num_samples, *_sizes(tensor, length))).astype(tensor.dtype)
            )
            for tensor in self.spec.inputs
        }

    def expected(self, inputs: Arrays) -> Arrays:
        """The answer, by NumPy and the original network."""
        names = [tensor.name for tensor in self.network.get_inputs()]
        known = {**inputs, **{name: self._vectors(name, inputs) for name in LOOKUPS if name in names}}
        outputs = [tensor.name for tensor in self.spec.outputs]
        return dict(zip(outputs, self.network.run(outputs, {name: known[name] for name in names}), strict=True))

    def _vectors(self, name: str, inputs: Arrays) -> NDArray[np.float32]:
        found = np.concatenate([self._looked_up(lookup, inputs) for lookup in LOOKUPS[name]], axis=1)
        return found.reshape(len(found), *_SHAPES.get(name, found.shape[1:]))

    def _looked_up(self, lookup: LookupSpec, inputs: Arrays) -> NDArray[np.float32]:
        keys = inputs[lookup.keys]
        keys = keys[:, slice(*lookup.columns)] if lookup.columns else keys
        keys = keys if keys.ndim > 1 else keys[:, None]
        spec = self.spec.table_in(lookup.table)
        default = np.full(spec.embedding_dim, spec.default_vector, np.float32)
        rows = self.tables[lookup.table]
        found = np.array([rows.get(key, default) for key in keys.reshape(-1).tolist()], np.float32)
        found = found.reshape(*keys.shape, spec.embedding_dim)
        if lookup.weights:
            found *= inputs[lookup.weights][..., None]
        if lookup.pooling == "none":
            return found.reshape(len(keys), keys.shape[1] * spec.embedding_dim)
        return found.mean(axis=1) if lookup.pooling == "mean" else found.sum(axis=1)


def write(directory: Path, rng: np.random.Generator) -> ConcatModel:
    """Write a random model of this family as a version directory."""
    tables = {table.folder: _write_table(directory / TABLES_FOLDER / table.folder, table, rng) for table in TABLES}
    vectors = rng.permutation([*LOOKUPS])[: rng.integers(1, len(LOOKUPS) + 1)].tolist()
    given = {f"dense{i}": int(width) for i, width in enumerate(rng.integers(1, 14, rng.integers(1, 4)))}
    network = _network(vectors, given, rng)
    lookups = [lookup for name in vectors for lookup in LOOKUPS[name]]
    read = {name for lookup in lookups for name in lookup.reads}
    spec = ModelSpec(
        inputs=(
            *(tensor for name, tensor in _INPUTS.items() if name in read),
            *(TensorSpec(name, "float32", (-1, *_shape(name, width))) for name, width in given.items()),
        ),
        outputs=tuple(
            TensorSpec(value.name, "float32", (-1, value.type.tensor_type.shape.dim[1].dim_value))
            for value in network.graph.output
        ),
        tables=TABLES,
        lookups=tuple(lookups),
    )
    onnx.save(network, directory / DENSE_FILE)
    manifest.describe_version(spec, directory)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(network.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return ConcatModel(directory, spec, tables, session)


def _write_table(folder: Path, table: TableSpec, rng: np.random.Generator) -> dict[int, NDArray[np.float32]]:
    folder.mkdir(parents=True)
    rows = rng.standard_normal((ROWS, table.embedding_dim)).astype(table.dtype)
    rows.tofile(folder / "emb_vector")
    keys = np.arange(ROWS)
    if table.keys == "stored":
        keys = rng.permutation(np.arange(-2, ROWS - 2))
        keys.tofile(folder / "key")
    found = dict(zip(keys.tolist(), rows.astype(np.float32), strict=True))
    if table.keys == "row_number":
        found |= {key - ROWS: found[key] for key in range(ROWS)}
    return found


def _shape(name: str, width: int) -> tuple[int, ...]:
    """Of a sample of an input of the network: of single numbers, it has no dimension."""
    return () if width == 1 else _SHAPES.get(name, (width,))


def _sizes(tensor: TensorSpec, length: int) -> list[int]:
    return [length if size < 0 else size for size in tensor.shape[1:]]


def _network(vectors: list[str], given: dict[str, int], rng: np.random.Generator) -> onnx.ModelProto:
    """Concat, perhaps in another one, products of it, and often readers of operands that forbid a concat input."""
    widths = {**{name: WIDTHS[name] for name in vectors}, **given}
    order = rng.permutation([*widths]).tolist()
    split = int(rng.integers(0, len(order) + 1))
    shaped = [name for name, width in widths.items() if _shape(name, width) != (width,)]
    constants = [numpy_helper.from_array(np.array([-1, widths[name]]), f"{name}_shape") for name in shaped]
    nodes = [helper.make_node("Reshape", [name, f"{name}_shape"], [f"{name}_flat"]) for name in shaped]
    order = [f"{name}_flat" if name in shaped else name for name in order]
    operands = order
    if 2 <= split < len(order):
        nodes.append(helper.make_node("Concat", order[:split], ["nested"], axis=-1))
        operands = ["nested", *order[split:]]
    nodes.append(helper.make_node("Concat", operands, ["joined"], axis=1))
    outputs = {}
    for i in range(rng.integers(1, 3)):
        outputs[f"out{i}"] = 3
        shape = sum(widths.values()), 3
        kind = rng.choice(["MatMul", "Gemm", "transposed"])
        matrix = rng.standard_normal(shape[::-1] if kind == "transposed" else shape).astype(np.float32)
        constants.append(numpy_helper.from_array(matrix, f"w{i}"))
        constants.append(numpy_helper.from_array(rng.standard_normal(3).astype(np.float32), f"b{i}"))
        if kind == "MatMul":
            nodes.append(helper.make_node("MatMul", ["joined", f"w{i}"], [f"product{i}"]))
            nodes.append(helper.make_node("Add", [f"product{i}", f"b{i}"], [f"out{i}"]))
        else:
            operand = ["joined", f"w{i}", f"b{i}"]
            nodes.append(helper.make_node("Gemm", operand, [f"out{i}"], transB=int(kind == "transposed")))
    also_read = {0: "joined", 1: order[0]}.get(int(rng.integers(0, 6)))
    if also_read:
        nodes.append(helper.make_node("Neg", [also_read], ["negative"]))
        outputs["negative"] = sum(widths.values()) if also_read == "joined" else widths[also_read.removesuffix("_flat")]
    whole = helper.make_graph(
        nodes,
        "concat_model",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", *_shape(name, width)])
            for name, width in widths.items()
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width]) for name, width in outputs.items()],
        constants,
    )
    return helper.make_model(whole, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
