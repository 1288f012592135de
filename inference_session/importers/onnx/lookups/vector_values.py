"""Which values depend on looked-up vectors: keys cannot be computed from them."""

from __future__ import annotations

from onnx import GraphProto, NodeProto

from inference_session.onnx_graphs import bodies, reads


def values_of_vectors(graph: GraphProto, tables: set[str]) -> set[str]:
    """The values, of the graph and its bodies, that are computed from rows of the tables."""
    dependent = set(tables)
    _add_dependent(graph, dependent)
    return dependent


def _add_dependent(graph: GraphProto, dependent: set[str]) -> None:
    for node in graph.node:
        if node.op_type == "Loop" and bodies(node):
            _add_carried(node, bodies(node)[0], dependent, first_input=2, first_output=1)
            if bodies(node)[0].output[0].name in dependent or dependent.intersection(node.input[:2]):
                dependent.update(node.output)
        elif node.op_type == "Scan" and bodies(node):
            _add_carried(node, bodies(node)[0], dependent, first_input=0, first_output=0)
        else:
            for body in bodies(node):
                _add_dependent(body, dependent)
            if dependent & reads(node) or dependent.intersection(
                value.name for body in bodies(node) for value in body.output
            ):
                dependent.update(node.output)


def _add_carried(
    node: NodeProto, body: GraphProto, dependent: set[str], *, first_input: int, first_output: int
) -> None:
    """Add those of a body until there are no more carried values to add."""
    inner = [value.name for value in body.input][first_input:]
    results = [value.name for value in body.output][first_output:]
    dependent.update(name for name, given in zip(inner, node.input[first_input:], strict=False) if given in dependent)
    num_carried = len(inner) if node.op_type == "Loop" else _num_states(node, body)
    before = -1
    while before != len(dependent):
        before = len(dependent)
        _add_dependent(body, dependent)
        pairs = zip(inner[:num_carried], results, strict=False)
        dependent.update(name for name, result in pairs if result in dependent)
    dependent.update(name for name, result in zip(node.output, results, strict=False) if result in dependent)


def _num_states(scan: NodeProto, body: GraphProto) -> int:
    num_scanned = next(int(a.i) for a in scan.attribute if a.name == "num_scan_inputs")
    return len(body.input) - num_scanned
