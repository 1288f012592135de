"""Which values depend on looked-up vectors: keys cannot be computed from them."""

from __future__ import annotations

from onnx import GraphProto, NodeProto

from inference_session.onnx_graphs import bodies, reads


def values_of_vectors(graph: GraphProto, tables: set[str]) -> set[str]:
    """The values, of the graph and its bodies, that are computed from rows of the tables."""
    marked = set(tables)
    _mark(graph, marked)
    return marked


def _mark(graph: GraphProto, marked: set[str]) -> None:
    for node in graph.node:
        if node.op_type == "Loop" and bodies(node):
            _mark_carried(node, bodies(node)[0], marked, first_input=2, first_output=1)
            if bodies(node)[0].output[0].name in marked or marked.intersection(node.input[:2]):
                marked.update(node.output)
        elif node.op_type == "Scan" and bodies(node):
            _mark_carried(node, bodies(node)[0], marked, first_input=0, first_output=0)
        else:
            for body in bodies(node):
                _mark(body, marked)
            if marked & reads(node) or any(_gives_marked(body, marked) for body in bodies(node)):
                marked.update(node.output)


def _mark_carried(node: NodeProto, body: GraphProto, marked: set[str], *, first_input: int, first_output: int) -> None:
    """Mark inside a body until the marks of its carried values no longer change."""
    inner = [value.name for value in body.input][first_input:]
    results = [value.name for value in body.output][first_output:]
    marked.update(name for name, given in zip(inner, node.input[first_input:], strict=False) if given in marked)
    num_carried = len(inner) if node.op_type == "Loop" else _num_states(node, body)
    before = -1
    while before != len(marked):
        before = len(marked)
        _mark(body, marked)
        pairs = zip(inner[:num_carried], results, strict=False)
        marked.update(name for name, result in pairs if result in marked)
    marked.update(name for name, result in zip(node.output, results, strict=False) if result in marked)


def _num_states(scan: NodeProto, body: GraphProto) -> int:
    num_scanned = next(int(a.i) for a in scan.attribute if a.name == "num_scan_inputs")
    return len(body.input) - num_scanned


def _gives_marked(body: GraphProto, marked: set[str]) -> bool:
    return any(value.name in marked for value in body.output)
