"""What a value of a network is to the samples of a batch, and where the samples are in it.

Each value is one of four things: *free* of the samples (a constant, or computed from sizes alone), *per sample* (it
holds a block for each sample, and each block depends on that sample alone), *per place* (each block depends on its
sample and on the sample's place in the batch), or neither. Shapes, and the values of axes, come from two runs with
different prime numbers of samples, so sizes do not match by chance.

A per-sample value is described by `before`: in row-major order, it is `before` times the sequence of all samples, each
with an equal number of elements. Reshaping keeps that number, so samples can be located in any shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Shapes = tuple[tuple[int, ...], ...]
"""Shapes of one value, in each run."""


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


@dataclass(frozen=True)
class Places(Free):
    """A value with a block for each sample, which depends on the sample's place in the batch alone."""

    counts: NDArray[np.bool_] | bool = True
    before: int = 1
    """As for `PerSample`."""
    exact: bool = False
    """Whether all elements of a block are the place itself, counted from 0."""


@dataclass(frozen=True)
class PerIteration(Free):
    """A constant of one iteration of a Loop or Scan, which may be another one in the next."""


@dataclass(frozen=True)
class PerPlace:
    """A value with a block for each sample, which depends on the sample and on its place in the batch."""

    before: int
    column: int | None = None
    """The only index of the last axis whose elements depend on the place, and they are the place itself; None: any."""


Kind = Free | PerSample | PerPlace | None
"""None: it may depend on several samples at once."""

CONSTANT = Free()
PER_ITERATION = PerIteration()


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
    bodies: Mapping[str, Observations] = field(default_factory=dict)
    """The same of the first iteration of each Loop and Scan, by the name of its first result."""

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
