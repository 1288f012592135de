"""A GPU without free memory, for tests of the error messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_SMALLEST_BYTES = 1 << 16


@contextlib.contextmanager
def full_device(spare_bytes: int = 0) -> Iterator[None]:
    """Allocates all memory of the first GPU except about `spare_bytes`."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    spare = [cupy.cuda.Memory(spare_bytes)] if spare_bytes else []
    taken, size = [], cupy.cuda.runtime.memGetInfo()[0]
    while size >= _SMALLEST_BYTES:
        with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
            taken.append(cupy.cuda.Memory(size))
            continue
        size //= 2
    spare.clear()
    try:
        yield
    finally:
        taken.clear()
