"""What a request's answer is made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_session.errors import HotrowError
from inference_session.model_spec import PREDICTIONS
from inference_session.requests.outputs import Outputs
from tests.testing import small_model


@pytest.mark.parametrize(("label", "values"), [("click", [[1.0], [2.0]]), ("stay", [1.0, 2.0])])
def test_predictions_are_not_the_memory_of_their_label(label: str, values: list[Any]) -> None:
    """A caller may write to one of them and keep the other."""
    outputs = Outputs(replace(small_model.SPEC, labels=(label,), label_outputs=(label,)))
    computed: dict[str, NDArray[Any]] = {label: np.array(values, np.float32)}

    answers = outputs.split(computed, [[label, PREDICTIONS]] * 2, [1, 1])

    for answer in answers:
        answer[PREDICTIONS] *= 100
    np.testing.assert_array_equal(np.concatenate([answer[label] for answer in answers]), values)


def test_predictions_need_a_dimension_of_samples() -> None:
    """A Squeeze drops it where there is one sample: that was a TypeError about unsized objects."""
    outputs = Outputs(replace(small_model.SPEC, labels=("stay",), label_outputs=("stay",)))

    with pytest.raises(HotrowError, match="OUTPUT0 cannot be made of outputs without a dimension of samples"):
        outputs.predictions([np.array(1, np.float32)])
