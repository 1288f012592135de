"""Finds operators whose results jump: a rounding error in what they read may change them by one, or entirely.

Random requests seldom come close enough to a jump to show it. So a model with such an operator behind a sum of the
context's values is divided only where every sum stays in its order.
"""

from __future__ import annotations

from collections.abc import Collection

from onnx import GraphProto, NodeProto, TensorProto

from inference_session.onnx_graphs import BROADCASTING, UNARY, attribute, reads

_JUMPING = frozenset({
    "ArgMax", "ArgMin", "Bernoulli", "Ceil", "DynamicQuantizeLinear", "Floor", "Hardmax", "Mod", "Multinomial",
    "NonZero", "QuantizeLinear", "Round", "Shrink", "Sign", "ThresholdedRelu", "TopK", "Unique",
})  # fmt: skip
_COMPARING = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
_FINE = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE})
"""Types whose steps are as small as rounding errors."""
_ROUNDING_ALIKE = UNARY | BROADCASTING | {
    "Concat", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Pad", "ReduceMax", "ReduceMin", "Reshape",
    "Shape", "Size", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
}  # fmt: skip
"""What adds nothing up, or two operands alone."""


def may_jump(graph: GraphProto, context: Collection[str]) -> bool:
    """Whether a sum of the context's values is rounded to a whole number, compared, sorted or the like."""
    of_context, summed = set(context), set[str]()
    for node in graph.node:
        sources = reads(node)
        if summed & sources and _jumps(node, graph):
            return True
        if sources & of_context:
            of_context.update(node.output)
            if sources & summed or node.domain or node.op_type not in _ROUNDING_ALIKE:
                summed.update(node.output)
    return False


def _jumps(node: NodeProto, graph: GraphProto) -> bool:
    if node.domain:
        return False
    if node.op_type == "Cast":
        return attribute(node, "to", TensorProto.FLOAT) not in _FINE
    if node.op_type in _COMPARING:  # a choice between two values, as activations make it, is mostly one of equal ones
        return not all(_chooses(reader, node.output[0]) for reader in graph.node if node.output[0] in reads(reader))
    return node.op_type in _JUMPING


def _chooses(node: NodeProto, condition: str) -> bool:
    return node.op_type == "Where" and condition not in node.input[1:]
