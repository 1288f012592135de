"""The Python backend's tensors as NumPy arrays and back, whichever NumPy its stub was built for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from inference_session.errors import UnsupportedModelError
from inference_session.model_spec import TensorSpec
from triton_backend.backend.dlpack import ExportedTensor, ImportedTensor


def read_array(tensor: Any) -> NDArray[Any]:
    """A view of the tensor's memory: keep the request as long as the array. A tensor on a GPU is copied."""
    if not tensor.is_cpu():
        return _downloaded(tensor)
    if knows_numpy():
        return tensor.as_numpy()  # type: ignore[no-any-return]
    return np.from_dlpack(ImportedTensor(tensor))


def array_reader() -> Callable[[Any], NDArray[Any]]:
    """The fastest equivalent of `read_array`; it may raise TritonModelException for a tensor on a GPU."""
    return pb_utils.Tensor.as_numpy if knows_numpy() else read_array


def write_tensor(name: str, array: NDArray[Any]) -> Any:
    """A `pb_utils.Tensor` of the array's values."""
    if knows_numpy():
        return pb_utils.Tensor(name, array)
    return pb_utils.Tensor.from_dlpack(name, ExportedTensor(array))


def check_types(tensors: Iterable[TensorSpec]) -> None:
    """UnsupportedModelError for strings where the stub would crash on them: DLPack does not support strings."""
    for tensor in tensors:
        if tensor.dtype == "object" and not knows_numpy():
            raise UnsupportedModelError(
                f"tensor {tensor.name!r} holds strings, for which this tritonserver needs NumPy 1, but NumPy "
                f"{np.__version__} is installed: pip install 'numpy<2' for the server's Python"
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
