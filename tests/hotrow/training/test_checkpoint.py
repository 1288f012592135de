"""Training goes on from a checkpoint as if it had never stopped."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchrec")

from torch import nn  # noqa: E402

from hotrow import training  # noqa: E402
from inference_session import InferenceSession  # noqa: E402
from inference_session.errors import ConfigurationError, HotrowError, ModelFormatError  # noqa: E402
from tests.testing import training_jobs as jobs  # noqa: E402
from tests.testing import training_models as models  # noqa: E402
from tests.testing.broker import Broker  # noqa: E402
from tests.testing.hadoop import Hdfs  # noqa: E402
from tests.testing.servers import wait_until  # noqa: E402
from tests.testing.trainer import job, trainer  # noqa: E402
from tests.testing.training_models import bag_collection, exported, serves, table_rows, train  # noqa: E402

pytestmark = [pytest.mark.training, pytest.mark.filterwarnings("ignore")]


def _same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


@pytest.mark.filterwarnings("error:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["SGD", "Adam", "Adagrad"])
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path, kind: str) -> None:
    """Weights, optimizer states and learning rates: bit-equal after further steps."""
    model, optimizer = job(kind)
    checkpoint = training.Checkpoint(model, optimizer, tmp_path / "checkpoints")
    assert checkpoint.restore() == 0
    torch.manual_seed(1)
    for step in range(3):
        train(model.eval(), optimizer, step)
    optimizer.param_groups[0]["lr"] = 0.05
    checkpoint.save(2)
    for step in range(3, 6):
        train(model, optimizer, step)

    again, its_optimizer = job(kind)
    start = training.Checkpoint(again, its_optimizer, tmp_path / "checkpoints").restore()

    assert start == 3
    assert its_optimizer.param_groups[0]["lr"] == 0.05
    for step in range(start, 6):
        train(again.eval(), its_optimizer, step)
    assert _same(again, model)


def test_the_newest_are_kept_and_any_of_them_restored(tmp_path: Path) -> None:
    """Older ones go when a new one is in place."""
    model, optimizer = job()
    checkpoint = training.Checkpoint(model, optimizer, tmp_path, keep=2)
    for step in (5, 10, 15):
        train(model, optimizer, step)
        checkpoint.save(step)

    assert checkpoint.steps() == [10, 15]
    assert checkpoint.restore(step=10) == 11
    with pytest.raises(ConfigurationError, match="no checkpoint of step 5"):
        checkpoint.restore(step=5)
    with pytest.raises(ConfigurationError, match="already exists"):
        checkpoint.save(15)


PLAN = {"bags": {"t0": "row_wise", "t1": "table_wise"}}


def _sharded(way: str) -> tuple[Any, Any]:
    from torchrec import EmbeddingBagCollection
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

    torch.manual_seed(0)
    plan = PLAN if way == "rows" else {"bags": {"t0": "table_wise", "t1": "row_wise"}}
    # Sums only: TorchRec's own answers are wrong for a mean sharded by rows together with a sum sharded by tables.
    bags = EmbeddingBagCollection(models.bag_configs(means=()))
    model: Any = jobs.distributed(models.Clicks(bags, 16), plan)
    dense = {name: value for name, value in model.named_parameters() if "layers" in name}
    keyed = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adam(params, lr=0.1))
    return model.eval(), CombinedOptimizer([model.fused_optimizer, keyed])


def _save_on_ranks(rank: int, place: str, folder: Path) -> None:
    model, optimizer = _sharded("rows")
    checkpoint = training.Checkpoint(model, optimizer, place)
    for _ in range(3):
        train(model, optimizer, 7)  # the same on all ranks, so that their number makes no difference
    checkpoint.save(2)
    _gather_after_steps(rank, model, optimizer, folder / "first.npz")


def _restore_on_ranks(rank: int, place: str, folder: Path) -> None:
    model, optimizer = _sharded("tables")
    assert training.Checkpoint(model, optimizer, place).restore() == 3
    _gather_after_steps(rank, model, optimizer, folder / "second.npz")


def _gather_after_steps(rank: int, model: Any, optimizer: Any, path: Path) -> None:
    """Two steps on, all rows, which Adagrad's state decides, and dense weights, which Adam's does."""
    for _ in range(2):
        train(model, optimizer, 7)
    rows = {name: jobs.gathered(model, f"bags.embedding_bags.{name}.weight") for name in ("t0", "t1")}
    dense = {name: value.numpy() for name, value in model.state_dict().items() if "layers" in name}
    if rank == 0:
        np.savez(path, **rows, **dense)


def test_tables_come_back_on_ranks_that_shard_them_otherwise(tmp_path: Path) -> None:
    """2 ranks save; 2 that hold other rows, and 1, go on from there with the optimizers' states."""
    _check_that_ranks_go_on(str(tmp_path / "checkpoints"), tmp_path)


def test_ranks_go_on_from_hdfs(tmp_path: Path, hdfs: Hdfs) -> None:
    """The same, where no rank sees a folder of another."""
    _check_that_ranks_go_on(f"{hdfs.url}/checkpoints", tmp_path)


def _check_that_ranks_go_on(where: str, tmp_path: Path) -> None:
    jobs.run_ranks(_save_on_ranks, where, tmp_path)
    first = np.load(tmp_path / "first.npz")

    for num_ranks in (2, 1):
        jobs.run_ranks(_restore_on_ranks, where, tmp_path, num_ranks=num_ranks)
        second = np.load(tmp_path / "second.npz")
        for name in first.files:
            np.testing.assert_allclose(second[name], first[name], atol=1e-6, err_msg=name)


# What is not whole


def _saved(tmp_path: Path) -> tuple[Any, Path]:
    model, optimizer = job()
    checkpoint = training.Checkpoint(model, optimizer, tmp_path)
    train(model, optimizer, 0)
    checkpoint.save(0)
    return checkpoint, tmp_path / "0"


def test_a_file_that_is_gone_or_cut_is_named(tmp_path: Path) -> None:
    """And no other checkpoint is restored in its place."""
    for number, damage in enumerate(("__0_0.distcp", ".metadata", "checkpoint.json")):
        checkpoint, folder = _saved(tmp_path / str(number))
        content = (folder / damage).read_bytes()
        (folder / damage).write_bytes(content[: len(content) // 2])
        with pytest.raises(HotrowError):
            checkpoint.restore()
    checkpoint, folder = _saved(tmp_path / "gone")
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(ModelFormatError, match="no such file"):
        checkpoint.restore()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    """With the name that it lacks, or the shapes that differ."""
    _saved(tmp_path)
    for model, text in (
        (nn.Linear(3, 1), "has no 'model.weight'"),
        (models.Clicks(bag_collection(), 24), "layers.0.weight.*has shape"),
    ):
        model_layers = model
        with pytest.raises(ConfigurationError, match=text):
            training.Checkpoint(model_layers, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path).restore()


class _Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_metadata_that_would_run_something_are_refused(tmp_path: Path) -> None:
    """Only torch's own records are read."""
    checkpoint, folder = _saved(tmp_path / "checkpoints")
    content = pickle.dumps(_Harm(tmp_path / "made"))
    description = json.loads((folder / "checkpoint.json").read_text())
    del description["metadata_sha256"]  # as of 0.1.0
    (folder / "checkpoint.json").write_text(json.dumps(description))
    (folder / ".metadata").write_bytes(content)

    with pytest.raises(ModelFormatError, match=r"names (posix|os)\.mkdir"):
        checkpoint.restore()

    assert not (tmp_path / "made").exists()


def test_a_half_written_checkpoint_does_not_count(tmp_path: Path) -> None:
    """As a process leaves it that is killed while it saves; the next one takes its place."""
    checkpoint, folder = _saved(tmp_path)
    shutil.copytree(folder, tmp_path / ".tmp-5")

    assert checkpoint.steps() == [0]
    checkpoint.save(5)
    assert checkpoint.restore() == 6


def test_a_save_removes_what_a_killed_save_of_another_step_left(tmp_path: Path) -> None:
    """But nothing that a process still holds, and nothing that has another name."""
    checkpoint, folder = _saved(tmp_path)
    for name in (".tmp-3", ".tmp-4", ".tmp-mine"):
        shutil.copytree(folder, tmp_path / name)
    held = os.open(tmp_path / ".tmp-4", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        checkpoint.save(5)
    finally:
        os.close(held)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "5", ".tmp-4", ".tmp-mine"}


# Killed


def test_a_killed_trainer_goes_on_and_the_servers_end_with_its_rows(tmp_path: Path, broker: Broker) -> None:
    """Rows of lost steps are published again with their values in the restored model."""
    model, _ = job("SGD")
    directory = exported(model, tmp_path, "killed")
    place = str(tmp_path / "checkpoints")
    with InferenceSession.open(directory, device="cpu", update_stream=broker.url) as session:
        for kill_at, expected_start in ((8, 0), (13, 6)):
            with trainer(place, broker.url, 10_000) as process:
                assert _lines_until(process, f"step {kill_at}\n")[0] == f"start {expected_start}\n"
                process.send_signal(signal.SIGKILL)
        with trainer(place, broker.url, 12) as process:
            assert _lines_until(process, "start 11\n")
            assert process.wait(120) == 0
        model.load_state_dict(torch.load(place + ".final", weights_only=True))
        wait_until(lambda: serves(session, table_rows(model)), "the rows of the restored model")


def _lines_until(process: subprocess.Popen[str], line: str) -> list[str]:
    assert process.stdout is not None
    lines: list[str] = []
    for found in process.stdout:
        lines.append(found)
        if found == line:
            return lines
    raise AssertionError(f"no line {line!r}; found: {lines}")
