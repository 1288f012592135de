"""Adds biases where a product is computed, instead of in a pass of its own over a large result.

ONNX Runtime does that for matrices. Products of three dimensions and more, as those behind an attention over a history,
are written as such matrices here.
"""

from __future__ import annotations

from onnx import NodeProto

from inference_session.importers.onnx.context.work import Builder, Work


def fold_biases(work: Work) -> None:
    """Change the graph."""
    readers: dict[str, list[int]] = {}
    for i, node in enumerate(work.graph.node):
        for name in node.input:
            readers.setdefault(name, []).append(i)
    replaced: dict[int, list[NodeProto]] = {}
    for i, node in enumerate(work.graph.node):
        if node.op_type == "MatMul" and not node.domain and work.uses.get(node.output[0]) == 1:
            (at,) = readers.get(node.output[0]) or (0,)
            if nodes := _folded(work, node, work.graph.node[at]):
                replaced |= {i: [], at: nodes}
    if replaced:
        work.replace(replaced)


def _folded(work: Work, product: NodeProto, add: NodeProto) -> list[NodeProto] | None:
    if add.op_type != "Add" or add.domain or work.is_contexts(add.output[0]):
        return None
    weights = work.constant(product.input[1])
    (name,) = [name for name in add.input if name != product.output[0]] or [""]
    bias, rank = work.constant(name), work.rank(product.input[0])
    if weights is None or bias is None or weights.ndim != 2 or bias.shape != weights.shape[1:] or (rank or 0) < 3:
        return None
    if weights.dtype != "float32":
        return None
    builder = Builder(work, add.output[0])
    flat = builder.add("Reshape", [product.input[0], builder.integers([-1, len(weights)])])
    result = builder.add("Gemm", [flat, product.input[1], name])
    sizes = [builder.size(product.input[0], axis) for axis in range(1, (rank or 0) - 1)]
    builder.add("Reshape", [result, builder.list_of([-1, *sizes, weights.shape[1]])], add.output[0])
    return builder.nodes
