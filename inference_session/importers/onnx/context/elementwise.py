"""Lets elementwise operators stretch a context's value over the candidates of a block, instead of reading a tile."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from inference_session.importers.onnx.context.work import Work, WorkBuilder
from inference_session.onnx_graphs import BROADCASTING


def drop_expansions(work: Work) -> None:
    """Let elementwise operators stretch what Expand stretches before them, where another operand has the full shape."""
    for node in work.graph.node:
        if node.op_type in BROADCASTING and not node.domain and not work.is_contexts(node.output[0]):
            for position, name in enumerate(node.input):
                source = work.made_by.get(name)
                if source is not None and source.op_type in ("Expand", "Tile") and not source.domain:
                    _drop(work, node, position, source.input[0])
    work.drop_unused()


def _drop(work: Work, node: NodeProto, position: int, source: str) -> None:
    inputs = [source if i == position else name for i, name in enumerate(node.input)]
    operands = zip(*(work.all_dims(name) for name in inputs), strict=True)
    for dims, whole in zip(operands, work.all_dims(node.output[0]), strict=True):
        known = [d for d in dims if d is not None]
        try:
            if whole is None or len(known) < len(dims) or np.broadcast_shapes(*known) != whole:
                return
        except ValueError:
            return
    node.input[:] = inputs


def broadcast_elementwise(work: Work, node: NodeProto) -> list[NodeProto] | None:
    """Let an elementwise operator read a context's value once per block."""
    if node.op_type not in BROADCASTING or node.domain or not any(work.tiled(name) for name in node.input):
        return None
    rank, whole = work.rank(node.output[0]), work.dims(node.output[0])
    if rank is None or whole is None or whole[0] != work.dims_of_rows:
        return None
    own = [dims for name in node.input if work.tiled(name) is None and (dims := work.dims(name)) is not None]
    if all(len(dims) < rank or dims[0] != work.dims_of_rows for dims in own):
        return None  # nothing else has a row for each candidate
    builder = WorkBuilder(work, node.output[0])
    inputs = [_operand(work, builder, name, rank) for name in node.input]
    if None in inputs:
        return None
    blocks = builder.copy(node, [name or "" for name in inputs])
    builder.add("Reshape", [blocks, builder.whole(node.output[0], blocks)], node.output[0])
    return builder.nodes


def _operand(work: Work, builder: WorkBuilder, name: str, rank: int) -> str | None:
    """An operand with a dimension for blocks and one for the rows of a block, where it has samples at all."""
    dims = work.dims(name)
    if dims is None:
        return None
    if len(dims) < rank or dims[:1] == (1,):
        return None if work.dims_of_rows in dims else name
    if (source := work.tiled(name)) is not None:
        value = builder.of_blocks(source)
        return builder.add("Reshape", [value, builder.shape(source, [builder.num_blocks(), 1])])
    return builder.to_blocks(name) if dims[0] == work.dims_of_rows else None
