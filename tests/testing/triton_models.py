"""Small models in the native layout, with the answers that NumPy gives for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from inference_session.model_spec import LookupSpec, ModelSpec, TableSpec, TensorSpec
from inference_session.version_directory.manifest import describe_version
from triton_backend.repository.config_writer import write_model_config

NUM_ROWS = 50
TABLE: NDArray[np.float32] = np.arange(NUM_ROWS * 4, dtype=np.float32).reshape(NUM_ROWS, 4) / np.float32(64)
"""Multiples of a power of two, so that sums of any order are exact."""

_ITEM = TableSpec("item", "item", NUM_ROWS, 4, keys="row_number")
_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
    "object": TensorProto.STRING,
}


def write_ctr(version_dir: Path, *, scale: float = 1.0) -> None:
    """Ids and dense features, two tasks: `click` is the scaled sum of all, `like` twice that."""
    spec = ModelSpec(
        inputs=(TensorSpec("ids", "int64", (-1, 3)), TensorSpec("dense", "float32", (-1, 2))),
        outputs=(TensorSpec("click", "float32", (-1, 1)), TensorSpec("like", "float32", (-1, 1))),
        tables=(_ITEM,),
        lookups=(LookupSpec("item", keys="ids", dense_input="vectors"),),
        labels=("click", "like"),
        label_outputs=("click", "like"),
    )
    nodes = [
        helper.make_node("ReduceSum", ["vectors", "last_two"], ["of_ids"], keepdims=0),
        helper.make_node("ReduceSum", ["dense", "last"], ["of_dense"], keepdims=0),
        helper.make_node("Add", ["of_ids", "of_dense"], ["sum"]),
        helper.make_node("Unsqueeze", ["sum", "last"], ["column"]),
        helper.make_node("Mul", ["column", "scale"], ["click"]),
        helper.make_node("Add", ["click", "click"], ["like"]),
    ]
    constants = {
        "last_two": np.array([1, 2]),
        "last": np.array([1]),
        "scale": np.array([scale], np.float32),
    }
    vectors = TensorSpec("vectors", "float32", (-1, 3, 4))
    _write(version_dir, spec, nodes, [vectors, spec.inputs[1]], constants)


def ctr_answer(ids: NDArray[np.int64], dense: NDArray[np.float32], *, scale: float = 1.0) -> NDArray[np.float32]:
    """The predictions of `write_ctr`: float32 [samples, 2]."""
    click = (TABLE[ids].sum((1, 2)) + dense.sum(1)) * np.float32(scale)
    return np.stack([click, 2 * click], axis=1)


def write_flat(version_dir: Path) -> None:
    """1-D tensors: `score` [samples] is the sum of an item's vector times its price."""
    spec = ModelSpec(
        inputs=(TensorSpec("item", "int64", (-1,)), TensorSpec("price", "float32", (-1,))),
        outputs=(TensorSpec("score", "float32", (-1,)),),
        tables=(_ITEM,),
        lookups=(LookupSpec("item", keys="item", dense_input="vectors"),),
        labels=("score",),
        label_outputs=("score",),
    )
    nodes = [
        helper.make_node("ReduceSum", ["vectors", "last"], ["sum"], keepdims=0),
        helper.make_node("Mul", ["sum", "price"], ["score"]),
    ]
    inputs = [TensorSpec("vectors", "float32", (-1, 4)), spec.inputs[1]]
    _write(version_dir, spec, nodes, inputs, {"last": np.array([1])}, max_batch_size=64)


def flat_answer(item: NDArray[np.int64], price: NDArray[np.float32]) -> NDArray[np.float32]:
    """The scores of `write_flat`: float32 [samples]."""
    return np.asarray(TABLE[item].sum(1) * price)


def write_bags(version_dir: Path) -> None:
    """Bags of any length, summed: `score` [samples, 1]."""
    spec = ModelSpec(
        inputs=(TensorSpec("bag", "int64", (-1, -1)),),
        outputs=(TensorSpec("score", "float32", (-1, 1)),),
        tables=(_ITEM,),
        lookups=(LookupSpec("item", keys="bag", dense_input="vectors", pooling="sum"),),
        labels=("score",),
        label_outputs=("score",),
    )
    nodes = [helper.make_node("ReduceSum", ["vectors", "last"], ["score"], keepdims=1)]
    _write(version_dir, spec, nodes, [TensorSpec("vectors", "float32", (-1, 4))], {"last": np.array([1])})


def write_joined(version_dir: Path) -> None:
    """Columns of a matrix of ids and a weighted bag side by side: `score` [samples, 1] is the sum of all, and of
    `dense`.
    """
    spec = ModelSpec(
        inputs=(
            TensorSpec("ids", "int32", (-1, 3)),
            TensorSpec("bag", "int64", (-1, 2)),
            TensorSpec("factors", "float32", (-1, 2)),
            TensorSpec("dense", "float32", (-1, 2)),
        ),
        outputs=(TensorSpec("score", "float32", (-1, 1)),),
        tables=(_ITEM,),
        lookups=(
            LookupSpec("item", keys="ids", dense_input="vectors", columns=(0, 1), joined=True),
            LookupSpec("item", keys="bag", dense_input="vectors", pooling="sum", weights="factors", joined=True),
            LookupSpec("item", keys="ids", dense_input="vectors", columns=(1, 3), joined=True),
        ),
        labels=("score",),
        label_outputs=("score",),
    )
    nodes = [
        helper.make_node("Concat", ["vectors", "dense"], ["all"], axis=1),
        helper.make_node("ReduceSum", ["all", "last"], ["score"], keepdims=1),
    ]
    _write(
        version_dir, spec, nodes, [TensorSpec("vectors", "float32", (-1, 16)), spec.inputs[3]], {"last": np.array([1])}
    )


def joined_answer(
    ids: NDArray[np.int32], bag: NDArray[np.int64], factors: NDArray[np.float32], dense: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The scores of `write_joined`: float32 [samples, 1]."""
    pooled = (TABLE[bag] * factors[..., None]).sum((1, 2))
    return np.asarray((TABLE[ids].sum((1, 2)) + pooled + dense.sum(1))[:, None], np.float32)


def write_types(version_dir: Path, *, strings: bool) -> None:
    """Booleans and halves, and strings if wanted, without any table: no predictions."""
    inputs = [TensorSpec("flag", "bool", (-1, 1)), TensorSpec("half", "float16", (-1, 1))]
    outputs = [TensorSpec("opposite", "bool", (-1, 1)), TensorSpec("same", "float16", (-1, 1))]
    nodes = [helper.make_node("Not", ["flag"], ["opposite"]), helper.make_node("Identity", ["half"], ["same"])]
    if strings:
        inputs.append(TensorSpec("word", "object", (-1, 1)))
        outputs.append(TensorSpec("echo", "object", (-1, 1)))
        nodes.append(helper.make_node("Identity", ["word"], ["echo"]))
    spec = ModelSpec(tuple(inputs), tuple(outputs), tables=(), lookups=())
    _write(version_dir, spec, nodes, inputs, {})


def write_scalar(version_dir: Path) -> None:
    """`hot` [samples] is what a scalar divides; `largest` is a scalar."""
    inputs = [TensorSpec("logit", "float32", (-1,)), TensorSpec("temperature", "float32", ())]
    outputs = (TensorSpec("hot", "float32", (-1,)), TensorSpec("largest", "float32", ()))
    nodes = [
        helper.make_node("Div", ["logit", "temperature"], ["hot"]),
        helper.make_node("ReduceMax", ["hot"], ["largest"], keepdims=0),
    ]
    _write(version_dir, ModelSpec(tuple(inputs), outputs, (), (), batched=False), nodes, inputs, {})


def _write(
    version_dir: Path,
    spec: ModelSpec,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[TensorSpec],
    constants: dict[str, NDArray[np.generic]],
    *,
    max_batch_size: int = 1024,
) -> None:
    """Stage a version and rename it into place."""
    staged = version_dir.with_name(f".tmp-{version_dir.name}")
    staged.mkdir(parents=True)
    graph = helper.make_graph(
        nodes,
        "dense",
        [_value(tensor) for tensor in inputs],
        [_value(tensor) for tensor in spec.outputs],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), staged / "dense.onnx"
    )
    for table in spec.tables:
        folder = staged / "tables" / table.folder
        folder.mkdir(parents=True)
        TABLE.tofile(folder / "emb_vector")
    describe_version(spec, staged)
    write_model_config(staged, spec, version_dir.parent.name, max_batch_size=max_batch_size)
    staged.rename(version_dir)


def _value(tensor: TensorSpec) -> onnx.ValueInfoProto:
    shape = [f"d{axis}" if size < 0 else size for axis, size in enumerate(tensor.shape)]
    return helper.make_tensor_value_info(tensor.name, _TYPES[tensor.dtype], shape)
