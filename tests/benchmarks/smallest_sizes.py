"""Each benchmark runs on real components, with sizes and rounds so small that its figures say nothing.

Benchmarks check the answers that they time. `make bench-smallest` runs these tests, and `make test` does not: they take
minutes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from tests.testing import ROOT
from tests.testing.programs import PROGRAM_S

FOLDER = ROOT / "benchmarks"
RUN_WITH_CONSTANTS = """
import importlib, json, sys
_, sys.path[0], name, constants, *options = sys.argv
sys.argv = [f"{name}.py", *options]
benchmark = importlib.import_module(name)
for constant, value in json.loads(constants).items():
    assert hasattr(benchmark, constant), constant
    setattr(benchmark, constant, value)
benchmark.main()
"""


class Smallest(NamedTuple):
    """How a benchmark runs with its smallest sizes."""

    name: str
    options: str
    printed: str
    """A part of the last lines that it prints."""
    constants: Mapping[str, Any] = MappingProxyType({})
    """Of its module, where an option does not set them."""
    needs: str = ""
    """The marker of tests that need the same."""


SMALLEST = (
    Smallest("cache", "", "goal >= +0.02", {
        "REPETITIONS": 1, "COMPARED": [[2, 1000, 4, 64]], "NUM_ROWS_WRITTEN": 40_000, "NUM_TRACED_KEYS": 1000,
    }),
    Smallest("concat_inputs", "--quick", "1 x 1024", {"ROWS": 100, "NUM_BATCHES": 1, "FEW_SAMPLES": 1}),
    Smallest("context", "--kind two_towers --rows 1000 --rounds 1 --triton", "C2: mean"),
    Smallest("freshness", "--every 100 --limit 200", "published to served, 2 times"),
    Smallest("front", "", "http  direct", {"NUM_ROUNDS": 1, "NUM_REQUESTS": 2}),
    Smallest("hdfs", "--mib 1 --repeats 1", "hotrow copy"),
    Smallest("hugectr", "--quick", "Triton,    64 samples"),
    Smallest("in_process", "--quick", "modulo 1 x 1024", {"NUM_ROWS_QUICK": 2600, "ROUND_S": 1e-4, "KEYS": 1}),
    Smallest("instances", "--counts 1 --rounds 1 --seconds 0.1", "| packed | 1 |", {
        "ROWS_PER_TABLE": 100, "MODELS": {"packed": ["hotrow", "plain"]},
    }),
    Smallest("lookup", "", "one call of row numbers", {
        "NUM_ROWS": 8000, "FUSED": [[16, 100]], "KEYS_PER_CALL": 1024, "REPETITIONS": 1,
    }),
    Smallest("opening", "--gib 0.001", "private memory taken", {"ROUNDS": 1}),
    Smallest("quantized", "", "int8", {"NUM_ROWS": 10_000, "CALLS": 1, "REPETITIONS": 1}),
    Smallest("several_gpus_updates", "--device cpu --swaps 1 --rate 100 --rows 100 --seconds 1", "M5 "),
    Smallest("stored_rows", "", "refreshing / nothing", {
        "NUM_ROWS": 4000, "NUM_HOT": 2000, "ROUNDS": 1, "CLIENTS": [2], "CLIENTS_ROUNDS": 1, "CLIENTS_S": 0.2,
        "WINDOWS": 4,
    }),
    Smallest("stores", "", "the same, default settings", {"NUM_ROWS": 20_000, "REPETITIONS": 1}),
    Smallest("swap", "--swaps 1 --clients 1 --rows 2600 --steady 0.1", "load  "),
    Smallest("triton", "--quick --only http/packed", "requests/s at 16 beside", {"NUM_ROWS_QUICK": 2600}),
    Smallest("updates", "--quick --tiers RocksDB", "requests p99", {"NUM_ROWS_QUICK": 1000, "ROUNDS": 1}),
    Smallest("benchmarks.hugectr_training", "--batch-size 64 --rounds 1 --steps 1", "apart: ", {
        "MIN_RECORDS": 1000,
    }, needs="training"),
    Smallest("training", "T1", "4 ranks: answers differ", needs="training"),
    Smallest("gpu_cache", "--quick --only G2,G3", "rows from there", needs="gpu"),
    Smallest("gpu_profile", "--rows 65536", "registers", needs="gpu"),
    Smallest("gpu_stored_rows", "--samples 8 --rows 1000", "10.0% missing", needs="gpu"),
    Smallest("gpu_triton", "--rows 1000 --rounds 1 --seconds 0.1", "of null, goal", needs="gpu"),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "smallest",
    [
        pytest.param(each, id=each.name, marks=[getattr(pytest.mark, each.needs)] if each.needs else [])
        for each in SMALLEST
    ],
)
def test_a_benchmark_runs(smallest: Smallest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = [str(FOLDER / f"{smallest.name}.py")]
    if smallest.constants:
        root = ROOT if "." in smallest.name else FOLDER
        run = ["-c", RUN_WITH_CONSTANTS, str(root), smallest.name, json.dumps(dict(smallest.constants))]

    command = [sys.executable, *run, *smallest.options.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S, check=False)

    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr  # of a thread
    assert smallest.printed in done.stdout, done.stdout


OF_SEVERAL_GPUS = {"several_gpus_updates"}
"""Measures GPUs; a processor stands in for them only in its smallest size."""


def test_make_bench_runs_each_benchmark_of_the_processor() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.partition("\nbench: ")[2].partition("\n\n")[0]
    of_processor = {smallest.name for smallest in SMALLEST if not smallest.needs}
    assert of_processor - OF_SEVERAL_GPUS == set(re.findall(r"benchmarks/(\w+)\.py", recipe))
