"""A model whose requests compiled code stages: each kind of look-up that this code supports, and other inputs.

There is a second one that answers the same, in which a graph computes most keys, though they stay the same numbers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from inference_session.model_spec import (
    DENSE_FILE,
    KEYS_FILE,
    TABLES_FOLDER,
    LookupSpec,
    ModelSpec,
    TableSpec,
    TensorSpec,
)
from inference_session.tables.quantized_rows import quantize_int8
from inference_session.version_directory import manifest
from tests.testing.onnx_models import model_of

EXTREMES = (-(2**63), -(2**31), -51, -50, -1, 0, 1, 49, 50, 2**31 - 1, 2**63 - 1)
"""Keys at the edges of the types and tables."""
TABLES = (
    TableSpec("wide", "wide", 50, 16, keys="row_number", default_vector=2.0),
    TableSpec("odd", "odd", 40, 5, dtype="float16", keys="row_number"),
    TableSpec("hashed", "hashed", 30, 4, keys="stored", default_vector=(0.5, -0.5, 1.0, 2.0)),
    TableSpec("small", "small", 20, 20, dtype="int8", keys="row_number"),
    TableSpec("blocks", "blocks", 10, 6, keys="row_number", row_shape=(2, 3)),
)
_BLOCKS: dict[str, tuple[Any, ...]] = {
    "matrix": ("n", 16 + 3 * 5 + 4 + 2 * 20),
    "alone": ("n", "length", 16),
    "pooled": ("n", 4),
    "most": ("n", 2, 5),
    "weighted": ("n", 20),
    "shaped": ("n", 2, 2, 3),
    "side": ("n", 8),
}
SPEC = ModelSpec(
    inputs=(
        TensorSpec("packed", "int64", (-1, 5)),
        TensorSpec("codes", "int32", (-1, 2)),
        TensorSpec("history", "int64", (-1, -1)),
        TensorSpec("items", "int32", (-1, -1)),
        TensorSpec("sets", "int64", (-1, 2, 3)),
        TensorSpec("bag", "int64", (-1, 3)),
        TensorSpec("factors", "float32", (-1, 3)),
        TensorSpec("pairs", "int64", (-1, 2)),
        TensorSpec("dense", "float32", (-1, 3)),
        TensorSpec("flags", "bool", (-1,)),
        TensorSpec("steps", "float32", (-1, -1, 2)),
    ),
    outputs=(
        *(TensorSpec(f"{name}_out", "float32", (-1, *[-1] * (len(shape) - 1))) for name, shape in _BLOCKS.items()),
        TensorSpec("click", "float32", (-1, 1)),
        TensorSpec("flags_out", "bool", (-1,)),
        TensorSpec("steps_out", "float32", (-1, -1, 2)),
        TensorSpec("codes_out", "int32", (-1, 2)),
    ),
    tables=TABLES,
    lookups=(
        LookupSpec("wide", "packed", "matrix", columns=(0, 1), joined=True),
        LookupSpec("odd", "packed", "matrix", columns=(1, 4), joined=True),
        LookupSpec("hashed", "packed", "matrix", columns=(4, 5), joined=True),
        LookupSpec("small", "codes", "matrix", joined=True),
        LookupSpec("wide", "history", "alone"),
        LookupSpec("hashed", "items", "pooled", pooling="mean"),
        LookupSpec("odd", "sets", "most", pooling="max"),
        LookupSpec("small", "bag", "weighted", pooling="sum", weights="factors"),
        LookupSpec("blocks", "pairs", "shaped"),
        LookupSpec("hashed", "pairs", "side", joined=True),
    ),
    labels=("click",),
    label_outputs=("click",),
)


_KEY_GRAPH = """staged (
        int64[n, 5] packed, int32[n, 2] codes, int64[n, l] history, int64[n, 2, 3] sets, int64[n, 3] bag,
        float[n, 3] factors, int64[n, 2] pairs
    ) => (
        int64[n, 1] packed_0, int64[n, 3] packed_1, int64[n, 1] packed_4, int32[n, 2] codes_0, int64[n, l] history_0,
        int64[n, 2, 3] sets_0, int64[n, 3] bag_0, float[n, 3] factors_0, int64[n, 2] pairs_0
    ) {
        packed_0, packed_1, packed_4 = Split<axis = 1>(packed, widths)
        wide = Cast<to = 7>(codes)
        codes_0 = Cast<to = 6>(wide)
        history_0 = Sub(history, zero)
        opposite = Neg(sets)
        sets_0 = Neg(opposite)
        is_negative = Less(bag, zero)
        bag_0 = Where(is_negative, bag, bag)
        factors_0 = Mul(factors, one)
        pairs_0 = Add(pairs, zero)
    }"""


def write(directory: Path, seed: int = 0, *, key_graph: bool = False) -> None:
    """Write the model, or the one with a key graph, as a version directory."""
    rng = np.random.default_rng(seed)
    for table in TABLES:
        folder = directory / TABLES_FOLDER / table.folder
        folder.mkdir(parents=True)
        vectors = rng.standard_normal((table.num_rows, table.embedding_dim), np.float32)
        rows = quantize_int8(vectors) if table.dtype == "int8" else vectors.astype(table.dtype)
        rows.tofile(folder / "emb_vector")
        if table.keys == "stored":
            keys = np.unique([*EXTREMES, *range(2, 40)])[: table.num_rows]
            rng.permutation(keys).tofile(folder / "key")
    onnx.save(_network(), directory / DENSE_FILE)
    spec = SPEC
    if key_graph:
        spec = replace(SPEC, lookups=tuple(map(_of_key_graph, SPEC.lookups)))
        constants = {"widths": np.array([1, 3, 1]), "zero": np.array(0), "one": np.array(1, np.float32)}
        onnx.save(model_of(_KEY_GRAPH, constants), directory / KEYS_FILE)
    manifest.describe_version(spec, directory)


def inputs(
    num_samples: int, rng: np.random.Generator, *, length: int = 3, num_items: int = 4
) -> dict[str, NDArray[Any]]:
    """A request of known, unknown and extreme keys, with duplicates."""

    def keys(dtype: Any, *shape: int) -> NDArray[Any]:
        limits = np.iinfo(dtype)
        edges = [key for key in EXTREMES if limits.min <= key <= limits.max]
        drawn = np.where(rng.random(shape) < 0.1, rng.choice(edges, shape), rng.integers(-10, 60, shape))
        return drawn.astype(dtype)

    def fractions(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, np.float32)

    return {
        "packed": keys(np.int64, num_samples, 5),
        "codes": keys(np.int32, num_samples, 2),
        "history": keys(np.int64, num_samples, length),
        "items": keys(np.int32, num_samples, num_items),
        "sets": keys(np.int64, num_samples, 2, 3),
        "bag": keys(np.int64, num_samples, 3),
        "factors": fractions(num_samples, 3),
        "pairs": keys(np.int64, num_samples, 2),
        "dense": fractions(num_samples, 3),
        "flags": rng.random(num_samples) < 0.5,
        "steps": fractions(num_samples, length + 1, 2),
    }


def _of_key_graph(lookup: LookupSpec) -> LookupSpec:
    """The same look-up of the graph's results; bags of different lengths stay as requests have them."""
    if lookup.keys == "items":
        return lookup
    first, _ = lookup.columns or (0, 0)
    weights = lookup.weights and f"{lookup.weights}_0"
    return replace(lookup, keys=f"{lookup.keys}_{first}", weights=weights, columns=None)


def _network() -> onnx.ModelProto:
    """Outputs most of its inputs unchanged."""

    def tensor(name: str, shape: tuple[Any, ...], kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    others = {
        "flags": (("n",), TensorProto.BOOL),
        "steps": (("n", "steps", 2), TensorProto.FLOAT),
        "codes": (("n", 2), TensorProto.INT32),
    }
    given = [*(tensor(*block) for block in _BLOCKS.items()), *(tensor(name, *rest) for name, rest in others.items())]
    made = [
        *(tensor(f"{name}_out", shape) for name, shape in _BLOCKS.items()),
        tensor("click", ("n", 1)),
        *(tensor(f"{name}_out", *rest) for name, rest in others.items()),
    ]
    nodes = [helper.make_node("Identity", [name], [f"{name}_out"]) for name in (*_BLOCKS, *others)]
    nodes += [
        helper.make_node("ReduceMean", ["matrix"], ["mean"], axes=[1]),
        helper.make_node("ReduceMean", ["dense"], ["dense_mean"], axes=[1]),
        helper.make_node("Add", ["mean", "dense_mean"], ["click"]),
    ]
    graph = helper.make_graph(nodes, "staged", [*given, tensor("dense", ("n", 3))], made)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
