"""Simplifies the graph before the rewrites, so that they see plain operators, and after them.

Exporters write constants as casts and sums of others, and read a large value only for its number of samples. The
rewrites compute several times what is the same: shapes of blocks, and a context's value for each block.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto, numpy_helper

from inference_session.importers.onnx.context.work import Work, WorkBuilder
from inference_session.model_spec import ROW_CONTEXT
from inference_session.onnx_graphs import copied, make_node, replace_reads

_SHARED = frozenset({"Concat", "Expand", "Gather", "Reshape", "Shape", "Slice", "Transpose"})


def fold_constants(work: Work) -> None:
    """Let values that depend on small constants alone be constants."""
    folded: set[str] = set()
    for node in work.graph.node:
        names = [name for name in node.input if name]
        values = [value for name in node.output if (value := work.known(name)) is not None]
        is_fixed = names and all(work.is_constant(name) or name in folded for name in names)
        if is_fixed and len(values) == len(node.output):
            folded.update(node.output)
            pairs = zip(node.output, values, strict=True)
            work.graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in pairs)
    gone: dict[int, list[NodeProto]] = {
        i: [] for i, node in enumerate(work.graph.node) if folded.intersection(node.output)
    }
    work.replace(gone)


def answer_shape(work: Work, node: NodeProto) -> list[NodeProto] | None:
    """Let the shape of a candidates' value follow from their number, where its other sizes are always the same."""
    if node.op_type != "Shape" or node.domain or node.attribute or node.input[0] == ROW_CONTEXT:
        return None
    dims, sizes = work.dims(node.input[0]), work.sizes(node.input[0])
    if not dims or sizes is None or dims[0] != work.dims_of_rows or None in sizes[1:]:
        return None
    builder = WorkBuilder(work, node.output[0])
    rows = builder.add("Shape", [ROW_CONTEXT])
    rest = builder.integers([size or 0 for size in sizes[1:]])
    builder.add("Concat", [rows, rest] if sizes[1:] else [rows], node.output[0], axis=0)
    return builder.nodes


def write_plainly(work: Work, node: NodeProto) -> list[NodeProto] | None:
    """Leave out operators that copy, and write PRelu with one slope for all as LeakyRelu, which is much faster."""
    dims = work.all_dims(node.output[0])
    if node.domain or None in dims or not node.input or dims != work.all_dims(node.input[0]):
        return None
    if node.op_type in ("Expand", "Tile"):
        return [make_node("Identity", [node.input[0]], node.output[0])]
    slope = work.constant(node.input[1]) if node.op_type == "PRelu" and work.is_float(node.input[0]) else None
    if slope is None or slope.size != 1:
        return None
    return [make_node("LeakyRelu", [node.input[0]], node.output[0], alpha=float(slope.ravel()[0]))]


def share_equal_nodes(work: Work) -> None:
    """Change the graph: of nodes, and of small constants, that differ only in their names, keep one."""
    replace_reads(work.graph, _equal_constants(work))
    outputs = {value.name for value in work.graph.output}
    first: dict[bytes, str] = {}
    shared: dict[str, str] = {}
    for node in work.graph.node:
        node.input[:] = [shared.get(name, name) for name in node.input]
        if node.op_type in _SHARED and not node.domain and node.output[0] not in outputs:
            known = first.setdefault(_content(node), node.output[0])
            if known != node.output[0]:
                shared[node.output[0]] = known
    replace_reads(work.graph, shared)
    work.drop_unused()


def _equal_constants(work: Work) -> dict[str, str]:
    """The first of equal constants, by the names of the others."""
    first: dict[bytes, str] = {}
    found: dict[str, str] = {}
    for tensor in work.graph.initializer:
        copy = TensorProto()
        copy.CopyFrom(tensor)
        copy.name = ""
        known = first.setdefault(copy.SerializeToString(), tensor.name)
        if known != tensor.name:
            found[tensor.name] = known
    return found


def _content(node: NodeProto) -> bytes:
    """All but the names of the node and its outputs."""
    copy = copied(node)
    copy.name = ""
    del copy.output[:]
    return bytes(copy.SerializeToString())
