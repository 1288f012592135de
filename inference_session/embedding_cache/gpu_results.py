"""What a look-up on the GPU returns: by table, made when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from inference_session.kernels.cuda.records import Tiles

_ALIGNED_FLOATS = 64


class Geometry:
    """All that follows from which tables are asked for how many keys, in arrays of which strides."""

    def __init__(self, tables: Sequence[str], dims: Sequence[int], segments: NDArray[np.void], tiles: Tiles) -> None:
        """`segments`: complete but for addresses; `dims`: embedding_dim by segment."""
        self.tables = tuple(tables)
        self.place = {table: i for i, table in enumerate(tables)}
        self.dims = dims
        self.num_keys: list[int] = segments["num_rows"].tolist()
        self.segments = segments
        self.tiles = tiles
        self.num_calls = 0
        sizes = [-(-n * dim // _ALIGNED_FLOATS) * _ALIGNED_FLOATS for n, dim in zip(self.num_keys, dims, strict=True)]
        ends = np.cumsum([0, *sizes])
        self.begins: list[int] = ends[:-1].tolist()
        """Where each segment's vectors begin in a block of them all, in floats."""
        self.num_floats = int(ends[-1])


class Vectors(Mapping[str, Any]):
    """Vectors by table, float32 [n, embedding_dim] on the device, all in one block of memory."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._block = cupy.empty(geometry.num_floats, np.float32)
        self.address: int = self._block.data.ptr

    def __getitem__(self, table: str) -> Any:
        geometry = self._geometry
        s = geometry.place[table]
        begin, n, dim = geometry.begins[s], geometry.num_keys[s], geometry.dims[s]
        return self._block[begin : begin + n * dim].reshape(n, dim)

    def __iter__(self) -> Iterator[str]:
        return iter(self._geometry.tables)

    def __len__(self) -> int:
        return len(self._geometry.tables)


class Missing(Mapping[str, Any]):
    """The positions of missing keys by table, int64 on the device, ascending. Reading one waits for the look-up."""

    def __init__(self, geometry: Geometry, bits: Any, stream: Any) -> None:
        self._geometry = geometry
        self._bits = bits
        self._stream = stream
        self._known: dict[str, Any] = {}

    def __getitem__(self, table: str) -> Any:
        if table not in self._known:
            self._known[table] = self._positions(self._geometry.place[table])
        return self._known[table]

    def __iter__(self) -> Iterator[str]:
        return iter(self._geometry.tables)

    def __len__(self) -> int:
        return len(self._geometry.tables)

    def _positions(self, s: int) -> Any:
        tiles = self._geometry.tiles
        with self._stream:
            begin, end = 4 * int(tiles.first[s]), 4 * int(tiles.first[s + 1])
            words = cupy.ndarray(end - begin, np.uint8, self._bits + begin)
            bits = cupy.unpackbits(words, bitorder="little").reshape(-1, 32)[:, : tiles.keys_per_tile]
            return cupy.flatnonzero(bits.ravel()[: self._geometry.num_keys[s]])
