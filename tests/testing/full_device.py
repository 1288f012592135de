"""A GPU without free memory, for tests of the error messages; other test processes use it before or after."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SMALLEST_BYTES = 1 << 16
_FOLDER = Path(tempfile.gettempdir())


@contextlib.contextmanager
def shared_device() -> Iterator[None]:
    """No other process fills the GPU meanwhile, until this one does."""
    with _lock_file("gate") as gate, _lock_file("device") as device:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(device, fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        _held.append(device)
        try:
            yield
        finally:
            _held.pop()


@contextlib.contextmanager
def full_device(spare_bytes: int = 0) -> Iterator[None]:
    """Allocates all memory of the first GPU except about `spare_bytes`; for a test that runs in `shared_device`."""
    with _only_process():
        taken = _all_memory(spare_bytes)
        try:
            yield
        finally:
            taken.clear()


_held: list[int] = []
"""The lock that this process holds on the GPU."""


@contextlib.contextmanager
def _only_process() -> Iterator[None]:
    """Waits for the tests of other processes; none of them begins another one before this one has ended."""
    device = _held[-1]
    with _lock_file("gate") as gate:
        fcntl.flock(device, fcntl.LOCK_UN)
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(device, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(device, fcntl.LOCK_SH)


@contextlib.contextmanager
def _lock_file(name: str) -> Iterator[int]:
    file = os.open(_FOLDER / f"hotrow-tests-{os.getuid()}-{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _all_memory(spare_bytes: int) -> list[object]:
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    spare = [cupy.cuda.Memory(spare_bytes)] if spare_bytes else []
    taken: list[object] = []
    size = cupy.cuda.runtime.memGetInfo()[0]
    while size >= _SMALLEST_BYTES:
        with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
            taken.append(cupy.cuda.Memory(size))
            continue
        size //= 2
    spare.clear()
    return taken
