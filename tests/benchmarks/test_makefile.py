"""`make bench` runs all benchmarks of the processor."""

from __future__ import annotations

import re

from tests.benchmarks.smallest_sizes import SMALLEST
from tests.testing import ROOT

OF_SEVERAL_GPUS = {"several_gpus_updates"}
"""Measures GPUs; a processor stands in for them only in its smallest size."""


def test_make_bench_runs_each_benchmark_of_the_processor() -> None:
    """Those that `make bench-smallest` runs without a GPU or torch."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.partition("\nbench: ")[2].partition("\n\n")[0]
    runs = set(re.findall(r"benchmarks/(\w+)\.py", recipe))
    assert {smallest.name for smallest in SMALLEST if not smallest.needs} - OF_SEVERAL_GPUS == runs
