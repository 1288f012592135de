"""Merges values that the rewrites compute several times: shapes of blocks, and a context's value for each block."""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from inference_session.importers.onnx.context.work import Work
from inference_session.importers.onnx.graph import copied, replace_reads

_SHARED = frozenset({"Concat", "Expand", "Gather", "Reshape", "Shape", "Slice", "Transpose"})


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
    work.refresh()


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
