"""Ctrl-C, and other exceptions that a signal handler raises, such as a time limit's: a session goes on after them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from inference_session import InferenceSession
from inference_session.embedding_cache.cpu import CpuEmbeddingCache
from inference_session.rows.updated import UpdatedRowWriter
from tests.testing import small_model
from tests.testing.interrupts import interrupted
from tests.testing.servers import PATIENCE_S
from tests.testing.stored_model import assert_answers, url_of, write_stored

_CALLS_APART = 7
"""An interrupt at every call takes half a minute."""


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, small_model.Arrays]:
    """The small model, its rows in a RocksDB, and its tables."""
    return write_stored(tmp_path_factory.mktemp("stored"))


@pytest.fixture
def files_session(tmp_path: Path) -> Iterator[tuple[InferenceSession, small_model.Arrays]]:
    tables = small_model.write(tmp_path / "1")
    with InferenceSession.open(tmp_path / "1") as opened:
        yield opened, tables


@pytest.fixture
def stored_session(
    version: tuple[Path, small_model.Arrays],
) -> Iterator[tuple[InferenceSession, small_model.Arrays]]:
    """The cache has room for few rows: most requests write to it."""
    with InferenceSession.open(version[0], persistent_store=url_of(version[0]), cache_bytes=2000) as opened:
        yield opened, version[1]


@pytest.mark.parametrize("kind", ["files_session", "stored_session"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_requests_after_an_interrupt_are_answered(kind: str, request: pytest.FixtureRequest) -> None:
    """In the same thread, of the same shape, and in another one: no request waits for one that will not end."""
    session, tables = request.getfixturevalue(kind)
    rng = np.random.default_rng(0)

    def inputs(number: int) -> dict[str, Any]:
        return small_model.random_inputs(number, np.random.default_rng(number))

    with ThreadPoolExecutor(1) as other:
        for number in interrupted(lambda number: session.run(inputs(number)), _CALLS_APART):
            assert_answers(session.run(inputs(number)), small_model.expected(tables, inputs(number)))
            keys = rng.permutation(tables["hashed/key"])
            found = other.submit(session.lookup, "hashed", keys).result(PATIENCE_S)
            rows = dict(zip(tables["hashed/key"].tolist(), tables["hashed"], strict=True))
            np.testing.assert_array_equal(found, [rows[key] for key in keys.tolist()])


def test_no_writer_waits_for_a_look_up_that_was_interrupted() -> None:
    """Wherever that was: a look-up must leave the set of those under way."""
    cache = CpuEmbeddingCache({"t": 2}, 1000)
    updated = UpdatedRowWriter([])
    for _ in interrupted(lambda _: cache.read(len)):
        assert not cache.readers.includes_this_thread
    for _ in interrupted(lambda _: updated.read(lambda _: None)):
        assert not updated._readers.includes_this_thread


def test_an_interrupted_close_is_made_good_by_the_next(version: tuple[Path, small_model.Arrays]) -> None:
    """Its threads and stores stayed open until the process ended."""
    before = {*threading.enumerate()}
    session = InferenceSession.open(version[0], persistent_store=url_of(version[0]), refresh_interval_s=60)
    with patch.object(session.rows.writer, "close", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        session.close()

    session.close()

    assert {*threading.enumerate()} <= before


@pytest.mark.parametrize("step", ["rows.stored_writer.RepeatedCall", "execution.model.create_staging_pool"])
def test_what_an_interrupted_open_has_opened_is_closed(version: tuple[Path, small_model.Arrays], step: str) -> None:
    """The parameter server stayed open until the process ended."""
    before, url = {*threading.enumerate()}, url_of(version[0])
    interrupt = patch(f"inference_session.{step}", side_effect=KeyboardInterrupt)

    with interrupt, pytest.raises(KeyboardInterrupt):
        InferenceSession.open(version[0], persistent_store=url, refresh_interval_s=60)

    assert {*threading.enumerate()} <= before
