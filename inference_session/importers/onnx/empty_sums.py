"""Keeps ONNX Runtime from answering wrongly where a list is empty.

Reductions over axes that are counted from the end leave an empty axis unchanged. Products over an empty axis
with a transposed matrix return uninitialized memory: ONNX Runtime fuses both steps, and the fused step writes nothing.
"""

from __future__ import annotations

from onnx import GraphProto, NodeProto

from inference_session.importers.onnx.graph import all_graphs, axes_of, insert_before, make_node, producers
from inference_session.importers.onnx.lookups import Surgery


def correct_empty_sums(surgery: Surgery) -> None:
    """Change the graph, which means the same as before, where its ranks are known."""
    for scope in all_graphs(surgery.graph):
        made_by = producers(scope)
        for node in list(scope.node):
            if node.op_type.startswith("Reduce") and not node.domain:
                _count_axes_from_front(surgery, node)
            elif node.op_type == "MatMul" and not node.domain:
                _keep_steps_apart(surgery, scope, made_by, node)


def _count_axes_from_front(surgery: Surgery, node: NodeProto) -> None:
    axes, rank = axes_of(surgery.graph, node), surgery.types.rank(node.input[0])
    if not axes or not rank or min(axes) >= 0:
        return
    from_front = [axis % rank for axis in axes]
    if len(node.input) > 1:
        node.input[1] = surgery.constant(f"{node.output[0]}_axes", from_front)
    else:
        given = next(item for item in node.attribute if item.name == "axes")
        given.ints[:] = from_front


def _keep_steps_apart(surgery: Surgery, scope: GraphProto, made_by: dict[str, NodeProto], product: NodeProto) -> None:
    """Put a Reshape that changes and costs nothing behind a Transpose, unless the sums are known not to be empty."""
    shapes = [surgery.types.dims(name) for name in product.input]
    if any(dims and isinstance(dims[max(axis, -len(dims))], int) for dims, axis in zip(shapes, (-1, -2), strict=True)):
        return
    for i, (name, dims) in enumerate(zip(list(product.input), shapes, strict=True)):
        if dims and name in made_by and made_by[name].op_type == "Transpose":
            apart = surgery.names.fresh(f"{name}_apart")
            same = surgery.constant(f"{apart}_shape", [0] * len(dims))  # 0: as in the input
            insert_before(scope, product, [make_node("Reshape", [name, same], apart)])
            product.input[i] = apart
