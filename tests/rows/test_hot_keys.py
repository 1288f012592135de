"""Hot keys of one session are in the next one's cache before the first request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_session import InferenceSession
from inference_session.embedding_cache.cpu import CpuEmbeddingCache
from inference_session.platform.state_file import read_state, write_state
from inference_session.rows.hot_keys import read_hot_keys, write_hot_keys
from inference_session.version_directory.verified_files import VerifiedFiles
from tests.testing import small_model
from tests.testing.cache_lookups import look_up
from tests.testing.servers import PATIENCE_S, wait_until
from tests.testing.stored_model import push


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """The small model with a RocksDB, and settings that keep its hot keys."""
    directory = tmp_path / "repository" / "small" / "1"
    small_model.write(directory)
    push(directory, f"rocksdb://{tmp_path}/db")
    return directory, {
        "persistent_store": f"rocksdb://{tmp_path}/db",
        "cache_bytes": 1 << 20,
        "warm_up_s": PATIENCE_S,
        "state_dir": str(tmp_path / "state"),
    }


def ask(session: InferenceSession, seed: int = 0) -> None:
    """Forty samples."""
    session.predict(small_model.random_inputs(40, np.random.default_rng(seed)))


def counts(session: InferenceSession) -> tuple[int, int]:
    """Hits and misses of the cache so far."""
    stats = session.stats()["cache"]
    return stats["hits"], stats["misses"]


def test_the_next_session_starts_with_the_rows_of_the_last(stored: tuple[Path, dict[str, Any]]) -> None:
    """Keys that the first session looked up are hits in the second, whose counters begin at 0."""
    directory, settings = stored
    with InferenceSession.open(directory, **settings) as session:
        assert counts(session) == (0, 0)
        ask(session)
        cold = counts(session)
    with InferenceSession.open(directory, **settings) as session:
        assert counts(session) == (0, 0)
        ask(session)
        warm = counts(session)

    # Keys that no tier has, and row numbers that count from the end, are never cached.
    assert sum(warm) == sum(cold)
    assert warm[0] > cold[0]
    rows = session.spec.table("code").folder
    assert rows in read_hot_keys(Path(settings["state_dir"]) / "small.hot_keys")


def test_another_version_starts_with_the_rows_of_this_one(stored: tuple[Path, dict[str, Any]]) -> None:
    """Versions of a model share the file: the vectors are each version's own."""
    directory, settings = stored
    tables = small_model.write(directory.with_name("2"), seed=2)
    push(directory.with_name("2"), settings["persistent_store"])
    with InferenceSession.open(directory, **settings) as session:
        ask(session)
        session.upkeep.save_hot_keys()
        with InferenceSession.open(directory.with_name("2"), **settings) as new:
            inputs = small_model.random_inputs(40, np.random.default_rng(0))
            found = new.predict(inputs)
            hits = new.stats()["cache"]["tables"]["code"]

    np.testing.assert_allclose(found, small_model.expected(tables, inputs)["OUTPUT0"], rtol=1e-5, atol=1e-5)
    assert hits["misses"] == 0
    assert hits["hits"] == 80


def test_a_running_session_writes_by_itself(stored: tuple[Path, dict[str, Any]]) -> None:
    """A killed process leaves the keys that were hot shortly before."""
    directory, settings = stored
    path = Path(settings["state_dir"]) / "small.hot_keys"
    with InferenceSession.open(directory, **settings) as session:
        ask(session)
        wait_until(path.exists, "the file")

        assert read_hot_keys(path)["code"].size


def test_no_time_for_warming_up_is_no_harm(stored: tuple[Path, dict[str, Any]]) -> None:
    """With warm_up_s 0 the cache starts empty, and everything is answered."""
    directory, settings = stored
    with InferenceSession.open(directory, **settings) as session:
        ask(session)
    with InferenceSession.open(directory, **{**settings, "warm_up_s": 0}) as session:
        ask(session)

        assert counts(session)[1] > 0


@pytest.mark.parametrize("content", [b"", b"nonsense", b"hotrow state 1\n" + bytes(32) + b"not this digest's"])
def test_a_damaged_file_is_ignored_and_said(
    stored: tuple[Path, dict[str, Any]], content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The version opens with any content of the file."""
    directory, settings = stored
    for kind in ("hot_keys", "verified"):
        path = Path(settings["state_dir"]) / f"small.{kind}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    with InferenceSession.open(directory, verify="full", **settings) as session:
        ask(session)

    assert "small.hot_keys is ignored" in caplog.text
    assert read_hot_keys(path.with_suffix(".hot_keys"))["code"].size


def test_a_folder_that_cannot_be_written_is_said_once(
    stored: tuple[Path, dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Serving goes on without."""
    (tmp_path / "file").touch()
    directory, settings = stored
    with InferenceSession.open(directory, **{**settings, "state_dir": str(tmp_path / "file")}) as session:
        for seed in range(3):
            ask(session, seed)
            session.upkeep.save_hot_keys()

    assert caplog.text.count("hot keys could not be saved") == 1


def test_the_hottest_keys_come_first(tmp_path: Path) -> None:
    """A cache gives the keys that were hit before those that were not."""
    with CpuEmbeddingCache({"t": 4}, 1 << 16) as cache:
        keys = np.arange(1, 101)
        cache.insert("t", keys, np.ones((100, 4), np.float32))
        hot: NDArray[np.int64] = np.array([90, 7, 33])
        for _ in range(2):
            look_up(cache, {"t": hot})
        look_up(cache, {"t": np.array([50])})

        hottest = cache.hottest("t")
    assert set(hottest[:3]) == set(hot.tolist())
    assert hottest[3] == 50
    assert sorted(hottest) == sorted(keys)


def test_keys_are_read_as_written(tmp_path: Path) -> None:
    """All tables, in their order, empty ones too."""
    keys = {"a": np.array([5, -3, 2**62]), "b": np.array([], np.int64), "c": np.array([1])}
    write_hot_keys(tmp_path / "keys", keys)
    read = read_hot_keys(tmp_path / "keys")

    assert {name: array.tolist() for name, array in read.items()} == {n: a.tolist() for n, a in keys.items()}
    assert read_hot_keys(tmp_path / "absent") == {}


@pytest.mark.parametrize("content", [b"{}", b"[1]", b"\xff", b'{"tables": [1]}', b'{"tables": {"a": "b"}}'])
def test_a_state_file_of_another_kind_counts_as_none(content: bytes, tmp_path: Path) -> None:
    """It is whole, but of another kind: neither hot keys nor verified files."""
    write_state(tmp_path / "state", content)

    assert read_hot_keys(tmp_path / "state") == {}
    assert not VerifiedFiles(tmp_path / "state").holds((1, 2, 3, 4, 5), "00")


def test_a_state_file_appears_whole(tmp_path: Path) -> None:
    """It is replaced in one step, and nothing else is left in the folder."""
    path = tmp_path / "deep" / "state"
    for content in (b"one", b"two" * 1000):
        write_state(path, content)
        assert read_state(path) == content

    assert list(path.parent.iterdir()) == [path]
