"""HugeCTR's metrics of evaluation, over all samples since the last call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

import hotrow.answer_quality.auc
from hotrow.training.hugectr.arguments.enums import MetricsType

Array = NDArray[np.float64]
_HIT = 0.8
"""A prediction above this counts for the hit rate."""


class Metrics:
    """Collects batches; `take` computes the metrics and starts anew."""

    def __init__(self, spec: Mapping[MetricsType, float]) -> None:
        self._kinds = list(spec)
        self._losses: list[float] = []
        self._predictions: list[NDArray[np.float32]] = []
        self._labels: list[NDArray[np.float32]] = []

    def add(self, predictions: NDArray[np.float32], labels: NDArray[np.float32], loss: float) -> None:
        """One batch: predictions and labels, both [samples, columns of all labels], and the loss."""
        self._predictions.append(predictions)
        self._labels.append(labels)
        self._losses.append(loss)

    def take(self) -> list[tuple[str, float]]:
        """Names and values in the order of `metrics_spec`. Of several columns, AUC and NDCG are the mean over them.

        NaN where there is no batch.
        """
        if not self._losses:
            return [(kind.value, math.nan) for kind in self._kinds]
        predictions = np.concatenate(self._predictions).astype(np.float64)
        labels = np.concatenate(self._labels).astype(np.float64)
        losses, self._losses, self._predictions, self._labels = self._losses, [], [], []
        return [
            (kind.value, float(np.mean(losses)) if kind is MetricsType.AverageLoss else _of(kind, predictions, labels))
            for kind in self._kinds
        ]


def compared_columns(labels: Mapping[str, int], outputs: Mapping[str, int]) -> tuple[list[int], list[int]]:
    """The columns of predictions, and those of labels that they are compared with.

    Of two classes with one label, the second is the positive one. A label without a loss has no prediction.

    Args:
        labels: how many columns each has, in their order.
        outputs: the same of the predictions of some labels.
    """
    ends_of_labels = dict(zip(labels, accumulate(labels.values()), strict=True))
    predicted, known = list[int](), list[int]()
    for name, end in zip(outputs, accumulate(outputs.values()), strict=True):
        predicted += range(end - labels[name], end)
        known += range(ends_of_labels[name] - labels[name], ends_of_labels[name])
    return predicted, known


def auc(predictions: Array, labels: Array) -> float:
    """The share of pairs of a positive and a negative that are in order, ties as one half.

    0.5 where there is no pair.
    """
    found = hotrow.answer_quality.auc.auc(labels > 0.5, predictions)
    return 0.5 if math.isnan(found) else found


def _ndcg(predictions: Array, labels: Array) -> float:
    def gain(values: Array) -> float:
        return float((values / np.log2(np.arange(len(values)) + 2)).sum())

    ideal = gain(-np.sort(-labels))
    return gain(labels[np.argsort(-predictions, kind="stable")]) / ideal if ideal else 0.0


def _hit_rate(predictions: Array, labels: Array) -> float:
    is_hit = predictions > _HIT
    return float((labels[is_hit] == 1.0).mean()) if is_hit.any() else 0.0


def _smape(predictions: Array, labels: Array) -> float:
    return float((np.abs(predictions - labels) / np.maximum((predictions + labels) / 2, 1e-12)).mean())


_FORMULAS: Mapping[MetricsType, Callable[[Array, Array], float]] = {
    MetricsType.AUC: auc,
    MetricsType.NDCG: _ndcg,
    MetricsType.HitRate: _hit_rate,
    MetricsType.SMAPE: _smape,
}


def _of(kind: MetricsType, predictions: Array, labels: Array) -> float:
    """Labels below -0.5 are unknown and do not count. NaN if a prediction is."""
    if np.isnan(predictions).any():
        return math.nan
    found = []
    for column, label in zip(predictions.T, labels.T, strict=True):
        is_known = label >= -0.5
        if is_known.any():
            found.append(_FORMULAS[kind](column[is_known], label[is_known]))
    return float(np.mean(found)) if found else math.nan
