"""RecentWrites: what was written since a moment, or more, never less."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_session.parameter_server import recent_writes
from inference_session.parameter_server.recent_writes import RecentWrites

KEYS = st.lists(st.integers(-5, 5), max_size=4).map(lambda keys: np.array(keys, np.int64))


@given(writes=st.lists(KEYS, max_size=8), asked=KEYS, since=st.integers(0, 8))
def test_the_keys_of_later_writes_are_written(writes: list[np.ndarray], asked: np.ndarray, since: int) -> None:
    """Exactly the keys of the writes after the moment, as long as all of these are remembered."""
    recent = RecentWrites()
    for keys in writes:
        recent.add(keys)
    since = min(since, recent.moment)

    written = recent.written(asked, since)

    done = [keys for keys in writes if len(keys)]
    later = [key for keys in done[since:] for key in keys.tolist()]
    assert written.tolist() == [key in later for key in asked.tolist()]


def test_writes_of_no_keys_are_not_remembered() -> None:
    """However many there are, nothing is kept of them."""
    recent = RecentWrites()
    for _ in range(1000):
        recent.add(np.empty(0, np.int64))
    assert recent.moment == 0
    assert not recent._keys


def test_all_keys_are_written_since_a_moment_too_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is forgotten counts as written; what is remembered is told exactly."""
    monkeypatch.setattr(recent_writes, "MAX_KEYS", 10)
    recent = RecentWrites()
    moments = []
    for key in range(8):
        moments.append(recent.moment)
        recent.add(np.full(3, key))

    asked = np.arange(9)

    assert recent.written(asked, moments[0]).all()
    assert recent.written(asked, moments[5]).tolist() == [False] * 5 + [True] * 3 + [False]
