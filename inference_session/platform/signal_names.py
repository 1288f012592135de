"""What messages call signals."""

from __future__ import annotations

import signal
from contextlib import suppress


def signal_name(number: int) -> str:
    """`SIGKILL`; `signal 40` of one that has no name."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
