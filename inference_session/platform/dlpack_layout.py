"""How DLPack describes a tensor in memory (dlpack.h, version 0)."""

from __future__ import annotations

import ctypes

CPU, CUDA_HOST = 1, 3
"""Types of devices whose memory the processor reads."""
KINDS = {"i": 0, "u": 1, "f": 2, "b": 6}
"""Type codes by NumPy's kinds."""


class DataType(ctypes.Structure):
    """DLDataType: what one element is."""

    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )
