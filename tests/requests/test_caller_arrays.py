"""Inputs on a GPU, as far as tests can check without one."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from inference_session.errors import InvalidRequestError
from inference_session.model_spec import TableSpec
from inference_session.requests.caller_arrays import as_input, as_rows, copied_to_host, is_on_gpu


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


@pytest.mark.parametrize("error", [RuntimeError, TypeError, ValueError])
def test_what_does_not_become_an_array_is_named(error: type[Exception]) -> None:
    """PyTorch's tensors raise these where they have a gradient, or a type that NumPy lacks."""

    class Tensor:
        def __array__(self, *_: object, **__: object) -> None:
            raise error("call detach() first")

    with pytest.raises(InvalidRequestError, match=r"input 'user' cannot be converted to an array: call detach\(\)"):
        as_input("user", Tensor(), np.dtype(np.int64))  # type: ignore[arg-type]


def test_what_lies_below_a_mask_is_no_value() -> None:
    """NumPy takes it as one."""
    masked = np.ma.masked_array([[1], [2]], mask=[[False], [True]])
    for value in (masked, list(masked), (np.array([1]), masked[1])):
        with pytest.raises(InvalidRequestError, match=r"input 'user' has masked elements: fill them first"):
            as_input("user", value, np.dtype(np.int64))
    np.testing.assert_array_equal(as_input("user", masked[:1], np.dtype(np.int64)), [[1]])
    np.testing.assert_array_equal(as_input("user", list(masked[:1]), np.dtype(np.int64)), [[1]])


def test_numbers_that_a_type_cannot_hold_do_not_become_infinite() -> None:
    table = TableSpec("t", "t", 10, 2)
    for value in (1e300, -1e39):
        assert as_input("dense", [value], np.dtype(np.float32)).dtype == np.float64  # refused for its type
        with pytest.raises(InvalidRequestError, match=r"table 't': vectors have elements that float32 cannot hold"):
            as_rows([1], np.array([[0, value]]), table)
    assert as_input("dense", [1.5, np.inf], np.dtype(np.float32)).tolist() == [1.5, np.inf]
    assert as_rows([1], np.array([[0.5, -np.inf]]), table)[1].tolist() == [[0.5, -np.inf]]
