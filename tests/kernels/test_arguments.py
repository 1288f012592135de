"""Arguments that compiled code reads from memory stay there until it has read them."""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_session.kernels.cpu.arguments import Arguments
from inference_session.kernels.cpu.requests import bag_staging, staging


@pytest.mark.parametrize(("module", "kernel"), [(staging, "stage"), (bag_staging, "stage_bags")])
def test_the_first_call_of_a_kernel_reads_arguments_that_live(
    module: ModuleType, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other threads of a server reuse freed memory: the kernel then read any address, and the process ended."""
    made: list[weakref.ref[Arguments]] = []
    lived: list[bool] = []

    class Noted(Arguments):
        def __init__(self, *values: Any) -> None:
            super().__init__(*values)
            made.append(weakref.ref(self))

    monkeypatch.setattr(module, "Arguments", Noted)
    monkeypatch.setattr(module, kernel, lambda *_: lived.append(made[-1]() is not None))
    module.compile_kernels()

    assert lived == [True]


@pytest.mark.parametrize("array", [np.zeros(6)[::2], np.zeros((2, 3)), np.array(0.0)])
def test_arrays_of_other_forms_are_refused(array: NDArray[Any]) -> None:
    """A kernel knows where an array begins, and how long it is."""
    with pytest.raises(ValueError, match=r"contiguous \[n\]"):
        Arguments(1, array)
