"""A small model in the native layout that uses every kind of look-up, and its expected answers, in plain NumPy.

user [n, 1] and codes [n, 2] stand side by side in one matrix; items [n, L] are pooled by their mean from `hashed`,
a table whose keys are stored. keys.onnx doubles `codes`. The dense network adds the columns up in several ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from inference_session.model_spec import (
    DENSE_FILE,
    KEYS_FILE,
    TABLES_FOLDER,
    LookupSpec,
    ModelSpec,
    TableSpec,
    TensorSpec,
)
from inference_session.version_directory import manifest

Arrays = dict[str, NDArray[Any]]

TABLES = (
    TableSpec("user.weight", "user_weight", 50, 4, keys="row_number"),
    TableSpec("code", "code", 40, 3, dtype="float16", keys="row_number"),
    TableSpec("hashed", "hashed", 30, 2, keys="stored", default_vector=(0.5, -0.5)),
)
SPEC = ModelSpec(
    inputs=(
        TensorSpec("user", "int64", (-1, 1)),
        TensorSpec("codes", "int64", (-1, 2)),
        TensorSpec("items", "int32", (-1, -1)),
        TensorSpec("dense", "float32", (-1, 3)),
    ),
    outputs=(
        TensorSpec("click", "float32", (-1, 1)),
        TensorSpec("stay", "float32", (-1,)),
        TensorSpec("wide", "float32", (-1, 10)),
        TensorSpec("user_vector", "float32", (-1, 1, 4)),
    ),
    tables=TABLES,
    lookups=(
        LookupSpec("user_weight", "user", "matrix", joined=True),
        LookupSpec("code", "doubled", "matrix", joined=True),
        LookupSpec("hashed", "items", "pooled", pooling="mean"),
        LookupSpec("user_weight", "user", "user_again"),
    ),
    labels=("click", "stay"),
    label_outputs=("click", "stay"),
)


def write(directory: Path, *, seed: int = 0) -> Arrays:
    """Write the model as a version directory; returns its tables by folder, `hashed/key` included."""
    tables = random_tables(seed)
    (directory / TABLES_FOLDER).mkdir(parents=True)
    for table in TABLES:
        folder = directory / TABLES_FOLDER / table.folder
        folder.mkdir()
        tables[table.folder].tofile(folder / "emb_vector")
    tables["hashed/key"].tofile(directory / TABLES_FOLDER / "hashed" / "key")
    onnx.save(_dense_network(), directory / DENSE_FILE)
    onnx.save(_key_graph(), directory / KEYS_FILE)
    manifest.describe_version(SPEC, directory)
    return tables


def random_tables(seed: int) -> Arrays:
    """Random vectors, and keys over the whole range of int64."""
    rng = np.random.default_rng(seed)
    keys = np.unique(np.concatenate([np.arange(-8, 8), rng.integers(-(2**63), 2**63 - 1, 13), [2**63 - 1]]))[:30]
    return {
        "user_weight": rng.standard_normal((50, 4), np.float32),
        "code": rng.standard_normal((40, 3), np.float32).astype(np.float16),
        "hashed": rng.standard_normal((30, 2), np.float32),
        "hashed/key": rng.permutation(keys),
    }


def random_inputs(num_samples: int, rng: np.random.Generator, *, num_items: int = 5) -> Arrays:
    """A request whose keys are all in their tables, except a few of `items`."""
    return {
        "user": rng.integers(-50, 50, (num_samples, 1)),
        "codes": rng.integers(0, 20, (num_samples, 2)),
        "items": rng.integers(-12, 12, (num_samples, num_items), dtype=np.int32),
        "dense": rng.standard_normal((num_samples, 3), np.float32),
    }


def expected(tables: Mapping[str, NDArray[Any]], inputs: Mapping[str, NDArray[Any]]) -> Arrays:
    """All outputs, in float64, sample by sample."""
    user = tables["user_weight"].astype(float)[inputs["user"][:, 0]]
    codes = tables["code"].astype(float)[2 * inputs["codes"]].reshape(len(user), 6)
    rows = dict(zip(tables["hashed/key"].tolist(), tables["hashed"].astype(float), strict=True))
    default = np.array([0.5, -0.5])
    pooled = np.zeros((len(user), 2))
    for i, bag in enumerate(inputs["items"].tolist()):
        if bag:
            pooled[i] = sum(rows.get(key, default) for key in bag) / len(bag)
    matrix = np.concatenate([user, codes], axis=1)
    total = matrix.sum(1) + pooled.sum(1)
    return {
        "click": total[:, None],
        "stay": total + inputs["dense"].astype(float).sum(1),
        "wide": matrix,
        "user_vector": user[:, None, :],
        "OUTPUT0": np.stack([total, total + inputs["dense"].astype(float).sum(1)], axis=1),
    }


def _dense_network() -> onnx.ModelProto:
    def tensor(name: str, *shape: Any) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    nodes = [
        helper.make_node("ReduceSum", ["matrix", "last"], ["matrix_sum"], keepdims=1),
        helper.make_node("ReduceSum", ["pooled", "last"], ["pooled_sum"], keepdims=1),
        helper.make_node("Add", ["matrix_sum", "pooled_sum"], ["click"]),
        helper.make_node("ReduceSum", ["dense", "last"], ["dense_sum"], keepdims=1),
        helper.make_node("Add", ["click", "dense_sum"], ["stay_column"]),
        helper.make_node("Squeeze", ["stay_column", "last"], ["stay"]),
        helper.make_node("Identity", ["matrix"], ["wide"]),
        helper.make_node("Identity", ["user_again"], ["user_vector"]),
    ]
    inputs = [
        tensor("dense", "n", 3),
        tensor("matrix", "n", 10),
        tensor("pooled", "n", 2),
        tensor("user_again", "n", 1, 4),
    ]
    outputs = [tensor("click", "n", 1), tensor("stay", "n"), tensor("wide", "n", 10), tensor("user_vector", "n", 1, 4)]
    last = numpy_helper.from_array(np.array([-1]), "last")
    return _model(helper.make_graph(nodes, "dense", inputs, outputs, [last]))


def _key_graph() -> onnx.ModelProto:
    nodes = [helper.make_node("Add", ["codes", "codes"], ["doubled"])]
    inputs = [helper.make_tensor_value_info("codes", TensorProto.INT64, ("n", 2))]
    outputs = [helper.make_tensor_value_info("doubled", TensorProto.INT64, ("n", 2))]
    return _model(helper.make_graph(nodes, "keys", inputs, outputs))


def _model(graph: onnx.GraphProto) -> onnx.ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
