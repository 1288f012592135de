"""One operator of a network as the rules see it (rules.py): its operands, and where their samples are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onnx import NodeProto

from inference_session.importers.onnx.samples.kinds import Axis, Free, Kind, Observations, PerIteration, PerSample
from inference_session.onnx_graphs import attributes, is_random


@dataclass(frozen=True)
class Step:
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

    def common(self) -> Axis | None:
        """Where the samples are if all operands hold them in the same place."""
        found = {at for _, at in self.per_sample}
        at = found.pop() if len(found) == 1 and len(self.per_sample) == len(self.kinds) else None
        return at if at is not None and at.axis >= 0 else None

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
        return attributes(self.node).get(name, default)

    def fixed(self, position: int) -> list[int] | None:
        """The integers of an operand that is constant; [] where it is left out."""
        if position >= len(self.node.input) or not self.node.input[position]:
            return []
        kind, values = self.kinds[position], self.observed.fixed(self.node.input[position])
        if values is None or not is_constant(kind) or isinstance(kind, PerIteration):
            return None
        found: list[int] = values.ravel().tolist()
        return found

    def axes(self) -> list[int] | None:
        """The axes of a reduction and the like, from its attribute or second operand, counted from the front."""
        named = self.attribute("axes", None)
        axes = list(named) if named is not None else self.fixed(1)
        return None if axes is None else [axis % max(self.rank(), 1) for axis in axes]


def is_constant(kind: Kind) -> bool:
    return isinstance(kind, Free) and kind.is_constant


def neither(step: Step) -> list[Kind]:
    """What a node without a rule makes: of sizes alone, something that depends on sizes."""
    kind = Free(True) if step.sizes_of_samples and not is_random(step.node) else None
    return [kind] * len(step.node.output)


def all_constant(kinds: Sequence[Kind]) -> bool:
    return all(is_constant(kind) for kind in kinds)


def is_size(kind: Kind) -> bool:
    """Whether a value may be the target shape of another one: constants, and multiples of the number of samples."""
    return isinstance(kind, Free) and kind.counts is not True
