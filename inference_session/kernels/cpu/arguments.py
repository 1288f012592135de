"""Arguments that compiled code reads from memory.

Numba looks at each array that Python passes to compiled code, and again at the next call. For a kernel that is called
with the same arrays for each request, `Arguments` writes down once where they are, and the kernel takes its address.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numpy.typing import NDArray

from inference_session.kernels.cpu.intrinsics import intrinsic, kernel, load, pointer_to, store
from inference_session.kernels.records import address_of

Result = TypeVar("Result")
_PAIR = ir.ArrayType(ir.IntType(64), 2)
"""An argument in memory: a number and 0, or the address of an array and its length."""


class Arguments:
    """Whole numbers and contiguous arrays [n], in the order of a kernel's arguments. Keeps the arrays alive."""

    def __init__(self, *values: int | NDArray[Any]) -> None:
        """ValueError for any other array: a kernel would read and write beyond it."""
        for value in values:
            if not isinstance(value, int) and (value.ndim != 1 or not value.flags.c_contiguous):
                raise ValueError(f"arguments of kernels are contiguous [n], found {value.shape} {value.strides}")
        self._values = values
        pairs = [(value, 0) if isinstance(value, int) else (address_of(value), len(value)) for value in values]
        self._memory = np.array(pairs, np.int64)
        self._address = address_of(self._memory)

    def bound_to(self, kernel: Callable[..., Result]) -> Callable[..., Result]:
        """The kernel with the address of these arguments as its first argument. Keeps them alive."""
        bound = partial(kernel, self._address)
        bound.__dict__["arguments"] = self  # lives as long as the function
        return bound


@kernel
def int_at(arguments: int, number: int) -> Any:
    """The argument of that number, an int."""
    return load(arguments, np.int64, 2 * number)


@kernel
def put_int(arguments: int, number: int, value: int) -> None:
    """Replace the argument of that number by an int."""
    store(arguments, np.int64, 2 * number, value)


@intrinsic
def put_array(_context: Any, _arguments: Any, _number: Any, array: Any) -> Any:
    """put_array(arguments, number, array): replace the argument of that number by an array [n], which stays alive.

    TypingError for an array that is not contiguous.
    """
    if array.ndim != 1 or array.layout != "C":
        raise TypingError(f"arguments of kernels are contiguous [n], found {array}")

    def build(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        arguments, number, value = values
        view, word = context.make_array(array)(context, builder, value), ir.IntType(32)
        pair = builder.gep(pointer_to(builder, arguments, _PAIR), [number])
        for i, part in enumerate((builder.ptrtoint(view.data, ir.IntType(64)), view.nitems)):
            builder.store(part, builder.gep(pair, [word(0), word(i)]))
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, array), build


@intrinsic
def array_at(_context: Any, _arguments: Any, _number: Any, kind: Any) -> Any:
    """array_at(arguments, number, dtype) → the argument of that number, an array [n] of this dtype, a constant."""
    array = types.Array(kind.dtype, 1, "C")

    def build(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        from numba.np import arrayobj  # half of Numba, which processes that only load machine code do without

        address, number, _ = values
        word = ir.IntType(32)
        pair = builder.gep(pointer_to(builder, address, _PAIR), [number])
        begin, length = (builder.load(builder.gep(pair, [word(0), word(i)])) for i in range(2))
        element = context.get_data_type(kind.dtype)
        size = cgutils.intp_t(context.get_abi_sizeof(element))
        made = context.make_array(array)(context, builder)
        data = pointer_to(builder, begin, element)
        arrayobj.populate_array(made, data=data, shape=[length], strides=[size], itemsize=size, meminfo=None)  # type: ignore[no-untyped-call]
        return made._getvalue()

    return array(types.int64, types.int64, kind), build
