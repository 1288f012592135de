"""Where the samples of a graph's values lie, as `sample_axis.py` proves it, for a graph that has not been run.

Sizes are inferred for two numbers of samples, both prime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from onnx import ModelProto

from inference_session.importers.onnx.context.shapes import Shapes, sized
from inference_session.importers.onnx.sample_axis import SampleAxis
from inference_session.importers.onnx.sample_kinds import CONSTANT, Free, Observations, PerSample
from inference_session.importers.onnx.weights import Weight

_NUM_SAMPLES, _OPEN_SIZE = (101, 103), 13


class Other(Enum):
    """The state of values that do not hold a part per sample."""

    FREE = "the same for every batch"
    SIZES = "depends only on the size of the batch"
    UNKNOWN = "may depend on the other samples of the batch"


@dataclass(frozen=True)
class Rows:
    """A block for each sample, along one axis."""

    axis: int
    plain: bool
    """Whether the axis counts samples and nothing else."""


State: TypeAlias = Rows | Other


class RowAnalysis:
    """The states of all values of a canonical model."""

    def __init__(self, model: ModelProto, weights: Mapping[str, Weight]) -> None:
        self._observed = _observed(model, weights)
        kinds = {value.name: PerSample(1) for value in model.graph.input}
        self._kinds = SampleAxis(model.graph, self._observed, kinds).kinds

    def state(self, name: str) -> State:
        """The state of a value; initializers are FREE."""
        kind = self._kinds.get(name, CONSTANT)
        if isinstance(kind, Free):
            return Other.FREE if kind.is_constant else Other.SIZES
        found = self._observed.axis(kind, name) if kind is not None else None
        return Other.UNKNOWN if found is None else Rows(found.axis, found.is_whole)


def _observed(model: ModelProto, weights: Mapping[str, Weight]) -> Observations:
    runs = []
    for size in _NUM_SAMPLES:
        shapes = {value.name: sized(model.graph, value.name, size, _OPEN_SIZE) for value in model.graph.input}
        runs.append(Shapes(model, weights, shapes))
    dims = tuple({name: found for name in run.types if (found := run.dims(name)) is not None} for run in runs)
    return Observations(_NUM_SAMPLES, dims, tuple(run.known for run in runs))
