"""Divides the products of all pairs of a sample's vectors, as in DLRM: pairs of context vectors once per context.

T Tᵀ of T = Concat(context, candidates) has four parts: one depends on the context alone, and two are each other's
transposes. Flattened, they are columns, by which the next layer is then cut.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from inference_session.importers.onnx.context.work import Work, WorkBuilder
from inference_session.importers.onnx.evaluation import reference_values
from inference_session.model_spec import ROW_CONTEXT
from inference_session.onnx_graphs import attribute, integers_attribute, needed_nodes, text_attribute

_SWAPPED = [0, 2, 1]
_MOVING = frozenset({
    "Flatten", "Gather", "GatherND", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze",
})  # fmt: skip
"""Operators that move elements, and compute nothing."""


def divide_pairs(work: Work) -> None:
    """Compute products of pairs of context vectors once per context."""
    positions = {name: i for i, node in enumerate(work.graph.node) for name in node.output}
    replaced: dict[int, list[NodeProto]] = {}
    for node in work.graph.node:
        parts = _parts(work, node)
        picked = _picked(work, node.output[0]) if parts else None
        if parts and picked and (nodes := _divided(work, parts, *picked)):
            replaced[positions[picked[0]]] = nodes
    work.replace(replaced)


def _divided(work: Work, parts: list[str], output: str, places: NDArray[np.int64]) -> list[NodeProto] | None:
    """Some of the products of all pairs, from those of pairs of parts."""
    counts = [(work.sizes(name) or [0, 0])[1] or 0 for name in parts]
    if 0 in counts:
        return None
    builder = WorkBuilder(work, output)
    columns = [_products(work, builder, parts[i], parts[j]) for i, j in _pairs(len(parts))]
    joined = builder.add("Concat", columns, axis=1)
    builder.add("Gather", [joined, builder.integers(_places(counts).ravel()[places])], output, axis=1)
    return builder.nodes


def _picked(work: Work, product: str) -> tuple[str, NDArray[np.int64]] | None:
    """The matrix [rows, columns] that a product [rows, vectors, vectors] becomes, and which element each column is."""
    found, value = "", product
    while work.uses.get(value) == 1:
        node = next((node for node in work.graph.node if value in node.input), None)
        if node is None or node.op_type not in _MOVING or node.domain or node.input[0] != value:
            break
        value = node.output[0]
        sizes = work.sizes(value)
        if sizes is not None and sizes[1:] == [*sizes[1:2]] and None not in sizes[1:] and work.has_rows(value):
            found = value
    dims = work.dims(product)
    if not found or dims is None:
        return None
    runs = [_moved(work, product, found, (num_rows, *dims[1:])) for num_rows in (2, 3)]
    if runs[0] is None or runs[1] is None or not np.array_equal(runs[0], runs[1]):
        return None
    return found, runs[0]


def _moved(work: Work, product: str, output: str, dims: tuple[int, ...]) -> NDArray[np.int64] | None:
    """Which element of its row of a product each column is; None where columns are of another row."""
    needed = needed_nodes([node for node in work.graph.node if product not in node.output], [output])
    read = {name for node in needed for name in node.input if name}
    given = read - {name for node in needed for name in node.output}
    constants = {name: value for name in given if (value := work.constant(name)) is not None}
    if given - set(constants) - {product, ROW_CONTEXT}:
        return None
    numbers = np.arange(np.prod(dims), dtype=np.float32).reshape(dims)
    feeds = {**constants, product: numbers, ROW_CONTEXT: np.zeros(dims[0], np.int64)}
    found = reference_values(needed, [output], {name: feeds[name] for name in given}, work.model)
    if found is None:
        return None
    per_row = int(np.prod(dims[1:]))
    places = found[0][0].astype(np.int64)
    expected = places + per_row * np.arange(dims[0])[:, None]
    return places if np.array_equal(found[0], expected) and (places < per_row).all() else None


def _pairs(num_parts: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(num_parts) for j in range(i, num_parts)]


def _parts(work: Work, product: NodeProto) -> list[str] | None:
    """The parts of T in T Tᵀ, where some are the context's."""
    if product.domain or work.rank(product.output[0]) != 3 or not _is_of_pairs(work, product):
        return None
    concat = work.made_by.get(product.input[0])
    if concat is None or concat.op_type != "Concat" or attribute(concat, "axis", 0) not in (1, -2):
        return None
    return list(concat.input) if any(work.tiled(name) for name in concat.input) else None


def _is_of_pairs(work: Work, product: NodeProto) -> bool:
    """Whether a node multiplies a value by itself, transposed."""
    if product.op_type == "Einsum":
        left, right, result = ([*text_attribute(product, "equation").replace("->", ",").split(","), "", ""])[:3]
        is_form = len(left) == len(right) == len(result) == 3 and len(set(left + right)) == 4
        return (
            is_form and product.input[0] == product.input[1] and result == left[:2] + right[1] and left[2] == right[2]
        )
    flipped = work.made_by.get(product.input[1]) if product.op_type == "MatMul" else None
    if flipped is None or flipped.op_type != "Transpose" or flipped.input[0] != product.input[0]:
        return False
    return integers_attribute(flipped, "perm") == _SWAPPED


def _products(work: Work, builder: WorkBuilder, one: str, other: str) -> str:
    """The products of the vectors of two parts, [rows, those of `one` by those of `other`]."""
    sources = work.tiled(one), work.tiled(other)
    if all(sources):
        return builder.tile(_flat(builder, sources[0] or "", sources[1] or ""))
    if sources[1] is not None:
        matrix = builder.tile(builder.add("Transpose", [sources[1]], perm=_SWAPPED))
        return builder.add("Flatten", [builder.add("MatMul", [one, matrix])], axis=1)
    if sources[0] is not None:
        matrix = builder.tile(builder.add("Transpose", [sources[0]], perm=_SWAPPED))
        product = builder.add("MatMul", [other, matrix])  # a candidate's rows by the context's columns
        return builder.add("Flatten", [builder.add("Transpose", [product], perm=_SWAPPED)], axis=1)
    return _flat(builder, one, other)


def _flat(builder: WorkBuilder, one: str, other: str) -> str:
    product = builder.add("MatMul", [one, builder.add("Transpose", [other], perm=_SWAPPED)])
    return builder.add("Flatten", [product], axis=1)


def _places(counts: list[int]) -> NDArray[np.int64]:
    """The column of the product of each pair of vectors, [vectors, vectors]."""
    begins, total, begin = np.cumsum([0, *counts]), sum(counts), 0
    places = np.zeros((total, total), np.int64)
    for i, j in _pairs(len(counts)):
        block = begin + np.arange(counts[i] * counts[j]).reshape(counts[i], counts[j])
        rows, columns = slice(begins[i], begins[i + 1]), slice(begins[j], begins[j + 1])
        places[rows, columns] = block
        places[columns, rows] = block.T
        begin += block.size
    return places
