"""Proves that no sample of a batch influences another one, operator by operator.

Each value of a network is one of three things: *free* of the samples (a constant, or computed from sizes alone), *per
sample* (it holds a block for each sample, and each block depends on that sample alone), or neither. Rules say what each
operator makes of its operands; operators without a rule, and those that read along the samples, give neither. Shapes,
and the values of axes, come from two runs with different prime numbers of samples, so sizes do not match by chance.

A per-sample value is described by `before`: in row-major order, it is `before` times the sequence of all samples, each
with an equal number of elements. Reshaping keeps that number, so samples can be located in any shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, helper

from inference_session.importers.onnx.graph import BROADCASTING, UNARY, bodies, reads

Shapes = tuple[tuple[int, ...], ...]
"""Shapes of one value, in each run."""

_NO_END = 2**31 - 1


@dataclass(frozen=True)
class Free:
    """A value that depends on no sample."""

    counts: NDArray[np.bool_] | bool = False
    """Which of its elements are the number of samples, or a constant multiple of it; False: none; True: they depend on
    that number in other ways."""

    @property
    def is_constant(self) -> bool:
        """Whether no element depends on the number of samples."""
        return not np.any(self.counts)


@dataclass(frozen=True)
class PerSample:
    """A value with a block for each sample."""

    before: int


Kind = Free | PerSample | None
"""None: it may depend on several samples at once."""

CONSTANT = Free()


@dataclass(frozen=True)
class Axis:
    """Where the samples of a value are: dimension `axis` has `outer` x number of samples x `inner` elements."""

    axis: int
    outer: int
    inner: int

    @property
    def is_whole(self) -> bool:
        """Whether the dimension counts samples and nothing else."""
        return self.outer == self.inner == 1


@dataclass(frozen=True)
class Observations:
    """The observations of two runs of a network with different numbers of samples."""

    num_samples: tuple[int, ...]
    dims: tuple[Mapping[str, tuple[int, ...]], ...]
    """The shapes of tensors by name, in each run."""
    values: tuple[Mapping[str, Any], ...]
    """By name, in each run; small ones at least, where they depend on sizes alone."""

    @classmethod
    def of_runs(
        cls, num_samples: tuple[int, ...], values: tuple[Mapping[str, Any], ...], weights: Mapping[str, tuple[int, ...]]
    ) -> Observations:
        """The values of two runs; `weights`: the shapes of constants whose values do not matter."""
        dims = tuple(
            {**weights, **{name: value.shape for name, value in run.items() if isinstance(value, np.ndarray)}}
            for run in values
        )
        return cls(num_samples, dims, values)

    def shapes(self, name: str) -> Shapes | None:
        """The shapes of a value; None where it did not occur in both runs, or is no tensor."""
        found = [run[name] for run in self.dims if name in run]
        return tuple(found) if len(found) == len(self.dims) else None

    def fixed(self, name: str) -> NDArray[Any] | None:
        """A value that is the same in both runs."""
        arrays = [run[name] for run in self.values if isinstance(run.get(name), np.ndarray)]
        is_same = len(arrays) == len(self.values) and all(np.array_equal(arrays[0], array) for array in arrays)
        return arrays[0] if is_same else None

    def axis(self, kind: PerSample, name: str) -> Axis | None:
        """Where the samples of a value are; None where they are not one block of one dimension."""
        shapes = self.shapes(name)
        if shapes is None or len({len(shape) for shape in shapes}) > 1:
            return None
        if len({math.prod(shape) / n for shape, n in zip(shapes, self.num_samples, strict=True)}) > 1:
            return None  # the blocks themselves grow with the number of samples
        found = {_find(shape, kind.before, n) for shape, n in zip(shapes, self.num_samples, strict=True)}
        return found.pop() if len(found) == 1 else None

    def per_sample(self, name: str, axis: int, outer: int = 1) -> Kind:
        """A value whose dimension `axis` is known to hold the samples, behind `outer` others."""
        shapes = self.shapes(name)
        if shapes is None or not all(0 <= axis < len(shape) for shape in shapes):
            return None
        before = {outer * math.prod(shape[:axis]) for shape in shapes}
        kind = PerSample(before.pop())
        return kind if not before and self.axis(kind, name) else None


def _find(shape: tuple[int, ...], before: int, num_samples: int) -> Axis | None:
    passed = 1
    for axis, size in enumerate(shape):
        outer, rest = divmod(before, passed)
        if rest == 0 and size % (outer * num_samples) == 0 and size:
            return Axis(axis, outer, size // (outer * num_samples))
        passed *= size
        if not passed or before % passed:
            return None
    return None


class SampleAxis:
    """Follows the samples through one graph."""

    def __init__(self, graph: GraphProto, observed: Observations, kinds: Mapping[str, Kind]) -> None:
        """`kinds`: of the graph's inputs. All other values from outside are constant."""
        self._graph = graph
        self._observed = observed
        self.kinds: dict[str, Kind] = dict(kinds)
        self.culprit: NodeProto | None = None
        """The first node that may look along the samples."""
        for node in graph.node:
            self._follow(node)

    def _follow(self, node: NodeProto) -> None:
        step = _Step(node, self._observed, [self.kinds.get(name, CONSTANT) for name in node.input])
        around = [self.kinds.get(name, CONSTANT) for name in reads(node)]
        if all(isinstance(kind, Free) and kind.is_constant for kind in around) and not _is_random(node):
            found: Sequence[Kind] = [CONSTANT] * len(node.output)
        elif None in around or bodies(node) or node.domain:
            found = [None] * len(node.output)
        else:
            try:
                found = _RULES.get(node.op_type, _neither)(step)
            except (ValueError, IndexError, TypeError, ZeroDivisionError):  # a node that violates ONNX's specification
                found = [None] * len(node.output)
        for name, kind in zip(node.output, found, strict=False):
            self.kinds[name] = kind
        if self.culprit is None and None in found and None not in around:
            self.culprit = node


def _is_random(node: NodeProto) -> bool:
    return node.op_type.startswith("Random") or node.op_type in ("Bernoulli", "Multinomial")


@dataclass(frozen=True)
class _Step:
    """One node, and the kinds of its operands."""

    node: NodeProto
    observed: Observations
    kinds: list[Kind]

    @property
    def per_sample(self) -> list[tuple[int, Axis]]:
        """The operands that hold samples, with where; an operand whose samples cannot be found has axis -1."""
        lost = Axis(-1, 0, 0)
        found = [(i, kind) for i, kind in enumerate(self.kinds) if isinstance(kind, PerSample)]
        return [(i, self.observed.axis(kind, self.node.input[i]) or lost) for i, kind in found]

    @property
    def rest_is_constant(self) -> bool:
        """Whether no operand depends on the number of samples."""
        return all(kind.is_constant for kind in self.kinds if isinstance(kind, Free))

    @property
    def sizes_of_samples(self) -> bool:
        """Whether all operands are free: the node computes with sizes."""
        return not any(isinstance(kind, PerSample) for kind in self.kinds)

    def only(self, position: int = 0) -> Axis | None:
        """Where the samples are if this operand alone holds any, and all others are constant."""
        found = self.per_sample
        alone = len(found) == 1 and found[0][0] == position and self.rest_is_constant
        return found[0][1] if alone and found[0][1].axis >= 0 else None

    def rank(self, position: int = 0) -> int:
        """Number of dimensions of an operand; ValueError where it is not known."""
        return len(self.shape(position))

    def shape(self, position: int = 0) -> tuple[int, ...]:
        """The shape of an operand in the first run; ValueError where it is not known."""
        shapes = self.observed.shapes(self.node.input[position])
        if shapes is None:
            raise ValueError(f"{self.node.input[position]!r} has no known shape")
        return shapes[0]

    def outputs(self, axis: int, outer: int = 1) -> list[Kind]:
        """All outputs have their samples in this dimension."""
        return [self.observed.per_sample(name, axis, outer) if name else None for name in self.node.output]

    def attribute(self, name: str, default: Any) -> Any:
        """Its value."""
        return next((helper.get_attribute_value(a) for a in self.node.attribute if a.name == name), default)

    def fixed(self, position: int) -> list[int] | None:
        """The integers of an operand that is constant; [] where it is left out."""
        if position >= len(self.node.input) or not self.node.input[position]:
            return []
        kind, values = self.kinds[position], self.observed.fixed(self.node.input[position])
        return None if values is None or not _is_constant(kind) else values.ravel().tolist()

    def axes(self) -> list[int] | None:
        """The axes of a reduction and the like, from its attribute or second operand, counted from the front."""
        named = self.attribute("axes", None)
        axes = list(named) if named is not None else self.fixed(1)
        return None if axes is None else [axis % max(self.rank(), 1) for axis in axes]


def _is_constant(kind: Kind) -> bool:
    return isinstance(kind, Free) and kind.is_constant


def _neither(step: _Step) -> list[Kind]:
    """What a node without a rule makes: of sizes alone, something that depends on sizes."""
    kind = Free(True) if step.sizes_of_samples and not _is_random(step.node) else None
    return [kind] * len(step.node.output)


def _elementwise(step: _Step) -> list[Kind]:
    if step.sizes_of_samples:
        return [_counted_elementwise(step)] * len(step.node.output)
    shapes = step.observed.shapes(step.node.output[0])
    if not step.rest_is_constant or shapes is None:
        return [None] * len(step.node.output)
    places = {(len(shapes[0]) - step.rank(i) + at.axis, at.outer) for i, at in step.per_sample if at.axis >= 0}
    if len(places) != 1 or any(at.axis < 0 for _, at in step.per_sample):
        return [None] * len(step.node.output)
    return step.outputs(*places.pop())


def _counted_elementwise(step: _Step) -> Kind:
    shapes = step.observed.shapes(step.node.output[0])
    if shapes is None or len(set(shapes)) > 1:
        return Free(True)
    masks = [kind.counts for kind in step.kinds if isinstance(kind, Free)]
    counted = [position for position, mask in enumerate(masks) if np.any(mask)]
    keeps = _KEEPS_COUNTS.get(step.node.op_type, ())
    if any(mask is True for mask in masks) or len(counted) > 1 or not set(counted) <= set(keeps):
        return Free(True)
    return Free(np.logical_or.reduce([np.broadcast_to(mask, shapes[0]) for mask in masks]))


_KEEPS_COUNTS = {"Identity": (0,), "Cast": (0,), "Mul": (0, 1), "Div": (0,), "Where": (1, 2)}
"""Operands of which a multiple of the number of samples becomes another one; all else must be constant."""


def _is_size(kind: Kind) -> bool:
    """Whether a value may be the target shape of another one: constants, and multiples of the number of samples."""
    return isinstance(kind, Free) and kind.counts is not True


def _reshaped(step: _Step) -> list[Kind]:
    """The same elements in the same order, in another shape."""
    kind, name = step.kinds[0], step.node.output[0]
    if isinstance(kind, PerSample):
        return [kind if step.observed.axis(kind, name) and all(map(_is_size, step.kinds[1:])) else None]
    shapes = step.observed.shapes(name)
    if isinstance(kind, Free) and shapes and len(set(shapes)) == 1 and _all_constant(step.kinds[1:]):
        return [kind if kind.counts is True else Free(np.broadcast_to(kind.counts, step.shape()).reshape(shapes[0]))]
    return _neither(step)


def _all_constant(kinds: Sequence[Kind]) -> bool:
    return all(_is_constant(kind) for kind in kinds)


def _shape(step: _Step) -> list[Kind]:
    kind, shapes = step.kinds[0], step.observed.shapes(step.node.input[0])
    if not isinstance(kind, PerSample) or shapes is None:
        return [Free(True) if isinstance(kind, Free) else None]
    at = step.observed.axis(kind, step.node.input[0])
    if at is None:
        return [None]
    mask = np.arange(len(shapes[0])) == at.axis
    return [Free(mask[step.attribute("start", 0) : step.attribute("end", None)])]


def _transpose(step: _Step) -> list[Kind]:
    at = step.only()
    perm = list(step.attribute("perm", range(step.rank())[::-1]))
    return step.outputs(perm.index(at.axis), at.outer) if at else _neither(step)


def _reduction(step: _Step) -> list[Kind]:
    at, axes = step.only(), step.axes()
    if step.node.op_type == "ReduceProd" and isinstance(sizes := step.kinds[0], Free) and step.rank() == 1:
        is_multiple = sizes.counts is not True and np.sum(sizes.counts) == 1
        return [
            Free(np.array([True]) if step.attribute("keepdims", 1) else np.array(True)) if is_multiple else Free(True)
        ]
    if at is None or axes is None:
        return _neither(step)
    if not axes and step.attribute("noop_with_empty_axes", 0):
        return step.outputs(at.axis, at.outer)
    return _without(step, at, axes or list(range(step.rank())), keep=bool(step.attribute("keepdims", 1)))


def _without(step: _Step, at: Axis, axes: list[int], *, keep: bool) -> list[Kind]:
    """Outputs that lack these dimensions, or have 1 there."""
    if at.axis in axes:
        return [None] * len(step.node.output)
    return step.outputs(at.axis if keep else at.axis - sum(axis < at.axis for axis in axes), at.outer)


def _arg(step: _Step) -> list[Kind]:
    at = step.only()
    if at is None:
        return _neither(step)
    return _without(step, at, [step.attribute("axis", 0) % step.rank()], keep=bool(step.attribute("keepdims", 1)))


def _along(*, from_there_on: bool = False) -> Callable[[_Step], list[Kind]]:
    """A node that computes along one axis, by default the last, or along all from one on, and keeps the shape."""

    def rule(step: _Step) -> list[Kind]:
        at = step.only()
        if at is None:
            return _neither(step)
        axis = step.attribute("axis", -1) % step.rank()
        looks_there = at.axis >= axis if from_there_on else at.axis == axis
        return [None] * len(step.node.output) if looks_there else step.outputs(at.axis, at.outer)

    return rule


def _softmax(step: _Step) -> list[Kind]:
    """Before opset 13, it computed along all axes from one on; the stricter rule is valid for both."""
    at = step.only()
    if at is None:
        return _neither(step)
    axis = step.attribute("axis", None)
    first = (1 if axis is None else axis) % step.rank()
    looked = {*range(first, step.rank()), step.rank() - 1}
    return [None] if at.axis in looked else step.outputs(at.axis, at.outer)


def _cumulative(step: _Step) -> list[Kind]:
    at, axis = step.only(), step.fixed(1)
    if at is None or not axis:
        return _neither(step)
    return [None] if at.axis == axis[0] % step.rank() else step.outputs(at.axis, at.outer)


def _gather(step: _Step) -> list[Kind]:
    axis = step.attribute("axis", 0) % max(step.rank(), 1)
    if (at := step.only(1)) is not None:
        return step.outputs(axis + at.axis, at.outer)
    if (at := step.only(0)) is not None:
        moved = at.axis if at.axis < axis else at.axis - 1 + step.rank(1)
        return [None] if at.axis == axis else step.outputs(moved, at.outer)
    picked = step.fixed(1)
    if picked and isinstance(kind := step.kinds[0], Free) and kind.counts is not True and step.rank() == 1:
        return [Free(np.broadcast_to(kind.counts, step.shape())[np.array(picked)].reshape(step.shape(1)))]
    return _neither(step)


def _gather_elements(step: _Step) -> list[Kind]:
    places = {at for _, at in step.per_sample}
    at = places.pop() if len(places) == 1 and len(step.per_sample) == len(step.kinds) else None
    if at is None or at.axis < 0 or at.axis == step.attribute("axis", 0) % step.rank():
        return _neither(step)
    return step.outputs(at.axis, at.outer)


def _gather_nd(step: _Step) -> list[Kind]:
    num_batch_dims = step.attribute("batch_dims", 0)
    if (at := step.only(1)) is not None and num_batch_dims == 0 and at.axis < step.rank(1) - 1:
        return step.outputs(at.axis, at.outer)
    if (at := step.only(0)) is not None and num_batch_dims == 0 and at.axis >= step.shape(1)[-1]:
        return step.outputs(step.rank(1) - 1 + at.axis - step.shape(1)[-1], at.outer)
    places = {at for _, at in step.per_sample}
    shared = places.pop() if len(places) == 1 and len(step.per_sample) == len(step.kinds) else None
    if shared is not None and 0 <= shared.axis < num_batch_dims:
        return step.outputs(shared.axis, shared.outer)
    return _neither(step)


def _matmul(step: _Step) -> list[Kind]:
    shapes = step.observed.shapes(step.node.output[0])
    if step.sizes_of_samples or not step.rest_is_constant or shapes is None:
        return _neither(step)
    is_vector = [step.rank(i) == 1 for i in (0, 1)]
    places = set()
    for i, at in step.per_sample:
        from_end = step.rank(i) - 1 - at.axis
        if at.axis < 0 or is_vector[i] or from_end == i:  # the axis that is summed over
            return [None]
        shift = is_vector[1 - i] and from_end > 0
        places.add((len(shapes[0]) - 1 - from_end + int(shift), at.outer))
    return step.outputs(*places.pop()) if len(places) == 1 else [None]


def _gemm(step: _Step) -> list[Kind]:
    if not step.rest_is_constant:
        return [None]
    places = set()
    for i, at in step.per_sample:
        is_turned = bool(step.attribute("transA" if i == 0 else "transB", 0))
        rows_or_columns = (i == 0) == is_turned
        if at.axis < 0 or (i < 2 and at.axis != int(rows_or_columns)):
            return [None]
        if i == 2:
            places.add((2 - step.rank(2) + at.axis, at.outer))
        else:
            places.add((i, at.outer))
    return step.outputs(*places.pop()) if len(places) == 1 else [None]


def _einsum(step: _Step) -> list[Kind]:
    equation = step.attribute("equation", b"").decode().replace(" ", "")
    inputs, arrow, output = equation.partition("->")
    labels = inputs.split(",")
    if not arrow or "." in equation or not step.rest_is_constant or any(at.axis < 0 for _, at in step.per_sample):
        return [None]
    found = {(labels[i][at.axis], at.outer) for i, at in step.per_sample}
    label, outer = found.pop() if found else ("", 1)
    is_shared = not found and label in output and equation.count(label) == len(step.per_sample) + 1
    return step.outputs(output.index(label), outer) if is_shared else [None]


def _concat(step: _Step) -> list[Kind]:
    if step.sizes_of_samples:
        return [_concatenated_sizes(step)]
    places = {(at.axis, at.outer) for _, at in step.per_sample}
    axis = step.attribute("axis", 0) % step.rank()
    if len(places) != 1 or len(step.per_sample) != len(step.kinds) or places & {(axis, 1), (-1, 0)}:
        return [None]
    found, outer = places.pop()
    return [None] if found == axis else step.outputs(found, outer)


def _concatenated_sizes(step: _Step) -> Kind:
    masks = [kind.counts for kind in step.kinds if isinstance(kind, Free)]
    shapes = [step.observed.shapes(name) or () for name in step.node.input]
    if any(mask is True for mask in masks) or any(len(set(shape)) != 1 or len(shape[0]) != 1 for shape in shapes):
        return Free(True)
    return Free(np.concatenate([np.broadcast_to(mask, shape[0]) for mask, shape in zip(masks, shapes, strict=True)]))


def _split(step: _Step) -> list[Kind]:
    at = step.only()
    if at is None or at.axis == step.attribute("axis", 0) % step.rank():
        return _neither(step)
    return step.outputs(at.axis, at.outer)


def _slice(step: _Step) -> list[Kind]:
    if step.sizes_of_samples:
        return [_sliced_sizes(step)]
    found = step.per_sample
    if len(found) != 1 or found[0][0] != 0 or found[0][1].axis < 0 or step.node.input[1:2] == []:
        return [None]
    at = found[0][1]
    axes = step.fixed(3) if len(step.node.input) > 3 else list(range(step.rank()))
    if axes is None or not _all_constant(step.kinds[1:]):
        return [None]
    axes = [axis % step.rank() for axis in axes or range(step.rank())]
    if at.axis in axes and not _takes_all(step, axes.index(at.axis)):
        return [None]
    return step.outputs(at.axis, at.outer)


def _takes_all(step: _Step, position: int) -> bool:
    """Whether a Slice leaves an axis of any size unchanged."""
    begins, ends, steps = step.fixed(1), step.fixed(2), step.fixed(4)
    if not begins or not ends or steps is None or len(begins) <= position or len(ends) <= position:
        return False
    return begins[position] == 0 and ends[position] >= _NO_END and (not steps or steps[position] == 1)


def _sliced_sizes(step: _Step) -> Kind:
    """A part of a list of sizes."""
    shapes, kind = step.observed.shapes(step.node.input[0]), step.kinds[0]
    bounds = [step.fixed(i) for i in (1, 2, 4)]
    if shapes is None or len(shapes[0]) != 1 or len(set(shapes)) > 1 or not _is_size(kind):
        return Free(True)
    begins, ends, strides = bounds
    if not begins or not ends or strides is None or (strides or [1])[0] != 1:
        return Free(True)
    return Free(np.broadcast_to(kind.counts, shapes[0])[begins[0] : ends[0]])  # type: ignore[union-attr]


def _expand(step: _Step) -> list[Kind]:
    """Repeats along axes; if a size is the number of samples, that axis gets a block for each of them."""
    if isinstance(step.kinds[0], PerSample):
        if not _is_size(step.kinds[1]):
            return [None]
        return _elementwise(_Step(step.node, step.observed, [step.kinds[0], CONSTANT]))
    return _filled(step, step.kinds[1]) if _is_constant(step.kinds[0]) else _neither(step)


def _constant_of_shape(step: _Step) -> list[Kind]:
    return _filled(step, step.kinds[0])


def _filled(step: _Step, sizes: Kind) -> list[Kind]:
    """The same block for each sample, where exactly one of the sizes depends on the number of samples."""
    if not isinstance(sizes, Free) or not isinstance(sizes.counts, np.ndarray) or np.sum(sizes.counts) != 1:
        return _neither(step)
    shapes = step.observed.shapes(step.node.output[0])
    axis = int(np.argmax(sizes.counts)) + (len(shapes[0]) if shapes else 0) - len(sizes.counts)
    if _varies(step, axis):
        return _neither(step)
    return step.outputs(axis)


def _varies(step: _Step, axis: int) -> bool:
    """Whether what is repeated along an axis is more than one block."""
    shapes = step.observed.shapes(step.node.input[0])
    offset = len((step.observed.shapes(step.node.output[0]) or ((),))[0]) - (len(shapes[0]) if shapes else 0)
    return step.node.op_type == "Expand" and (shapes is None or (axis >= offset and shapes[0][axis - offset] != 1))


def _tile(step: _Step) -> list[Kind]:
    at, repeats = step.only(), step.fixed(1)
    if at is None or not repeats or repeats[at.axis] != 1:
        return _neither(step)
    return step.outputs(at.axis, at.outer)


def _pad(step: _Step) -> list[Kind]:
    at, pads = step.only(), step.attribute("pads", None) or step.fixed(1)
    if at is None or not pads or len(step.node.input) > 3 or pads[at.axis] or pads[at.axis + step.rank()]:
        return _neither(step)
    return step.outputs(at.axis, at.outer)


def _one_hot(step: _Step) -> list[Kind]:
    at = step.only()
    if at is None:
        return _neither(step)
    axis = step.attribute("axis", -1) % (step.rank() + 1)
    return step.outputs(at.axis + (axis <= at.axis), at.outer)


def _trilu(step: _Step) -> list[Kind]:
    at = step.only()
    return step.outputs(at.axis, at.outer) if at and at.axis < step.rank() - 2 else _neither(step)


def _batch_normalization(step: _Step) -> list[Kind]:
    at = step.only()
    is_training = step.attribute("training_mode", 0) or len(list(filter(None, step.node.output))) > 1
    if at is None or is_training or at.axis == 1:
        return [None] * len(step.node.output)
    return step.outputs(at.axis, at.outer)


def _samples_in_front(step: _Step) -> list[Kind]:
    """A node whose first axis is that of samples, which it keeps apart."""
    at = step.only()
    return step.outputs(0) if at and at.axis == 0 and at.is_whole else _neither(step)


def _recurrent(step: _Step) -> list[Kind]:
    """GRU, LSTM, RNN: the sequence, the lengths and the first states have their samples on different axes."""
    is_first = step.attribute("layout", 0) == 1
    wanted = {0: 0 if is_first else 1, 4: 0, 5: 0 if is_first else 1, 6: 0 if is_first else 1}
    places = step.per_sample
    if not step.rest_is_constant or not places or places[0][0] != 0:
        return [None] * len(step.node.output)
    if any(not at.is_whole or wanted.get(i) != at.axis for i, at in places):
        return [None] * len(step.node.output)
    axes = [0 if is_first else (1 if position else 2) for position in range(len(step.node.output))]
    return [
        step.observed.per_sample(name, axis) if name else CONSTANT
        for name, axis in zip(step.node.output, axes, strict=True)
    ]


def _dropout(step: _Step) -> list[Kind]:
    """The rule outside training; a third operand may ask for training."""
    asks_for_training = len(step.kinds) > 2 and bool(step.node.input[2]) and step.fixed(2) not in ([0], [False])
    return _neither(step) if asks_for_training else _elementwise(step)


def _normalized_axes(step: _Step) -> list[Kind]:
    at = step.only()
    axes = [axis % step.rank() for axis in step.attribute("axes", [0, 2, 3])]
    return step.outputs(at.axis, at.outer) if at and at.axis not in axes else _neither(step)


_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")

_SAMPLES_IN_FRONT = """
AveragePool Conv DepthToSpace GlobalAveragePool GlobalMaxPool GroupNormalization InstanceNormalization LRN MaxPool
SpaceToDepth
"""

_RULES: dict[str, Callable[[_Step], list[Kind]]] = {
    **dict.fromkeys(UNARY | BROADCASTING, _elementwise),
    **dict.fromkeys((f"Reduce{name}" for name in _REDUCTIONS), _reduction),
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), _reshaped),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), _softmax),
    **dict.fromkeys(("ArgMax", "ArgMin"), _arg),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _recurrent),
    **dict.fromkeys(_SAMPLES_IN_FRONT.split(), _samples_in_front),
    "BatchNormalization": _batch_normalization,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "CumSum": _cumulative,
    "Dropout": _dropout,
    "Einsum": _einsum,
    "Expand": _expand,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "LayerNormalization": _along(from_there_on=True),
    "LpNormalization": _along(),
    "MatMul": _matmul,
    "MeanVarianceNormalization": _normalized_axes,
    "OneHot": _one_hot,
    "Pad": _pad,
    "RMSNormalization": _along(from_there_on=True),
    "Shape": _shape,
    "Size": lambda _: [Free(True)],
    "Slice": _slice,
    "Split": _split,
    "Tile": _tile,
    "TopK": _along(),
    "Transpose": _transpose,
    "Trilu": _trilu,
}
