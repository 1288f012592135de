"""RocksDbStore: the stores' contract, readers next to a writer, crashes and damage."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import numpy as np
import pytest
from rocksdict import AccessType, Options, Rdict

from inference_session.errors import ConfigurationError, SessionClosedError, StoreError, UnavailableError
from inference_session.parameter_server.namespace import Namespace, StoredTable
from inference_session.parameter_server.rocksdb import database
from inference_session.parameter_server.rocksdb.database import list_families, translated
from inference_session.parameter_server.rocksdb.store import RocksDbStore, list_rocksdb_tables
from inference_session.parameter_server.server import ParameterServer
from inference_session.parameter_server.tier import Tier
from tests.testing.forked import FORKED, prepare_forks
from tests.testing.servers import PATIENCE_S, wait_until
from tests.testing.store_contract import (
    DIMS,
    EXTREMES,
    SharedStoreContract,
    assert_same_bits,
    fetch,
    keys_of,
    packed,
    random_keys,
    random_vectors,
)

NAMESPACE = Namespace("ctr", "7")


@pytest.fixture(scope="module", autouse=True)
def forks() -> None:
    """Processes fork from one that has imported this module, and has opened no database."""
    prepare_forks(__name__)


def open_store(
    path: Path, namespace: Namespace = NAMESPACE, *, writable: bool | Literal["later"] = True
) -> RocksDbStore:
    return RocksDbStore(path, namespace, DIMS, writable=writable)


class TestRocksDb(SharedStoreContract):
    """The writer. Past it: rows are put by the handle inside, and read by a plain secondary."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[RocksDbStore]:
        with open_store(tmp_path / "db") as self.bound:
            yield self.bound

    def put(self, table: str, key: int, row: bytes) -> None:
        self.bound.database().create_family(NAMESPACE.tag(table)).put(packed(key), row)

    def get(self, table: str, key: int) -> bytes | None:
        path = self.bound.path
        families = Rdict.list_cf(str(path))
        plain = Rdict(
            str(path),
            options=Options(raw_mode=True),
            column_families={name: Options(raw_mode=True) for name in families},
            access_type=AccessType.secondary(str(path.parent / "secondary")),
        )
        try:
            tag = NAMESPACE.tag(table)
            return plain.get_column_family(tag).get(packed(key)) if tag in families else None
        finally:
            plain.close()


class TestReaders:
    """Any number of secondaries next to one writer."""

    def test_a_reader_sees_what_was_written_before_it_opened(self, tmp_path: Path) -> None:
        """Rows still in the writer's log are seen as well."""
        keys, vectors = random_keys(100), random_vectors(100, 4)
        with open_store(tmp_path) as writer:
            writer.insert("user", keys, vectors)
            with open_store(tmp_path, writable=False) as one, open_store(tmp_path, writable=False) as two:
                for reader in (one, two):
                    found, out = fetch(reader, "user", keys)
                    assert found.all()
                    assert_same_bits(out, vectors)

    def test_a_reader_follows_when_it_refreshes(self, tmp_path: Path) -> None:
        """New rows, new tables, replaced, erased and cleared ones are seen after a refresh."""
        with open_store(tmp_path) as writer:
            writer.insert("odd", keys_of(1, 2), np.ones((2, 1), np.float32))
            with open_store(tmp_path, writable=False) as reader:
                assert not fetch(reader, "user", keys_of(1))[0].any()
                assert fetch(reader, "odd", keys_of(1, 2))[0].all()
                writer.insert("user", keys_of(1), random_vectors(1, 4))
                writer.insert("odd", keys_of(3), np.full((1, 1), 3, np.float32))
                writer.insert("odd", keys_of(1), np.full((1, 1), 9, np.float32))
                writer.erase("odd", keys_of(2))
                reader.refresh()
                assert fetch(reader, "user", keys_of(1))[0].all()
                found, out = fetch(reader, "odd", keys_of(1, 2, 3))
                assert found.tolist() == [True, False, True]
                assert out[found, 0].tolist() == [9, 3]
                writer.clear("odd")
                writer.refresh()
                reader.refresh()
                assert not fetch(reader, "odd", keys_of(1, 3))[0].any()

    def test_a_reader_follows_a_table_that_was_cleared_and_filled_again(self, tmp_path: Path) -> None:
        """Each by a process of its own: RocksDB crashes in the reader's where the table's column family is dropped."""
        open_store(tmp_path).close()
        for target in (_fill_again, _fill_again, _read_filled):
            process = FORKED.Process(target=target, args=(tmp_path,))
            process.start()
            process.join()
            assert process.exitcode == 0

    def test_a_reader_may_become_the_writer(self, tmp_path: Path) -> None:
        """Opened to be written to later, it waits for the writer's place, and then reads what it wrote at once."""
        keys, vectors = random_keys(100), random_vectors(100, 4)
        with open_store(tmp_path) as writer, open_store(tmp_path, writable="later") as store:
            writer.insert("user", keys, vectors)
            assert store.lags
            with pytest.raises(UnavailableError, match="being written by another store of this process"):
                store.erase("user", keys[:10])
            store.refresh()
            assert fetch(store, "user", keys)[0].all()
            writer.close()

            store.erase("user", keys[:10])
            store.insert("odd", keys_of(1), np.ones((1, 1), np.float32))

            assert fetch(store, "user", keys)[0].tolist() == [False] * 10 + [True] * 90
            assert fetch(store, "odd", keys_of(1))[0].all()
            assert not store.lags

    def test_a_reader_is_right_while_the_writer_compacts(self, tmp_path: Path) -> None:
        """Files that a compaction removes stay readable for readers that have them open."""
        keys, vectors = random_keys(4000), random_vectors(4000, 128)
        with open_store(tmp_path) as writer:
            writer.insert("wide", keys, vectors)
            writer.family("wide").flush()
            with open_store(tmp_path, writable=False) as reader:
                writer.insert("wide", keys, -vectors)
                writer.family("wide").flush()
                writer.family("wide").compact_range(None, None)
                found, out = fetch(reader, "wide", keys)
                assert found.all()
                assert_same_bits(out, vectors)
                reader.refresh()
                assert_same_bits(fetch(reader, "wide", keys)[1], -vectors)

    def test_a_reader_refuses_writes(self, tmp_path: Path) -> None:
        """Insert, erase, clear and notes say that this is no writer."""
        open_store(tmp_path).close()
        with open_store(tmp_path, writable=False) as reader:
            for call in (
                lambda: reader.insert("user", keys_of(1), random_vectors(1, 4)),
                lambda: reader.erase("user", keys_of(1)),
                lambda: reader.clear("user"),
                lambda: reader.set_note("user", "x"),
            ):
                with pytest.raises(StoreError, match="is read-only"):
                    call()

    def test_a_readers_folder_goes_with_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A reader leaves nothing behind, nor does one that could not open."""
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(temporary))
        open_store(tmp_path / "db").close()
        open_store(tmp_path / "db", writable=False).close()
        with pytest.raises(StoreError):
            open_store(tmp_path / "none", writable=False)
        assert list(temporary.iterdir()) == []

    def test_folders_of_killed_readers_are_removed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """By the next reader; folders of living readers, and all other files, stay."""
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(temporary))
        open_store(tmp_path / "db").close()
        (temporary / "hotrow-rocksdb-reader-file").touch()
        process = FORKED.Process(target=_read_until_killed, args=(tmp_path / "db", temporary))
        process.start()
        wait_until(lambda: len(_folders(temporary)) == 1, "the other process to open")
        with open_store(tmp_path / "db", writable=False):
            assert len(_folders(temporary)) == 2
            process.kill()
            process.join()
            with open_store(tmp_path / "db", writable=False) as other:
                other.check()
                assert len(_folders(temporary)) == 2
        assert [path.name for path in temporary.iterdir()] == ["hotrow-rocksdb-reader-file"]

    def test_a_readers_log_is_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """However often it catches up: a log that is full is followed by another, and few are kept."""
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        monkeypatch.setattr("inference_session.parameter_server.rocksdb.database._LOG_BYTES", 30_000)
        with open_store(tmp_path / "db") as writer, open_store(tmp_path / "db", writable=False) as reader:
            for number in range(200):
                writer.insert("user", keys_of(number), random_vectors(1, 4))
                reader.refresh()
            (folder,) = _folders(tmp_path)
            sizes = [path.stat().st_size for path in folder.iterdir()]
        assert len(sizes) > 2, sizes  # those of a log without a bound, the most of which is not written yet
        assert sum(sizes) < 200_000, sizes

    @pytest.mark.parametrize("writable", [False, "later"])
    @pytest.mark.parametrize("gap", [True, False], ids=["gone_meanwhile", "at_once"])
    def test_a_database_that_is_replaced_is_opened_again(
        self, tmp_path: Path, writable: Literal[False, "later"], gap: bool
    ) -> None:
        """By readers, and by a reader that has become the writer; while no database exists, calls are errors."""
        old, new, path = tmp_path / "old", tmp_path / "new", tmp_path / "db"
        for folder, value in ((path, 1), (new, 2)):
            with open_store(folder) as store:
                store.insert("user", keys_of(1), np.full((1, 4), value, np.float32))
        with open_store(path, writable=writable) as store:
            if writable:
                store.insert("user", keys_of(2), np.ones((1, 4), np.float32))
            assert fetch(store, "user", keys_of(1))[1][0, 0] == 1
            path.rename(old)
            if gap:
                for call in (store.refresh, store.check):
                    with pytest.raises(UnavailableError, match="does not exist any more"):
                        call()
            new.rename(path)
            store.check() if gap else store.refresh()
            found, rows = fetch(store, "user", keys_of(1, 2))
            assert found.tolist() == [True, False]
            assert rows[0, 0] == 2
            if writable:
                with pytest.raises(UnavailableError, match="once that is started again"):
                    store.insert("user", keys_of(3), np.full((1, 4), 3, np.float32))
        self.assert_is_whole(path)

    def test_a_reader_that_is_to_write_makes_no_database(self, tmp_path: Path) -> None:
        """Where the database is gone, perhaps with its disk, an empty one would answer that no row exists."""
        path = tmp_path / "db"
        with open_store(path) as store:
            store.insert("user", keys_of(1), np.ones((1, 4), np.float32))
        with open_store(path, writable="later") as store:
            path.rename(tmp_path / "away")
            for write in (
                lambda: store.insert("user", keys_of(2), np.ones((1, 4), np.float32)),
                lambda: store.erase("user", keys_of(1)),
                lambda: store.set_note("user", "a note"),
            ):
                with pytest.raises(UnavailableError, match="does not exist any more"):
                    write()
            assert not path.exists()
            (tmp_path / "away").rename(path)
            store.insert("user", keys_of(2), np.ones((1, 4), np.float32))
            assert fetch(store, "user", keys_of(1, 2))[0].all()

    def test_a_reader_does_not_become_the_writer_during_a_dump(self, tmp_path: Path) -> None:
        """It would open the database again, and see what another process has written since the dump began."""
        with open_store(tmp_path / "db") as store:
            store.insert("user", keys_of(1), np.ones((1, 4), np.float32))
        reader = open_store(tmp_path / "db", writable="later")
        with contextlib.closing(ParameterServer([Tier("persistent", reader, durable=True)])) as server:
            with server.frozen():
                with open_store(tmp_path / "db") as store:
                    store.insert("user", keys_of(1), np.full((1, 4), 2, np.float32))
                writing = threading.Thread(target=server.prepare_write)
                writing.start()
                writing.join(0.5)
                assert fetch(reader, "user", keys_of(1))[1][0, 0] == 1
            writing.join(PATIENCE_S)
            assert fetch(reader, "user", keys_of(1))[1][0, 0] == 2

    @pytest.mark.parametrize("gone", [False, True])
    def test_a_writer_that_is_replaced_leaves_the_new_database_alone(self, tmp_path: Path, gone: bool) -> None:
        """RocksDB would write its own files into it when it is closed, or when the process ends."""
        new, path = tmp_path / "new", tmp_path / "db"
        with open_store(new) as store:
            store.insert("user", keys_of(1), np.full((1, 4), 2, np.float32))
        with open_store(path) as store:
            store.insert("user", keys_of(1), np.ones((1, 4), np.float32))
        with open_store(path, writable="later") as store:
            store.insert("user", random_keys(100), random_vectors(100, 4))
            path.rename(tmp_path / "old")
            if not gone:
                new.rename(path)
                with pytest.raises(UnavailableError, match="was replaced"):
                    store.insert("user", keys_of(5), np.ones((1, 4), np.float32))
        if gone:
            new.rename(path)
        self.assert_is_whole(path)

    @staticmethod
    def assert_is_whole(path: Path) -> None:
        """Row 1 has the value 2, and rows can be written."""
        gc.collect()
        with open_store(path, writable=False) as store:
            assert fetch(store, "user", keys_of(1))[1][0, 0] == 2
        process = FORKED.Process(target=_write_one, args=(path,))
        process.start()
        process.join()
        assert process.exitcode == 0

    def test_a_database_that_is_made_anew_in_the_same_folder_is_opened_again(self, tmp_path: Path) -> None:
        """The folder itself stays, like the folder of a mount."""
        path, copy = tmp_path / "db", tmp_path / "copy"
        for folder, value in ((path, 1), (copy, 2)):
            with open_store(folder) as store:
                store.insert("user", keys_of(1), np.full((1, 4), value, np.float32))
        with open_store(path, writable=False) as store:
            for file in path.iterdir():
                file.unlink()
            for file in copy.iterdir():
                shutil.copy2(file, path)
            store.refresh()
            assert fetch(store, "user", keys_of(1))[1][0, 0] == 2

    def test_a_database_that_was_linked_or_given_another_mode_is_the_same(self, tmp_path: Path) -> None:
        """As by a backup of hard links, or by Kubernetes, which sets the owner of a volume's files at each mount."""
        path, backup = tmp_path / "db", tmp_path / "backup"
        backup.mkdir()
        with open_store(path) as store:
            store.insert("user", keys_of(1), np.ones((1, 4), np.float32))
        with open_store(path, writable="later") as store:
            store.insert("user", keys_of(2), np.ones((1, 4), np.float32))
            identity = path / "IDENTITY"
            (backup / "IDENTITY").hardlink_to(identity)
            linked_ns = identity.stat().st_ctime_ns
            wait_until(lambda: identity.chmod(0o640) or identity.stat().st_ctime_ns > linked_ns, "another ctime")

            store.refresh()
            store.insert("user", keys_of(3), np.full((1, 4), 3, np.float32))

            assert fetch(store, "user", keys_of(1, 2, 3))[0].all()
            assert not store.lags

    def test_rows_are_read_while_the_part_changes(self, tmp_path: Path) -> None:
        """From reader to writer and back, as fast as it can: every call sees one state or the other."""
        switch_interval = sys.getswitchinterval()
        keys, ones = np.arange(64), np.ones((64, 4), np.float32)
        with open_store(tmp_path) as store:
            store.insert("user", keys, ones)
        done, failures = threading.Event(), []
        with open_store(tmp_path, writable="later") as store:

            def read() -> None:
                while not done.is_set():
                    try:
                        assert fetch(store, "user", keys_of(3))[0].all()
                    except Exception as error:  # noqa: BLE001, PERF203 - whatever it is, it is a failure
                        failures.append(error)

            readers = [threading.Thread(target=read) for _ in range(3)]
            sys.setswitchinterval(1e-6)
            try:
                for reader in readers:
                    reader.start()
                for _ in range(60):
                    with contextlib.suppress(UnavailableError):  # a reader still holds what was open as the writer
                        store.insert("user", keys[:1], ones[:1])
                        store.reopen(store.database())
            finally:
                done.set()
                for reader in readers:
                    reader.join()
                sys.setswitchinterval(switch_interval)
        assert not failures


def _fill_again(path: Path) -> None:
    with open_store(path) as store:
        for table, dim in DIMS.items():
            store.clear(table)
            store.set_note(table, "begun")
            store.insert(table, keys_of(*range(50)), np.ones((50, dim), np.float32))
            store.set_note(table, "done")


def _read_filled(path: Path) -> None:
    for _ in range(3):
        with open_store(path, writable="later") as store:
            store.refresh()
            assert all(fetch(store, table, keys_of(*range(50)))[0].all() for table in DIMS)


def _write_one(path: Path) -> None:
    with open_store(path) as store:
        store.insert("user", keys_of(9), np.full((1, 4), 9, np.float32))
    with open_store(path) as store:
        assert fetch(store, "user", keys_of(1, 9))[1][:, 0].tolist() == [2, 9]


def _folders(temporary: Path) -> list[Path]:
    return [path for path in temporary.glob("hotrow-rocksdb-reader-*") if path.is_dir()]


def _read_until_killed(path: Path, temporary: Path) -> None:
    tempfile.tempdir = str(temporary)
    with open_store(path, writable=False) as store:
        while True:
            store.refresh()
            time.sleep(0.05)


def test_a_reader_sees_what_its_writer_wrote_before_it_moved_its_log_to_files(tmp_path: Path) -> None:
    """RocksDB itself passes over the rest of such a log, and answers what it has read of it before."""
    keys = np.arange(3)
    with open_store(tmp_path / "db") as first:
        first.insert("user", keys, np.full((3, DIMS["user"]), 0, np.float32))
    with open_store(tmp_path / "db", writable=False) as reader:
        for value in range(1, 6):
            with open_store(tmp_path / "db", writable="later") as writer:
                writer.insert("user", keys, np.full((3, DIMS["user"]), value, np.float32))
                reader.refresh()
                writer.insert("user", keys, np.full((3, DIMS["user"]), -value, np.float32))
                writer.erase("user", keys[:1])
            reader.refresh()
            found, vectors = fetch(reader, "user", keys)
            assert found.tolist() == [False, True, True]
            assert (vectors[1:] == -value).all()


def test_a_reader_is_opened_again_whose_writer_moved_its_log_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows may have left the log before the reader came to it, and not have been in the files that it had listed."""
    open_reader, opened = database.open_reader, []
    writer = open_store(tmp_path)
    writer.insert("user", keys_of(1), np.ones((1, 4), np.float32))

    def open_and_close_writer(path: Path, folder: Path) -> Any:
        opened.append(open_reader(path, folder))
        writer.close()
        return opened[-1]

    monkeypatch.setattr(database, "open_reader", open_and_close_writer)
    with open_store(tmp_path, writable=False) as reader:
        assert len(opened) == 2
        assert fetch(reader, "user", keys_of(1))[0].all()


def test_retired_versions_are_removed(tmp_path: Path) -> None:
    """Rows and notes of the versions named go; other models and the shared name space stay."""
    kept = [Namespace("ctr", "3"), Namespace("ctr"), Namespace("ctr2", "1")]
    for namespace in (Namespace("ctr", "1"), Namespace("ctr", "2"), *kept):
        with open_store(tmp_path, namespace) as store:
            store.insert("user", random_keys(50), random_vectors(50, 4))
            store.set_note("user", "done")
    with open_store(tmp_path, kept[0]) as store:
        assert store.versions() == {"1", "2", "3"}
        assert store.remove_versions({"1", "2"}) == 2
        assert store.remove_versions({"1", "2"}) == 0
        assert store.versions() == {"3"}
    assert [table.tag for table in list_rocksdb_tables(tmp_path)] == sorted(n.tag("user") for n in kept)
    with open_store(tmp_path, Namespace("ctr", "1")) as store:
        assert store.note("user") is None


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    """The database says that it is being written, in this process or another."""
    with open_store(tmp_path), pytest.raises(UnavailableError, match="being written"):
        open_store(tmp_path)
    open_store(tmp_path).close()


def test_no_database_is_an_error_that_names_the_way_out(tmp_path: Path) -> None:
    """A reader makes no database."""
    with pytest.raises(StoreError, match="hotrow push"):
        open_store(tmp_path / "none", writable=False)
    assert not (tmp_path / "none").exists()
    with pytest.raises(StoreError, match="hotrow push"):
        list_rocksdb_tables(tmp_path / "none")


def test_a_path_that_cannot_be_a_database_is_named(tmp_path: Path) -> None:
    """The error says that a file is in the way."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(UnavailableError, match="file"):
        open_store(tmp_path / "file")


@pytest.mark.parametrize("text", ["Read-only file system (os error 30)", "Permission denied (os error 13)"])
def test_a_folder_that_may_not_be_written_to_is_an_error_that_says_so(text: str) -> None:
    """For readers too, which one would not expect; root may write anywhere, so the error is raised here."""
    with pytest.raises(UnavailableError, match="readers also need write access"), translated(Path("/rows")):
        raise OSError(text)


def test_rows_survive_reopening(tmp_path: Path) -> None:
    """Rows and notes are found again after a close, for the same version only."""
    keys, vectors = random_keys(1000), random_vectors(1000, 128)
    with open_store(tmp_path) as store:
        store.insert("wide", keys, vectors)
        store.set_note("wide", "all")
    with open_store(tmp_path) as store:
        found, out = fetch(store, "wide", keys)
        assert found.all()
        assert_same_bits(out, vectors)
        assert store.note("wide") == "all"
    with open_store(tmp_path, Namespace("ctr", "8"), writable=False) as other:
        assert not fetch(other, "wide", keys)[0].any()
        assert other.note("wide") is None


def _insert_for_ever(path: Path) -> None:
    store = open_store(path)
    for n in range(1_000_000):
        store.insert("user", np.arange(100 * n, 100 * n + 100), np.full((100, 4), n, np.float32))
        store.set_note("user", str(100 * n + 100))


def test_a_killed_writer_loses_nothing_it_vouched_for(tmp_path: Path) -> None:
    """After SIGKILL the rows that the note counts are all there, whole."""
    process = FORKED.Process(target=_insert_for_ever, args=(tmp_path,))
    process.start()
    try:

        def has_begun() -> bool:
            try:
                with open_store(tmp_path, writable=False) as reader:
                    return int(reader.note("user") or 0) >= 2000
            except (StoreError, UnavailableError):  # it is just being made
                return False

        wait_until(has_begun, "the writer to begin")
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.join()
    with open_store(tmp_path) as store:
        count = int(store.note("user") or 0)
        found, out = fetch(store, "user", np.arange(count))
        assert found.all()
        np.testing.assert_array_equal(out[:, 0], np.arange(count) // 100)


def test_a_frozen_writer_is_named(tmp_path: Path) -> None:
    """Others read what it has written, and take its place once it has ended."""
    process = FORKED.Process(target=_insert_for_ever, args=(tmp_path,))
    process.start()
    try:
        wait_until((tmp_path / "CURRENT").exists, "the database")
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        with open_store(tmp_path, writable="later") as store:
            num_rows = int(store.note("user") or 0)
            assert fetch(store, "user", np.arange(num_rows))[0].all()
            with pytest.raises(UnavailableError, match=rf"being written by process {process.pid} \(.*, stopped\)"):
                store.erase("user", keys_of(0))
            process.kill()
            process.join()
            store.insert("user", keys_of(-1), np.ones((1, 4), np.float32))
            assert fetch(store, "user", np.append(np.arange(num_rows), -1))[0].all()
    finally:
        process.kill()
        process.join()


def test_tables_of_a_database_are_listed(tmp_path: Path) -> None:
    """The list gives exact rows and widths of every tag, also while a writer has the database open."""
    with open_store(tmp_path) as store:
        store.insert("user", random_keys(100), random_vectors(100, 4))
        store.insert("user", random_keys(100)[:50], random_vectors(50, 4))
        store.insert("odd", keys_of(1), random_vectors(1, 1))
        store.erase("odd", keys_of(1))
        expected = [StoredTable("hps_et.ctr@7.odd", 0, None), StoredTable("hps_et.ctr@7.user", 100, 4)]
        assert list_rocksdb_tables(tmp_path) == expected
    assert list_rocksdb_tables(tmp_path) == expected


def test_keys_of_another_length_are_passed_over(tmp_path: Path) -> None:
    """A scan comes by them, and counts them."""
    with open_store(tmp_path) as store:
        vectors = random_vectors(2, 4)
        store.insert("user", keys_of(1, 2), vectors)
        store.family("user").put(b"abc", vectors[0].tobytes())
        [(keys, rows)] = list(store.scan("user"))
        assert keys.tolist() == [1, 2]
        assert_same_bits(rows, vectors)
        assert store.num_malformed == 1


def test_damage_is_an_error_and_never_a_row(tmp_path: Path) -> None:
    """Flipped bytes in a data file are found by its checksums when the rows are read."""
    keys, vectors = random_keys(3000), random_vectors(3000, 128)
    with open_store(tmp_path) as store:
        store.insert("wide", keys, vectors)
    data = max(tmp_path.glob("*.sst"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    for i in range(1000, len(content) // 2, 997):
        content[i] ^= 0xFF
    data.write_bytes(content)
    with open_store(tmp_path, writable=False) as store, pytest.raises(StoreError, match=str(tmp_path)):
        fetch(store, "wide", keys)


def _shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _zero(path: Path) -> None:
    """In place, so that whoever has the file open sees it."""
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


def _zero_filter_and_index(path: Path) -> None:
    """They are behind the rows."""
    with path.open("r+b") as file:
        num_tail = path.stat().st_size // 10
        file.seek(-num_tail, os.SEEK_END)
        file.write(bytes(num_tail))


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("damage", [_shorten, _empty, _zero, _zero_filter_and_index])
def test_damage_of_an_open_database_is_an_error(tmp_path: Path, damage: Callable[[Path], None], writable: bool) -> None:
    """The process goes on, and no row of the damaged file is wrong or counts as unknown."""
    keys, vectors = random_keys(3000), random_vectors(3000, 128)
    with open_store(tmp_path) as store:
        store.insert("wide", keys, vectors)
    with open_store(tmp_path, writable=writable) as store:
        assert fetch(store, "wide", keys)[0].all()
        damage(max(tmp_path.glob("*.sst"), key=lambda path: path.stat().st_size))
        num_right = 0
        for key, vector in zip(keys[::50], vectors[::50], strict=True):
            with contextlib.suppress(StoreError):
                found, row = fetch(store, "wide", key[None])
                assert found.all()
                assert_same_bits(row, vector[None])
                num_right += 1
        assert num_right < len(keys[::50])


def test_a_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    """A database that lacks a data file is refused by its writer."""
    with open_store(tmp_path) as store:
        store.insert("wide", random_keys(3000), random_vectors(3000, 128))
    for data in tmp_path.glob("*.sst"):
        data.unlink()
    with pytest.raises((StoreError, UnavailableError), match=str(tmp_path)), open_store(tmp_path) as store:
        fetch(store, "wide", random_keys(3000))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [("*.sst", _cut), ("*.sst", Path.unlink), ("CURRENT", _cut), ("MANIFEST-*", Path.unlink)],
)
def test_a_reader_refuses_an_incomplete_database_until_it_is_mended(
    tmp_path: Path, pattern: str, damage: Callable[[Path], None]
) -> None:
    """Rows of a file that is missing or cut do not count as unknown keys."""
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    keys, vectors = random_keys(3000), random_vectors(3000, 128)
    with open_store(whole) as store:
        store.insert("wide", keys, vectors)
    shutil.copytree(whole, damaged)
    for path in damaged.glob(pattern):
        damage(path)
    with open_store(damaged, writable=False) as store:
        for call in (store.check, store.refresh, lambda: fetch(store, "wide", keys)):
            with pytest.raises(UnavailableError, match=str(damaged)):
                call()
        shutil.rmtree(damaged)
        shutil.copytree(whole, damaged)
        store.check()
        assert_same_bits(fetch(store, "wide", keys)[1], vectors)


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_manifest_that_was_cut_between_two_records_is_an_error(tmp_path: Path, is_closed: bool) -> None:
    """RocksDB itself opens it, as that of an older database."""
    database, copied = tmp_path / "db", tmp_path / "copied"
    with open_store(database) as store:
        store.insert("wide", random_keys(100), random_vectors(100, 128))
        [manifest] = database.glob("MANIFEST-*")
        num_bytes = manifest.stat().st_size
        store.insert("odd", EXTREMES, random_vectors(len(EXTREMES), 1))  # whose family is another record
        store.set_note("odd", "{}")
        shutil.copytree(database, copied, ignore=shutil.ignore_patterns("LOCK"))
    path = database if is_closed else copied
    os.truncate(path / manifest.name, num_bytes)
    list_families(path)  # which reads it without an error

    with pytest.raises(StoreError, match=f"its {manifest.name} has {num_bytes} bytes and had"), open_store(path):
        pass
    with (
        open_store(path, writable=False) as reader,
        pytest.raises(UnavailableError, match=f"its {manifest.name} has {num_bytes} bytes and had"),
    ):
        reader.check()


def _write_beyond_a_limit(path: Path) -> None:
    """Insert rows, be refused, insert when there is room again; then be refused for good, and close."""
    keys, vectors = random_keys(2000), random_vectors(2000, 128)
    unlimited = resource.RLIM_INFINITY
    with open_store(path, writable=True) as store:
        store.insert("wide", keys, vectors)
    with open_store(path, writable="later") as store:
        for _ in range(2):
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, unlimited))
            with pytest.raises(UnavailableError, match="File too large"):
                store.insert("wide", keys, vectors)
            assert fetch(store, "wide", keys)[0].all()
            resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
            store.insert("wide", keys, -vectors)
            assert_same_bits(fetch(store, "wide", keys)[1], -vectors)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, unlimited))
    resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
    with open_store(path, writable=True) as store:
        assert_same_bits(fetch(store, "wide", keys)[1], -vectors)


def test_a_release_of_the_package_that_loses_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 0.3.27, no row of a batch was found again."""
    monkeypatch.setattr(metadata, "version", lambda _: "0.3.27")

    with pytest.raises(ConfigurationError, match=r"rocksdict 0.3.27 is installed, .* needs 0.3.28 or later"):
        open_store(tmp_path / "db", writable=True)


def test_a_package_that_does_not_say_its_release_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is part of a program of one file."""
    monkeypatch.setattr(metadata, "version", Mock(side_effect=metadata.PackageNotFoundError))

    open_store(tmp_path / "db", writable=True).close()


def test_writes_go_on_once_the_disk_takes_them_again(tmp_path: Path) -> None:
    """A write that the disk refuses is an error; reads go on meanwhile, and later another write is enough.

    A limit on the size of files, set in a separate process, stands for a disk that fails or a quota.
    """
    process = FORKED.Process(target=_write_beyond_a_limit, args=(tmp_path / "db",))
    process.start()
    process.join()
    assert process.exitcode == 0


def _update_beyond_a_limit(path: Path) -> None:
    """As a session does: the parameter server's errors lead to the store's frames, and nothing collects garbage."""
    gc.disable()
    keys, vectors = random_keys(2000), random_vectors(2000, 128)
    open_store(path, writable=True).close()
    with open_store(path, writable="later") as store:
        server = ParameterServer([Tier("persistent", store, durable=True)])
        server.insert("wide", keys[:1], vectors[:1])
        for _ in range(2):
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
            with pytest.raises(UnavailableError, match="File too large"):
                server.insert("wide", keys, vectors)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            server.insert("wide", keys, -vectors)
            assert_same_bits(fetch(store, "wide", keys)[1], -vectors)
        server.close()


def test_a_refused_update_does_not_keep_the_database_from_its_next_writer(tmp_path: Path) -> None:
    """That is the same store, which has opened the database again."""
    process = multiprocessing.get_context("spawn").Process(target=_update_beyond_a_limit, args=(tmp_path / "db",))
    process.start()
    process.join()
    assert process.exitcode == 0


def test_closing_waits_for_look_ups(tmp_path: Path) -> None:
    """Closing failed where a look-up was in RocksDB, and left the database open."""
    keys, failures = random_keys(50_000), list[BaseException]()
    with open_store(tmp_path) as writer:
        writer.insert("user", keys, random_vectors(len(keys), 4))
    for _ in range(5):
        store, reads = open_store(tmp_path), threading.Event()

        def read(store: RocksDbStore = store, reads: threading.Event = reads) -> None:
            try:
                while True:
                    fetch(store, "user", keys)
                    reads.set()
            except BaseException as error:  # noqa: BLE001  compared below
                failures.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        assert reads.wait(PATIENCE_S)
        store.close()
        thread.join(PATIENCE_S)
    assert [type(error) for error in failures] == [SessionClosedError] * 5


def test_closing_twice_and_using_after_is_no_crash(tmp_path: Path) -> None:
    """Every call on a closed store is an error of ours."""
    store = open_store(tmp_path)
    store.insert("user", keys_of(1), random_vectors(1, 4))
    store.close()
    store.close()
    for call in (
        lambda: store.insert("user", keys_of(1), random_vectors(1, 4)),
        lambda: store.erase("user", keys_of(1)),
        lambda: store.note("user"),
        store.refresh,
        store.check,
    ):
        with pytest.raises(SessionClosedError):
            call()
