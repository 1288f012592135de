"""The benchmark of the CPU cache runs: records of kernels change, and benchmarks fill some themselves."""

import numpy as np
import pytest

from tests.testing import ROOT
from tests.testing.programs import script_module

cache = script_module(ROOT / "benchmarks" / "cache.py")


def test_the_cache_is_compared_with_files(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups in files and in the cache give the same rows, and a line compares their times."""
    monkeypatch.setattr(cache, "REPETITIONS", 1)
    cache.compare_with_files(2, 1000, 4, 64)
    assert " 2 tables x    64 keys" in capsys.readouterr().out


def test_hit_rates_are_compared_with_lru(capsys: pytest.CaptureFixture[str]) -> None:
    """A trace is replayed in caches of three sizes."""
    cache.show_hit_rates(np.arange(100) % 10)
    assert capsys.readouterr().out.count("LRU 0.9000") == 3
