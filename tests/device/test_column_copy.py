"""What a GPU copies into columns of a matrix, with CUDA's copies made in host memory."""

from __future__ import annotations

import subprocess
import sys

from tests.testing import ROOT

_PROGRAM = """
from types import SimpleNamespace
import numpy as np
from tests.testing.fake_cuda import FakeGpu, install
install([FakeGpu("H200", 1, 1)])
from inference_session.device.cuda import CudaDevice

class Array(np.ndarray):
    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)

device = SimpleNamespace(stream=SimpleNamespace(ptr=0))
for dtype in ("float32", "float16"):
    matrix, source = np.full((3, 7), 9, dtype).view(Array), np.zeros((3, 2), dtype).view(Array)
    copy, expected = CudaDevice.column_copy(device, source, matrix, 4), matrix.copy()
    for first in (0, 10):
        source[...] = np.arange(first, first + 6).reshape(3, 2)
        copy()
        expected[:, 4:6] = source
        assert (matrix == expected).all(), matrix
    CudaDevice.column_copy(device, source[:0], matrix[:0], 4)()
"""


def test_vectors_are_copied_into_columns() -> None:
    """Those that were pooled apart, each time anew, and nothing else; of no samples, nothing."""
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True, cwd=ROOT)
