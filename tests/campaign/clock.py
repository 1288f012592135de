"""Makes the wall clock of this process, or of Python processes that it starts, jump. Monotonic clocks do not jump."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

_INJECTED = """\
import os, time

def _off_s():
    with open(os.environ["CAMPAIGN_CLOCK"], encoding="ascii") as file:
        return int(file.read())

_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + _off_s()
time.time_ns = lambda: _time_ns() + _off_s() * 10**9
"""
Number = TypeVar("Number", int, float)


class Clock:
    """A context manager. Python processes started within it import a module that makes them follow this clock."""

    def __init__(self, folder: Path, *, is_own: bool) -> None:
        """`is_own`: whether this process follows it, too; a gRPC client fails on a clock that differs from gRPC's."""
        self._folder = folder
        self._off_s = 0
        path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        self._patches: list[Any] = [
            mock.patch.dict(os.environ, {"PYTHONPATH": path, "CAMPAIGN_CLOCK": str(folder / "off_s")})
        ]
        if is_own:
            self._patches += [
                mock.patch("time.time", _ahead(time.time, lambda: self._off_s)),
                mock.patch("time.time_ns", _ahead(time.time_ns, lambda: self._off_s * 10**9)),
            ]

    def set(self, off_s: int) -> None:
        """Set how many seconds it is ahead of the true time."""
        self._off_s = off_s
        written = self._folder / "written"
        written.write_text(str(off_s), encoding="ascii")
        written.replace(self._folder / "off_s")

    def __enter__(self) -> Clock:
        self._folder.mkdir()
        (self._folder / "sitecustomize.py").write_text(_INJECTED, encoding="ascii")
        self.set(0)
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


def _ahead(clock: Callable[[], Number], ahead: Callable[[], Number]) -> Callable[[], Number]:
    return lambda: clock() + ahead()
