"""Sums of vectors of one type: a column's sum stays in a register until the last vector is added.

Vector by vector, the sum would be loaded and stored each time, and float16 and int8 be written as float32 first. The
order of the additions and what is rounded are the same either way, and so are the sums, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from inference_session.kernels.cpu.intrinsics import intrinsic, kernel, pointer_to
from inference_session.kernels.records import VectorCode

_FLOAT32, _FLOAT16 = int(VectorCode.FLOAT32), int(VectorCode.FLOAT16)
_FLOAT, _INT64 = ir.FloatType(), ir.IntType(64)
_ELEMENTS = {
    VectorCode.FLOAT32: (_FLOAT, 4),
    VectorCode.FLOAT16: (ir.HalfType(), 2),
    VectorCode.INT8: (ir.IntType(8), 1),
}
"""Type and bytes of a stored element."""


@kernel
def sum_vectors(total: int, sources: int, weights: int, num: int, code: int, dim: int, begins: bool) -> None:
    """Add vectors to `total`, float32[dim]; if this begins a sum, `total` need not be set.

    `sources`: the address of `num` addresses of vectors. `weights`: of as many float32, the factors; 0: all are 1.
    """
    if code == _FLOAT32:
        _sum_float32(total, sources, weights, num, dim, begins)
    elif code == _FLOAT16:
        _sum_float16(total, sources, weights, num, dim, begins)
    else:
        _sum_int8(total, sources, weights, num, dim, begins)


def _sums(code: VectorCode) -> Callable[..., None]:
    """For vectors of one type: as many columns at a time as there are."""
    sum_64, sum_16, sum_4, sum_1 = (_columns(code, *shape) for shape in ((16, 4), (16, 1), (4, 1), (1, 1)))

    @kernel
    def add(total: int, sources: int, weights: int, num: int, dim: int, begins: bool) -> None:
        column = 0
        while column + 64 <= dim:
            sum_64(total, sources, weights, num, dim, begins, column)
            column += 64
        while column + 16 <= dim:
            sum_16(total, sources, weights, num, dim, begins, column)
            column += 16
        while column + 4 <= dim:
            sum_4(total, sources, weights, num, dim, begins, column)
            column += 4
        while column < dim:
            sum_1(total, sources, weights, num, dim, begins, column)
            column += 1

    return add


def _columns(code: VectorCode, width: int, count: int) -> Callable[..., Any]:
    """As `sum_vectors`, for `count` registers of `width` columns from a given one on."""
    floats = ir.VectorType(_FLOAT, width)

    @intrinsic
    def add(
        _context: Any, _total: Any, _sources: Any, _weights: Any, _num: Any, _dim: Any, _begins: Any, _column: Any
    ) -> Any:
        def build(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            total, sources, weights, num, dim, begins, column = arguments
            places = _places(builder, total, column, 4, floats, count)
            sums = _begin(builder, places, begins)
            weight_of = _factors(builder, weights, width)
            with cgutils.for_range(builder, num) as loop:
                source = builder.load(builder.gep(pointer_to(builder, sources, _INT64), [loop.index]))
                weight = weight_of(loop.index)
                for register, value in zip(
                    sums, _widened(builder, code, source, dim, column, floats, count), strict=True
                ):
                    builder.store(builder.fadd(builder.load(register), builder.fmul(value, weight)), register)
            for register, place in zip(sums, places, strict=True):
                builder.store(builder.load(register), place, align=1)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 5, types.boolean, types.int64), build

    return add


def _places(builder: Any, address: Any, column: Any, size: int, vector: Any, count: int) -> list[Any]:
    """Of `count` vectors of elements of `size` bytes that follow each other, from a column on."""
    first = builder.add(address, builder.mul(column, _INT64(size)))
    return [pointer_to(builder, builder.add(first, _INT64(size * vector.count * i)), vector) for i in range(count)]


def _begin(builder: Any, places: list[Any], begins: Any) -> list[Any]:
    """A variable for each sum, which LLVM keeps in a register."""
    floats = places[0].type.pointee
    sums: list[Any] = [cgutils.alloca_once(builder, floats) for _ in places]  # type: ignore[no-untyped-call]
    with builder.if_else(begins) as (then, otherwise):
        with then:
            for register in sums:
                # The one number that changes nothing that is added to it: 0 would make 0 of -0.
                builder.store(ir.Constant(floats, [-0.0] * floats.count), register)
        with otherwise:
            for register, place in zip(sums, places, strict=True):
                builder.store(builder.load(place, align=1), register)
    return sums


def _factors(builder: Any, weights: Any, width: int) -> Callable[[Any], Any]:
    """Gives the factor of a vector by its number."""
    one: Any = cgutils.alloca_once_value(builder, ir.Constant(_FLOAT, 1.0))  # type: ignore[no-untyped-call]
    has_weights = builder.icmp_signed("!=", weights, _INT64(0))
    first = builder.select(has_weights, pointer_to(builder, weights, _FLOAT), one)
    step = builder.select(has_weights, _INT64(1), _INT64(0))
    return lambda i: _spread(builder, builder.load(builder.gep(first, [builder.mul(i, step)]), align=1), width)


def _spread(builder: Any, value: Any, width: int) -> Any:
    """A vector of one value."""
    nothing, lanes = ir.Constant(ir.VectorType(_FLOAT, width), ir.Undefined), ir.VectorType(ir.IntType(32), width)
    single = builder.insert_element(nothing, value, ir.IntType(32)(0))
    return builder.shuffle_vector(single, nothing, ir.Constant(lanes, [0] * width))


def _widened(builder: Any, code: VectorCode, source: Any, dim: Any, column: Any, floats: Any, count: int) -> list[Any]:
    """Elements of a stored vector, from a column on, as float32."""
    element, size = _ELEMENTS[code]
    places = _places(builder, source, column, size, ir.VectorType(element, floats.count), count)
    stored = [builder.load(place, align=1) for place in places]
    if code == VectorCode.FLOAT32:
        return stored
    if code == VectorCode.FLOAT16:
        return [builder.fpext(value, floats) for value in stored]
    scale_and_bias = pointer_to(builder, builder.add(source, dim), _FLOAT)
    scale, bias = (
        _spread(builder, builder.load(builder.gep(scale_and_bias, [_INT64(i)]), align=1), floats.count) for i in (0, 1)
    )
    return [builder.fadd(builder.fmul(builder.sitofp(value, floats), scale), bias) for value in stored]


_sum_float32, _sum_float16, _sum_int8 = _sums(VectorCode.FLOAT32), _sums(VectorCode.FLOAT16), _sums(VectorCode.INT8)
