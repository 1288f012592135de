"""The model that a campaign serves, and its version directories.

Three tables of 8 columns: `user` (row numbers), `code` (row numbers, float16) and `item` (stored keys over the whole
range of int64, its own default vector). Outputs are the rows that were looked up, a bag of one item, and
`content`, a constant of the dense network, so that an answer says which content gave it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from inference_session.model_spec import DENSE_FILE, TABLES_FOLDER, LookupSpec, ModelSpec, TableSpec, TensorSpec
from inference_session.version_directory import manifest
from tests.campaign.rows import EMBEDDING_DIM, Integers, encode

MODEL = "campaign"
NUM_ROWS = 200
NUM_NEW = 24
"""Keys of `item` that are in no file: writes add and remove them."""

Arrays = dict[str, NDArray[Any]]


class Table(NamedTuple):
    """One table of the model."""

    number: int
    name: str
    keys: Integers
    """All keys that requests name; those of the files come first."""
    num_in_files: int
    default: float
    dtype: str

    @property
    def spec(self) -> TableSpec:
        """Its entry in session.json."""
        kind = "stored" if self.name == "item" else "row_number"
        return TableSpec(
            self.name,
            self.name,
            self.num_in_files,
            EMBEDDING_DIM,
            self.dtype,
            kind,
            default_vector=self.default,  # type: ignore[arg-type]
        )


def _item_keys() -> Integers:
    rng = np.random.default_rng(0)
    extremes = [0, 1, -1, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63) + 1]
    keys = np.unique(np.concatenate([rng.integers(-(2**63), 2**63 - 1, NUM_ROWS + NUM_NEW), extremes]))
    return rng.permutation(keys)[: NUM_ROWS + NUM_NEW]


TABLES = (
    Table(0, "user", np.arange(NUM_ROWS), NUM_ROWS, 0.0, "float32"),
    Table(1, "code", np.arange(NUM_ROWS), NUM_ROWS, 0.0, "float16"),
    Table(2, "item", _item_keys(), NUM_ROWS, -1.0, "float32"),
)
SPEC = ModelSpec(
    inputs=(
        *(TensorSpec(f"{table.name}_keys", "int64", (-1, -1)) for table in TABLES),
        TensorSpec("bag", "int64", (-1, 1)),
        TensorSpec("dense", "float32", (-1, 1)),
    ),
    outputs=(
        *(TensorSpec(f"{table.name}_rows", "float32", (-1, -1, EMBEDDING_DIM)) for table in TABLES),
        TensorSpec("bag_rows", "float32", (-1, EMBEDDING_DIM)),
        TensorSpec("content", "float32", (-1, 1)),
    ),
    tables=tuple(table.spec for table in TABLES),
    lookups=(
        *(LookupSpec(table.name, f"{table.name}_keys", f"{table.name}_vectors") for table in TABLES),
        LookupSpec("item", "bag", "bag_vectors", pooling="sum"),
    ),
    labels=("content",),
    label_outputs=("content",),
)


def write_version(directory: Path, *, content: int, tag: int, settings: Mapping[str, Any] | None = None) -> None:
    """Write a version directory whose dense network outputs `content` and whose rows hold `tag`."""
    for table in TABLES:
        folder = directory / TABLES_FOLDER / table.name
        folder.mkdir(parents=True)
        rows = encode(table.number, np.arange(table.num_in_files), tag, 0)
        rows.astype(table.dtype).tofile(folder / "emb_vector")
        if table.spec.keys == "stored":
            table.keys[: table.num_in_files].tofile(folder / "key")
    onnx.save(_network(content), directory / DENSE_FILE)
    manifest.describe_version(dataclasses.replace(SPEC, settings=dict(settings or {})), directory)


def _network(content: int) -> onnx.ModelProto:
    def tensor(name: str, *shape: Any) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    names = [table.name for table in TABLES]
    nodes = [helper.make_node("Identity", [f"{name}_vectors"], [f"{name}_rows"]) for name in [*names, "bag"]]
    nodes += [
        helper.make_node("Mul", ["dense", "zero"], ["nothing"]),
        helper.make_node("Add", ["nothing", "number"], ["content"]),
    ]
    shapes = {name: ("n", f"{name}_k", EMBEDDING_DIM) for name in names} | {"bag": ("n", EMBEDDING_DIM)}
    inputs = [tensor(f"{name}_vectors", *shape) for name, shape in shapes.items()] + [tensor("dense", "n", 1)]
    outputs = [tensor(f"{name}_rows", *shape) for name, shape in shapes.items()] + [tensor("content", "n", 1)]
    constants = [
        numpy_helper.from_array(np.array([0], np.float32), "zero"),
        numpy_helper.from_array(np.array([content], np.float32), "number"),
    ]
    graph = helper.make_graph(nodes, "dense", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


class Question(NamedTuple):
    """A request, by the positions of its keys."""

    positions: dict[str, Integers]
    """By table, [samples, keys]."""
    bag: Integers
    """Of `item`, [samples, 1]."""
    inputs: Arrays


def random_question(rng: np.random.Generator) -> Question:
    """A request of one to eight samples; popular keys, rare ones, new ones, duplicates, row numbers from the end."""
    num_samples = int(rng.integers(1, 9))
    positions = {table.name: _random_positions(table, num_samples, rng) for table in TABLES}
    bag = _random_positions(TABLES[2], num_samples, rng)[:, :1]
    inputs: Arrays = {}
    for table in TABLES:
        keys = table.keys[positions[table.name]]
        from_end = rng.random(keys.shape) < 0.2
        inputs[f"{table.name}_keys"] = keys if table.name == "item" else np.where(from_end, keys - NUM_ROWS, keys)
    inputs["bag"] = TABLES[2].keys[bag]
    inputs["dense"] = rng.standard_normal((num_samples, 1), np.float32)
    return Question(positions, bag, inputs)


def _random_positions(table: Table, num_samples: int, rng: np.random.Generator) -> Integers:
    shape = num_samples, int(rng.integers(1, 7))
    popular = rng.integers(0, 12, shape)
    return np.where(rng.random(shape) < 0.4, popular, rng.integers(0, len(table.keys), shape))


def every_key() -> Arrays:
    """A request for every key of every table, a sample for each; keys of smaller tables are repeated."""
    num_samples = max(len(table.keys) for table in TABLES)
    inputs: Arrays = {f"{table.name}_keys": np.resize(table.keys, num_samples)[:, None] for table in TABLES}
    return inputs | {"bag": inputs["item_keys"], "dense": np.zeros((num_samples, 1), np.float32)}
