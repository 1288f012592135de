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
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.kernels.cuda import records
from inference_session.kernels.cuda.source import source
from inference_session.kernels.records import address_of

COMPILER = (shutil.which("c++") or shutil.which("g++")) if sys.platform == "linux" else None
"""None: the emulation cannot be built here."""
THREADS = 128
_HEADER = Path(__file__).with_name("emulated_gpu.hpp")
_LAUNCH = """
extern "C" const char* emulate_{name}(u32 blocks, u32 width, u32 height, void** arguments) {{
  return emulated::launch_with(blocks, {{width, height}}, {name}, arguments);
}}
"""
_KERNELS = (
    "look_up",
    "look_up_and_pool",
    "note_regions",
    "begin_regions",
    "order_keys",
    "note_last",
    "claim",
    "write_rows",
    "write_numbers",
    "erase",
    "mark_deleted",
)
_ORDERED_BLOCKS = 2
"""Few, so that each warp takes several times keys in order."""


class EmulatedKernels:
    """Kernels that were compiled for the processor."""

    def __init__(self, folder: Path, kernels: str, names: Sequence[str], **constants: int) -> None:
        """Compile them.

        Args:
            folder: for the compiled library.
            kernels: their source.
            names: of the kernels in it.
            constants: macros.
        """
        assert COMPILER is not None
        self._source, library = folder / "kernels.cpp", folder / "kernels.so"
        launches = "".join(_LAUNCH.format(name=name) for name in names)
        # Without names for other files: one section cannot hold statics of functions with and without them.
        self._source.write_text(f'#include "{_HEADER}"\nnamespace {{\n{kernels}\n}}\n{launches}')
        options = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w", "-U_FORTIFY_SOURCE"]
        # A GPU ends a kernel that reads a vector which is not aligned.
        options += ["-fsanitize=alignment,bounds"]
        options += [f"-D{name}={value}" for name, value in constants.items()]
        subprocess.run([COMPILER, *options, "-o", library, self._source], check=True)
        self._library = ctypes.CDLL(str(library))

    def launch(self, name: str, num_blocks: int, block: tuple[int, int], addresses: Any) -> None:
        """Run a kernel. `addresses`: of its arguments, in C an array."""
        launch = getattr(self._library, f"emulate_{name}")
        launch.restype = ctypes.c_char_p
        with _errors() as reported:
            failure = launch(num_blocks, *block, addresses)
        assert not failure, f"{name}: {re.sub('line ([0-9]+)', self._spelled_out, failure.decode())}"
        assert not reported, f"{name}: {reported[0]}"

    def _spelled_out(self, line: re.Match[str]) -> str:
        """The text of a line of the source that was compiled."""
        return f"`{self._source.read_text().splitlines()[int(line[1]) - 1].strip()}` ({self._source}:{line[1]})"


class EmulatedGpu:
    """The kernels for some constants; see `kernels.cuda.launch.Variant`."""

    def __init__(self, folder: Path, **constants: int) -> None:
        """`folder`: for the compiled library."""
        kernels = source()
        # The only instructions of a GPU that older ones need, too.
        kernels = re.sub(r'asm\("cvt\.f32\.f16 .*?;.*?\);', "value = emulated::from_half(half_bits);", kernels)
        kernels = re.sub(r'asm\("cvt\.rn\.f16\.f32 .*?;.*?\);', "half_bits = emulated::to_half(value);", kernels)
        self._kernels = EmulatedKernels(folder, kernels, _KERNELS, **constants)

    def look_up(
        self,
        segments: NDArray[np.void],
        tables: NDArray[np.void],
        *,
        num_unknown: NDArray[np.uint64] | None = None,
        missing_bits: NDArray[np.uint32] | None = None,
        seed: int = 0,
        regions: records.Regions | None = None,
    ) -> None:
        """Look SEGMENT records up in GPU_TABLE records, by the kernel that `kernels.cuda.launch.Launch` takes.

        `num_unknown`: zeros [segments x COUNT_STRIDE]. `missing_bits`: zeros, one word per tile. `regions`: by which
        keys are put in order, where the kernels are compiled for that.
        """
        tiles = records.divide(segments)
        request = records.request_of(segments, tiles)
        sums = np.zeros(len(segments), np.uint32)
        request["tables_address"], request["seed"] = address_of(tables), seed
        request["unknown_sums_address"] = address_of(sums)
        request["num_unknown_address"] = 0 if num_unknown is None else address_of(num_unknown)
        request["missing_bits_address"] = 0 if missing_bits is None else address_of(missing_bits)
        few = len(segments) <= records.MAX_INLINE_SEGMENTS
        if not few:
            request["segments_address"], request["first_tiles_address"] = address_of(segments), address_of(tiles.first)
        num_threads = int(tiles.first[-1]) * records.WARP
        if regions is not None:
            order = self._put_in_order(request, regions, num_threads)
            request["order_address"], request["num_ordered_blocks"] = address_of(order), _ORDERED_BLOCKS
            num_threads += _ORDERED_BLOCKS * THREADS
        self._launch("look_up" if few and not tiles.pooled else "look_up_and_pool", num_threads, request)
        assert not sums.any()

    def _put_in_order(self, request: NDArray[np.void], regions: records.Regions, num_threads: int) -> NDArray[np.uint8]:
        """The keys of a REQUEST in order, as TURN records."""
        request["few_begins"][: len(regions.begins)] = regions.begins
        noted, order = aligned(16 * regions.num_keys), aligned(16 * regions.num_keys)
        counts = np.zeros(regions.num_regions, np.uint32)
        num_keys, num_regions = ctypes.c_uint32(regions.num_keys), ctypes.c_uint32(regions.num_regions)
        of_segments, counted = _pointer(regions.of_segments), _pointer(counts)
        self._launch("note_regions", num_threads, request, of_segments, counted, _pointer(noted))
        self._launch("begin_regions", THREADS, counted, num_regions)
        self._launch("order_keys", regions.num_keys, _pointer(noted), counted, num_keys, _pointer(order))
        return order

    def write_rows(self, targets: NDArray[np.void], *, may_insert: bool = True, may_evict: bool = True) -> None:
        """Put rows into indexes: TARGET records without `first`."""
        self._write("write_rows", targets, may_insert, may_evict)

    def write_numbers(self, target: NDArray[np.void], numbers: NDArray[np.uint32]) -> None:
        """Put the keys of a TARGET record into an index; `numbers`: for each slot, which of the keys it holds."""
        self._write("write_numbers", target, True, False, _pointer(numbers), ctypes.c_uint32(0))

    def _write(self, name: str, targets: NDArray[np.void], may_insert: bool, may_evict: bool, *arguments: Any) -> None:
        batch = records.batch_of(targets, may_insert=may_insert, may_evict=may_evict)
        num_positions = int(batch["num_positions"])
        seen, claims = np.zeros(int(batch["seen_mask"]) + 1, np.uint32), np.zeros((num_positions, 2), np.uint32)
        places = np.zeros(num_positions, np.uint32)
        batch["seen_address"], batch["claims_address"], batch["places_address"] = map(
            address_of, (seen, claims, places)
        )
        self._launch("note_last", num_positions, batch)
        self._launch("claim", num_positions, batch)
        self._launch(name, num_positions, batch, *arguments)

    def erase(self, index: NDArray[np.void], events: NDArray[np.uint64], keys: NDArray[np.int64]) -> None:
        """Drop keys from an index, an INDEX record."""
        self._launch("erase", len(keys), index, _pointer(events), _pointer(keys), ctypes.c_uint32(len(keys)))

    def mark_deleted(self, index: NDArray[np.void], keys: NDArray[np.int64]) -> None:
        """Of an index over rows that change: these keys were deleted."""
        self._launch("mark_deleted", len(keys), index, _pointer(keys), ctypes.c_uint32(len(keys)))

    def _launch(self, name: str, num_threads: int, *arguments: Any) -> None:
        """Run a kernel. Arguments: records, pointers and numbers."""
        addresses = [address_of(a) if isinstance(a, np.ndarray) else ctypes.addressof(a) for a in arguments]
        num_blocks = -(-num_threads // THREADS)
        self._kernels.launch(name, num_blocks, (THREADS, 1), (ctypes.c_void_p * len(addresses))(*addresses))


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


def aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Zeros that begin where a GPU's memory could."""
    memory = np.zeros(num_bytes + 256, np.uint8)
    return memory[-address_of(memory) % 256 :][:num_bytes]


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(address_of(array))
