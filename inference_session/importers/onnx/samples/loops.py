"""Follows the samples through Loop and Scan, such as those of a GRU: what holds of one iteration holds of all.

By induction: the first iteration is followed, and each state that it leaves must be of the same kind and shape as the
one that it began with. Values that differ between iterations, such as their number, must not decide on shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper

from inference_session.importers.onnx.evaluation import open_network, save_network
from inference_session.importers.onnx.samples.kinds import (
    CONSTANT,
    PER_ITERATION,
    Free,
    Kind,
    Observations,
    PerIteration,
    PerSample,
)
from inference_session.importers.onnx.samples.step import Step, is_constant
from inference_session.model_spec import NamedArrays
from inference_session.onnx_graphs import BROADCASTING, UNARY, captures, integers_attribute

Follow = Callable[[GraphProto, Observations, dict[str, Kind]], dict[str, Kind]]
"""The kinds of all values of a graph, from those of its inputs and of what it captures."""

_FIRST_SHAPES = frozenset(
    {"Expand", "Flatten", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"}
)
"""Operators whose first operand has no say in the shape of the result, but others have."""
_ALL_SHAPES = UNARY | BROADCASTING | {"Concat", "Gather", "GatherElements", "Gemm", "MatMul", "Softmax"}
"""Operators whose result has the same shape whatever the values of the operands."""


@dataclass(frozen=True)
class Iteration:
    """How a node's inputs and outputs correspond to those of its body."""

    node: NodeProto
    body: GraphProto
    states: list[tuple[str, str, str, str]] = field(default_factory=list)
    """The node's input, the body's, the body's output, the node's, which may be left out."""
    sliced: list[tuple[str, str, int]] = field(default_factory=list)
    """The node's input, the body's, and the axis along which it is cut."""
    stacked: list[tuple[str, str]] = field(default_factory=list)
    """The body's output and the node's."""
    counted: list[tuple[str, Any]] = field(default_factory=list)
    """Inputs of the body that differ between iterations, with their values in the first one."""
    deciding: list[str] = field(default_factory=list)
    """Inputs of the node, and outputs of the body, that decide on the number of iterations."""

    @classmethod
    def of(cls, node: NodeProto) -> Iteration | None:
        """None: it is no Loop or Scan, or one of a form that is not followed."""
        if node.domain or node.op_type not in ("Loop", "Scan"):
            return None
        body = next(attribute.g for attribute in node.attribute if attribute.name == "body")
        if len(node.input) != len(body.input):  # as in the Scan of opset 8, which has lengths of sequences
            return None
        return _of_loop(node, body) if node.op_type == "Loop" else _of_scan(node, body)

    def first_inputs(self, values: dict[str, Any]) -> dict[str, Any]:
        """The body's inputs in the first iteration."""
        return {
            **dict(self.counted),
            **{inner: values[outer] for outer, inner, _, _ in self.states},
            **{inner: values[outer].take(0, axis) for outer, inner, axis in self.sliced},
        }


def _of_loop(node: NodeProto, body: GraphProto) -> Iteration | None:
    if any(value.type.tensor_type.shape.dim for value in body.input[:2]):  # ONNX Runtime gives what is declared
        return None
    inputs, outputs = [value.name for value in body.input], [value.name for value in body.output]
    num_states = len(node.input) - 2
    given = [*node.output, *[""] * (len(outputs) - 1 - len(node.output))]
    return Iteration(
        node,
        body,
        states=list(zip(node.input[2:], inputs[2:], outputs[1 : 1 + num_states], given, strict=False)),
        stacked=list(zip(outputs[1 + num_states :], given[num_states:], strict=True)),
        counted=list(zip(inputs[:2], (0, True), strict=True)),
        deciding=[*filter(None, node.input[:2]), outputs[0]],
    )


def _of_scan(node: NodeProto, body: GraphProto) -> Iteration | None:
    (num_sliced,) = (attribute.i for attribute in node.attribute if attribute.name == "num_scan_inputs")
    num_states = len(node.input) - num_sliced
    inputs, outputs = [value.name for value in body.input], [value.name for value in body.output]
    axes = integers_attribute(node, "scan_input_axes") or [0] * num_sliced
    given = [*node.output, *[""] * (len(outputs) - len(node.output))]
    if any(integers_attribute(node, "scan_output_axes") or ()) or min(axes) < 0:
        return None
    return Iteration(
        node,
        body,
        states=list(zip(node.input[:num_states], inputs, outputs, given, strict=False)),
        sliced=list(zip(node.input[num_states:], inputs[num_states:], axes, strict=True)),
        stacked=list(zip(outputs[num_states:], given[num_states:], strict=True)),
    )


def result_of(node: NodeProto) -> str:
    """The first result that has a name, which no other node makes."""
    return next(filter(None, node.output), "")


def first_iterations(
    model: ModelProto, node: NodeProto, runs: Sequence[Mapping[str, Any]], path: Path
) -> list[dict[str, Any]] | None:
    """All values in the first iteration of a Loop or Scan of a model, in each of some runs.

    None: the node is neither, or cannot be run so. `path`: a temporary file to write.
    """
    if (iteration := Iteration.of(node)) is None:
        return None
    body, tensors = iteration.body, {tensor.name: tensor for tensor in model.graph.initializer}
    fixed = {tensor.name: numpy_helper.to_array(tensor) for tensor in body.initializer}
    fixed |= {name: numpy_helper.to_array(tensors[name]) for name in node.input if name in tensors}
    made = [name for inner in body.node for name in inner.output if name]
    try:
        fed = [_first_inputs(iteration, {**run, **fixed}, tensors) for run in runs]
        save_network(_iteration_model(model, body, fed[0], made), path)
        session = open_network(path)
        found = [dict(zip(made, session.run(made, inputs), strict=True)) for inputs in fed]
    except Exception:  # noqa: BLE001  ONNX Runtime raises any type; such a Loop is not followed
        return None
    return [{**run, **fixed, **inputs, **values} for run, inputs, values in zip(runs, fed, found, strict=True)]


def _first_inputs(iteration: Iteration, run: dict[str, Any], constant: Container[str]) -> NamedArrays:
    """What the body reads from outside in the first iteration."""
    captured = {name: run[name] for name in captures(iteration.body) if name not in constant}
    return {name: np.asarray(value) for name, value in {**captured, **iteration.first_inputs(run)}.items()}


def _iteration_model(model: ModelProto, body: GraphProto, inputs: NamedArrays, outputs: list[str]) -> ModelProto:
    """One iteration as a model, whose inputs are also what the body captures."""
    one = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    one.graph.name = "iteration"
    one.graph.node.extend(body.node)
    needed = captures(body)
    one.graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in needed)
    one.graph.initializer.extend(body.initializer)
    for name, value in inputs.items():
        elem_type = helper.np_dtype_to_tensor_dtype(value.dtype)
        one.graph.input.append(helper.make_tensor_value_info(name, elem_type, [None] * value.ndim))
    one.graph.output.extend(ValueInfoProto(name=name) for name in outputs)
    return one


def follow_iterations(step: Step, outside: dict[str, Kind], follow: Follow) -> Sequence[Kind]:
    """The kinds of the results of a Loop or Scan; `outside`: the kinds of what its body may capture."""
    unknown: list[Kind] = [None] * len(step.node.output)
    iteration, observed = Iteration.of(step.node), step.observed.bodies.get(result_of(step.node))
    if iteration is None or observed is None:
        return unknown
    first = _first_kinds(iteration, step.observed, outside)
    kinds = follow(iteration.body, observed, {**outside, **first})
    if any(not is_constant(kinds.get(name, CONSTANT)) for name in iteration.deciding):
        return unknown
    results: dict[str, Kind] = {}
    for _, inner, left, result in iteration.states:
        if not _is_kept(first[inner], kinds.get(left, CONSTANT)) or not _same_shapes(observed, inner, left):
            return unknown
        results[result] = CONSTANT if is_constant(first[inner]) else first[inner]
    for made, result in iteration.stacked:
        results[result] = _stacked(step.observed, observed, kinds.get(made, CONSTANT), made, result)
    return [results[name] if name else CONSTANT for name in step.node.output]


def _first_kinds(iteration: Iteration, observed: Observations, outside: dict[str, Kind]) -> dict[str, Kind]:
    """The kinds of the body's inputs; None where they are not followed."""
    kinds: dict[str, Kind] = {name: PER_ITERATION for name, _ in iteration.counted}
    for outer, inner, _, _ in iteration.states:
        kind = outside.get(outer, CONSTANT)
        kinds[inner] = PER_ITERATION if is_constant(kind) else kind if isinstance(kind, PerSample) else None
    for outer, inner, axis in iteration.sliced:
        kinds[inner] = _slice_of(outside.get(outer, CONSTANT), observed, outer, axis)
    return kinds


def _slice_of(kind: Kind, observed: Observations, name: str, axis: int) -> Kind:
    if is_constant(kind):
        return PER_ITERATION
    at, shapes = observed.axis(kind, name) if isinstance(kind, PerSample) else None, observed.shapes(name)
    if at is None or shapes is None or at.axis == axis:
        return None
    before = kind.before // shapes[0][axis] if axis < at.axis else kind.before  # type: ignore[union-attr]
    return PerSample(before)


def _is_kept(kind: Kind, left: Kind) -> bool:
    """Whether a state, begun as one kind, is left as the same one."""
    return is_constant(left) if is_constant(kind) else isinstance(kind, PerSample) and kind == left


def _same_shapes(observed: Observations, name: str, other: str) -> bool:
    shapes = observed.shapes(name)
    return shapes is not None and shapes == observed.shapes(other)


def _stacked(outside: Observations, inside: Observations, kind: Kind, name: str, result: str) -> Kind:
    """The results of all iterations, one behind the other."""
    if not result or is_constant(kind):
        return CONSTANT
    at = inside.axis(kind, name) if isinstance(kind, PerSample) else None
    return outside.per_sample(result, at.axis + 1, at.outer) if at else None


def follow_per_iteration(step: Step, rule: Callable[[Step], list[Kind]]) -> list[Kind]:
    """The results of a node, of which some operands may differ between iterations."""
    varying = [i for i, kind in enumerate(step.kinds) if isinstance(kind, PerIteration)]
    if not varying:
        return rule(step)
    op_type = step.node.op_type
    keeps_shape = op_type in _ALL_SHAPES or (op_type in _FIRST_SHAPES and varying == [0])
    has_sizes = any(isinstance(kind, Free) and not kind.is_constant for kind in step.kinds)
    if step.node.domain or not keeps_shape or has_sizes:
        return [None] * len(step.node.output)
    if all(isinstance(kind, Free) and kind.is_constant for kind in step.kinds):
        return [PER_ITERATION] * len(step.node.output)
    return rule(step)
