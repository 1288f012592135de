"""Divides a ranking network into the context's part and the candidates', so that the context's results can be kept."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from inference_session.dense_engine.network_file import NetworkFile
from inference_session.dense_engine.onnx import OnnxEngine
from inference_session.dense_engine.rewrites.parts import part_of
from inference_session.onnx_graphs import producers, reads


@dataclass(frozen=True)
class ContextParts:
    """Two networks that are run one after the other."""

    context: NetworkFile
    """The network that computes `values`, with a row per context, and the outputs that depend on the context alone."""
    candidates: NetworkFile
    """The network that has `values` among its inputs."""
    values: tuple[str, ...]
    inputs: tuple[str, ...]
    """Inputs of the context that the candidates' part reads as well."""
    outputs: tuple[str, ...]
    """Outputs of the network that depend on the context alone."""
    has_candidates: bool
    """Whether the network has other outputs."""


@dataclass
class _Division:
    """Which values depend on the context's inputs alone."""

    model: ModelProto
    context: set[str]
    sizes: set[str] = field(default_factory=set)
    """Those of these values that follow from shapes, and so have no row per context."""
    candidates: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.candidates = {value.name for value in self.model.graph.input} - self.context
        for node in self.model.graph.node:
            read = reads(node)
            if read & self.candidates:
                self.candidates.update(node.output)
            elif read & self.context:
                self.context.update(node.output)
                if node.op_type == "Shape" or read & self.context <= self.sizes:
                    self.sizes.update(node.output)

    def border(self) -> list[str]:
        """The values that the candidates' part reads, or whose shape it reads."""
        made_by = producers(self.model.graph)
        outputs = {value.name for value in self.model.graph.output}
        waiting = [node for node in self.model.graph.node if self.candidates & {*node.output}]
        found: dict[str, None] = {}
        while waiting:
            for name in sorted(reads(waiting.pop()) & self.context):
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
    first = part_of(model, list(model.graph.input), [*outputs, *(ValueInfoProto(name=name) for name in values)], set())
    inputs = [*model.graph.input, *_typed(path, first, values)]
    others = [value for value in model.graph.output if value.name not in division.context]
    second = part_of(model, inputs, others, set(values))
    return ContextParts(
        NetworkFile(path, first.SerializeToString()),
        NetworkFile(path, second.SerializeToString()),
        tuple(values),
        tuple(given & {*border}),
        tuple(value.name for value in outputs),
        bool(others),
    )


def _typed(path: Path, part: ModelProto, names: Collection[str]) -> list[ValueInfoProto]:
    """Declarations of a network's outputs, as inputs of another."""
    if not names:
        return []
    engine = OnnxEngine(NetworkFile(path, part.SerializeToString()), num_threads=1)
    types = {value.name: _element_type(value.type) for value in engine.opened().get_outputs()}
    engine.close()
    return [helper.make_tensor_value_info(name, types[name], None) for name in names]


def _element_type(kind: str) -> int:
    """ONNX's number of a type of tensors that ONNX Runtime calls `tensor(int64)` or alike."""
    return int(TensorProto.DataType.Value(kind.removeprefix("tensor(").removesuffix(")").upper()))
