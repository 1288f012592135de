"""Programs and functions that all begin with the same imports: one process does these, and forks for each of them."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

_FORKING = """
import json, os, sys, traceback

def run(program, environment):
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    prepare()
    status = 1
    try:
        exec(program, {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)

for line in sys.stdin:
    (out, child_out), (err, child_err) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(child_out, 1)
        os.dup2(child_err, 2)
        for handle in (out, child_out, err, child_err):
            os.close(handle)
        run(*json.loads(line))
    os.close(child_out)
    os.close(child_err)
    printed = [open(handle).read() for handle in (out, err)]
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), *printed]), flush=True)
"""
"""Reads a program and its environment from each line. Programs print less than a pipe holds."""


FORKED: ForkServerContext = multiprocessing.get_context("forkserver")
"""Starts processes that run a function, from one that has imported what `prepare_forks` names."""


def prepare_forks(*modules: str) -> None:
    """Start that process, which imports the modules that the functions need, if it can; if it runs already, it stays
    as it is.

    Called before a test changes the folder for temporary files, where its socket lies.
    """
    FORKED.set_forkserver_preload([*modules])
    forkserver.ensure_running()


class ForkedPrograms:
    """`imports`: a program that imports, and defines `prepare()`, which each child calls in its own environment.

    A context manager.
    """

    def __init__(self, imports: str, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-B", "-c", imports + _FORKING],
            env={"OPENBLAS_NUM_THREADS": "1", **environment},  # a process of one thread can be forked
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, program: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a program in a process whose environment is this one only; PYTHONPATH has to be in it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([program, dict(environment)]), file=self._process.stdin, flush=True)
        status, out, err = json.loads(self._process.stdout.readline())
        return subprocess.CompletedProcess(program, status, out, err)

    def __enter__(self) -> ForkedPrograms:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process as process:
            process.communicate()
