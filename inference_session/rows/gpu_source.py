"""What all rows have in common that look-ups read on a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.device.cuda import GpuContext
from inference_session.kernels.cuda import launch as gpu
from inference_session.kernels.cuda.records import MAX_INLINE_SEGMENTS, divide
from inference_session.rows import RowSource

_MAX_SHAPES = 1024


class GpuSource(RowSource):
    """Rows that are looked up within `GpuContext.request`, which waits for them."""

    by_column = True
    """Keys are read from host memory: apart, each of them is a transfer of its own."""

    _context: GpuContext

    def request(self) -> AbstractContextManager[None]:
        """See RowSource."""
        return self._context.request()

    def empty(self, shape: tuple[int, ...]) -> Any:
        """See RowSource."""
        return self._context.empty(shape)

    def stage(self, array: NDArray[Any]) -> NDArray[Any]:
        """See RowSource."""
        return self._context.stage(array)

    def counts(self, num_segments: int) -> NDArray[np.int64]:
        """See RowSource: in pinned memory."""
        counts = self._context.pinned((num_segments,), np.int64)
        counts[:] = 0
        return counts

    def settled(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """See RowSource."""
        self._context.wait()
        settled: NDArray[np.int64] = counts.copy()
        return settled


class Launches:
    """Look-ups in certain tables, kept by the shapes of their segments: those of a request have often come before."""

    def __init__(self, tables_address: int) -> None:
        """`tables_address`: of GPU_TABLE records."""
        self._tables_address = tables_address
        self._kept: dict[bytes, gpu.Launch] = {}

    def of(self, segments: NDArray[np.void]) -> tuple[gpu.Launch, NDArray[np.void] | None]:
        """A look-up of these segments: what to run, and the segments that its `run` takes."""
        if len(segments) > MAX_INLINE_SEGMENTS:
            return self._create(segments), None
        shapes = b"".join([segments[name].tobytes() for name in ("num_rows", "keys_per_row", "pooling")])
        launch = self._kept.get(shapes)
        if launch is None:
            if len(self._kept) >= _MAX_SHAPES:
                self._kept.clear()
            launch = self._kept[shapes] = self._create(segments)
        return launch, segments

    def _create(self, segments: NDArray[np.void]) -> gpu.Launch:
        return gpu.Launch(segments, divide(segments), tables_address=self._tables_address)
