"""What a division saves, and what still runs per candidate: for the report of an import."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from onnx import GraphProto, ModelProto, NodeProto, helper

from inference_session.importers.onnx.context.work import Work
from inference_session.importers.onnx.samples.axis import SampleAxis
from inference_session.importers.onnx.shapes import Shape, Shapes, sized
from inference_session.importers.onnx.tables import is_row_read
from inference_session.importers.onnx.weights import Weight
from inference_session.model_spec import BLOCK_CONTEXT, ROW_CONTEXT
from inference_session.onnx_graphs import attribute, reads, text_attribute

_NUM_ROWS, _OPEN_SIZE = 128, 50
"""Candidates that costs are counted for, and what an open size is taken to be."""


class Costs(NamedTuple):
    """Fractions of what one candidate costs that are paid once per context instead."""

    multiply_adds: float
    lookups: float
    input_bytes: float


def saved_costs(model: ModelProto, weights: Mapping[str, Weight], work: Work) -> Costs:
    """Compare a model with its two parts."""
    inputs = [value.name for value in model.graph.input]
    whole = _shapes(model, weights, inputs, ())
    parts = _shapes(work.model, work.weights, inputs, work.context)
    of_candidates = [node for node in work.graph.node if not work.is_contexts(node.output[0])]
    sent = {name: _num_bytes(whole, name) for name in inputs}
    return Costs(
        _saved(_multiply_adds(model.graph.node, whole), _multiply_adds(of_candidates, parts)),
        _saved(_num_lookups(model.graph.node, whole, weights), _num_lookups(of_candidates, parts, work.weights)),
        _saved(sum(sent.values()), sum(size for name, size in sent.items() if name not in work.context)),
    )


def _saved(before: float, after: float) -> float:
    return round(max(0.0, 1 - after / before), 4) if before else 0.0


def _shapes(model: ModelProto, weights: Mapping[str, Weight], inputs: Sequence[str], context: Sequence[str]) -> Shapes:
    sizes: dict[str, Shape] = {ROW_CONTEXT: (_NUM_ROWS,), BLOCK_CONTEXT: (1,)}
    for name in inputs:
        sizes[name] = sized(model.graph, name, 1 if name in context else _NUM_ROWS, _OPEN_SIZE)
    return Shapes(model, weights, sizes)


def _num_bytes(shapes: Shapes, name: str) -> int:
    try:
        item = helper.tensor_dtype_to_np_dtype(shapes.elem_type(name)).itemsize
    except (KeyError, TypeError):
        item = 8
    return math.prod(shapes.dims(name) or ()) * item


def _multiply_adds(nodes: Sequence[NodeProto], shapes: Shapes) -> float:
    return float(sum(_multiply_adds_of(node, shapes) for node in nodes))


def _multiply_adds_of(node: NodeProto, shapes: Shapes) -> int:
    dims = [shapes.dims(name) for name in node.input if name]
    result = shapes.dims(node.output[0])
    if node.domain or result is None or None in dims:
        return 0
    known = [d for d in dims if d is not None]
    if node.op_type in ("MatMul", "Gemm"):
        summed = known[0][0] if attribute(node, "transA", 0) else known[0][-1]
        return math.prod(result) * summed
    if node.op_type == "Einsum":
        return _of_einsum(node, known)
    if node.op_type == "Conv":
        return math.prod(result) * math.prod(known[1][1:])
    if node.op_type in ("LSTM", "GRU", "RNN"):
        return math.prod(known[0][:2]) * (math.prod(known[1]) + math.prod(known[2]))
    return 0


def _of_einsum(node: NodeProto, dims: Sequence[Sequence[int]]) -> int:
    operands = text_attribute(node, "equation").partition("->")[0].split(",")
    sizes = {
        letter: size
        for axes, shape in zip(operands, dims, strict=True)
        for letter, size in zip(axes, shape, strict=False)
    }
    return math.prod(sizes.values())


def _num_lookups(nodes: Sequence[NodeProto], shapes: Shapes, weights: Mapping[str, Weight]) -> float:
    reads_of_tables = [node for node in nodes if is_row_read(node) and node.input[0] in weights]
    return float(sum(math.prod(shapes.dims(node.input[1]) or (0,)) for node in reads_of_tables))


def tiled_readers(work: Work) -> list[str]:
    """What reads values of the context that are repeated for every candidate."""
    found: list[str] = []
    for node in work.graph.node:
        for name in sorted(reads(node)):
            axis = work.made_by.get(name)
            is_tiled = axis is not None and axis.op_type == "Gather" and axis.input[1] == ROW_CONTEXT
            if is_tiled and axis is not None and not _is_bias(node, name):
                found.append(f"{node.op_type} {node.output[0]!r} reads {axis.input[0]!r} for every candidate")
    return list(dict.fromkeys(found))


def _is_bias(node: NodeProto, name: str) -> bool:
    """Whether a product adds this value: the context's part of it, with a row for each candidate like the product."""
    return node.op_type == "Gemm" and name == node.input[2]


def unproven_readers(graph: GraphProto, samples: SampleAxis) -> list[str]:
    """The first operators for which samples are not proved to be independent of each other."""
    found = []
    for node in graph.node:
        is_first = not any(samples.kind(name) is None for name in reads(node))
        if is_first and any(samples.kind(name) is None for name in node.output if name):
            found.append(f"{node.op_type} {node.output[0]!r} may mix samples")
    return found
