"""AUC against counting all pairs."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hotrow.answer_quality.auc import auc

SAMPLES = st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40)


@given(SAMPLES)
def test_auc_is_the_share_of_pairs_in_order(samples: list[tuple[bool, int]]) -> None:
    """A positive above a negative counts one, a tie one half."""
    positive = [score for label, score in samples if label]
    negative = [score for label, score in samples if not label]
    pairs = [(p > n) + (p == n) / 2 for p in positive for n in negative]
    labels, scores = (np.array([sample[i] for sample in samples], np.float64) for i in (0, 1))

    found = auc(labels, scores)

    assert math.isclose(found, sum(pairs) / len(pairs)) if pairs else math.isnan(found)
