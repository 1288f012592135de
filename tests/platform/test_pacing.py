"""Rests between pieces of background work."""

import threading

import pytest

from inference_session.platform import pacing


class Clock(threading.Event):
    """A clock that advances with work and waits, and an event that is set at a given time."""

    def __init__(self, ends_at: float = float("inf")) -> None:
        super().__init__()
        self.now = 0.0
        self._ends_at = ends_at

    def monotonic(self) -> float:
        return self.now

    thread_time = monotonic

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.now += max(timeout, 0.0)
        return self.now >= self._ends_at


def do_all(clock: Clock, monkeypatch: pytest.MonkeyPatch, work_s: float, over_s: float = 0.0) -> list[float]:
    """The times at which five pieces, which take this long, began."""
    monkeypatch.setattr(pacing, "time", clock)
    begins = []
    for _ in pacing.paced(range(5), clock, over_s=over_s):
        begins.append(clock.now)
        clock.now += work_s
    return begins


def test_each_piece_is_followed_by_a_rest_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that takes long rests long, within a bound."""
    assert do_all(Clock(), monkeypatch, 0.001) == pytest.approx([0, 0.021, 0.042, 0.063, 0.084])
    assert do_all(Clock(), monkeypatch, 10.0) == pytest.approx([0, 10.2, 20.4, 30.6, 40.8])


def test_pieces_are_spread_over_the_time_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evenly, and no less than the rests that they need."""
    clock = Clock()
    assert do_all(clock, monkeypatch, 0.01, over_s=10.0) == pytest.approx([0, 2, 4, 6, 8])
    assert clock.now == pytest.approx(10)
    assert do_all(Clock(), monkeypatch, 0.001, over_s=0.1) == pytest.approx([0, 0.021, 0.042, 0.063, 0.084])


def test_nothing_is_done_any_more_once_it_is_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is cut short, and no piece comes after it."""
    assert do_all(Clock(ends_at=3.0), monkeypatch, 0.01, over_s=10.0) == pytest.approx([0, 2])
    assert list(pacing.paced([], Clock())) == []
