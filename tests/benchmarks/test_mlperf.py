"""The MLPerf benchmark in its quick mode: it checks its own answers, and says how reliable its figures are."""

from __future__ import annotations

import re
import sys

from tests.testing import ROOT
from tests.testing.programs import run_program

DISCLAIMER = "unofficial, not verified by MLCommons, random weights, no accuracy run"
RATE = r"[\d,.]+ samples/s +[\d,]+ pairs/s +p99 +[\d.]+ ms .*of [\d,]+ samples/s \(.+MLPerf Inference v5.1"


def test_the_quick_run_checks_answers_and_prints_rates_beside_the_published_one() -> None:
    script = str(ROOT / "benchmarks" / "mlperf.py")
    options = ["--quick", "--seconds", "0.1", "--samples", "4", "--scenario", "Offline"]

    printed = run_program(sys.executable, script, *options)

    lines = printed.splitlines()
    assert DISCLAIMER in lines[0]
    assert DISCLAIMER in lines[-1]
    for engine in ("hotrow", "plain ONNX Runtime"):
        assert re.search(rf"{engine}: answers within [\d.e-]+ of the oracle", printed)
        assert re.search(rf"^Offline +{engine} +{RATE}", printed, re.MULTILINE)
