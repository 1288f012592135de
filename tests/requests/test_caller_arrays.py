"""Inputs on a GPU, as far as tests can check without one."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from inference_session.errors import InvalidRequestError
from inference_session.requests.caller_arrays import copied_to_host, is_on_gpu


class OnGpu:
    """What CuPy and PyTorch offer."""

    __cuda_array_interface__ = {"shape": (2,), "typestr": "<i8", "data": (0, False), "version": 3}  # noqa: RUF012


def test_only_arrays_of_a_gpu_count_as_such() -> None:
    assert is_on_gpu(OnGpu())
    for value in (np.zeros(2), [1, 2], 3, None):
        assert not is_on_gpu(value)


def test_without_cupy_the_input_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)

    with pytest.raises(InvalidRequestError, match=r"input 'ids' lies on a GPU, and CuPy.* is not installed.*NumPy"):
        copied_to_host("ids", OnGpu())
