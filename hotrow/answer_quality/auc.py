"""How well scores separate positive samples from the others."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def auc(labels: NDArray[Any], scores: NDArray[Any]) -> float:
    """The chance that a sample with label 1 scores above one with label 0, a tie counting one half; NaN if a label
    does not occur. Both are [samples].
    """
    is_positive = labels > 0
    num_positive, num_negative = int(is_positive.sum()), int((~is_positive).sum())
    if not num_positive or not num_negative:
        return float("nan")
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    rank_sum = float(mean_rank[place][is_positive].sum())
    return (rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)


def auc_by_label(labels: NDArray[Any], scores: NDArray[Any]) -> list[float]:
    """The AUC of each column; both arrays are [samples, labels]."""
    return [auc(*pair) for pair in zip(labels.T, scores.T, strict=True)]
