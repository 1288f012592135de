"""`hotrow push` and `hotrow inspect STORE_URL`, against real stores."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from hotrow.command_line import cli
from inference_session.errors import ConfigurationError, ModelFormatError, StoreError, UnavailableError
from inference_session.model_spec import TABLES_FOLDER, ModelSpec, TableSpec
from inference_session.parameter_server import table_push, table_source
from inference_session.parameter_server.create import create_store
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.table_push import TablePush
from inference_session.parameter_server.table_source import push_note
from inference_session.tables.table_file import write_table
from inference_session.version_directory import manifest
from inference_session.version_directory.session_file import read_spec
from tests.testing.command_line import hotrow
from tests.testing.memory_store import MemoryStore
from tests.testing.servers import PATIENCE_MS, RedisClusterServers, RedisServer
from tests.testing.store_contract import assert_same_bits, fetch, random_keys, random_vectors
from tests.testing.wrapper_store import FaultStore

NUM_ROWS = 5000
DIMS = {"hashed": 16, "numbered": 4, "halved": 3}


@pytest.fixture(scope="module")
def version_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """<...>/ctr/3 with a table of stored keys (some of them twice), one of row numbers, one of float16."""
    directory = tmp_path_factory.mktemp("repository") / "ctr" / "3"
    tables = directory / TABLES_FOLDER
    keys = np.concatenate([random_keys(NUM_ROWS - 100), random_keys(NUM_ROWS - 100)[:100]])
    write_table(tables / "hashed", [random_vectors(NUM_ROWS, 16)], keys=[keys])
    write_table(tables / "numbered", [random_vectors(700, 4)])
    write_table(tables / "halved", [np.arange(300, dtype=np.float32).reshape(100, 3)], dtype="float16")
    specs = (
        TableSpec("hashed.weight", "hashed", NUM_ROWS, 16),
        TableSpec("numbered", "numbered", 700, 4, keys="row_number"),
        TableSpec("halved", "halved", 100, 3, dtype="float16", keys="row_number"),
    )
    manifest.describe_version(ModelSpec((), (), specs, ()), directory)
    return directory


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def stored(url: str) -> dict[str, Any]:
    tables = json.loads(hotrow("inspect", url, "--json"))["tables"]
    return {table["tag"]: (table["rows"], table["embedding_dim"]) for table in tables}


def check_rows(url: str, namespace: Namespace, version_dir: Path) -> None:
    """Everything in the files is in the store, bit by bit, as a look-up would see it."""
    with create_store(url, namespace, DIMS, timeout_ms=PATIENCE_MS) as store:
        keys = np.fromfile(version_dir / TABLES_FOLDER / "hashed" / "key", np.int64)
        vectors = np.fromfile(version_dir / TABLES_FOLDER / "hashed" / "emb_vector", np.float32).reshape(-1, 16)
        last = {key: i for i, key in enumerate(keys.tolist())}
        found, out = fetch(store, "hashed", np.array(list(last)))
        assert found.all()
        assert_same_bits(out, vectors[list(last.values())])
        found, out = fetch(store, "halved", np.arange(101))
        assert found.tolist() == [True] * 100 + [False]
        np.testing.assert_array_equal(out[:100], np.arange(300).reshape(100, 3))


def test_a_version_is_pushed_to_redis(server: RedisServer, version_dir: Path) -> None:
    """All rows arrive under the version's tags, the counts are printed, and pushing again changes nothing."""
    for _ in range(2):
        output = hotrow("push", version_dir, "--to", f"{server.url}/1", "--verify")
        assert "hashed: 5000 rows\n" in output
        assert "5800 rows pushed in" in output
        assert "rows/s" in output
        assert "5800 rows read back" in output
        check_rows(f"{server.url}/1", Namespace("ctr", "3"), version_dir)
    assert stored(f"{server.url}/1") == {
        "hps_et.ctr@3.hashed": (4900, 16),
        "hps_et.ctr@3.numbered": (700, 4),
        "hps_et.ctr@3.halved": (100, 3),
    }


@pytest.mark.parametrize("name", ["hashed/key", "halved/emb_vector"])
def test_a_damaged_version_is_not_pushed(name: str, server: RedisServer, version_dir: Path, tmp_path: Path) -> None:
    """A changed byte is found before anything is written, because rows in a store have no checksum."""
    damaged = shutil.copytree(version_dir, tmp_path / "damaged" / "1")
    path = damaged / TABLES_FOLDER / name
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")

    with pytest.raises(ModelFormatError, match=f"{name}: damaged"):
        hotrow("push", damaged, "--to", f"{server.url}/5")
    assert stored(f"{server.url}/5") == {}


def test_the_shared_name_space_is_hps_own(server: RedisServer, version_dir: Path) -> None:
    """With --namespace shared there is no version in the tags."""
    hotrow("push", version_dir, "--to", f"{server.url}/2", "--namespace", "shared", "--verify-sample", 50)
    check_rows(f"{server.url}/2", Namespace("ctr"), version_dir)
    output = hotrow("inspect", f"{server.url}/2")
    assert "hps_et.ctr.hashed" in output
    assert "4900" in output


def test_a_version_is_pushed_to_a_cluster(version_dir: Path) -> None:
    """A Cluster takes the same commands, and all of its masters get rows."""
    with RedisClusterServers() as cluster:
        hotrow("push", version_dir, "--to", cluster.url, "--verify")
        check_rows(cluster.url, Namespace("ctr", "3"), version_dir)
        assert stored(cluster.url)["hps_et.ctr@3.hashed"] == (4900, 16)
        for master in cluster.masters:
            with master.client() as client:
                assert client.dbsize() > 0


def test_a_version_is_pushed_to_rocksdb(tmp_path: Path, version_dir: Path) -> None:
    """A database is made, filled, and readable by a reader right after."""
    url = f"rocksdb://{tmp_path}/db"
    hotrow("push", version_dir, "--to", url, "--verify")
    check_rows(url, Namespace("ctr", "3"), version_dir)
    assert stored(url)["hps_et.ctr@3.hashed"] == (4900, 16)


def test_a_push_goes_on_where_it_was_interrupted(version_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that the note counts are not written again; later rows are, and all rows are right in the end."""
    monkeypatch.setattr(table_push, "BYTES_PER_BATCH", 400 * 64)
    monkeypatch.setattr(table_push, "NOTE_INTERVAL_S", 0)
    memory, calls = MemoryStore(DIMS), iter(range(100))
    store = FaultStore(memory, lambda verb: UnavailableError("gone") if verb == "insert" and next(calls) == 5 else None)
    spec = read_spec(version_dir).tables[0]
    with pytest.raises(UnavailableError):
        TablePush(version_dir, spec, store).run()
    assert json.loads(memory.note("hashed") or "")["rows"] == 2000
    done: list[int] = []
    report = TablePush(version_dir, spec, store).run(done.append)
    assert (report.num_rows, report.num_resumed, sum(done)) == (5000, 2000, 3000)
    assert TablePush(version_dir, spec, store).verify() == 5000
    assert TablePush(version_dir, spec, store).run().num_resumed == 0


def test_a_push_that_was_interrupted_at_once_has_left_its_mark(version_dir: Path) -> None:
    """Some of its rows are in the store, which must not seem to have those of other files, or of none."""
    memory = MemoryStore(DIMS)
    store = FaultStore(memory, lambda verb: UnavailableError("gone") if verb == "insert" else None)
    with pytest.raises(UnavailableError):
        TablePush(version_dir, read_spec(version_dir).tables[0], store).run()
    assert json.loads(memory.note("hashed") or "")["rows"] == 0


@pytest.mark.parametrize("kind", ["redis", "rocksdb"])
@pytest.mark.parametrize("namespace", ["version", "shared"])
def test_rows_of_other_files_are_dropped(
    server: RedisServer, version_dir: Path, tmp_path: Path, kind: str, namespace: str
) -> None:
    """Keys that the new files lack have no row then, and none is erased; in the shared name space they stay."""
    url = f"{server.url}/6" if kind == "redis" else f"rocksdb://{tmp_path}/db"
    bound_to = Namespace.of(version_dir, shared=namespace == "shared")
    with create_store(url, bound_to, DIMS | {"hashed~erased": 1}, writable=True) as store:
        store.insert("hashed", np.array([-5]), np.ones((1, 16), np.float32))
        store.insert("hashed~erased", random_keys(1), np.ones((1, 1), np.float32))
        store.set_note("hashed", push_note("another", 1, 1))
    hotrow("push", version_dir, "--to", url, "--namespace", namespace, "--verify")
    with create_store(url, bound_to, DIMS | {"hashed~erased": 1}) as store:
        is_kept = namespace == "shared"
        assert fetch(store, "hashed", np.array([-5]))[0].tolist() == [is_kept]
        assert store.num_rows("hashed~erased") == is_kept


@pytest.mark.parametrize("begun", ["at the beginning", "at the end"])
def test_two_pushes_of_different_files_at_once_are_an_error(
    version_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: str
) -> None:
    """As of a version that was removed, and its number given to other files. Neither leaves a mixture for complete."""
    monkeypatch.setattr(table_push, "BYTES_PER_BATCH", 1 << 16)
    other_dir = tmp_path / "ctr" / "3"
    write_table(other_dir / TABLES_FOLDER / "hashed", [random_vectors(50, 16)], keys=[random_keys(50)])
    spec = TableSpec("hashed.weight", "hashed", 50, 16)
    manifest.describe_version(ModelSpec((), (), (spec,), ()), other_dir)
    memory = MemoryStore(DIMS)
    push, other = TablePush(version_dir, read_spec(version_dir).tables[0], memory), TablePush(other_dir, spec, memory)
    batches = iter([*["at the beginning"], *["later"] * (NUM_ROWS // 1024 - 1), "at the end"])

    def begin_other(_num_rows: int) -> None:
        if next(batches) == begun:
            other.run()

    with pytest.raises(StoreError, match=r"'hashed.weight': .*another push"):
        push.run(begin_other)
    assert table_source.noted_source(memory, spec) not in (push.source, other.source)
    assert other.run().num_resumed == 0
    assert memory.num_rows("hashed") == 50


def test_a_store_that_is_emptied_during_a_push_is_an_error(version_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Redis that is restarted takes the next rows as if nothing had happened."""
    monkeypatch.setattr(table_push, "BYTES_PER_BATCH", 1 << 16)
    memory, cleared = MemoryStore(DIMS), iter([True])
    push = TablePush(version_dir, read_spec(version_dir).tables[0], memory)
    with pytest.raises(StoreError, match=r"'hashed.weight': .*came back older or empty"):
        push.run(lambda _num_rows: memory.clear("hashed") if next(cleared, False) else None)
    assert push.run().num_resumed == 0
    assert push.verify() == NUM_ROWS


@pytest.mark.parametrize(
    "note",
    [
        "",
        "{}",
        "[]",
        "null",
        "}",
        '{"rows": 5}',
        '{"source": "other", "rows": 5}',
        pytest.param("[" * 100_000, id="nested"),
    ],
)
def test_a_note_of_other_files_is_no_reason_to_skip_rows(version_dir: Path, note: str) -> None:
    """Only a push of exactly the same files is continued."""
    memory = MemoryStore(DIMS)
    memory.set_note("hashed", note)
    push = TablePush(version_dir, read_spec(version_dir).tables[0], memory)
    assert push.run().num_resumed == 0
    assert push.verify() == 5000


@pytest.mark.parametrize(("damage", "message"), [("erase", "is missing"), ("insert", "differs")])
def test_verify_finds_a_single_wrong_row(version_dir: Path, damage: str, message: str) -> None:
    """The error names the key of a row that is missing or different."""
    memory = MemoryStore(DIMS)
    push = TablePush(version_dir, read_spec(version_dir).tables[0], memory)
    push.run()
    key = random_keys(NUM_ROWS - 100)[1234:1235]
    if damage == "erase":
        memory.erase("hashed", key)
    else:
        memory.insert("hashed", key, np.ones((1, 16), np.float32))
    with pytest.raises(StoreError, match=rf"'hashed.weight': the row of key {key[0]} {message}"):
        push.verify()


def test_the_version_is_named_by_its_folders(
    server: RedisServer, version_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path is as good as an absolute one."""
    monkeypatch.chdir(version_dir)
    hotrow("push", ".", "--to", f"{server.url}/4")
    assert "hps_et.ctr@3.hashed" in stored(f"{server.url}/4")


def test_mistakes_are_told_in_one_line(server: RedisServer, version_dir: Path) -> None:
    """An unknown scheme, a host that is down, a store asked for checksums: each says what is wrong."""
    with pytest.raises(ConfigurationError, match="allowed: redis://"):
        hotrow("push", version_dir, "--to", "mysql://host")
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        hotrow("push", version_dir, "--to", "redis://127.0.0.1:1")
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        hotrow("inspect", "redis://127.0.0.1:1")
    with pytest.raises(ConfigurationError, match="push --verify"):
        hotrow("inspect", server.url, "--verify")
    swapped = CliRunner().invoke(cli, ["push", "redis://:secret@host", "--to", str(version_dir)])
    assert swapped.exit_code == 2
    assert "give the store with --to" in swapped.output
    assert "secret" not in swapped.output


def test_names_that_others_gave_are_shown_and_not_obeyed() -> None:
    """Markup and control characters in the name of a hash are text: neither rich nor the terminal acts upon them."""
    with RedisServer() as server, server.client() as client:
        for tag in ("[bold]a[/none]", "b\x1b[31m\x07"):
            client.hset(f"hps_et{{{tag}/p0}}v", b"12345678", bytes(8))
        shown = hotrow("inspect", server.url)
    assert "[bold]a[/none]" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_a_key_that_is_no_hash_is_named() -> None:
    """`hotrow inspect` says what is wrong with which key."""
    with RedisServer() as server, server.client() as client:
        client.set("hps_et{hps_et.ctr@3.user/p2}v", "text")
        with pytest.raises(StoreError, match=r"hps_et\{hps_et\.ctr@3\.user/p2\}v'.*WRONGTYPE"):
            hotrow("inspect", server.url)
