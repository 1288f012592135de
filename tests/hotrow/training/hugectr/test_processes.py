"""Several processes train one model as one process does."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from hotrow.training.hugectr.processes import start_command
from tests.testing.hugectr_training_samples import SAMPLES, Sample, make_data, make_model
from tests.testing.training_jobs import run_ranks

pytestmark = pytest.mark.training


def _train(folder: Path, prefix: str) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)
    sample = SAMPLES["wdl_parquet"]

    def network(model: object) -> None:
        # Dropout would draw differently in each process.
        sample.network(_WithoutDropout(model))  # type: ignore[arg-type]

    model = make_model(Sample(**{**vars(sample), "network": network}), folder)
    model.start_data_reading()
    for _ in range(6):
        assert model.train()
    loss = model.get_current_loss()
    assert model.eval()
    model.save_params_to_files(prefix, 6)
    if os.environ.get("RANK", "0") == "0":
        model.export_predictions(f"{prefix}_predictions", f"{prefix}_labels")
        (folder / f"{prefix}_loss").write_text(repr(loss))


class _WithoutDropout:
    def __init__(self, model: object) -> None:
        self._model = model

    def add(self, layer: object) -> None:
        if getattr(layer, "dropout_rate", None) is not None:
            layer.dropout_rate = 0.0  # type: ignore[attr-defined]
        self._model.add(layer)  # type: ignore[attr-defined]


def _rank(rank: int, folder: str) -> None:
    os.environ.update({"WORLD_SIZE": "2", "RANK": str(rank)})
    _train(Path(folder), "two")


def test_two_processes_learn_what_one_learns(tmp_path: Path) -> None:
    make_data(SAMPLES["wdl_parquet"], tmp_path)
    here = Path.cwd()
    try:
        _train(tmp_path, "one")
    finally:
        os.chdir(here)
    run_ranks(_rank, str(tmp_path))
    for name in ("dense_6.model", "opt_dense_6.model"):
        one, two = (np.fromfile(tmp_path / f"{prefix}_{name}", np.float32) for prefix in ("one", "two"))
        np.testing.assert_allclose(one, two, atol=2e-5)
    for table in range(2):
        keys = [np.fromfile(tmp_path / f"{p}{table}_sparse_6.model" / "key", np.int64) for p in ("one", "two")]
        np.testing.assert_array_equal(*keys)
        rows = [np.fromfile(tmp_path / f"{p}{table}_sparse_6.model" / "emb_vector", np.float32) for p in ("one", "two")]
        np.testing.assert_allclose(*rows, atol=2e-5)
    texts = [np.loadtxt(tmp_path / f"{prefix}_predictions") for prefix in ("one", "two")]
    assert texts[0].shape == (200,)
    np.testing.assert_allclose(*texts, atol=1e-4)
    assert float((tmp_path / "one_loss").read_text()) == pytest.approx(
        float((tmp_path / "two_loss").read_text()), abs=1e-4
    )


def test_a_program_is_started_again_once_per_gpu() -> None:
    script = start_command(["python", "-u", "train.py", "--steps", "3"], 4)
    assert script[1:] == [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "train.py", "--steps", "3"
    ]  # fmt: skip
    module = start_command(["python", "-m", "hotrow.training.hugectr", "train.py"], 2)
    assert module[-3:] == ["-m", "hotrow.training.hugectr", "train.py"]
