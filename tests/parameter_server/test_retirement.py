"""Retired versions are removed from the volatile store, unless their rows would be lost."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

import pytest

from inference_session import InferenceSession
from inference_session.parameter_server import retirement
from inference_session.parameter_server.create import create_store
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.retirement import retired_versions
from tests.testing import small_model
from tests.testing.servers import PATIENCE_MS, RedisServer, wait_until
from tests.testing.stored_model import DIMS, push


@pytest.mark.parametrize(
    ("versions", "num_kept", "retired"),
    [
        ("1 2 3 4 5", 2, "1 2"),
        ("1 2 3 4 5", 1, "1 2 3"),
        ("1 9 10", 2, ""),
        ("4", 2, ""),
        ("2 3 10 draft", 1, "2 3"),
        ("", 3, ""),
    ],
)
def test_the_newest_up_to_the_current_one_are_kept(versions: str, num_kept: int, retired: str) -> None:
    """Of versions before 4, by number; later ones and other names are never removed."""
    assert retired_versions(versions.split(), "4", num_kept) == retired.split()


def stored_versions(url: str) -> Collection[str]:
    with create_store(url, Namespace("small", "1"), DIMS, timeout_ms=PATIENCE_MS) as store:
        return store.versions()


def test_opening_a_version_retires_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis keeps the newest two, later versions, and rows that no other tier has; the tiers below keep theirs."""
    monkeypatch.setattr(retirement, "DELAY_S", 0.05)
    repository, database = tmp_path / "small", f"rocksdb://{tmp_path}/db"
    with RedisServer() as server:
        for version in ("1", "2", "3", "4", "5", "6"):
            small_model.write(repository / version)
            push(repository / version, server.url)
        push(repository / "1", database)
        push(repository / "5", database)
        for version in ("1", "2", "5"):
            shutil.rmtree(repository / version / "tables")
        shutil.rmtree(repository / "3")
        stores = {"volatile_store": server.url, "persistent_store": database, "store_timeout_ms": PATIENCE_MS}

        with InferenceSession.open(repository / "5", keep_versions=0, **stores):
            assert len(stored_versions(server.url)) == 6
        with InferenceSession.open(repository / "5", **stores) as session:
            wait_until(lambda: len(stored_versions(server.url)) == 4, "old versions to be removed")
            session.lookup("code", [1])

        assert stored_versions(server.url) == {"2", "4", "5", "6"}  # 1 is in the database, 3 was removed
        assert stored_versions(database) == {"1", "5"}
