"""A trainer that saves checkpoints and publishes rows, as a process that can be killed.

python -m tests.testing.trainer CHECKPOINTS UPDATE_STREAM LAST_STEP
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch

from hotrow import training
from tests.testing import ROOT
from tests.testing import training_models as models


def job(kind: str = "Adam") -> tuple[Any, Any]:
    """A model that is always the same, and an optimizer of a kind."""
    torch.manual_seed(0)
    model = models.Clicks(models.bag_collection(), 16)
    return model, getattr(torch.optim, kind)(model.parameters(), lr=0.1)


def trainer(place: str, url: str, last: int) -> subprocess.Popen[str]:
    """Start the process; it prints each step that it has done."""
    arguments = [sys.executable, "-W", "ignore", "-m", "tests.testing.trainer", place, url, str(last)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def main(place: str, url: str, last: int) -> None:
    """Train from the last checkpoint on; every fifth step is saved, every second is published."""
    model, optimizer = job("SGD")
    updates = training.UpdatePublisher(model, url, "killed", every_steps=2)
    checkpoint = training.Checkpoint(model, optimizer, place)
    start = checkpoint.restore()
    print("start", start, flush=True)
    for step in range(start, last):
        models.train(model.eval(), optimizer, step)
        updates.step()
        if step % 5 == 0:
            checkpoint.save(step)
        print("step", step, flush=True)
    updates.close()
    torch.save(model.state_dict(), place + ".final")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
