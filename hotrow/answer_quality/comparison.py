"""Measures how much the answers of two versions differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.answer_quality.auc import auc_by_label
from hotrow.answer_quality.random_requests import random_requests
from inference_session import InferenceSession
from inference_session.errors import ConfigurationError
from inference_session.model_spec import PREDICTIONS, ModelSpec, NamedArrays
from inference_session.requests.canary import BROKEN, INPUT, read_arrays

_SAMPLES_PER_RUN = 1024
_OFFLINE: Mapping[str, Any] = {
    "device": "cpu",
    **dict.fromkeys(("volatile_store", "persistent_store", "update_stream"), ""),
    **dict.fromkeys(("canary_requests", "record_keys", "state_dir"), ""),
    "warm_up_s": 0,
}
"""Settings of sessions that answer only from their table files, and write nothing."""


@dataclass(frozen=True)
class OutputDifference:
    """The absolute differences of one output."""

    output: str
    largest: float
    mean: float


@dataclass(frozen=True)
class LabelAuc:
    """The AUC of one label's predictions by both versions."""

    label: str
    before: float | None
    """None: there is no AUC, because all samples have the same label."""
    after: float | None

    def __str__(self) -> str:
        if self.before is None or self.after is None:
            return f"AUC of {self.label!r}: none, because all samples have the same label"
        return f"AUC of {self.label!r}: {self.before:.6f} before, {self.after:.6f} after"


@dataclass(frozen=True)
class AnswerQuality:
    """The result of a comparison."""

    requests: str
    """Where the requests came from."""
    differences: Sequence[OutputDifference]
    aucs: Sequence[LabelAuc]

    @property
    def largest(self) -> float:
        """The largest difference over all outputs."""
        return max((difference.largest for difference in self.differences), default=0.0)

    def as_json(self) -> dict[str, Any]:
        """The result in a form for programs."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"Answers to {self.requests}:"]
        lines += [f"  {d.output!r}: largest difference {d.largest:.3g}, mean {d.mean:.3g}" for d in self.differences]
        lines += [f"  {auc}" for auc in self.aucs]
        return "\n".join(lines)


def compare(before: Path, after: Path, requests: Path | None, labels: Path | None) -> AnswerQuality:
    """Answer the same requests from both versions' table files, on the CPU.

    Args:
        before: a version directory.
        after: one of the same model.
        requests: an .npz file of one request, as `hotrow record-canary` takes or writes it; None: random ones.
        labels: 0 and 1 for the samples of the requests: a .npy file, [samples] or [samples, labels], or an .npz
            file with an array for each label; None: no AUC.

    Raises:
        ConfigurationError: a file cannot be read, or does not fit the model.
        InvalidRequestError: the model does not take the request.
    """
    with InferenceSession.open(before, **_OFFLINE) as old, InferenceSession.open(after, **_OFFLINE) as new:
        asked = random_requests(old) if requests is None else _in_parts(old.spec, _inputs_of(requests))
        answers, changed = ([session.run(request) for request in asked] for session in (old, new))
    names = list(answers[0])
    if not any(array.size for answer in answers for array in answer.values()):
        raise ConfigurationError(f"{requests}: the request has no sample, so that no answers can be compared")
    differences = [_difference(name, _joined(answers, name), _joined(changed, name)) for name in names]
    aucs = [] if labels is None else _aucs(old.spec, labels, answers, changed)
    return AnswerQuality("random requests" if requests is None else str(requests), differences, aucs)


def _inputs_of(path: Path) -> NamedArrays:
    """The request in a file of plain arrays, or in one that `hotrow record-canary` has written."""
    arrays = read_arrays(path)
    recorded = {name.removeprefix(INPUT): array for name, array in arrays.items() if name.startswith(INPUT)}
    return recorded or arrays


def _in_parts(spec: ModelSpec, request: NamedArrays) -> list[NamedArrays]:
    """Splits into requests of at most 1024 samples, if the samples can be separated."""
    sizes = {len(array) if array.ndim else 1 for array in request.values()}
    if not (spec.batched and spec.has_own_inputs and not spec.context and len(sizes) == 1):
        return [request]
    begins = range(0, max(sizes.pop(), 1), _SAMPLES_PER_RUN)
    return [{name: array[begin : begin + _SAMPLES_PER_RUN] for name, array in request.items()} for begin in begins]


def _joined(answers: Sequence[NamedArrays], name: str) -> NDArray[Any]:
    """All values of an output, concatenated."""
    return np.concatenate([answer[name].reshape(-1) for answer in answers])


def _difference(name: str, before: NDArray[Any], after: NDArray[Any]) -> OutputDifference:
    """Arrays of other types or shapes differ by 0 or 1 as a whole; a number differs from NaN by infinity."""
    if before.shape != after.shape or before.dtype.kind not in "fiu":
        same = before.shape == after.shape and np.array_equal(before, after)
        return OutputDifference(name, float(not same), float(not same))
    if not before.size:
        return OutputDifference(name, 0.0, 0.0)
    old, new = before.astype(np.float64), after.astype(np.float64)
    with np.errstate(invalid="ignore"):
        off = np.abs(old - new)
    off[(old == new) | (np.isnan(old) & np.isnan(new))] = 0
    off[np.isnan(off)] = np.inf
    return OutputDifference(name, float(off.max()), float(off.mean()))


def _aucs(spec: ModelSpec, path: Path, before: Sequence[NamedArrays], after: Sequence[NamedArrays]) -> list[LabelAuc]:
    if not spec.labels:
        raise ConfigurationError(f"labels {path}: the model has no predictions to compare with labels")
    scores = [_joined(answers, PREDICTIONS).reshape(-1, len(spec.labels)) for answers in (before, after)]
    labels = _read_labels(path, spec.labels)
    if labels.shape != scores[0].shape:
        raise ConfigurationError(
            f"labels {path}: shape {list(labels.shape)}, expected {list(scores[0].shape)}, one column for each of "
            f"{', '.join(map(repr, spec.labels))}"
        )
    if not np.isin(labels, (0, 1)).all():
        raise ConfigurationError(f"labels {path}: holds {labels[~np.isin(labels, (0, 1))][0]:g}, expected 0 and 1")
    before_after = zip(*(auc_by_label(labels, each) for each in scores), strict=True)
    found = ([None if math.isnan(auc) else auc for auc in pair] for pair in before_after)
    return [LabelAuc(name, *pair) for name, pair in zip(spec.labels, found, strict=True)]


def _read_labels(path: Path, names: Sequence[str]) -> NDArray[Any]:
    """[samples, labels]: one array, or an archive of one array for each label."""
    try:
        with path.open("rb") as file:
            content = np.load(file, allow_pickle=False)
            columns = [content] if isinstance(content, np.ndarray) else [content[name] for name in names]
        return np.concatenate([column.reshape(len(column), -1) for column in columns], axis=1).astype(np.float64)
    except BROKEN as error:
        raise ConfigurationError(
            f"labels {path}: expected 0 and 1 in a .npy file, [samples] or [samples, labels], or in an .npz file with "
            f"an array for each of {', '.join(map(repr, names))}"
        ) from error
