"""The statistics and log of a stream."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict

import pytest

from inference_session.update_stream.stream_stats import MAX_SET_ASIDE, StreamStats

LOGGER = "inference_session.update_stream.stream_stats"


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Its log lines; threads of other streams may also write to the log."""
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


@pytest.fixture
def stats() -> StreamStats:
    """Statistics of a stream that has done nothing yet."""
    return StreamStats("ctr")


def test_a_failure_is_logged_when_it_begins_and_ends(stats: StreamStats, caplog: pytest.LogCaptureFixture) -> None:
    """All failures are counted, and the last one is reported while it lasts."""
    with caplog.at_level(logging.INFO, LOGGER):
        stats.fail("no broker")
        stats.fail("still none")
        during = asdict(stats.snapshot())
        stats.recover()
        stats.recover()

    assert (during["failures"], during["failure"]) == (2, "still none")
    assert asdict(stats.snapshot())["failure"] is None
    assert said(caplog) == [
        "the update stream of model 'ctr' is waiting: no broker",
        "the update stream of model 'ctr' continues",
    ]


def test_refusals_are_logged_once_per_reason(stats: StreamStats, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the log nor the kept faults grow with the number of a producer's faults."""
    for i in range(2 * MAX_SET_ASIDE):
        stats.refuse("no_key", f"message {i}")
    stats.refuse("truncated", "another")

    told = asdict(stats.snapshot())
    assert told["rejected"]["no_key"] == 2 * MAX_SET_ASIDE
    assert len(told["set_aside"]) == MAX_SET_ASIDE
    assert told["set_aside"][-1] == "truncated: another"
    assert len(said(caplog)) == 2


def test_staleness_grows_while_messages_wait(stats: StreamStats) -> None:
    """A message that is being applied counts by its age now, an applied one by its age at that time."""
    stats.begin(time.time() - 1000)
    pending = asdict(stats.snapshot())["staleness_s"]
    stats.end(5)
    applied = asdict(stats.snapshot())

    assert pending > 500
    assert applied["staleness_s"] > 500
    assert applied["staleness_s"] == asdict(stats.snapshot())["staleness_s"]
    assert applied["messages"] == 5


def test_a_clock_that_went_back_makes_no_negative_age(stats: StreamStats) -> None:
    """Publishers have clocks of their own."""
    stats.begin(time.time() + 1e6)
    stats.end(1)

    assert asdict(stats.snapshot())["staleness_s"] == 0
