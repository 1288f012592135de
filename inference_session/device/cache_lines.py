"""Memory that begins at a line of the processor's caches, as buckets and rows are read fastest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inference_session.kernels.records import address_of

LINE_BYTES = 64


def zeros_at_line(num_rows: int, row_bytes: int) -> NDArray[np.uint8]:
    """Zeros, [num_rows, row_bytes], that begin at a cache line; takes a line more."""
    num_bytes = num_rows * row_bytes
    memory = np.zeros(num_bytes + LINE_BYTES, np.uint8)
    offset = -address_of(memory) % LINE_BYTES
    return memory[offset : offset + num_bytes].reshape(num_rows, row_bytes)
