"""The CUDA kernels on a processor: compiled as C++, with `emulated_gpu.hpp` in place of what CUDA offers.

It finds wrong results, and lanes that do not wait for one another where they have to. It says nothing about speed, or
about blocks that run at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.kernels.cuda import records
from inference_session.kernels.cuda.source import source
from inference_session.kernels.records import address_of

COMPILER = shutil.which("c++") or shutil.which("g++")
THREADS = 128
_HEADER = Path(__file__).with_name("emulated_gpu.hpp")
_LAUNCHES = """
#define LAUNCH(kernel, Record) \\
  extern "C" const char* emulate_##kernel(u32 blocks, u32 threads, const Record* record) { \\
    return emulated::launch(blocks, threads, [=] { kernel(*record); }); \\
  }
LAUNCH(look_up, Request) LAUNCH(look_up_and_pool, Request)
LAUNCH(note_last, Batch) LAUNCH(claim, Batch) LAUNCH(write_rows, Batch)
extern "C" const char* emulate_erase(u32 blocks, u32 threads, const Index* index, u64* events, const i64* keys, u32 n) {
  return emulated::launch(blocks, threads, [=] { erase(*index, events, keys, n); });
}
extern "C" const char* emulate_mark_deleted(u32 blocks, u32 threads, const Index* index, const i64* keys, u32 n) {
  return emulated::launch(blocks, threads, [=] { mark_deleted(*index, keys, n); });
}
"""


class EmulatedGpu:
    """The kernels for some constants; see `kernels.cuda.launch.Variant`."""

    def __init__(self, folder: Path, **constants: int) -> None:
        """`folder`: for the compiled library."""
        assert COMPILER is not None
        kernels = source()
        # The only instructions of a GPU that older ones need, too.
        kernels = re.sub(r'asm\("cvt\.f32\.f16 .*?;.*?\);', "value = emulated::from_half(half_bits);", kernels)
        kernels = re.sub(r'asm\("cvt\.rn\.f16\.f32 .*?;.*?\);', "half_bits = emulated::to_half(value);", kernels)
        self._source, library = folder / "kernels.cpp", folder / "kernels.so"
        self._source.write_text(f'#include "{_HEADER}"\n{kernels}\n{_LAUNCHES}')
        options = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w"]
        # A GPU ends a kernel that reads a vector which is not aligned.
        options += ["-fsanitize=alignment,bounds"]
        options += [f"-D{name}={value}" for name, value in constants.items()]
        subprocess.run([COMPILER, *options, "-o", library, self._source], check=True)
        self._library = ctypes.CDLL(str(library))

    def look_up(
        self,
        segments: NDArray[np.void],
        tables: NDArray[np.void],
        *,
        num_unknown: NDArray[np.uint64] | None = None,
        missing_bits: NDArray[np.uint32] | None = None,
        fill: bool = False,
        seed: int = 0,
    ) -> None:
        """Look SEGMENT records up in GPU_TABLE records, by the kernel that `kernels.cuda.launch.Launch` takes.

        `num_unknown`: zeros [segments x COUNT_STRIDE]. `missing_bits`: zeros, one word per tile.
        """
        tiles = records.divide(segments)
        request = records.request_of(segments, tiles)
        sums = np.zeros(len(segments), np.uint32)
        request["tables_address"], request["seed"], request["fill"] = address_of(tables), seed, fill
        request["unknown_sums_address"] = address_of(sums)
        request["num_unknown_address"] = 0 if num_unknown is None else address_of(num_unknown)
        request["missing_bits_address"] = 0 if missing_bits is None else address_of(missing_bits)
        few = len(segments) <= records.MAX_INLINE_SEGMENTS
        if not few:
            request["segments_address"], request["first_tiles_address"] = address_of(segments), address_of(tiles.first)
        name = "look_up" if few and not tiles.pooled else "look_up_and_pool"
        self._launch(name, int(tiles.first[-1]) * records.WARP, request)
        assert not sums.any()

    def write_rows(self, targets: NDArray[np.void], *, may_insert: bool = True, may_evict: bool = True) -> None:
        """Put rows into indexes: TARGET records without `first`."""
        batch = records.batch_of(targets, may_insert=may_insert, may_evict=may_evict)
        num_positions = int(batch["num_positions"])
        seen, claims = np.zeros(int(batch["seen_mask"]) + 1, np.uint32), np.zeros((num_positions, 2), np.uint32)
        places = np.zeros(num_positions, np.uint32)
        batch["seen_address"], batch["claims_address"], batch["places_address"] = map(
            address_of, (seen, claims, places)
        )
        for name in ("note_last", "claim", "write_rows"):
            self._launch(name, num_positions, batch)

    def erase(self, index: NDArray[np.void], events: NDArray[np.uint64], keys: NDArray[np.int64]) -> None:
        """Drop keys from an index, an INDEX record."""
        self._launch("erase", len(keys), index, _pointer(events), _pointer(keys), ctypes.c_uint32(len(keys)))

    def mark_deleted(self, index: NDArray[np.void], keys: NDArray[np.int64]) -> None:
        """Of an index over rows that change: these keys were deleted."""
        self._launch("mark_deleted", len(keys), index, _pointer(keys), ctypes.c_uint32(len(keys)))

    def _launch(self, name: str, num_threads: int, record: NDArray[Any], *arguments: Any) -> None:
        launch = getattr(self._library, f"emulate_{name}")
        launch.restype = ctypes.c_char_p
        with _errors() as reported:
            failure = launch(-(-num_threads // THREADS), THREADS, _pointer(record), *arguments)
        assert not failure, f"{name}, {self._source}, {failure.decode()}"
        assert not reported, f"{name}: {reported[0]}"


@contextlib.contextmanager
def _errors() -> Iterator[list[str]]:
    """What the compiler's checks write to the standard error within the block."""
    written: list[str] = []
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield written
        finally:
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        written += file.read().decode().splitlines()


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(address_of(array))
