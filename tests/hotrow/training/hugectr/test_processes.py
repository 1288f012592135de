"""Several processes train one model as one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hotrow.training import hugectr
from hotrow.training.hugectr import DataReaderType_t, Layer_t, Model
from hotrow.training.hugectr.trainer.processes import join_processes, start_command
from inference_session.errors import ConfigurationError
from tests.testing.hugectr_training_samples import SAMPLES, Sample, layer, make_data, make_model
from tests.testing.training_jobs import run_ranks

pytestmark = pytest.mark.training


def _train(folder: Path, prefix: str, name: str = "wdl_parquet", *, after: str = "", **solver: Any) -> None:
    """Train some steps, from the snapshot `after` on if there is one, and save."""
    torch.set_num_threads(1)
    os.chdir(folder)
    sample = SAMPLES[name]

    def network(model: object) -> None:
        # Dropout would draw differently in each process.
        sample.network(_WithoutDropout(model))  # type: ignore[arg-type]

    model = make_model(Sample(**{**vars(sample), "network": network}), folder, **solver)
    if after:
        model.load_dense_weights(f"{after}_dense_6.model")
        model.load_sparse_weights([f"{after}{table}_sparse_6.model" for table in range(2)])
        model.load_dense_optimizer_states(f"{after}_opt_dense_6.model")
        model.load_sparse_optimizer_states([f"{after}{table}_opt_sparse_6.model" for table in range(2)])
    model.start_data_reading()
    for _ in range(6):
        assert model.train()
    loss = model.get_current_loss()
    assert model.eval()
    model.save_params_to_files(prefix, 6)
    rank = os.environ.get("RANK", "0")
    for number, table in enumerate(model.trainer.tables):
        np.save(folder / f"{prefix}{number}_keys_of_{rank}.npy", table.keys.cpu().numpy())
    if rank == "0":
        model.export_predictions(f"{prefix}_predictions", f"{prefix}_labels")
        (folder / f"{prefix}_loss").write_text(repr(loss))


class _WithoutDropout:
    def __init__(self, model: object) -> None:
        self._model = model

    def add(self, layer: object) -> None:
        if getattr(layer, "dropout_rate", None) is not None:
            layer.dropout_rate = 0.0  # type: ignore[attr-defined]
        self._model.add(layer)  # type: ignore[attr-defined]


def _rank(rank: int, folder: str, prefix: str, after: str) -> None:
    os.environ.update({"WORLD_SIZE": "2", "RANK": str(rank)})
    _train(Path(folder), prefix, after=after)


def test_two_processes_learn_what_one_learns_and_go_on_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps the rows of its keys; the files are those of one process, and either number restores the other's."""
    make_data(SAMPLES["wdl_parquet"], tmp_path)
    monkeypatch.chdir(tmp_path)

    _train(tmp_path, "one")
    run_ranks(_rank, str(tmp_path), "two", "")

    _compare(tmp_path, "one", "two", atol=2e-5)
    for table in range(2):
        kept = [np.load(f"two{table}_keys_of_{rank}.npy") for rank in range(2)]
        assert all(len(keys) and (keys % 2 == rank).all() for rank, keys in enumerate(kept))
        assert sorted(np.concatenate(kept)) == sorted(np.load(f"one{table}_keys_of_0.npy"))

    _train(tmp_path, "one_after_two", after="two")
    run_ranks(_rank, str(tmp_path), "two_after_one", "one")

    _compare(tmp_path, "one_after_two", "two_after_one", atol=5e-5)


def _regularized(model: Model) -> None:
    layer(model, Layer_t.InnerProduct, "dense", "fc1", num_output=5)
    layer(model, Layer_t.BatchNorm, "fc1", "bn1", factor=0.25, eps=1e-4)
    layer(model, Layer_t.ReLU, "bn1", "relu1")
    layer(model, Layer_t.Reshape, "table", "flat", leading_dim=8)
    layer(model, Layer_t.Concat, "relu1 flat", "both")
    layer(model, Layer_t.InnerProduct, "both", "fc2", num_output=1)
    regularizer = {"use_regularizer": True, "regularizer_type": hugectr.Regularizer_t.L2, "lambda": 20.0}
    layer(model, Layer_t.BinaryCrossEntropyLoss, "fc2 label", "loss", **regularizer)


_BY_BATCHES = Sample(
    DataReaderType_t.Parquet, 4, (("data", 2, False, 2),), (("table", "data", 4, "mean"),), _regularized, (30, 20),
    (2, 1),
)  # fmt: skip


def _train_by_batches(folder: Path, prefix: str) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)
    model = make_model(
        _BY_BATCHES, folder, batchsize=96, batchsize_eval=90, repeat_dataset=False, drop_incomplete_batch=False
    )
    model.fit(num_epochs=1, display=0, eval_interval=0)  # the last batch is of 80 samples
    loss = model.get_current_loss()
    model.get_data_reader_eval().set_source()
    assert model.eval()
    model.save_params_to_files(prefix, 21)
    model.export_predictions(f"{prefix}_predictions", f"{prefix}_labels")
    if os.environ.get("RANK", "0") == "0":
        (folder / f"{prefix}_loss").write_text(repr(loss))


def _rank_by_batches(rank: int, folder: str, prefix: str, count: int) -> None:
    os.environ.update({"WORLD_SIZE": str(count), "RANK": str(rank)})
    _train_by_batches(Path(folder), prefix)


@pytest.mark.parametrize("count", [2, 3])
def test_processes_normalise_and_regularize_whole_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    make_data(_BY_BATCHES, tmp_path)
    monkeypatch.chdir(tmp_path)
    _train_by_batches(tmp_path, "one")
    run_ranks(_rank_by_batches, str(tmp_path), "several", count, num_ranks=count)

    for read, name in (
        (lambda path: np.fromfile(path, np.float32), "dense_21.model"),
        (np.loadtxt, "predictions"),
        (np.loadtxt, "loss"),
        (_statistics, "dense_21.model.ntp.json"),
    ):
        one, several = (read(tmp_path / f"{prefix}_{name}") for prefix in ("one", "several"))
        np.testing.assert_allclose(several, one, atol=2e-5, err_msg=name)


def _statistics(path: Path) -> np.ndarray[Any, Any]:
    (found,) = json.loads(path.read_text())["layers"]
    return np.array([found["mean"], found["var"]])


def _compare(folder: Path, one: str, two: str, *, atol: float) -> None:
    for name in ("dense_6.model", "opt_dense_6.model"):
        first, second = (np.fromfile(folder / f"{prefix}_{name}", np.float32) for prefix in (one, two))
        np.testing.assert_allclose(first, second, atol=atol)
    for table in range(2):
        found = [_rows(folder, f"{prefix}{table}") for prefix in (one, two)]
        for first, second in zip(*found, strict=True):
            np.testing.assert_allclose(first, second, atol=atol)
    texts = [np.loadtxt(folder / f"{prefix}_predictions") for prefix in (one, two)]
    assert texts[0].shape == (200,)
    np.testing.assert_allclose(texts[0], texts[1], atol=5 * atol)
    losses = [float((folder / f"{prefix}_loss").read_text()) for prefix in (one, two)]
    assert losses[0] == pytest.approx(losses[1], abs=5 * atol)


def _rows(folder: Path, prefix: str) -> tuple[np.ndarray[Any, Any], ...]:
    """Keys, ascending, with their vectors and optimizer states."""
    keys = np.fromfile(folder / f"{prefix}_sparse_6.model" / "key", np.int64)
    vectors = np.fromfile(folder / f"{prefix}_sparse_6.model" / "emb_vector", np.float32).reshape(len(keys), -1)
    states = np.fromfile(folder / f"{prefix}_opt_sparse_6.model", np.float32).reshape(-1, *vectors.shape)
    assert len(states), "the optimizer keeps no states"
    order = np.argsort(keys)
    return keys[order], vectors[order], states[:, order]


@pytest.mark.gpu
@pytest.mark.parametrize("gpus", [[0], [0, 1]], ids=["one GPU", "two GPUs"])
def test_vvgpu_trains_on_gpus_what_the_processor_trains(tmp_path: Path, gpus: list[int]) -> None:
    """As a script, which starts itself again once per GPU."""
    if torch.cuda.device_count() < len(gpus):
        pytest.skip(f"PyTorch finds fewer than {len(gpus)} GPUs")
    make_data(SAMPLES["wdl"], tmp_path)
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.hotrow.training.hugectr.test_processes import _train\n"
        f"_train(Path({str(tmp_path)!r}), sys.argv[1], 'wdl', vvgpu=[{gpus}])\n",
        encoding="utf-8",
    )
    root = str(Path(__file__).parents[4])
    for prefix, visible in (("processor", ""), ("gpus", ",".join(map(str, gpus)))):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible, "PYTHONPATH": root}
        command = [sys.executable, "-m", "hotrow.training.hugectr", str(script), prefix]
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert ("one process trains whole batches" in done.stdout) == (not visible and len(gpus) > 1)
    _compare(tmp_path, "processor", "gpus", atol=1e-4)


def test_processes_of_mpi_do_not_train_the_same_model_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    assert join_processes([[0]]).count == 1
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(ConfigurationError, match=r"MPI has started 4 processes \(OMPI_COMM_WORLD_SIZE\).* torchrun"):
        join_processes([[0], [0]])


def test_a_program_is_started_again_once_per_gpu() -> None:
    script = start_command(["python", "-u", "train.py", "--steps", "3"], 4)
    assert script[1:] == [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "train.py", "--steps", "3"
    ]  # fmt: skip
    module = start_command(["python", "-m", "hotrow.training.hugectr", "train.py"], 2)
    assert module[-3:] == ["-m", "hotrow.training.hugectr", "train.py"]
