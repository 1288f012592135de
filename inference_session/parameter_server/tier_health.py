"""Whether a tier is in use: its failures, its outages, and when one that is out is tried again."""

from __future__ import annotations

import logging
import math
import threading
import time

from inference_session.errors import HotrowError, UnavailableError
from inference_session.parameter_server.base import LateError
from inference_session.platform.log_records import warn

STEADY_S = 10.0
"""A tier that was back for less than this is unsteady, and left out for longer each time."""
MIN_RETRY_PAUSE_S, MAX_RETRY_PAUSE_S = 0.5, 16.0
"""The shortest and the longest that an unsteady tier is left out before it is tried again."""
MAX_TIMES_LATE = 3
"""After this many late calls in a row, a tier is left out although it answers checks."""
MAX_REPORTED = 100
"""Different errors that are logged; a store that keeps producing new ones does not fill the log."""

_log = logging.getLogger(__name__)


class TierHealth:
    """How a tier has been doing. Thread-safe. It calls no store: who calls one reports here how that went."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.failure: str | None = None
        """Why the tier is left out at the moment; None: it is in use."""
        self.last_error = ""
        """The message of its last failure."""
        self.is_suspect = False
        """It refused a call. Whether it refuses all, as after a change of passwords, must be checked."""
        self.is_returning = False
        """It answers again, and is dropping rows whose newer versions it missed."""
        self.failures = 0
        self.outages = 0
        """Times that the tier was left out, the present one included."""
        self.back_since = -math.inf
        """When the tier last came back."""
        self.retry_pause_s = 0.0
        self.retry_at = 0.0
        """When it is tried again."""
        self._times_late = 0
        """Late calls in a row."""
        self._late_at = -math.inf
        """When that was last counted."""
        self._reported: set[str] = set()
        self._lock = threading.Lock()

    def note_answer(self) -> None:
        """A fetch was answered: the late calls before it were no outage."""
        if self._times_late:
            with self._lock:
                self._times_late = 0

    def note_late(self, began: float) -> bool:
        """Count a late call that began then; returns whether the tier is late repeatedly, and so down.

        Calls that were late at the same time count once.
        """
        with self._lock:
            if began > self._late_at:
                self._times_late += 1
                self._late_at = time.monotonic()
            return self._times_late >= MAX_TIMES_LATE

    def note_refused_write(self) -> None:
        """Count the failure of a write that the tier need not take."""
        with self._lock:
            self.failures += 1

    def report(self, error: HotrowError, *, leave_out: bool | None = None) -> None:
        """Count a failure and log it once; a tier that is down is left out from now on. `leave_out`: whether it is;
        None: by the error.
        """
        is_out = says_down(error) if leave_out is None else leave_out
        with self._lock:
            self.failures += 1
            self.last_error = str(error)
            self.is_suspect = not is_out
            is_new = self.failure is None if is_out else self._is_new(str(error))
            if is_out and is_new:
                self.begin_outage(str(error))
        if is_new:
            warn(_log, "tier %s of the parameter server failed: %s", self._name, error)

    def _is_new(self, failure: str) -> bool:
        """Whether it is still unreported. Must be called while holding `_lock`."""
        if failure in self._reported or len(self._reported) >= MAX_REPORTED:
            return False
        self._reported.add(failure)
        return True

    def begin_outage(self, failure: str) -> None:
        """Leave the tier out. One that answers checks but not requests must not make these wait repeatedly."""
        now = time.monotonic()
        self.failure = failure
        self.outages += 1
        unsteady = now - self.back_since < STEADY_S
        self.retry_pause_s = min(max(MIN_RETRY_PAUSE_S, 2 * self.retry_pause_s), MAX_RETRY_PAUSE_S) if unsteady else 0.0
        self.retry_at = now + self.retry_pause_s

    def refuse(self, error: HotrowError) -> None:
        """Leave the tier out, though it answers, and log why once."""
        if self.failure == str(error):
            return
        with self._lock:
            self.failures += 1
            if self.failure is None:
                self.begin_outage(str(error))
            self.failure = self.last_error = str(error)
        warn(_log, "tier %s of the parameter server is left out: %s", self._name, error)

    def end_outage(self) -> None:
        """Use the tier again."""
        # Logged before a call can find it failing again, so that log lines are in order.
        # A warning, like the one it resolves: a reader who saw that one must see this one too.
        warn(_log, "tier %s of the parameter server answers again", self._name)
        with self._lock:
            self.failure, self.is_returning, self.back_since = None, False, time.monotonic()


def says_down(error: HotrowError) -> bool:
    """Whether a tier with this error is down, unless a check tells otherwise; a late call is no outage."""
    return isinstance(error, UnavailableError) and not isinstance(error, LateError)
