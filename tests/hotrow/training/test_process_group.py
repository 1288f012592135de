"""Nothing of a job of several processes outlives its process group: its threads may abort a process that ends."""

from __future__ import annotations

import atexit
import gc
import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from hotrow.training.hugectr.trainer.processes import join_processes  # noqa: E402
from hotrow.training.ranks import Ranks  # noqa: E402
from tests.testing.servers import free_port  # noqa: E402
from tests.testing.training_jobs import run_processes  # noqa: E402

pytestmark = [pytest.mark.training, pytest.mark.filterwarnings("ignore")]


def _threads_of_gloo() -> list[str]:
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def _destroy(rank: int, port: int) -> None:
    """As a program of PyTorch does at its end."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    ranks = Ranks()
    assert ranks.gather(rank) == [0, 1]
    assert Ranks().group is ranks.group
    assert _threads_of_gloo()
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    assert not _threads_of_gloo()
    with pytest.raises(ValueError, match="process group has not been initialized"):
        ranks.gather(rank)


def _end_a_script(rank: int, port: int) -> None:
    """A script of HugeCTR knows no process groups."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ.update(place)
    processes = join_processes([[0, 1]])
    assert processes.any(rank == 1)
    assert _threads_of_gloo()
    processes.wait()
    atexit._run_exitfuncs()
    assert not _threads_of_gloo()


@pytest.mark.parametrize("job", [_destroy, _end_a_script])
def test_no_thread_outlives_the_group(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run_processes(job, free_port(), num_processes=2)
