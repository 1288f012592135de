"""What the importer takes for the same answer."""

from __future__ import annotations

import numpy as np
import pytest

from inference_session.importers.onnx.probe import close

SCORES = np.array([[20.0, 0.001], [-3.0, np.inf]], np.float32)


@pytest.mark.parametrize(("off", "alike"), [(0.05, True), (0.2, False)])
def test_half_precision_has_the_steps_of_the_largest_score(off: float, alike: bool) -> None:
    """A score near 0 may be the sum of terms as large as another score."""
    found = SCORES + np.array([[0, off], [0, 0]], np.float32)

    assert close(found, SCORES, 1e-5, in_half=True) == alike
    assert close(found.astype(np.float16), SCORES.astype(np.float16), 1e-5) == alike
    assert not close(found, SCORES, 1e-5)


def test_small_scores_in_half_precision_have_steps_of_their_own() -> None:
    """No score is larger than 1, so nothing is scaled."""
    scores = np.array([0.5, 0.001], np.float32)

    assert close(scores + np.float32(0.003), scores, 1e-5, in_half=True)
    assert not close(scores + np.float32(0.02), scores, 1e-5, in_half=True)


def test_the_largest_floats_are_compared_without_a_warning() -> None:
    """A RuntimeWarning of NumPy stood in the output of an import."""
    largest = np.array([np.finfo(np.float32).max, 1.0], np.float32)

    assert close(largest, largest.copy(), 1e-5)
    assert not close(-largest, largest, 1e-5)
