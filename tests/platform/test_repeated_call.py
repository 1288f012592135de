"""Background work at intervals."""

import gc
import logging
import threading
import time
import weakref
from unittest.mock import Mock

import pytest

from inference_session.platform import repeated_call
from inference_session.platform.repeated_call import RepeatedCall
from tests.testing.servers import PATIENCE_S, wait_until


def test_calls_go_on_until_closed() -> None:
    """A call is made again and again; after `close`, which may be called twice, no more."""
    called = threading.Semaphore(0)
    calls = RepeatedCall("calls", called.release, 0.001, failure="failed")
    for _ in range(3):
        assert called.acquire(timeout=PATIENCE_S)
    calls.close()
    calls.close()
    assert not calls._thread.is_alive()


def test_its_owner_needs_no_garbage_collector() -> None:
    """Once it is closed: a session that holds it frees its memory with its last reference."""

    class Owner:
        def __init__(self) -> None:
            self.calls = RepeatedCall("calls", self.work, 60.0, failure="failed")

        def work(self) -> None:
            pass

    gc.disable()
    try:
        owner = Owner()
        owner.calls.close()
        gone = weakref.ref(owner)
        del owner
        assert gone() is None
    finally:
        gc.enable()


def test_an_error_is_logged_once_and_calls_go_on(caplog: pytest.LogCaptureFixture) -> None:
    """Calls that fail one after the other are logged once, and again if one fails after a success."""
    outcomes = [ValueError(), ValueError(), None, ValueError()]

    def call() -> bool | None:
        if not outcomes:
            return False
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome
        return None

    with caplog.at_level(logging.ERROR, repeated_call.__name__):
        calls = RepeatedCall("calls", call, 0.001, failure="it failed")
        wait_until(lambda: not calls._thread.is_alive(), "the call that returns False to be the last")
    assert [record.message for record in caplog.records] == ["it failed", "it failed"]


def test_a_call_may_close_itself() -> None:
    """`close` in a call does not wait for the call."""
    found: list[RepeatedCall] = []
    made = threading.Event()

    def call() -> None:
        assert made.wait(PATIENCE_S)
        found[0].close()

    found.append(RepeatedCall("calls", call, 0.001, failure="failed"))
    made.set()
    wait_until(lambda: not found[0]._thread.is_alive(), "the thread to end")


def test_long_calls_are_followed_by_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls take at most `max_load` of a core's time."""
    pauses: list[float] = []

    class Closing(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            return len(pauses) > 2

    calls = RepeatedCall("calls", lambda: None, 1.0, max_load=0.5, failure="failed")
    calls.close()
    calls.closing = Closing()
    monkeypatch.setattr(time, "thread_time", iter([0.0, 0.1, 0.1, 2.1]).__next__)
    calls._work(lambda: None)
    assert pauses == [1.0, 1.0, 4.0]


def test_an_error_that_cannot_be_logged_ends_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a handler of the application raises."""
    monkeypatch.setattr(repeated_call._log, "error", Mock(side_effect=OSError("no log server")))
    outcomes = [True, True, False]

    def call() -> bool:
        if outcomes.pop(0):
            raise ValueError
        return False

    calls = RepeatedCall("calls", call, 0.001, failure="it failed")
    wait_until(lambda: not outcomes, "all calls")
    calls.close()


def test_an_interrupted_start_leaves_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, while the new thread begins: nobody has anything to close."""
    start, started = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        RepeatedCall("calls", lambda: None, PATIENCE_S, failure="failed")

    started[0].join(PATIENCE_S / 2)
    assert not started[0].is_alive()
