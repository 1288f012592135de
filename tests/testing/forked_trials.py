"""Networks that tests import and publish are tried in forks of one process, which has imported ONNX Runtime."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence

from tests.testing import ROOT
from tests.testing.forked import ForkedPrograms

_IMPORTS = """
import os
from inference_session.dense_engine.trial import open_all

def prepare():
    os.chdir("/")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
"""


class ForkedTrials(contextlib.ExitStack):
    """That process, which starts at the first trial: many tests make none. A context manager."""

    def __init__(self) -> None:
        super().__init__()
        self._programs: ForkedPrograms | None = None
        self._lock = threading.Lock()

    def open_apart(self, paths: Sequence[str]) -> tuple[int, int]:
        """What `inference_session.dense_engine.trial` does in a new process, which takes 0.2 s of processor time."""
        with self._lock:
            if self._programs is None:
                self._programs = self.enter_context(ForkedPrograms(_IMPORTS, _environment()))
            done = self._programs.run(f"open_all({[*paths]!r})", _environment())
        return done.returncode, len(done.stdout)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}
