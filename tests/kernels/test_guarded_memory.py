"""Compiled code reads and writes nothing next to the arrays that it is given."""

from __future__ import annotations

import subprocess
import sys

from tests.testing import ROOT


def test_look_ups_read_and_write_within_arrays() -> None:
    """Each array ends, or begins, where a page does, next to one that ends the process when it is touched.

    The compiler once dropped the test between two keys of a loop: it read one behind the last where their number is
    odd.
    """
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.kernels.guarded_look_ups"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
