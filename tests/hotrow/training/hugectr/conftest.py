"""What all tests of HugeCTR's training API have in common."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Several threads of PyTorch wait for one another where the machine is busy."""
    torch.set_num_threads(1)
