"""Lets layers that treat columns one by one run before a Concat of the context's columns and the candidates'.

f(Concat(context, candidates)) becomes Concat(f(context), f(candidates)), to the last bit the same: f of the context
then runs once. Elementwise operators, inference of BatchNormalization, look-ups of tables and flattening are such.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from inference_session.importers.onnx.context.rows import BROADCASTING, UNARY
from inference_session.importers.onnx.context.work import Builder, Work
from inference_session.importers.onnx.graph import attribute


class Part(NamedTuple):
    """Some of the columns of a Concat."""

    value: str
    size: int
    is_contexts: bool
    """Whether `value` has a row per context, which is yet to be tiled."""


class Concatenation(NamedTuple):
    """A value that is made of parts."""

    axis: int
    parts: list[Part]


class _Columns(NamedTuple):
    """The columns of a part, along the axis so far from the last one."""

    from_end: int
    begin: int
    end: int


def delay_concatenations(work: Work) -> None:
    """Change the graph."""
    _Delay(work).run()


class _Delay:
    def __init__(self, work: Work) -> None:
        self._work = work
        self._made: dict[str, Concatenation] = {}

    def run(self) -> None:
        """Visit the nodes in their order, so that what is delayed once is delayed further."""
        replaced = {i: nodes for i, node in enumerate(self._work.graph.node) if (nodes := self._visit(node))}
        if replaced:
            self._work.replace(replaced)

    def _visit(self, node: NodeProto) -> list[NodeProto] | None:
        if node.domain or not node.input or not node.output[0]:
            return None
        builder = Builder(self._work, node.output[0])
        made = self._concat(node, builder) if node.op_type == "Concat" else self._through(node, builder)
        if made is None or len({part.is_contexts for part in made.parts}) < 2:
            return None
        self._made[node.output[0]] = made
        tiled = [builder.tile(part.value) if part.is_contexts else part.value for part in made.parts]
        builder.add("Concat", tiled, node.output[0], axis=made.axis)
        return builder.nodes

    def _concat(self, node: NodeProto, builder: Builder) -> Concatenation | None:
        rank = self._work.rank(node.output[0])
        if rank is None or (axis := attribute(node, "axis", 0) % rank) == 0:
            return None
        parts: list[Part] = []
        for name in node.input:
            inner = self._made.get(name)
            sizes = self._work.sizes(name)
            if sizes is None or (size := sizes[axis]) is None:
                return None
            if inner is not None and inner.axis == axis:
                parts += inner.parts
            else:
                source = self._work.tiled(name)
                parts.append(Part(source or name, size, source is not None))
        return Concatenation(axis, _merged(parts, axis, builder))

    def _through(self, node: NodeProto, builder: Builder) -> Concatenation | None:
        """The parts of what a node makes of a Concat; None where it does not treat its columns one by one."""
        position = next((i for i, name in enumerate(node.input) if name in self._made), None)
        if position is None:
            return None
        given = self._made[node.input[position]]
        rule = self._rule(node, position)
        return None if rule is None else rule(node, given, builder)

    def _rule(
        self, node: NodeProto, position: int
    ) -> Callable[[NodeProto, Concatenation, Builder], Concatenation | None] | None:
        if node.op_type in UNARY or (node.op_type in BROADCASTING and len(node.input) == 2):
            return self._elementwise
        if node.op_type == "BatchNormalization" and position == 0 and len(node.output) == 1:
            return self._elementwise
        if node.op_type == "Gather" and position == 1 and attribute(node, "axis", 0) == 0:
            return self._look_up
        if node.op_type in ("Flatten", "Reshape") and position == 0:
            return self._flatten
        return None

    def _elementwise(self, node: NodeProto, given: Concatenation, builder: Builder) -> Concatenation | None:
        """The same operator for each part, with that part's columns of its constants."""
        rank = self._work.rank(node.output[0])
        channels = node.op_type == "BatchNormalization"
        if rank is None or (channels and given.axis != 1):
            return None
        from_end = 1 if channels else rank - given.axis
        begin, parts = 0, []
        for part in given.parts:
            columns = _Columns(from_end, begin, begin + part.size)
            inputs = [self._input(name, given, part, columns, builder) for name in node.input]
            if None in inputs:
                return None
            parts.append(part._replace(value=self._again(node, [name or "" for name in inputs], builder)))
            begin += part.size
        return given._replace(parts=parts)

    def _input(self, name: str, given: Concatenation, part: Part, columns: _Columns, builder: Builder) -> str | None:
        """What an operator on one part reads in the place of an input; None where that cannot be said."""
        if not name:
            return ""
        if name in self._made:
            return part.value if self._made[name] is given else None
        constant = self._work.constant(name)
        if constant is None or constant.ndim > columns.from_end + given.axis:
            return None
        axis = constant.ndim - columns.from_end
        if axis < 0 or constant.shape[axis] == 1:
            return name
        if constant.shape[axis] != sum(item.size for item in given.parts):
            return None
        return self._constant(builder, constant.take(range(columns.begin, columns.end), axis))

    def _constant(self, builder: Builder, values: NDArray[np.generic]) -> str:
        return builder.weight(values) if values.dtype == np.float32 else builder.constant(values)

    def _look_up(self, node: NodeProto, given: Concatenation, builder: Builder) -> Concatenation | None:
        if not self._work.is_constant(node.input[0]):
            return None
        made = [self._again(node, [node.input[0], part.value], builder) for part in given.parts]
        return given._replace(parts=[part._replace(value=value) for part, value in zip(given.parts, made, strict=True)])

    def _flatten(self, node: NodeProto, given: Concatenation, builder: Builder) -> Concatenation | None:
        """[rows, parts, …] as [rows, columns], or the other way round: the parts stay behind each other."""
        before, after = self._work.sizes(node.input[0]), self._work.sizes(node.output[0])
        if before is None or after is None or given.axis != 1 or None in (*before[1:], *after[1:]):
            return None
        wide, narrow = (math.prod(size or 0 for size in sizes[2:]) for sizes in (before, after))
        widths = [part.size * wide for part in given.parts]
        if not narrow or any(width % narrow for width in widths) or sum(widths) != (after[1] or 0) * narrow:
            return None
        parts: list[Part] = []
        for part, width in zip(given.parts, widths, strict=True):
            shape = builder.integers([-1, width // narrow, *(size or 0 for size in after[2:])])
            parts.append(part._replace(value=builder.add("Reshape", [part.value, shape]), size=width // narrow))
        return Concatenation(1, parts)

    def _again(self, node: NodeProto, inputs: Sequence[str], builder: Builder) -> str:
        copy = NodeProto()
        copy.CopyFrom(node)
        copy.input[:] = inputs
        copy.output[:] = [self._work.fresh(f"{node.output[0]}_part")]
        copy.name = f"hotrow_{copy.output[0]}"
        builder.nodes.append(copy)
        return str(copy.output[0])


def _merged(parts: list[Part], axis: int, builder: Builder) -> list[Part]:
    """Neighbours of one kind as one part."""
    merged: list[Part] = []
    for is_contexts, run in groupby(parts, key=lambda part: part.is_contexts):
        group = list(run)
        if len(group) > 1:
            value = builder.add("Concat", [part.value for part in group], axis=axis)
            group = [Part(value, sum(part.size for part in group), is_contexts)]
        merged += group
    return merged
