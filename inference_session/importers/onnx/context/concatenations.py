"""Lets layers that treat columns one by one run before a Concat of the context's columns and the candidates'.

f(Concat(context, candidates)) becomes Concat(f(context), f(candidates)), which is bitwise equal; f of the context
then runs once. Such f are elementwise operators, inference of BatchNormalization, look-ups of tables and flattening.

ReduceSum(Concat(u, t)) along the concatenated axis, as of the fields of an FM, is the context's sum, which is computed
once, plus the candidate's; in a mean, both are weighted by their number of vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from inference_session.importers.onnx.context.linear_layer import linear_layer
from inference_session.importers.onnx.context.work import Work, WorkBuilder
from inference_session.onnx_graphs import BROADCASTING, UNARY, attribute, axes_of


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
    is_mixed: bool = False
    """Whether candidates' parts have been computed from the context's, so that none may be the context's alone."""


class _Columns(NamedTuple):
    """The columns of a part, along the axis at this distance from the last one."""

    from_end: int
    number: int
    """The position of the part."""
    begin: int
    end: int


class _Operand(NamedTuple):
    """What an operator on one part reads."""

    value: str
    is_contexts: bool | None
    """Whether it has a row per context, which is yet to be tiled; None: it is a constant."""


def delay_concatenations(work: Work) -> None:
    """Move Concats behind the operators that can work on their parts."""
    delay = _Delay(work)
    work.replace_each(lambda _, node: delay.visit(node))  # in their order: a Concat can move past several nodes


class _Delay:
    def __init__(self, work: Work) -> None:
        self._work = work
        self._made: dict[str, Concatenation] = {}

    def visit(self, node: NodeProto) -> list[NodeProto] | None:
        """What takes the place of a node; None: it stays."""
        if node.domain or not node.input or not node.output[0]:
            return None
        builder = WorkBuilder(self._work, node.output[0])
        made = self._concat(node, builder) if node.op_type == "Concat" else self._through(node, builder)
        if made is None or (len({part.is_contexts for part in made.parts}) < 2 and not made.is_mixed):
            return None
        self._made[node.output[0]] = made
        tiled = [builder.tile(part.value) if part.is_contexts else part.value for part in made.parts]
        builder.add("Concat", tiled, node.output[0], axis=made.axis)
        return builder.nodes

    def _concat(self, node: NodeProto, builder: WorkBuilder) -> Concatenation | None:
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
        is_mixed = any(name in self._made and self._made[name].is_mixed for name in node.input)
        return Concatenation(axis, _merged(parts, axis, builder), is_mixed)

    def _through(self, node: NodeProto, builder: WorkBuilder) -> Concatenation | None:
        """The parts of what a node makes of a Concat; None where it does not treat its columns one by one."""
        position = next((i for i, name in enumerate(node.input) if name in self._made), None)
        if position is None:
            return None
        given = self._made[node.input[position]]
        rule = self._rule(node, position)
        return None if rule is None else rule(node, given, builder)

    def _rule(
        self, node: NodeProto, position: int
    ) -> Callable[[NodeProto, Concatenation, WorkBuilder], Concatenation | None] | None:
        if node.op_type in UNARY or (node.op_type in BROADCASTING and len(node.input) == 2):
            return self._elementwise
        if node.op_type == "BatchNormalization" and position == 0 and len(node.output) == 1:
            return self._elementwise
        if node.op_type == "Gather" and position == 1 and attribute(node, "axis", 0) == 0:
            return self._look_up
        if node.op_type in ("Flatten", "Reshape") and position == 0:
            return self._flatten
        return None

    def _elementwise(self, node: NodeProto, given: Concatenation, builder: WorkBuilder) -> Concatenation | None:
        """The same operator for each part, with that part of its other operands."""
        rank = self._work.rank(node.output[0])
        channels = node.op_type == "BatchNormalization"
        if rank is None or (channels and given.axis != 1):
            return None
        from_end = 1 if channels else rank - given.axis
        begin, parts, is_mixed = 0, [], given.is_mixed
        for i, part in enumerate(given.parts):
            columns = _Columns(from_end, i, begin, begin + part.size)
            operands = [self._operand(name, node, given, columns, builder) for name in node.input]
            known = [operand for operand in operands if operand is not None]
            if len(known) < len(operands):
                return None
            kinds = {operand.is_contexts for operand in known} - {None}
            values = [
                builder.tile(operand.value) if operand.is_contexts and False in kinds else operand.value
                for operand in known
            ]
            is_mixed |= len(kinds) > 1
            parts.append(Part(builder.copy(node, values), part.size, kinds == {True}))
            begin += part.size
        return Concatenation(given.axis, parts, is_mixed)

    def _operand(
        self, name: str, node: NodeProto, given: Concatenation, columns: _Columns, builder: WorkBuilder
    ) -> _Operand | None:
        """What an operator on one part reads in the place of an input; None where that is not known."""
        if not name:
            return _Operand("", None)
        if (made := self._made.get(name)) is not None:
            same = made.axis == given.axis and [p.size for p in made.parts] == [p.size for p in given.parts]
            part = made.parts[columns.number] if same else None
            return None if part is None else _Operand(part.value, part.is_contexts)
        constant = self._work.constant(name)
        if constant is None:
            sliced = self._sliced_product(name, columns, builder) if node.op_type == "Mul" else None
            return None if sliced is None else _Operand(sliced, is_contexts=False)
        return self._columns(name, constant, given, columns, builder)

    def _columns(
        self, name: str, constant: NDArray[np.generic], given: Concatenation, columns: _Columns, builder: WorkBuilder
    ) -> _Operand | None:
        """The columns of a constant that belong to a part; the constant itself if all columns are the same."""
        axis = constant.ndim - columns.from_end
        if axis < 0 or constant.shape[axis] == 1:
            return _Operand(name, None) if constant.ndim <= columns.from_end + given.axis else None
        if axis > given.axis or constant.shape[axis] != sum(item.size for item in given.parts):
            return None
        return _Operand(self._constant(builder, constant.take(range(columns.begin, columns.end), axis)), None)

    def _sliced_product(self, name: str, columns: _Columns, builder: WorkBuilder) -> str | None:
        """Some columns of a product of a narrower matrix with weights, as the cross layers of DCN-v2 have them."""
        found = linear_layer(self._work, self._work.made_by.get(name))
        if found is None or self._work.is_contexts(name) or self._work.rank(name) != 2 or columns.from_end != 1:
            return None
        if len(found.weights) >= found.weights.shape[1]:
            return None
        own = slice(columns.begin, columns.end)
        factors = [found.matrix, builder.weight(found.weights[:, own])]
        return builder.add("Gemm", [*factors, builder.weight(found.bias[own])])

    def _constant(self, builder: WorkBuilder, values: NDArray[np.generic]) -> str:
        return builder.weight(values) if values.dtype == np.float32 else builder.constant(values)

    def _look_up(self, node: NodeProto, given: Concatenation, builder: WorkBuilder) -> Concatenation | None:
        if not self._work.is_constant(node.input[0]):
            return None
        made = [builder.copy(node, [node.input[0], part.value]) for part in given.parts]
        return given._replace(parts=[part._replace(value=value) for part, value in zip(given.parts, made, strict=True)])

    def _flatten(self, node: NodeProto, given: Concatenation, builder: WorkBuilder) -> Concatenation | None:
        """[rows, parts, …] as [rows, columns], or the reverse: the order of the parts stays the same."""
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
        return given._replace(parts=parts)


def _merged(parts: list[Part], axis: int, builder: WorkBuilder) -> list[Part]:
    """Neighbours of one kind as one part."""
    merged: list[Part] = []
    for is_contexts, run in groupby(parts, key=lambda part: part.is_contexts):
        group = list(run)
        if len(group) > 1:
            value = builder.add("Concat", [part.value for part in group], axis=axis)
            group = [Part(value, sum(part.size for part in group), is_contexts)]
        merged += group
    return merged


def reduce_by_parts(work: Work, node: NodeProto) -> list[NodeProto] | None:
    """Reduce the parts of a Concat one by one."""
    if node.op_type not in ("ReduceSum", "ReduceMean") or node.domain:
        return None
    concat, axes = work.made_by.get(node.input[0]), axes_of(work.graph, node)
    rank = work.rank(node.input[0])
    if concat is None or concat.op_type != "Concat" or concat.domain or axes is None or rank is None:
        return None
    axis = attribute(concat, "axis", 0) % rank
    tiled = [work.tiled(name) for name in concat.input]
    if [item % rank for item in axes] != [axis] or axis == 0 or not any(tiled) or all(tiled):
        return None
    if not work.is_float(node.input[0]) or any(
        (work.sizes(name) or [None] * rank)[axis] is None for name in concat.input
    ):
        return None
    builder = WorkBuilder(work, node.output[0])
    contexts = [source for source in tiled if source]
    candidates = [name for name, source in zip(concat.input, tiled, strict=True) if not source]
    parts = [_reduced(work, builder, node, group, axis) for group in (contexts, candidates)]
    builder.add("Add", [builder.tile(parts[0]), parts[1]], node.output[0])
    return builder.nodes


def _reduced(work: Work, builder: WorkBuilder, node: NodeProto, names: list[str], axis: int) -> str:
    """The share of some of the parts in the sum, or in the mean."""
    value = names[0] if len(names) == 1 else builder.add("Concat", names, axis=axis)
    part = builder.copy(node, [value, *node.input[1:]])
    if node.op_type == "ReduceSum":
        return part
    sizes = [(work.sizes(name) or [None] * (axis + 1))[axis] or 0 for name in (*names, node.input[0])]
    return builder.add("Mul", [part, builder.weight(np.array(sum(sizes[:-1]) / sizes[-1]))])
