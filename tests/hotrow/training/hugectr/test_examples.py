"""The examples, each as a user calls it, on generated rows in the original formats: trained, imported and served."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.testing import ROOT

pytestmark = [pytest.mark.training, pytest.mark.triton]

NUM_ROWS = 1600
"""Of which a fifth evaluates: more than a batch."""
RANDOM = np.random.default_rng(21)


def criteo(folder: Path) -> list[str]:
    """Whether one clicks follows from the first category."""
    lines = []
    for _ in range(NUM_ROWS):
        counts = [str(number) if number else "" for number in RANDOM.integers(0, 50, 13)]
        categories = [f"{number:08x}" for number in RANDOM.integers(0, 8, 26)]
        lines.append("\t".join([str(int(categories[0] < "00000004")), *counts, *categories]))
    (folder / "train.txt").write_text("\n".join(lines) + "\n")
    return ["--criteo", str(folder)]


def rees46(folder: Path) -> list[str]:
    """Whether one buys follows from the product."""
    lines = ["event_time,event_type,product_id,category_id,category_code,brand,price,user_id,user_session"]
    for number in range(NUM_ROWS):
        product = int(RANDOM.integers(0, 8))
        event = "purchase" if product < 4 else "view"
        time = f"2019-10-01 {number // 100 % 24:02}:00:00 UTC"
        lines.append(f"{time},{event},{product},{product % 3},,brand{product % 2},{product}.5,{number % 50},s{number}")
    (folder / "events.csv").write_text("\n".join(lines) + "\n")
    return ["--rees46", str(folder / "events.csv")]


def mind(folder: Path) -> list[str]:
    """Whether one clicks follows from the news item."""
    news = [f"N{i}\tcategory{i % 3}\tother\tTitle\tText\thttps://example.com\t[]\t[]" for i in range(8)]
    (folder / "news.tsv").write_text("\n".join(news) + "\n")
    lines = []
    for number in range(NUM_ROWS // 4):
        clicked = " ".join(f"N{i}" for i in RANDOM.integers(0, 8, RANDOM.integers(0, 5)))
        shown = " ".join(f"N{i}-{int(i < 4)}" for i in RANDOM.integers(0, 8, 4))
        lines.append(f"{number}\tU{number % 50}\t11/15/2019 10:22:32 AM\t{clicked}\t{shown}")
    (folder / "behaviors.tsv").write_text("\n".join(lines) + "\n")
    return ["--mind", str(folder)]


@pytest.mark.parametrize(
    ("module", "write"), [("dcn_criteo", criteo), ("dlrm_rees46", rees46), ("news_mind", mind)], ids=lambda item: item
)
def test_an_example_trains_and_serves_what_it_trained(
    tmp_path: Path, module: str, write: Callable[[Path], list[str]]
) -> None:
    """By one command; a real Triton answers as the trainer does, and it has learned."""
    command = [sys.executable, "-m", f"demo.hugectr_examples.{module}", *write(tmp_path), "--iterations", "60"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"256 samples: AUC ([\d.]+); differences of at most ([\d.e+-]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found[1]) > 0.9
    assert float(found[2]) <= 1e-6


@pytest.mark.parametrize("module", ["dcn_criteo", "news_mind"])
def test_an_example_names_what_is_wrong_with_its_files_in_one_line(tmp_path: Path, module: str) -> None:
    option = "--criteo" if module == "dcn_criteo" else "--mind"
    command = [sys.executable, "-m", f"demo.hugectr_examples.{module}", option, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 1
    assert re.fullmatch(rf"Error: {tmp_path}\S* [^\n]+\n", done.stderr)
