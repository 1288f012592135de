"""The index file: built once, found stale when it is, never half-written."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_session.errors import ModelFormatError
from inference_session.model_spec import TableSpec
from inference_session.tables import table_index
from inference_session.tables.table_file import TableFile, write_table
from inference_session.tables.table_index import build_index, ensure_index, open_index
from tests.testing.forked import ForkedPrograms

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def random_keys(count: int, seed: int = 0) -> np.ndarray:
    """Distinct keys over the full range."""
    return np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, count)


def test_a_large_index_holds_every_key_within_its_size(tmp_path: Path) -> None:
    """With full buckets and overflow, all keys are found, strangers are not, and 16 bytes per row suffice."""
    keys = random_keys(300_000)
    write_table(tmp_path, [keys[:, None].astype(np.float32)], keys=[keys])
    file = TableFile.open(tmp_path, TableSpec("t", "t", len(keys), 1), must_have_index=True)
    out = np.zeros((len(keys), 1), np.float32)
    assert file.fetch(keys, out).all()
    assert np.array_equal(out[:, 0], keys.astype(np.float32))
    assert not file.fetch(keys ^ 1, out).any()
    assert (tmp_path / "key").stat().st_size + (tmp_path / "index").stat().st_size <= 16 * len(keys)


def test_the_same_keys_give_the_same_file(tmp_path: Path) -> None:
    """An index that is built again matches the checksum that a manifest holds."""
    keys = random_keys(1000)
    build_index(tmp_path, keys)
    first = (tmp_path / "index").read_bytes()
    build_index(tmp_path, keys)
    assert (tmp_path / "index").read_bytes() == first


@pytest.mark.parametrize("damage", ["absent", "empty", "foreign", "truncated", "longer", "of other keys"])
def test_a_bad_index_is_built_anew(damage: str, tmp_path: Path) -> None:
    """Opening needs no good index file and leaves one behind; callers that insist on one get the reason."""
    keys = random_keys(100)
    build_index(tmp_path, random_keys(100, seed=1) if damage == "of other keys" else keys)
    path = tmp_path / "index"
    content = path.read_bytes()
    changed = {"empty": b"", "foreign": b"x" * len(content), "truncated": content[:-64], "longer": content + b"\0"}
    if damage == "absent":
        path.unlink()
    elif damage in changed:
        path.write_bytes(changed[damage])
    with pytest.raises(ModelFormatError, match="index: "):
        open_index(tmp_path, keys)
    ensure_index(tmp_path, keys)
    open_index(tmp_path, keys).verify(keys, path)
    assert [p.name for p in tmp_path.iterdir()] == ["index"]


def test_a_folder_that_takes_no_file_gets_an_index_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where the index cannot be written, a warning says so and the table works."""
    keys = random_keys(100)
    (tmp_path / table_index.PARTIAL_FILE).mkdir()
    index = ensure_index(tmp_path, keys)
    index.verify(keys, tmp_path / "index")
    assert "cannot write the index" in caplog.text
    assert not (tmp_path / "index").exists()


def test_a_full_disk_leaves_the_old_index(tmp_path: Path) -> None:
    """No room for a new index: an OSError, the old file as it was, nothing half-written."""
    old = random_keys(100)
    build_index(tmp_path, old)
    before = (tmp_path / "index").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            build_index(tmp_path, random_keys(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "index").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["index"]


def test_an_interrupted_build_leaves_the_old_index(tmp_path: Path) -> None:
    """Whatever ends a build half-way, the old index stays and the next build succeeds."""
    keys = random_keys(100)
    build_index(tmp_path, keys)
    before = (tmp_path / "index").read_bytes()

    def interrupt(num_rows: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(tmp_path, random_keys(500), interrupt)
    assert (tmp_path / "index").read_bytes() == before
    build_index(tmp_path, random_keys(500))
    open_index(tmp_path, random_keys(500)).verify(random_keys(500), tmp_path / "index")


IMPORTS = """
from inference_session.tables import table_index
def prepare():
    table_index.ROWS_PER_STEP, table_index.ROWS_PER_CHECKPOINT = 100, 400
"""
KILLED = """
import os, signal
from pathlib import Path
import numpy as np
from inference_session.tables import table_index
calls = []
def progress(num_rows):
    calls.append(num_rows)
    if len(calls) == {last_call}:
        os.kill(os.getpid(), signal.SIGKILL)
folder = Path({folder!r})
table_index.build_index(folder, np.load(folder / "keys.npy"), progress)
"""


@pytest.fixture(scope="module")
def builds() -> Iterator[ForkedPrograms]:
    """Processes that build an index, and have imported what that needs."""
    with ForkedPrograms(IMPORTS, ENVIRONMENT) as programs:
        yield programs


def kill_a_build(builds: ForkedPrograms, folder: Path, keys: NDArray[np.int64], last_call: int) -> None:
    """Build an index in a process that is killed when it reports its progress for the nth time."""
    np.save(folder / "keys.npy", keys)
    killed = builds.run(KILLED.format(folder=str(folder), last_call=last_call), ENVIRONMENT)
    assert killed.returncode == -signal.SIGKILL
    assert not (folder / "index").exists()


@pytest.mark.parametrize(("last_call", "resumed"), [(1, 100), (3, 100), (4, 400), (11, 800)])
def test_a_killed_build_goes_on_where_its_last_checkpoint_was(
    last_call: int, resumed: int, tmp_path: Path, builds: ForkedPrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is the same, byte for byte, as one that was built without a break, duplicates counted."""
    keys = np.random.default_rng(0).integers(0, 700, 1500)
    kill_a_build(builds, tmp_path, keys, last_call)
    calls: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(table_index, "ROWS_PER_STEP", 100)
        patch.setattr(table_index, "ROWS_PER_CHECKPOINT", 400)
        num_duplicates = build_index(tmp_path, keys, calls.append)
    assert (calls[0], num_duplicates) == (resumed, len(keys) - len(np.unique(keys)))
    resumed_file = (tmp_path / "index").read_bytes()
    build_index(tmp_path, keys)
    assert (tmp_path / "index").read_bytes() == resumed_file


@pytest.mark.parametrize("damage", ["other keys", "header", "size"])
def test_what_a_killed_build_left_is_not_trusted_blindly(damage: str, tmp_path: Path, builds: ForkedPrograms) -> None:
    """Where the keys or the header do not fit, the build begins at the first row."""
    keys = random_keys(1500)
    kill_a_build(builds, tmp_path, keys, 9)
    partial = tmp_path / table_index.PARTIAL_FILE
    if damage == "other keys":
        keys[7] ^= 1
    elif damage == "size":
        partial.write_bytes(partial.read_bytes()[:-64])
    else:
        content = bytearray(partial.read_bytes())
        content[20] ^= 1
        partial.write_bytes(content)
    build_index(tmp_path, keys)
    open_index(tmp_path, keys).verify(keys, tmp_path / "index")


def test_progress_counts_every_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The callback's numbers add up to the rows."""
    monkeypatch.setattr(table_index, "ROWS_PER_STEP", 300)
    done: list[int] = []
    assert build_index(tmp_path, random_keys(1000), done.append) == 0
    assert done == [300, 300, 300, 100]
