"""Divides the products of all pairs of a sample's vectors, as in DLRM: pairs of two of the context's are its own.

T Tᵀ of T = Concat(context, candidates) has four parts, of which one depends on the context alone, and two are each
other's transposes. Flattened, they are columns, which a layer behind them is then cut by.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from inference_session.importers.onnx.context.work import Builder, Work
from inference_session.importers.onnx.graph import attribute

_SWAPPED = [0, 2, 1]


def divide_pairs(work: Work) -> None:
    """Change the graph."""
    replaced = {i: nodes for i, node in enumerate(work.graph.node) if (nodes := _divided(work, node))}
    if replaced:
        work.replace(replaced)


def _divided(work: Work, node: NodeProto) -> list[NodeProto] | None:
    """The flattened products of all pairs, from those of pairs of parts; None where a node is nothing of the kind."""
    if node.domain or node.op_type not in ("Flatten", "Reshape") or work.uses.get(node.input[0]) != 1:
        return None
    parts = _parts(work, work.made_by.get(node.input[0]))
    sizes = work.sizes(node.output[0])
    if parts is None or sizes is None or len(sizes) != 2:
        return None
    counts = [(work.sizes(name) or [0, 0])[1] or 0 for name in parts]
    total = sum(counts)
    if sizes[1] != total * total or 0 in counts:
        return None
    builder = Builder(work, node.output[0])
    columns = [_products(work, builder, parts[i], parts[j]) for i, j in _pairs(len(parts))]
    joined = builder.add("Concat", columns, axis=1)
    builder.add("Gather", [joined, builder.integers(_places(counts).ravel())], node.output[0], axis=1)
    return builder.nodes


def _pairs(num_parts: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(num_parts) for j in range(i, num_parts)]


def _parts(work: Work, product: NodeProto | None) -> list[str] | None:
    """The parts of T in T Tᵀ, where some are the context's."""
    if product is None or product.op_type != "MatMul" or product.domain or work.rank(product.output[0]) != 3:
        return None
    stack, flipped = product.input[0], work.made_by.get(product.input[1])
    if flipped is None or flipped.op_type != "Transpose" or flipped.input[0] != stack:
        return None
    if next((list(a.ints) for a in flipped.attribute if a.name == "perm"), None) != _SWAPPED:
        return None
    concat = work.made_by.get(stack)
    if concat is None or concat.op_type != "Concat" or attribute(concat, "axis", 0) not in (1, -2):
        return None
    return list(concat.input) if any(work.tiled(name) for name in concat.input) else None


def _products(work: Work, builder: Builder, one: str, other: str) -> str:
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


def _flat(builder: Builder, one: str, other: str) -> str:
    product = builder.add("MatMul", [one, builder.add("Transpose", [other], perm=_SWAPPED)])
    return builder.add("Flatten", [product], axis=1)


def _places(counts: list[int]) -> NDArray[np.int64]:
    """Where the product of each pair of vectors stands among the columns, [vectors, vectors]."""
    begins, total, begin = np.cumsum([0, *counts]), sum(counts), 0
    places = np.zeros((total, total), np.int64)
    for i, j in _pairs(len(counts)):
        block = begin + np.arange(counts[i] * counts[j]).reshape(counts[i], counts[j])
        rows, columns = slice(begins[i], begins[i + 1]), slice(begins[j], begins[j + 1])
        places[rows, columns] = block
        places[columns, rows] = block.T
        begin += block.size
    return places
