"""Divides a ranking network into the context's part and the candidates', so that the former's results can be kept."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from inference_session.dense_engine.onnx import OnnxEngine

_ORT_TYPES = {
    "tensor(float)": TensorProto.FLOAT,
    "tensor(double)": TensorProto.DOUBLE,
    "tensor(float16)": TensorProto.FLOAT16,
    "tensor(int64)": TensorProto.INT64,
    "tensor(int32)": TensorProto.INT32,
    "tensor(bool)": TensorProto.BOOL,
}


@dataclass(frozen=True)
class ContextParts:
    """Two networks that are run one after the other."""

    context: bytes
    """Computes `values`, each with a row per context; and those outputs that the context alone has."""
    candidates: bytes
    """Takes `values` among its inputs."""
    values: tuple[str, ...]
    inputs: tuple[str, ...]
    """Inputs of the context that the candidates' part reads as well."""
    outputs: tuple[str, ...]
    """Of the network, those that the context alone has."""
    has_candidates: bool
    """Whether it has others."""


@dataclass
class _Division:
    """Which values depend on the context's inputs alone."""

    model: ModelProto
    context: set[str]
    sizes: set[str] = field(default_factory=set)
    """Of these values, those that follow from shapes: they are no rows."""
    candidates: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.candidates = {value.name for value in self.model.graph.input} - self.context
        for node in self.model.graph.node:
            read = _reads(node)
            if read & self.candidates:
                self.candidates.update(node.output)
            elif read & self.context:
                self.context.update(node.output)
                if node.op_type == "Shape" or read & self.context <= self.sizes:
                    self.sizes.update(node.output)

    def border(self) -> list[str]:
        """The rows that the candidates' part reads, itself or to ask for their shape."""
        made_by = {name: node for node in self.model.graph.node for name in node.output}
        outputs = {value.name for value in self.model.graph.output}
        waiting = [node for node in self.model.graph.node if self.candidates & {*node.output}]
        found: dict[str, None] = {}
        while waiting:
            for name in sorted(_reads(waiting.pop()) & self.context):
                if name in self.sizes:
                    waiting.append(made_by[name])
                else:
                    found[name] = None
        return [name for name in found if name not in outputs]


def divide(path: Path, context: Collection[str]) -> ContextParts:
    """Divide a network.

    Args:
        path: the network's file.
        context: those of its inputs that have a row per context.
    """
    model = onnx.load(path)
    division = _Division(model, set(context))
    given = {value.name for value in model.graph.input}
    border = division.border()
    values = [name for name in border if name not in given]
    outputs = [value for value in model.graph.output if value.name in division.context]
    first = _part(model, list(model.graph.input), [*outputs, *(ValueInfoProto(name=name) for name in values)], set())
    inputs = [*model.graph.input, *_typed(path, first, values)]
    others = [value for value in model.graph.output if value.name not in division.context]
    second = _part(model, inputs, others, set(values))
    return ContextParts(
        first.SerializeToString(),
        second.SerializeToString(),
        tuple(values),
        tuple(given & {*border}),
        tuple(value.name for value in outputs),
        bool(others),
    )


def _typed(path: Path, part: ModelProto, names: Collection[str]) -> list[ValueInfoProto]:
    """Declarations of a network's outputs, as inputs of another."""
    engine = OnnxEngine(path, content=part.SerializeToString(), num_threads=1)
    types = {value.name: _ORT_TYPES[value.type] for value in engine.opened().get_outputs()}
    engine.close()
    return [helper.make_tensor_value_info(name, types[name], None) for name in names]


def _part(
    model: ModelProto, inputs: list[ValueInfoProto], outputs: list[ValueInfoProto], given: set[str]
) -> ModelProto:
    """What computes these outputs, where some values are given."""
    part = ModelProto()
    part.CopyFrom(model)
    wanted, nodes = {value.name for value in outputs} - given, list[NodeProto]()
    for node in reversed(model.graph.node):
        if wanted.intersection(node.output):
            nodes.append(node)
            wanted |= _reads(node) - given
    read = wanted | {name for node in nodes for name in _reads(node)}
    graph = part.graph
    for repeated in (graph.node, graph.input, graph.output, graph.initializer, graph.value_info):
        del repeated[:]
    graph.node.extend(reversed(nodes))
    graph.input.extend(value for value in inputs if value.name in read)
    graph.output.extend(outputs)
    graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in read)
    return part


def _reads(node: NodeProto) -> set[str]:
    """The values that a node needs: its inputs, and those of its bodies, which are no others' names."""
    names = set(node.input) - {""}
    for item in node.attribute:
        for body in [item.g] if item.type == AttributeProto.GRAPH else item.graphs:
            names.update(*(_reads(inner) for inner in body.node), (value.name for value in body.output))
    return names
