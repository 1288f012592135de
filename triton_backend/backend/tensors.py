"""The Python backend's tensors as NumPy arrays and back, whichever NumPy its stub was built for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from inference_session.errors import UnsupportedModelError
from inference_session.kernels.cpu.requests.capsules import capsule_wrapper
from inference_session.model_spec import TensorSpec
from inference_session.platform.dlpack_layout import CPU, CUDA_HOST, KINDS
from triton_backend.backend.dlpack import ExportedTensor, ImportedTensor


def read_array(tensor: Any) -> NDArray[Any]:
    """A view of the tensor's memory, of its shape and type: keep the request as long as the array. A tensor on a GPU is
    copied.
    """
    if not tensor.is_cpu():
        return _downloaded(tensor)
    if knows_numpy():
        return tensor.as_numpy()  # type: ignore[no-any-return]
    return np.from_dlpack(ImportedTensor(tensor))


def arrays_reader() -> Callable[[Sequence[Any]], Iterable[NDArray[Any]]]:
    """The fastest way to `read_array` several tensors; it may raise TritonModelException for a tensor on a GPU."""
    if knows_numpy():
        return partial(map, pb_utils.Tensor.as_numpy)
    wrap = _capsule_wrapper()
    return partial(map, read_array) if wrap is None else partial(_read_capsules, wrap)


def write_tensor(name: str, array: NDArray[Any]) -> Any:
    """A `pb_utils.Tensor` of the array's values, shape and type."""
    if knows_numpy():
        return pb_utils.Tensor(name, array)
    return pb_utils.Tensor.from_dlpack(name, ExportedTensor(array))


def check_types(tensors: Iterable[TensorSpec]) -> None:
    """UnsupportedModelError for strings where the stub would crash on them: DLPack does not support strings."""
    for tensor in tensors:
        if tensor.dtype == "object" and not knows_numpy():
            raise UnsupportedModelError(
                f"tensor {tensor.name!r} holds strings, for which this tritonserver needs NumPy 1, but NumPy "
                f"{np.__version__} is installed: pip install 'numpy<2' for the server's Python, 3.12 or earlier"
            )


def _downloaded(tensor: Any) -> NDArray[Any]:
    import cupy

    array: NDArray[Any] = cupy.asnumpy(cupy.from_dlpack(tensor))
    return array


@cache
def knows_numpy() -> bool:
    """Whether the stub reads this NumPy's arrays correctly."""
    values = np.array([1, 2], np.int32)
    return bool(np.array_equal(pb_utils.Tensor.from_dlpack("probe", ExportedTensor(values)).as_numpy(), values))


@cache
def _capsule_wrapper() -> Callable[[int, int], int] | None:
    """Compiled code that reads the stub's capsules; None: it does not find in them what was put in."""
    samples: list[NDArray[Any]] = [np.arange(i, i + 6).reshape(2, 3).astype(kind) for i, kind in enumerate("qfihB")]
    try:
        if (wrap := capsule_wrapper(KINDS, (CPU, CUDA_HOST))) is None:
            return None
        found = [pb_utils.Tensor.from_dlpack("probe", ExportedTensor(each)).to_dlpack() for each in samples]
        is_read = wrap(id(found), len(found)) == len(samples) and all(map(_is_same, found, samples))
    except Exception:  # noqa: BLE001  whatever is not as expected, tensors can be read without it
        return None
    return wrap if is_read else None


def _is_same(found: NDArray[Any], wanted: NDArray[Any]) -> bool:
    return found.dtype == wanted.dtype and np.array_equal(found, wanted)


def _read_capsules(wrap: Callable[[int, int], int], tensors: Sequence[Any]) -> Iterable[NDArray[Any]]:
    """The arrays of tensors, of which `wrap` makes those of numbers in host memory."""
    capsules = list(map(pb_utils.Tensor.to_dlpack, tensors))
    if wrap(id(capsules), len(capsules)) == len(capsules):
        return capsules
    return map(read_array, tensors)
