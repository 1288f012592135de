"""MLPerf Inference's recommender DLRM-DCNv2: the network, tables of random rows, and random samples.

The sizes are those of the reference implementation (mlcommons/inference, recommendation/dlrm_v2). Weights and rows are
random, as the trained ones are 97 GB of downloads.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from inference_session.importers.onnx import import_onnx
from inference_session.model_spec import TABLES_FOLDER, VECTOR_FILE, ModelSpec, TableSpec, VectorType
from inference_session.platform.large_pages import open_for_writing
from inference_session.version_directory.manifest import describe_version

# fmt: off
TABLE_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938,
    155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)
POOLING = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
# fmt: on
"""Number of keys of each table for a pair of user and item; their rows are summed."""
DIM, NUM_DENSE = 128, 13
BOTTOM, TOP = (512, 256, 128), (1024, 1024, 512, 256, 1)
NUM_CROSS, CROSS_RANK = 3, 512
OUTPUT = "probability"
_LARGEST_ELEMENT = 0.25
"""The largest element of a row: sums of 100 rows then have elements of about 1.4."""
_BLOCK_ROWS = 1 << 16
_MOST_ROWS_OF_EXPORT = 64
"""Rows of a table in the ONNX file, which only describes the model: its tables are written directly."""

Weights = dict[str, NDArray[np.float32]]
Arrays = dict[str, Any]


class Sizes(NamedTuple):
    """The sizes of a model's tables, and the type of their vectors."""

    rows: tuple[int, ...]
    dtype: VectorType


def capped_rows(cap: int | None) -> tuple[int, ...]:
    """Rows of each table, at most `cap`."""
    return tuple(min(rows, cap or rows) for rows in TABLE_ROWS)


def key_names() -> list[str]:
    """The inputs with keys, one per table."""
    return [f"sparse_{i}" for i in range(len(TABLE_ROWS))]


def multiply_adds() -> int:
    """Multiply-adds of the dense network for one pair."""
    width = DIM * (1 + len(TABLE_ROWS))
    chains = ((NUM_DENSE, *BOTTOM), (width, *TOP))
    dense = sum(a * b for chain in chains for a, b in itertools.pairwise(chain))
    return dense + NUM_CROSS * 2 * width * CROSS_RANK


@functools.cache
def random_weights(seed: int = 0) -> Weights:
    """The weights of the dense network by name, scaled so that values stay about 1 from layer to layer."""
    rng, width = np.random.default_rng(seed), DIM * (1 + len(TABLE_ROWS))
    shapes = {f"bottom_{i}": s for i, s in enumerate(itertools.pairwise((NUM_DENSE, *BOTTOM)))}
    for i in range(NUM_CROSS):
        shapes |= {f"cross_v_{i}": (width, CROSS_RANK), f"cross_w_{i}": (CROSS_RANK, width)}
    shapes |= {f"top_{i}": s for i, s in enumerate(itertools.pairwise((width, *TOP)))}
    weights = {}
    for name, shape in shapes.items():
        weights[name] = rng.standard_normal(shape, np.float32) * np.float32(1 / math.sqrt(shape[0]))
        if not name.startswith("cross_v"):
            weights[f"{name}_bias"] = rng.standard_normal(shape[1], np.float32) * np.float32(0.1)
    return weights


class _Graph:
    """Collects the nodes of a network."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []

    def add(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """One node; returns its output."""
        output = f"{op_type.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), [output], **attributes))
        return output

    def layers(self, value: str, name: str, count: int, *, last_is_linear: bool = False) -> str:
        """Fully connected layers, each followed by ReLU."""
        for i in range(count):
            value = self.add("Gemm", value, f"{name}_{i}", f"{name}_{i}_bias")
            if not (last_is_linear and i + 1 == count):
                value = self.add("Relu", value)
        return value

    def cross(self, first: str, value: str, i: int) -> str:
        """x0 * (W (V x) + b) + x."""
        low = self.add("MatMul", value, f"cross_v_{i}")
        factor = self.add("Add", self.add("MatMul", low, f"cross_w_{i}"), f"cross_w_{i}_bias")
        return self.add("Add", self.add("Mul", first, factor), value)


def network(weights: Weights, tables: Sequence[NDArray[np.float32]]) -> onnx.ModelProto:
    """The whole model, tables inside, as a framework would export it."""
    graph = _Graph()
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    initializers += [numpy_helper.from_array(rows, f"table_{i}") for i, rows in enumerate(tables)]
    initializers.append(numpy_helper.from_array(np.array([1], np.int64), "bag_axis"))
    bottom = graph.layers("dense", "bottom", len(BOTTOM))
    bags = []
    for i, keys in enumerate(key_names()):
        rows = graph.add("Gather", f"table_{i}", keys, axis=0)
        bags.append(graph.add("ReduceSum", rows, "bag_axis", keepdims=0))
    first = value = graph.add("Concat", bottom, *bags, axis=1)
    for i in range(NUM_CROSS):
        value = graph.cross(first, value, i)
    value = graph.layers(value, "top", len(TOP), last_is_linear=True)
    graph.nodes.append(helper.make_node("Sigmoid", [value], [OUTPUT]))
    inputs = [_declared("dense", TensorProto.FLOAT, NUM_DENSE)]
    inputs += [_declared(name, TensorProto.INT32, k) for name, k in zip(key_names(), POOLING, strict=True)]
    outputs = [_declared(OUTPUT, TensorProto.FLOAT, 1)]
    whole = helper.make_graph(graph.nodes, "dlrm_dcnv2", inputs, outputs, initializers)
    return helper.make_model(whole, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _declared(name: str, kind: int, width: int) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, ["n", width])


def import_model(folder: Path, name: str, sizes: Sizes) -> Path:
    """The model in a repository, imported like any model, with tables of these sizes; returns the version directory.

    The importer is given small tables. The large ones are written over them in blocks, and `session.json` and the
    manifest again: an ONNX file with all rows would be 97 GB.
    """
    small = [np.zeros((min(rows, _MOST_ROWS_OF_EXPORT), DIM), np.float32) for rows in sizes.rows]
    path = folder / "dlrm_dcnv2.onnx"
    onnx.save(network(random_weights(), small), path)
    report = import_onnx(path, folder / "repository", name, min_rows=1)
    tables = []
    for table in report.spec.tables:
        rows = sizes.rows[int(table.name.removeprefix("table_"))]
        tables.append(replace(table, num_rows=rows, dtype=sizes.dtype))
    spec = replace(report.spec, tables=tuple(tables))
    write_tables(report.version_dir, spec)
    describe_version(spec, report.version_dir)
    return report.version_dir


def write_tables(version_dir: Path, spec: ModelSpec) -> None:
    """Overwrite each table with random rows; several tables at once."""
    with ThreadPoolExecutor() as threads:
        for _ in threads.map(lambda table: _write_rows(version_dir, table), spec.tables):
            pass


def _write_rows(version_dir: Path, table: TableSpec) -> None:
    path = version_dir / TABLES_FOLDER / table.folder / VECTOR_FILE
    path.unlink()
    with open_for_writing(path) as file:
        for block in random_blocks(table):
            file.write(block.data)
        file.flush()


def random_blocks(table: TableSpec) -> Iterator[NDArray[np.generic]]:
    """Rows as the table stores them, the same ones each time."""
    rng = np.random.Generator(np.random.SFC64(int(table.name.removeprefix("table_"))))
    for begin in range(0, table.num_rows, _BLOCK_ROWS):
        yield random_rows(rng, min(_BLOCK_ROWS, table.num_rows - begin), table.dtype)


def random_rows(rng: np.random.Generator, count: int, dtype: VectorType) -> NDArray[np.generic]:
    """Elements spread evenly around 0."""
    if dtype != "int8":
        halves = (rng.random((count, DIM), np.float32) - 0.5).astype(dtype)
        rows_of_floats: NDArray[np.generic] = halves * np.dtype(dtype).type(2 * _LARGEST_ELEMENT)
        return rows_of_floats
    rows = rng.integers(0, 1 << 64, (count, (DIM + 8) // 8), np.uint64).view(np.uint8)
    rows[:, DIM:].view(np.float32)[:] = _LARGEST_ELEMENT / 128, 0  # scale and bias
    return rows


def random_pairs(rng: np.random.Generator, count: int, rows: Sequence[int]) -> Arrays:
    """Inputs of this many pairs. Half of a table's keys fall on the hottest sixteenth of its rows."""
    pairs: Arrays = {"dense": rng.random((count, NUM_DENSE), np.float32)}
    for name, k, num_rows in zip(key_names(), POOLING, rows, strict=True):
        skewed = rng.random((count, k), np.float32)
        np.square(skewed, out=skewed)
        np.square(skewed, out=skewed)
        keys = (skewed * np.float32(num_rows)).astype(np.int32)
        pairs[name] = np.minimum(keys, num_rows - 1, out=keys)
    return pairs


def expected_answers(weights: Weights, tables: Sequence[NDArray[np.float32]], pairs: Arrays) -> NDArray[np.float64]:
    """The model in plain NumPy, in float64."""
    wide = {name: array.astype(np.float64) for name, array in weights.items()}

    def layer(value: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        return value @ wide[name] + wide[f"{name}_bias"]

    bottom = pairs["dense"].astype(np.float64)
    for i in range(len(BOTTOM)):
        bottom = np.maximum(layer(bottom, f"bottom_{i}"), 0)
    bags = [table[pairs[name]].astype(np.float64).sum(axis=1) for name, table in zip(key_names(), tables, strict=True)]
    first = value = np.concatenate([bottom, *bags], axis=1)
    for i in range(NUM_CROSS):
        value = first * layer(value @ wide[f"cross_v_{i}"], f"cross_w_{i}") + value
    for i in range(len(TOP)):
        value = layer(value, f"top_{i}")
        value = value if i + 1 == len(TOP) else np.maximum(value, 0)
    answers: NDArray[np.float64] = 1 / (1 + np.exp(-value))
    return answers
