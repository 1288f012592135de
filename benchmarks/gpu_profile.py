"""Shows which resources of a multiprocessor each CUDA kernel needs, and profiles look-ups with NVIDIA's profiler.

    python benchmarks/gpu_profile.py [--rows 2000000]

Always printed, for each kernel: registers, shared and local memory (local: what registers did not hold), and how much
of a multiprocessor its warps could fill (theoretical occupancy). Where `ncu` is installed and may count (an
administrator can allow it: NVIDIA's ERR_NVGPUCTRPERM), typical look-ups run once under it: time, active warps,
and bytes of device memory, compared with the bytes of the rows that were asked for.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda import driver, runtime
from gpu_cache import draw, filled_cache, lookup_of

from inference_session.device.cuda import CudaDevice
from inference_session.kernels.cuda import launch
from inference_session.kernels.records import PoolingCode
from inference_session.model_spec import TableSpec, VectorType, bytes_per_row
from inference_session.tables.cuda.placed_tables import open_cuda_tables
from inference_session.tables.cuda.tables import CudaTables
from inference_session.tables.table_file import TableFile, write_table

NUM_KEYS = 1 << 20
_THREADS = 128
_METRICS = {
    "gpu__time_duration.sum": "time",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy",
    "dram__bytes_read.sum": "read",
    "dram__bytes_write.sum": "written",
}


class Case(NamedTuple):
    """A look-up of NUM_KEYS keys."""

    name: str
    dim: int
    dtype: VectorType
    bag: int
    """Number of keys whose rows are summed; 0: no sum."""
    in_cache: bool
    """Whether rows are found by key in a full cache; else by number in a table on the device."""


CASES = (
    Case("cached, dim 128", 128, "float32", 0, in_cache=True),
    Case("cached, dim 32", 32, "float32", 0, in_cache=True),
    Case("row numbers, dim 128", 128, "float32", 0, in_cache=False),
    Case("row numbers, dim 128, int8", 128, "int8", 0, in_cache=False),
    Case("sums of 64, dim 128", 128, "float32", 64, in_cache=True),
    Case("sums of 64, dim 128, int8", 128, "int8", 64, in_cache=False),
    Case("sums of 8, dim 128, int8", 128, "int8", 8, in_cache=False),
    Case("sums of 1, dim 128, int8", 128, "int8", 1, in_cache=False),
)


def main() -> None:
    """Print what kernels need, then what look-ups reach."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000, help="of each table")
    parser.add_argument("--only-run", action="store_true", help="run the look-ups for a profiler, and print nothing")
    options = parser.parse_args()
    if options.only_run:
        run_cases(options.rows)
        return
    print_attributes()
    ncu = shutil.which("ncu")
    if ncu is None:
        print("ncu is not installed (NVIDIA Nsight Compute): achieved occupancy and bytes are not known")
    else:
        print_profile(ncu, options.rows)


def print_attributes() -> None:
    """One line per kernel."""
    properties = runtime.getDeviceProperties(0)
    print(f"{properties['name'].decode()}, occupancy with blocks of {_THREADS} threads")
    warps = properties["maxThreadsPerMultiProcessor"] // 32
    for name, kernel in launch.compile_kernels().items():
        found = kernel.attributes
        blocks = driver.occupancyMaxActiveBlocksPerMultiprocessor(kernel.kernel.ptr, _THREADS, 0)
        print(
            f"  {name:<18}{found['num_regs']:>4} registers  {found['shared_size_bytes']:>6} B shared"
            f"  {found['local_size_bytes']:>4} B local  occupancy {blocks * _THREADS // 32 / warps:.2f}"
        )


def print_profile(ncu: str, num_rows: int) -> None:
    """One line per case, of what ncu counted."""
    command = [ncu, "--csv", "--profile-from-start", "off", "-k", "regex:look_up", "--metrics", ",".join(_METRICS)]
    child = [sys.executable, __file__, "--only-run", "--rows", str(num_rows)]
    done = subprocess.run([*command, *child], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or not lines:
        reasons = [line for line in (done.stderr + done.stdout).splitlines() if "ERR" in line or "rror" in line]
        print(f"ncu could not count: {'; '.join(reasons) or 'it printed nothing'}")
        return
    launches: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(lines):
        value = f"{row['Metric Value']} {row['Metric Unit']}"
        launches.setdefault(row["ID"], {"kernel": row["Kernel Name"]})[_METRICS[row["Metric Name"]]] = value
    for case, found in zip(CASES, launches.values(), strict=True):
        rows = NUM_KEYS * bytes_per_row(case.dim, case.dtype) / 1e6
        print(
            f"  {case.name:<28}{found['kernel']:<18}{found['time']:>14}  warps {found['occupancy']:>8}"
            f"  read {found['read']:>12}  written {found['written']:>12}  rows asked for {rows:.0f} MB",
            flush=True,
        )


def run_cases(num_rows: int) -> None:
    """Launch each case twice, the second time for a profiler."""
    device = CudaDevice(0)
    for case in CASES:
        for look_up in _prepared(case, device, num_rows):
            look_up()
            device.wait()
            runtime.profilerStart()
            look_up()
            device.wait()
            runtime.profilerStop()


def _prepared(case: Case, device: CudaDevice, num_rows: int) -> Iterator[Callable[[], object]]:
    """The look-up of a case; its data is freed afterwards."""
    looked_up: Any
    with tempfile.TemporaryDirectory() as folder:
        if case.in_cache:
            looked_up, held, _ = filled_cache(device, case.dim, num_rows)
        else:
            looked_up, held = _tables(Path(folder), case, device, num_rows), cupy.arange(num_rows >> 16 << 16)
        with device.request():
            keys = held[draw(len(held), NUM_KEYS, zipf=False)]
            out = cupy.empty((NUM_KEYS // max(case.bag, 1), case.dim), np.float32)
            bags, pooling = keys.reshape(len(out), -1), PoolingCode.SUM if case.bag else PoolingCode.NONE
            lookup = lookup_of(looked_up, device, [bags], [out], pooling=pooling)
            yield lambda: looked_up.look_up(lookup)
        looked_up.close()


def _tables(folder: Path, case: Case, device: CudaDevice, num_rows: int) -> CudaTables:
    rng = np.random.default_rng(0)
    blocks = (rng.random((1 << 16, case.dim), np.float32) for _ in range(num_rows >> 16))
    write_table(folder / "t", blocks, dtype=case.dtype)
    rows = num_rows >> 16 << 16
    spec = TableSpec("t", "t", rows, case.dim, case.dtype, "row_number")
    return open_cuda_tables([TableFile.open(folder / "t", spec)], [device])[0]


if __name__ == "__main__":
    main()
