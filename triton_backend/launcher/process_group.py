"""A child process and its descendants: a process group that is ended as a whole."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time

_TIMEOUT_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of processes that our children start and leave behind.

    Some process has to wait for them, or they stay zombies. In a container it is `hotrow serve`, process 1.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_group(leader: subprocess.Popen[bytes]) -> None:
    """Kill the rest of the group that a child leads, and wait until it is gone."""
    deadline = time.monotonic() + _TIMEOUT_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(leader.pid, signal.SIGKILL)
            reap_orphans(leader)
            time.sleep(0.01)
    leader.wait()


def reap_orphans(leader: subprocess.Popen[bytes]) -> None:
    """Reap our children in the group that have ended. The leader is reaped through `leader`."""
    leader.poll()
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_PGID, leader.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == leader.pid:
                return
            os.waitid(os.P_PID, ended.si_pid, os.WEXITED | os.WNOHANG)
