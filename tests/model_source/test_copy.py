"""`hotrow copy`: what arrives, what does not, and what happens to an interrupted copy."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from inference_session.errors import ConfigurationError, ModelFormatError, UnavailableError
from inference_session.model_source import Copy, ModelSource, create_source, transfer
from inference_session.model_source.draft_copy import DraftCopy
from inference_session.model_source.transfer import FileTransfer
from inference_session.tables.table_file import write_table
from inference_session.version_directory import manifest
from tests.testing import small_model
from tests.testing.hadoop import Hdfs
from tests.testing.servers import wait_until
from tests.testing.sources import put

_numbers = itertools.count()
_BIG = 5_000_000


@pytest.fixture(params=[("local", "hdfs"), ("hdfs", "local")], ids="-".join)
def route(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Where an origin is, and where a target: each of the two kinds once on each side."""
    origin, target = request.param
    return origin, target


@pytest.fixture
def target(route: tuple[str, str], hdfs: Hdfs, tmp_path: Path) -> str:
    """A place that does not exist yet, in a folder that does not exist either.

    Fixtures name `hdfs` even where a route does not use it: such tests share one cluster with all others (conftest.py).
    """
    if route[1] == "local":
        return str(tmp_path / "target" / "of" / "copy")
    return f"{hdfs.url}/copy/{os.getpid()}/{next(_numbers)}/copy"


@pytest.fixture
def origin(route: tuple[str, str], hdfs: Hdfs, tmp_path: Path) -> str:
    """A table folder with one large file, a small one, an empty one, one of an odd name, and an empty folder."""
    if route[0] == "local":
        place = str(tmp_path / "origin" / "table")
    else:
        place = f"{hdfs.url}/origin/{os.getpid()}/{next(_numbers)}/table"
    with create_source(place) as source:
        put(source, "emb_vector", np.random.default_rng(1).bytes(_BIG))
        put(source, "key", np.arange(1000).tobytes())
        put(source, "inner/empty file", b"")
        put(source, "50% off/a+b;c ü%41#?&=", b"odd")
        source.make_folder("empty")
    return place


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks so small that a small file has many."""
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 300_000)


class _InterruptError(Exception):
    """Raised by a test to break a copy off."""


def contents(place: str) -> dict[str, bytes | None]:
    """All files and folders of a place."""
    with create_source(place) as source:
        return {
            entry.path: None if entry.is_folder else source.read(entry.path, 0, entry.num_bytes)
            for entry in source.entries()
        }


def folder_of(place: str) -> list[str]:
    """Names in the folder that holds a place, its own included."""
    with create_source(place.rpartition("/")[0]) as source:
        return [entry.path for entry in source.entries() if "/" not in entry.path]


def copy(origin: str, target: str, progress: Callable[[int], None] | None = None) -> int:
    """Copy; returns the bytes that an earlier run had written."""
    with Copy(origin, target) as job:
        return job.run(progress).num_resumed_bytes


def interrupted_after(num_bytes: int) -> Callable[[int], None]:
    """A progress callback that breaks the copy off after this many bytes."""
    done = [0]

    def progress(count: int) -> None:
        done[0] += count
        if done[0] >= num_bytes:
            raise _InterruptError

    return progress


def test_two_copies_to_one_target_do_not_write_into_each_other(tmp_path: Path) -> None:
    """Two that followed the same announcement: one continued a file, which the other completed and put in place."""
    origin, target = tmp_path / "origin" / "1", tmp_path / "target" / "1"
    with create_source(origin) as source:
        put(source, "emb_vector", np.random.default_rng(1).bytes(_BIG))
    with pytest.raises(_InterruptError):
        copy(str(origin), str(target), interrupted_after(1_000_000))
    errors: list[Exception] = []

    def copy_once(_num_bytes: int) -> None:
        if not errors:
            errors.append(UnavailableError("none"))
            try:
                copy(str(origin), str(target))
            except UnavailableError as error:
                errors.append(error)

    copy(str(origin), str(target), copy_once)

    assert contents(str(target)) == contents(str(origin))
    assert "another process is writing this version now" in str(errors[-1])
    assert folder_of(str(target)) == ["1"]


@pytest.mark.parametrize("route", list(itertools.product(("local", "hdfs"), repeat=2)), indirect=True, ids="-".join)
def test_the_target_is_the_source(origin: str, target: str) -> None:
    """All files and folders arrive, empty ones too; nothing else is next to them, and all bytes are reported."""
    told: list[int] = []
    copy(origin, target, told.append)
    assert contents(target) == contents(origin)
    assert folder_of(target) == ["copy"]
    assert sum(told) == _BIG + 8003


def test_a_single_file_is_copied(origin: str, target: str) -> None:
    """A file becomes a file."""
    copy(f"{origin}/key", target)
    assert contents(target) == {"": np.arange(1000).tobytes()}


def test_a_target_that_exists_is_refused(origin: str, target: str) -> None:
    """Nothing is ever replaced, and nothing is put into a folder that exists."""
    copy(f"{origin}/key", target)
    with pytest.raises(ConfigurationError, match="copy: already exists"):
        copy(origin, target)
    assert contents(target) == {"": np.arange(1000).tobytes()}


def test_a_target_that_is_there_already_is_compared(origin: str, target: str) -> None:
    """A target that a killed run had completed is found whole; a target with another byte is refused, and stays."""
    copy(origin, target)
    assert copy(origin, target) == _BIG + 8003
    with create_source(target) as place:
        place.remove("key")
        put(place, "key", np.arange(1, 1001).tobytes())
    with pytest.raises(ConfigurationError, match="copy: already exists with other contents"):
        copy(origin, target)
    assert contents(target)["key"] == np.arange(1, 1001).tobytes()


def test_a_copy_killed_between_its_last_steps_is_tidied_up(
    origin: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command completes a whole target whose run did not get to remove its temporary files."""
    with monkeypatch.context() as patch:
        patch.setattr(DraftCopy, "tidy_up", lambda _self: interrupted_after(0)(0))
        with pytest.raises(_InterruptError):
            copy(origin, target)

    copy(origin, target)

    assert contents(target) == contents(origin)
    assert folder_of(target) == ["copy"]


def test_a_copy_that_has_copied_nothing_leaves_nothing(
    origin: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing that the next one could continue with."""

    def fail(*_: object) -> None:
        raise OSError("input/output error")

    monkeypatch.setattr(FileTransfer, "run", fail)
    with pytest.raises(OSError, match="input/output error"):
        copy(origin, target)

    assert folder_of(target) == []


def test_a_full_disk_is_told_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied then. What an interrupted copy has written needs no room again."""
    (tmp_path / "large").write_bytes(bytes(2 * _BIG))
    with pytest.raises(_InterruptError):
        copy(str(tmp_path / "large"), str(tmp_path / "begun"), interrupted_after(_BIG + 300_000))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=9 * _BIG, free=2 * _BIG - 1))

    refused = rf"new: the copy needs {2 * _BIG} bytes, but only {2 * _BIG - 1} are free"
    with pytest.raises(UnavailableError, match=refused):
        copy(str(tmp_path / "large"), str(tmp_path / "new" / "copy"))
    assert not list((tmp_path / "new").iterdir())
    copy(str(tmp_path / "large"), str(tmp_path / "begun"))
    assert (tmp_path / "begun").read_bytes() == bytes(2 * _BIG)


def test_a_folder_is_not_copied_into_itself(origin: str) -> None:
    """A target inside of its source is refused, as it would be copied too."""
    with pytest.raises(ConfigurationError, match="is inside"):
        copy(origin, f"{origin}/inner/again")


def test_an_interrupted_copy_goes_on_at_its_byte(origin: str, target: str) -> None:
    """After an interruption nothing is at the target; the next run reads only what is missing, and completes it."""
    size = 6 * _BIG  # more than sockets hold, whose contents are lost
    with create_source(origin) as source:
        put(source, "large", np.random.default_rng(2).bytes(size))
    with pytest.raises(_InterruptError):
        copy(f"{origin}/large", target, interrupted_after(5 * _BIG))
    with create_source(target.rpartition("/")[0]) as place:
        assert place.stat("copy") is None
        # A DataNode takes a moment to notice that its writer has gone, and to close the file.
        wait_until(lambda: num_in_draft(place, "copy") > 0, "what was written to be counted")

    resumed = copy(f"{origin}/large", target)

    assert 0 < resumed < size
    assert contents(target) == contents(f"{origin}/large")
    assert folder_of(target) == ["copy"]


def test_what_has_changed_since_is_copied_anew(origin: str, target: str) -> None:
    """A file that changed before a copy goes on is begun again; a file that is gone leaves nothing."""
    with pytest.raises(_InterruptError):
        copy(origin, target, interrupted_after(3_000_000))
    with create_source(origin) as source:
        source.remove("emb_vector")
        source.remove("inner")
        put(source, "emb_vector", b"a" * 10_000)
    copy(origin, target)
    assert contents(target) == contents(origin)


def test_a_source_that_changes_meanwhile_arrives_in_one_state(origin: str, target: str) -> None:
    """A file that is written to while it is copied is copied again: what arrives is whole and the newest."""
    changes = iter([True])

    def change(num_bytes: int) -> None:
        if next(changes, False):
            with create_source(origin) as source:
                source.remove("emb_vector")
                put(source, "emb_vector", b"z" * 700_001)

    copy(origin, target, change)
    assert contents(target) == contents(origin)


def test_a_source_that_never_rests_is_an_error(origin: str, target: str) -> None:
    """A source that changes again and again is given up, and nothing is at the target."""
    with create_source(origin) as source:

        def change(num_bytes: int) -> None:
            put(source, f"inner/file-{next(_numbers)}", b"")

        with pytest.raises(UnavailableError, match="changed while they were copied"):
            copy(f"{origin}/inner", target, change)
    with create_source(target) as place:
        assert place.stat("") is None


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A version directory."""
    small_model.write(tmp_path / "model" / "1")
    return tmp_path / "model" / "1"


@pytest.mark.parametrize("resume", [False, True])
def test_damage_is_found_by_the_manifest(version: Path, target: str, resume: bool) -> None:
    """A file that is not what MANIFEST.json says is named, and nothing is at the target, on the first run and after."""
    vectors = version / "tables" / "hashed" / "emb_vector"
    damaged = bytearray(vectors.read_bytes())
    damaged[7] ^= 1
    vectors.write_bytes(damaged)
    for _ in range(1 + resume):
        with pytest.raises(ModelFormatError, match="hashed/emb_vector: damaged"):
            copy(str(version), target)
    with create_source(target) as place:
        assert place.stat("") is None


def test_a_version_that_is_not_whole_is_refused_at_once(version: Path, target: str) -> None:
    """A file of another size than MANIFEST.json says, or none, is named before anything is written."""
    vectors = version / "tables" / "hashed" / "emb_vector"
    vectors.write_bytes(b"1")
    with pytest.raises(ModelFormatError, match=r"hashed/emb_vector: 1 bytes, MANIFEST.json says 240"):
        copy(str(version), target)
    vectors.unlink()
    with pytest.raises(ModelFormatError, match="hashed/emb_vector: no such file"):
        copy(str(version), target)


def test_what_was_damaged_at_the_target_is_copied_anew(version: Path, target: str) -> None:
    """Where an earlier run's files are no longer what they were, the manifest tells, and they are written again."""
    total = sum(path.stat().st_size for path in version.rglob("*") if path.is_file())
    with pytest.raises(_InterruptError):
        copy(str(version), target, interrupted_after(total))
    folder, _, name = target.rpartition("/")
    with create_source(folder) as place:
        draft = f".tmp-{name}/content/tables/hashed/emb_vector"
        place.remove(draft)
        put(place, draft, b"x" * 240)
    copy(str(version), target)
    assert contents(target) == contents(str(version))


def test_a_version_served_from_stores_needs_no_tables(version: Path, tmp_path: Path) -> None:
    """A version without its folder of tables is whole where a store holds the rows."""
    copy(str(version), str(tmp_path / "a"))
    for item in sorted((tmp_path / "a" / "tables").rglob("*"), reverse=True):
        item.unlink() if item.is_file() else item.rmdir()
    (tmp_path / "a" / "tables").rmdir()
    copy(str(tmp_path / "a"), str(tmp_path / "b"))
    manifest.verify(tmp_path / "b", checksums=True, absent=frozenset({"tables"}))


def test_a_killed_command_is_completed_by_the_next(hdfs: Hdfs, tmp_path: Path) -> None:
    """`hotrow copy` that is killed leaves nothing at the target; run once more it says what it reused."""
    rows = np.random.default_rng(0).standard_normal((400_000, 64), np.float32)
    write_table(tmp_path / "table", [rows], keys=[np.arange(len(rows))])
    url = f"{hdfs.url}/killed/{os.getpid()}/table"
    command = [sys.executable, "-m", "hotrow", "copy", str(tmp_path / "table"), url]

    with create_source(url.rpartition("/")[0]) as place:
        first = subprocess.Popen(command)

        def has_begun() -> bool:
            """Checked while the process is stopped, as it must not end meanwhile."""
            first.send_signal(signal.SIGSTOP)
            begun = num_in_draft(place, "table") > 0
            first.send_signal(signal.SIGKILL if begun else signal.SIGCONT)
            return begun

        wait_until(has_begun, "some bytes to arrive")
        first.wait()
        assert place.stat("table") is None

    second = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "by an earlier run" in second.stdout
    assert contents(url) == contents(str(tmp_path / "table"))


def num_in_draft(place: ModelSource, name: str) -> int:
    """Bytes that are in a draft next to a target."""
    if place.stat(f".tmp-{name}/content") is None:
        return 0
    return sum(entry.num_bytes for entry in place.entries(f".tmp-{name}/content"))
