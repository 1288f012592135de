"""What Numba's Python lacks and the CPU kernels need: raw memory at an address, prefetching, byte matching in one
instruction. Each function is a few LLVM instructions, for use inside compiled code only.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as numba_intrinsic

from inference_session.kernels.machine_code import compiled

Function = TypeVar("Function", bound=Callable[..., Any])

_VECTOR16 = ir.VectorType(ir.IntType(8), 16)


def kernel(function: Function) -> Function:
    """Compile without the GIL and with IEEE arithmetic; the machine code is kept on disk where a folder allows it.

    Kernels do not allocate, so they are spared Numba's reference counting, which would cost more than the work itself.

    Numba sees that a kernel's own file has changed, but not those of the kernels that were compiled into it. So the
    name under which machine code is kept ends with a digest of them all: after an upgrade nothing old is found.
    """
    return _compiled(function, nogil=True)


def kernel_with_gil(function: Function) -> Function:
    """As `kernel`, with the GIL: for code that calls Python, or during which no other thread may run Python."""
    return _compiled(function, nogil=False)


def _compiled(function: Function, *, nogil: bool) -> Function:
    function.__qualname__ += _sources(function.__code__.co_filename)
    # Code in C never calls a kernel: to compile what it would call takes a tenth of the time.
    options: dict[str, Any] = {"error_model": "numpy", "_nrt": False, "forceinline": True, "no_cfunc_wrapper": True}
    return cast("Function", compiled(function, nogil=nogil, **options))


@functools.cache
def _sources(filename: str) -> str:
    """What names the sources of all kernels, and of those beside a file."""
    return "_".join(["", *sorted({_digest(Path(__file__).parents[1]), _digest(Path(filename).parent)})])


@functools.cache
def _digest(folder: Path) -> str:
    """Of all modules in and below a folder, which may have been installed without their sources."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is some instructions of LLVM."""
    return cast("Callable[..., Any]", numba_intrinsic(function))


def pointer_to(builder: Any, address: Any, pointee: Any) -> Any:
    """A pointer to what is at an address, for instructions of a kernel.

    Numba optimizes a kernel, and again what it was compiled into. In between, LLVM may have split `base + offset` into
    a pointer with the address `offset` and a distance `base` from it. For LLVM, no memory is at a distance from the
    pointer 0. So it would take code that reads at offset 0 for code that never runs, and drop it or the test before it:
    it has compiled loops that read a key behind the last one. Unless a function says that the pointer 0 is valid.
    """
    set.add(builder.function.attributes, "null_pointer_is_valid")  # which llvmlite does not know, but LLVM does
    return builder.inttoptr(address, pointee.as_pointer())


def _element(context: Any, builder: Any, kind: Any, address: Any, index: Any) -> Any:
    # An indexed pointer, not a sum of integers, is what lets LLVM vectorise loops over the elements.
    return builder.gep(pointer_to(builder, address, context.get_data_type(kind.dtype)), [index])


@intrinsic
def load(_context: Any, _address: Any, kind: Any, _index: Any) -> Any:
    """load(address, np.uint32, i) → element i of the array at the address, which need not be aligned."""

    def build(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address, _, index = arguments
        return builder.load(_element(context, builder, kind, address, index), align=1)

    return kind.dtype(types.int64, kind, types.int64), build


@intrinsic
def store(_context: Any, _address: Any, kind: Any, _index: Any, _value: Any) -> Any:
    """store(address, np.uint32, i, value): set element i of the array at the address, which need not be aligned."""

    def build(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address, _, index, value = arguments
        builder.store(value, _element(context, builder, kind, address, index), align=1)
        return context.get_dummy_value()

    return types.none(types.int64, kind, types.int64, kind.dtype), build


@intrinsic
def prefetch(_context: Any, _address: Any) -> Any:
    """prefetch(address): ask for the cache line of the address, which is read soon. Any address is harmless.

    Into the second-level cache: processors wait for more lines there than in the first.
    """

    def build(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        declared = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = builder.module.globals.get("llvm.prefetch.p0") or ir.Function(
            builder.module, declared, "llvm.prefetch.p0"
        )
        for_reading, second_level, data = word(0), word(2), word(1)
        pointer = pointer_to(builder, arguments[0], byte.pointee)
        builder.call(function, [pointer, for_reading, second_level, data])
        return context.get_dummy_value()

    return types.none(types.int64), build


def _copier(num_floats: int) -> Callable[..., Any]:
    floats = ir.VectorType(ir.FloatType(), num_floats)

    @intrinsic
    def copy(_context: Any, _target: Any, _source: Any) -> Any:
        def build(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            target, source = (pointer_to(builder, address, floats) for address in arguments)
            builder.store(builder.load(source, align=1), target, align=1)
            return context.get_dummy_value()

        return types.none(types.int64, types.int64), build

    return copy


copy_16_floats, copy_4_floats = _copier(16), _copier(4)
"""copy_16_floats(target, source): one move of 16 float32; neither address need be aligned."""


@intrinsic
def copy_bytes(_context: Any, _target: Any, _source: Any, _count: Any) -> Any:
    """copy_bytes(target, source, count): the two do not overlap."""

    def build(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8)
        target, source = (pointer_to(builder, address, byte) for address in arguments[:2])
        cgutils.raw_memcpy(builder, target, source, arguments[2], 1)  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), build


@intrinsic
def write_line(_context: Any, _target: Any, _source: Any) -> Any:
    """write_line(target, source): one move of a cache line, to memory and not to the caches; both begin at a line.

    Other threads are told of it after `finish_lines`.
    """
    line = ir.VectorType(ir.FloatType(), 16)

    def build(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        target, source = (pointer_to(builder, address, line) for address in arguments)
        written = builder.store(builder.load(source, align=64), target, align=64)
        yes = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        written.set_metadata("nontemporal", yes)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), build


@intrinsic
def finish_lines(_context: Any) -> Any:
    """finish_lines(): what `write_line` has written is in memory before anything that this thread stores later."""

    def build(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), build


@intrinsic
def match_bytes(_context: Any, _address: Any, _value: Any) -> Any:
    """match_bytes(address, value) → int64 with bit i set where byte i of the 16 at the address equals the value."""

    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address, value = arguments
        found = builder.load(pointer_to(builder, address, _VECTOR16), align=16)
        single = builder.insert_element(ir.Constant(_VECTOR16, ir.Undefined), value, ir.IntType(32)(0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), 16), [0] * 16)
        wanted = builder.shuffle_vector(single, ir.Constant(_VECTOR16, ir.Undefined), lanes)
        equal = builder.icmp_unsigned("==", found, wanted)
        return builder.zext(builder.bitcast(equal, ir.IntType(16)), ir.IntType(64))

    return types.int64(types.int64, types.uint8), build


@intrinsic
def lowest_bit(_context: Any, _mask: Any) -> Any:
    """lowest_bit(mask) → position of the lowest bit set; the mask must not be 0."""

    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.IntType(1)(1))

    return types.int64(types.int64), build


@intrinsic
def half_to_float(_context: Any, _bits: Any) -> Any:
    """half_to_float(bits of a float16 as uint16) → float32, exact."""

    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), build


@intrinsic
def release_fence(_context: Any) -> Any:
    """release_fence(): a thread that sees what this one stores from here on also sees all that it stored before."""

    def build(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("release")
        return context.get_dummy_value()

    return types.none(), build
