"""Every reader of untrusted bytes, fed with damaged files for some seconds, each in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.mutator import Mutator
from tests.fuzz.targets import TARGETS, TRAINING_TARGETS

ENGINE = os.environ.get("HOTROW_FUZZ_ENGINE", "tests.fuzz")
"""The program that does it; `make fuzz` takes tests.fuzz.coverage_guided where it can."""
SECONDS = float(os.environ.get("HOTROW_FUZZ_SECONDS", "2"))
"""For each reader; `make fuzz` takes a minute."""
SEED = int(os.environ.get("HOTROW_FUZZ_SEED", "0"))
MAX_FILES = 500
"""For each second."""
LONGEST_START_S = 240.0
CHUNK = 1 if "HOTROW_FUZZ_ENGINE" in os.environ else 5
"""The readers that one program takes in turn, because its start takes longer than some seconds of files."""


def chunks(names: list[str]) -> list[list[str]]:
    return [names[begin : begin + CHUNK] for begin in range(0, len(names), CHUNK)]


NAMES = [name for name in TARGETS if name not in TRAINING_TARGETS]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        *(pytest.param(names, id="-".join(names)) for names in chunks(NAMES)),
        *(pytest.param(names, id="-".join(names), marks=pytest.mark.training) for names in chunks([*TRAINING_TARGETS])),
    ],
)
@pytest.mark.timeout(CHUNK * (SECONDS + LONGEST_START_S) + 60)
def test_damaged_files_end_in_errors_of_ours(names: list[str], tmp_path: Path) -> None:
    """No other exception, no crash, no hang, no memory without bound."""
    options = ["--seconds", SECONDS, "--max-files", int(MAX_FILES * SECONDS) + 1, "--seed", SEED, "--folder", tmp_path]
    done = subprocess.run(
        [sys.executable, "-m", ENGINE, *names, *map(str, options)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=CHUNK * (SECONDS + LONGEST_START_S),
        check=False,
    )
    assert done.returncode == 0, (
        f"exit status {done.returncode}; the files are in {tmp_path}\n{done.stdout}{done.stderr}"
    )


def test_the_same_seed_damages_in_the_same_way() -> None:
    """So that a finding can be reproduced."""
    sound = b'{"a": [1, 2, {"b": null}]}'
    one, other = Mutator(7), Mutator(7)

    assert [one.mutated(sound) for _ in range(200)] == [other.mutated(sound) for _ in range(200)]
