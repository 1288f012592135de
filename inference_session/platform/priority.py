"""Threads of lower priority."""

from __future__ import annotations

import os
import threading

_NICENESS = 5
"""A third of the weight of others: where the processor is saturated, loading at 10 has been seen to take a minute."""


def yield_to_others() -> None:
    """Lower the priority of the calling thread permanently: on Linux each has its own, and may not raise it again."""
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < _NICENESS:
        os.setpriority(os.PRIO_PROCESS, thread, _NICENESS)
