"""What becomes of the places of samples in a batch: exporters write `x[arange(batch), k]` as elements at these places.

Each sample reads, and writes, at its own place then, whichever that is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from onnx import TensorProto

from inference_session.importers.onnx.samples.kinds import Axis, Free, Kind, PerPlace, PerSample, Places
from inference_session.importers.onnx.samples.step import Step

_MOVING = ("Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze")
"""Operators whose results have no other elements than their first operand, if a Cast keeps them (`_is_exact`)."""
_EXACT = (TensorProto.INT32, TensorProto.INT64, TensorProto.FLOAT, TensorProto.DOUBLE)
"""Types that have all places of a batch; those of fewer bits wrap, or round, from some place on."""


def follow_places(step: Step, rule: Callable[[Step], list[Kind]]) -> list[Kind]:
    """The results of a node by the rule for its operator, which knows nothing of places."""
    if not any(isinstance(kind, Places | PerPlace) for kind in step.kinds):
        return rule(step)
    found = rule(replace(step, kinds=[_as_sample(kind) for kind in step.kinds]))
    if step.node.op_type == "Shape" and found != [None]:
        return found
    if all(isinstance(kind, Free) for kind in step.kinds):
        is_moved = _is_exact(step) and isinstance(places := step.kinds[0], Places) and places.exact
        blocks = [kind.before for kind in found if isinstance(kind, PerSample)]
        is_placed = len(blocks) == len(found)
        return [Places(before=before, exact=is_moved) for before in blocks] if is_placed else rule(step)
    return _at_own_places(step) or [_per_place(step, kind) for kind in found]


def _is_exact(step: Step) -> bool:
    return step.node.op_type in _MOVING and (step.node.op_type != "Cast" or step.attribute("to", 0) in _EXACT)


def _as_sample(kind: Kind) -> Kind:
    return PerSample(kind.before) if isinstance(kind, Places | PerPlace) else kind


def _per_place(step: Step, kind: Kind) -> Kind:
    return PerPlace(kind.before, _column(step)) if isinstance(kind, PerSample) else kind


def _column(step: Step) -> int | None:
    """Where a list of indices, such as GatherND reads, has the places of samples."""
    if step.node.op_type in ("Cast", "Identity") and isinstance(kind := step.kinds[0], PerPlace):
        return kind.column if _is_exact(step) else None
    if step.node.op_type != "Concat" or step.attribute("axis", 0) % step.rank() != step.rank() - 1:
        return None
    places = [(i, kind) for i, kind in enumerate(step.kinds) if isinstance(kind, Places | PerPlace)]
    position, kind = places[0]
    if len(places) > 1 or not isinstance(kind, Places) or not kind.exact or step.shape(position)[-1] != 1:
        return None
    return sum(step.shape(i)[-1] for i in range(position))


def _at_own_places(step: Step) -> list[Kind] | None:
    """The results where each sample reads or writes its own elements only; None where that is not sure."""
    is_known = step.node.op_type in ("GatherND", "ScatterND") and not step.attribute("batch_dims", 0)
    indices = step.kinds[1] if is_known else None
    if not isinstance(indices, PerPlace) or not _has_place(step, indices.column):
        return None
    at = step.observed.axis(PerSample(indices.before), step.node.input[1])
    if at is None or at.axis == step.rank(1) - 1:
        return None
    if step.node.op_type == "GatherND":
        return step.outputs(at.axis, at.outer)
    return step.outputs(indices.column or 0) if _held(step, 2) == at else None


def _has_place(step: Step, column: int | None) -> bool:
    """Whether the first operand has its samples, and nothing else, where this column of the indices points to."""
    held = _held(step, 0)
    return held is not None and held.is_whole and held.axis == column


def _held(step: Step, position: int) -> Axis | None:
    kind = step.kinds[position]
    return step.observed.axis(kind, step.node.input[position]) if isinstance(kind, PerSample) else None
