"""The current GPU of a thread while Python collects garbage, with a driver that notes what it is asked.

test_several_gpus.py has two GPUs.
"""

from __future__ import annotations

import subprocess
import sys

_BEGIN = """
import gc, os, sys, types

class Driver:
    def __init__(self):
        self.context, self.process = 1, os.getpid()

    def ctxGetCurrent(self):
        if os.getpid() != self.process:
            raise RuntimeError("CUDA_ERROR_NOT_INITIALIZED")
        return self.context

    def ctxSetCurrent(self, context):
        self.context = context

driver = Driver()
for name in ("cupy_backends", "cupy_backends.cuda", "cupy_backends.cuda.api"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["cupy_backends.cuda.api"].driver = driver
from inference_session.device.current_context import keep_during_collections

class Garbage:
    def __init__(self):
        self.itself = self

    def __del__(self):
        driver.context = 2

gc.disable()
keep_during_collections()
keep_during_collections()
Garbage()
"""


def _run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", _BEGIN + script], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def test_a_collection_keeps_the_context() -> None:
    """A destructor in it changed the context."""
    assert _run("gc.collect(); print(driver.context)") == "1\n"


def test_a_forked_process_does_not_ask_the_driver() -> None:
    """It would answer with an error, which Python prints at each collection."""
    forked = """
if os.fork():
    print(os.waitstatus_to_exitcode(os.wait()[1]))
else:
    gc.collect()
    os._exit(driver.context)
"""
    assert _run(forked) == "2\n"
