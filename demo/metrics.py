"""How well scores separate the positive samples from the others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def auc(labels: NDArray[np.floating], scores: NDArray[np.floating]) -> float:
    """The chance that a positive sample scores above a negative one, a tie counting one half; NaN without both kinds.

    Args:
        labels: [samples], 1 or 0.
        scores: [samples].
    """
    positive, negative = scores[labels > 0], np.sort(scores[labels <= 0])
    if not len(positive) or not len(negative):
        return float("nan")
    below = np.searchsorted(negative, positive, "left")
    not_above = np.searchsorted(negative, positive, "right")
    return float((below + not_above).mean() / 2 / len(negative))


def auc_by_task(labels: NDArray[np.floating], scores: NDArray[np.floating]) -> list[float]:
    """AUC of each column; both arrays are [samples, tasks]."""
    return [auc(labels[:, task], scores[:, task]) for task in range(labels.shape[1])]
