"""Errors do not keep what the frames hold that they passed: requests, connections, sessions, large arrays."""

from __future__ import annotations

import ast
import contextlib
import gc
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from inference_session import InferenceSession, Request
from inference_session.errors import HotrowError, StoreError, UnavailableError, as_thrown, fresh
from inference_session.parameter_server.base import FetchRequest
from inference_session.parameter_server.create import create_store
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.redis.connection import Deadline, RedirectedError
from inference_session.parameter_server.redis.store import RedisStore
from inference_session.parameter_server.redis.topology import ask_one_of
from inference_session.parameter_server.server import ParameterServer
from inference_session.parameter_server.tier import Tier
from inference_session.tables.ordered_updates import OrderedUpdates, SourceProgress
from tests.testing import ROOT, small_model
from tests.testing.kept_errors import no_error_is_kept
from tests.testing.servers import PATIENCE_MS, RedisServer
from tests.testing.statements import statements
from tests.testing.store_contract import DIMS, fetch, keys_of, random_vectors

FOLDERS = ("inference_session", "triton_backend", "hotrow")


def open_store(url: str) -> RedisStore:
    """A store of a Redis."""
    store = create_store(url, Namespace("model", "1"), DIMS, timeout_ms=PATIENCE_MS)
    assert isinstance(store, RedisStore)
    return store


@pytest.fixture(scope="module")
def refusing() -> Iterator[RedisStore]:
    """A store whose user may do next to nothing."""
    with RedisServer() as server, server.client() as client:
        client.execute_command("ACL", "SETUSER", "nobody", "on", ">word", "~hps_et*", "+ping", "+select")
        with open_store(f"redis://nobody:word@127.0.0.1:{server.port}/1") as store:
            yield store


def _apply(store: RedisStore) -> None:
    none = np.empty(0, np.int64)
    progress = [SourceProgress("topic/0", "id", 0, 0, 1)]
    store.apply("user", OrderedUpdates(keys_of(1), random_vectors(1, 4), none, none, none, progress))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda store: fetch(store, "user", keys_of(1)), id="fetch"),
        pytest.param(lambda store: store.insert("user", keys_of(1), random_vectors(1, 4)), id="insert"),
        pytest.param(lambda store: store.erase("user", keys_of(1)), id="erase"),
        pytest.param(_apply, id="apply"),
        pytest.param(lambda store: store.note("user"), id="note"),
        pytest.param(lambda store: store.num_rows("user"), id="num_rows"),
        pytest.param(RedisStore.check, id="check"),
    ],
)
def test_what_redis_refuses_is_not_kept(refusing: RedisStore, call: Callable[[RedisStore], object]) -> None:
    """Each reply that is an error was raised from a variable of a frame to which it then led."""
    with no_error_is_kept(), pytest.raises(StoreError, match="NOPERM"):
        call(refusing)


@pytest.mark.parametrize("durable", [False, True])
def test_what_a_store_that_is_down_raises_is_not_kept(*, durable: bool) -> None:
    """The tier returns its error; the parameter server raises it."""
    with RedisServer() as redis, open_store(redis.url) as store:
        server = ParameterServer([Tier("redis", store, volatile=not durable, durable=durable)])
        calls: list[Callable[[], object]] = [
            lambda: server.insert("user", keys_of(1), random_vectors(1, 4)),
            lambda: server.fetch([FetchRequest("user", keys_of(1), np.zeros((1, 4), np.float32))]),
            server.prepare_write,
        ]
        calls[0]()
        redis.stop(signal.SIGKILL)
        with no_error_is_kept():
            for call in calls:
                with suppress(HotrowError):
                    call()
        server.close()


def test_what_the_first_of_several_servers_raises_is_not_kept() -> None:
    """Sentinels are asked in turn; the next one answers."""

    def ask(address: tuple[str, int], deadline: Deadline) -> str:
        if address == ("a", 1):
            raise UnavailableError("down")
        return "answer"

    with no_error_is_kept():
        assert ask_one_of([("a", 1), ("b", 1)], ask, Deadline(PATIENCE_MS)) == ("answer", ("b", 1))


def test_what_a_request_is_answered_with_is_not_kept(tmp_path: Path) -> None:
    """The error of one request that is malformed, and so its arrays."""
    version = tmp_path / "small" / "1"
    small_model.write(version)
    with InferenceSession.open(version) as session, no_error_is_kept():
        session.run_many([Request({"other": np.zeros(3)}), Request({})])
        with pytest.raises(HotrowError):
            session.run({"other": np.zeros(3)})


def test_a_fresh_error_is_the_same() -> None:
    """With what only errors of its type have."""
    error = fresh(RedirectedError("moved", ("host", 1), is_ask=True))

    assert (str(error), error.address, error.is_ask) == ("moved", ("host", 1), True)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        raise StoreError("translated") from as_thrown(error)


@contextlib.contextmanager
def _within_another() -> Iterator[None]:
    with _translated():
        yield


class _Held:
    """What a frame works with."""


@pytest.mark.parametrize("context", [_translated, _within_another])
def test_a_translated_error_does_not_keep_frames(
    context: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    """From Python 3.12 on, its cause would lead to itself by way of the context manager's generator."""
    found = []

    def fail() -> None:
        held = _Held()
        found.append(weakref.ref(held))
        with context():
            raise KeyError

    gc.disable()
    try:
        with pytest.raises(StoreError):
            fail()
        assert found[0]() is None
    finally:
        gc.enable()


def _translators(path: Path) -> Iterator[ast.ExceptHandler]:
    """What a file's generators with `@contextmanager` do with errors of their blocks."""
    for function in (node for node in statements(path) if isinstance(node, ast.FunctionDef)):
        if "contextmanager" in "".join(map(ast.unparse, function.decorator_list)):
            for tried in (node for node in ast.walk(function) if isinstance(node, ast.Try)):
                if any(isinstance(part, ast.Yield) for node in tried.body for part in ast.walk(node)):
                    yield from tried.handlers


def test_context_managers_translate_errors_so() -> None:
    """Wherever a generator raises another error for one of its block."""
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for handler in _translators(path):
            is_another = any(isinstance(node, ast.Raise) and node.exc for node in ast.walk(handler))
            assert not is_another or "as_thrown(" in ast.unparse(handler), f"{path}:{handler.lineno}"
