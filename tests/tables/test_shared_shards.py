"""Shards that several processes read: all of them answer as the processor does, whichever of them ends.

Where there is one GPU, all shards lie on it; the processes share its memory all the same.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference_session.device.discovery import unusable
from inference_session.errors import ConfigurationError
from inference_session.kernels.records import PoolingCode
from inference_session.model_spec import TableSpec
from inference_session.tables.host_tables import HostTables
from inference_session.tables.table_file import TableFile, write_table
from tests.testing.tables_of_all_kinds import SHAPES, answers, devices_of, some_keys, specs, write_files

NO_GPU = unusable(0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NO_GPU is not None, reason=f"no GPU: {NO_GPU}")]
SHARDED = [name for name, num_rows, *_ in SHAPES if num_rows]
OTHER = """
import sys
from pathlib import Path
import numpy as np
from inference_session.kernels.records import PoolingCode
from inference_session.tables.host_tables import HostTables
from tests.tables.test_shared_shards import opened, reopened
from tests.testing.tables_of_all_kinds import answers, some_keys

files, number, count = reopened(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
tables = opened(files, number, count)
print("open", flush=True)
for line in sys.stdin:
    rng = np.random.default_rng(int(line))
    keys = [some_keys(file, 500, rng) for file in files]
    expected, _ = answers(HostTables(files, num_threads=1), files, keys, PoolingCode.NONE)
    found, _ = answers(tables, files, keys, PoolingCode.NONE)
    print(all(np.allclose(*both, rtol=1e-6) for both in zip(found, expected)), flush=True)
tables.close()
"""
ALONE = """
import ctypes, sys
from pathlib import Path
import numpy as np
from inference_session.config import SessionConfig
from inference_session.device.discovery import open_devices
from inference_session.kernels.records import PoolingCode
from inference_session.rows.create import open_device_tables
from inference_session.tables.table_file import TableFile
from tests.testing.tables_of_all_kinds import answers, specs

config = SessionConfig(device="cuda:0", shard="rows", shard_devices="cuda:0,1")
files = [TableFile.open(Path(sys.argv[1]) / spec.folder, spec) for spec in specs()]
(tables,) = open_device_tables(files, config, open_devices(config.device))
keys = [np.asarray(file.keys()) for file in files]
answers(tables, files, keys, PoolingCode.NONE)
flags, is_active = ctypes.c_uint(), ctypes.c_int()
for device_id in range(2):
    state = ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState
    print(state(device_id, ctypes.byref(flags), ctypes.byref(is_active)), is_active.value)
tables.close()
"""


def reopened(folder: Path) -> list[TableFile]:
    """The same files, as another process opens them."""
    return [TableFile.open(folder / spec.folder, spec) for spec in specs()]


def opened(files: list[TableFile], number: int, count: int, **settings: Any) -> Any:
    """The tables of the process with GPU `number` of `count`, as many of them as exist."""
    from inference_session.tables.cuda.placed_tables import open_cuda_tables

    devices = devices_of(count)
    ids = [device.device_id for device in devices]
    settings = {"shard": "rows", **settings}
    (tables,) = open_cuda_tables(files, [devices[number]], shard_devices=ids, **settings)
    return tables


def check(tables: Any, files: list[TableFile], seed: int, pooling: PoolingCode = PoolingCode.NONE) -> None:
    """Look-ups in all tables give the vectors and counts of the processor."""
    rng = np.random.default_rng(seed)
    for count in (4, 64, 5000):
        keys = [some_keys(file, count, rng) for file in files]
        expected, num_unknown = answers(HostTables(files, num_threads=1), files, keys, pooling)
        vectors, counted = answers(tables, files, keys, pooling)
        assert counted.tolist() == num_unknown.tolist()
        for found, wanted in zip(vectors, expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


class Process:
    """Another process, with a GPU of its own if there are enough."""

    def __init__(self, folder: Path, number: int, count: int) -> None:
        command = [sys.executable, "-c", OTHER, str(folder), str(number), str(count)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait_until_open(self) -> None:
        assert self._line() == "open"

    def check(self, seed: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        assert self._line() == "True"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def end(self) -> None:
        self._process.communicate()
        assert self._process.returncode == 0

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture
def others() -> Iterator[list[Process]]:
    """Processes that end with the test."""
    running: list[Process] = []
    yield running
    for process in running:
        process.kill()


@pytest.mark.parametrize("count", [2, 3, 8])
def test_sessions_share_the_rows(files: list[TableFile], count: int) -> None:
    """Of one process: those that come later map the memory of the first, and keep it when that is closed."""
    all_tables = [opened(files, number, count) for number in range(count)]
    for pooling in PoolingCode:
        for tables in all_tables:
            check(tables, files, seed=pooling, pooling=pooling)
    while all_tables:
        all_tables.pop(0).close()
        for tables in all_tables:
            assert tables.placement.sharded == SHARDED
            check(tables, files, seed=len(all_tables))


def test_processes_share_the_rows(files: list[TableFile], folder_of_files: Path, others: list[Process]) -> None:
    """Those that made them may die: the rows stay, and who starts again finds them."""
    others += [Process(folder_of_files, number, 4) for number in range(3)]
    for process in others:
        process.wait_until_open()
    tables = opened(files, 3, 4)
    for seed, process in enumerate(others):
        process.check(seed)
        process.kill()
    check(tables, files, seed=9)
    others[:] = [Process(folder_of_files, 0, 4)]
    others[0].wait_until_open()
    tables.close()
    others[0].check(10)
    others[0].end()


def test_memory_is_taken_once(tmp_path: Path) -> None:
    """A second session of the same rows takes none for them, and the last one gives all of it back.

    Other processes may take and free memory of the GPU meanwhile: then it is measured again.
    """
    spec = TableSpec("large", "large", 1 << 20, 64, keys="row_number")
    write_table(tmp_path, [np.zeros((spec.num_rows, spec.embedding_dim), np.float32)])
    large = [TableFile.open(tmp_path, spec)]
    opened(large, 0, 2).close()  # what a process takes once for all
    half = large[0].vectors.nbytes // 2
    for _ in range(20):
        of_one, of_two, of_the_second, of_none = _taken_by(large)
        if min(of_one, of_the_second) >= half and max(of_two - of_one, of_none) < half // 2:
            return
    pytest.fail(f"of rows in {half} bytes: {of_one}, {of_two}, {of_the_second}, {of_none}")


def _taken_by(files: list[TableFile]) -> list[int]:
    """Bytes of the first GPU that a session takes, two do, the second one alone, and none."""
    from cupy.cuda import runtime

    free = [int(runtime.memGetInfo()[0])]
    first = opened(files, 0, 2)
    free.append(int(runtime.memGetInfo()[0]))
    second = opened(files, 0, 2)
    free.append(int(runtime.memGetInfo()[0]))
    for tables in (first, second):
        tables.close()
        free.append(int(runtime.memGetInfo()[0]))
    return [free[0] - now for now in free[1:]]


@pytest.mark.usefixtures("files")
@pytest.mark.skipif(unusable(1) is not None, reason=f"no second GPU: {unusable(1)}")
def test_a_process_has_a_context_on_its_own_gpu_alone(folder_of_files: Path) -> None:
    """On those of others there are the shards, and nothing else: a context takes some 500 MB."""
    command = [sys.executable, "-c", ALONE, str(folder_of_files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n") == ["0 1", "0 0", ""], done.stdout + done.stderr


def test_other_rows_are_not_shared(files: list[TableFile], tmp_path: Path) -> None:
    """Files of another version, other settings, other parts: each has its own."""
    changed = write_files(tmp_path / "changed", seed=1)
    versions = [(files, 2), (changed, 2), (files, 3)]
    all_tables = [opened(these, 0, count) for these, count in versions]
    all_tables.append(opened(files, 0, 2, cache_bytes=1 << 30))
    for tables, (these, _) in zip(all_tables, [*versions, (files, 2)], strict=True):
        check(tables, these, seed=3)
    for tables in all_tables:
        tables.close()


def test_tables_that_fit_are_copied(files: list[TableFile]) -> None:
    """With `auto`; nothing is shared then. A budget that is too small for all divides the largest, for all alike."""
    from inference_session.device.placement import bytes_on_each

    tables = opened(files, 0, 2, shard="auto")
    assert tables.placement.sharded == []
    check(tables, files, seed=4)
    tables.close()
    places = ["shards" if file.spec.folder == "wide" else "device" for file in files]
    budget = bytes_on_each([file.spec for file in files], places, 2)  # type: ignore[arg-type]
    both = [opened(files, number, 2, shard="auto", cache_bytes=budget) for number in range(2)]
    for each in both:
        assert each.placement.sharded == ["wide"]
        check(each, files, seed=5)
        each.close()


def test_processes_that_cannot_meet_do_without_shards(
    files: list[TableFile], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Tables that do not fit are read from host memory then, unless `rows` asks for shards."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(ConfigurationError, match=r"shard cannot be 'rows': .*absent.* set TMPDIR"):
        opened(files, 0, 2)
    tables = opened(files, 0, 2, shard="auto", cache_bytes=1000)
    assert tables.placement.sharded == []
    assert "wide" in tables.placement.on_host
    check(tables, files, seed=6)
    tables.close()


def test_tables_that_nobody_closes_give_their_memory_back(
    files: list[TableFile], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Once nothing refers to them: who comes later makes new ones."""
    from inference_session.platform.open_files import private_folder

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other processes do not meet here
    tables = opened(files, 0, 2)
    assert [*private_folder().glob("[0-9a-f]*.*")]
    del tables
    gc.collect()
    assert not [*private_folder().glob("[0-9a-f]*.*")]


def test_changed_rows_are_read_before_those_that_are_shared(files: list[TableFile]) -> None:
    """Each process has its own."""
    from inference_session.tables.base import UpdatedRows

    both = [opened(files, number, 2, rows_change=True) for number in range(2)]
    t = [file.spec.folder for file in files].index("wide")
    keys = np.asarray(files[t].keys())[:5].copy()
    changed = UpdatedRows(keys, np.full((5, files[t].spec.embedding_dim), 7, np.float32), np.zeros(5, np.bool_))
    both[0].put(t, changed, lambda: changed)
    asked = [keys if number == t else np.empty(0, np.int64) for number in range(len(files))]
    found = [answers(each, files, asked, PoolingCode.NONE)[0][t] for each in both]
    expected = answers(HostTables(files, num_threads=1), files, asked, PoolingCode.NONE)[0][t]
    np.testing.assert_array_equal(found[0], changed.vectors)
    np.testing.assert_array_equal(found[1], expected)
    for each in both:
        each.close()


def test_shards_that_do_not_fit_are_refused(files: list[TableFile]) -> None:
    """With the memory needed; the next that asks is not held up."""
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"shard=rows needs \d+ bytes on each of 2 GPUs, .* may take 1000"):
            opened(files, 0, 2, cache_bytes=1000)
