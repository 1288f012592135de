"""Several processes train one model as one process does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hotrow.training.hugectr.processes import start_command
from tests.testing.hugectr_training_samples import SAMPLES, Sample, make_data, make_model
from tests.testing.training_jobs import run_ranks

pytestmark = pytest.mark.training


def _train(folder: Path, prefix: str, name: str = "wdl_parquet", **solver: Any) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)
    sample = SAMPLES[name]

    def network(model: object) -> None:
        # Dropout would draw differently in each process.
        sample.network(_WithoutDropout(model))  # type: ignore[arg-type]

    model = make_model(Sample(**{**vars(sample), "network": network}), folder, **solver)
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
    _compare(tmp_path, "one", "two", atol=2e-5)


def _compare(folder: Path, one: str, two: str, *, atol: float) -> None:
    for name in ("dense_6.model", "opt_dense_6.model"):
        first, second = (np.fromfile(folder / f"{prefix}_{name}", np.float32) for prefix in (one, two))
        np.testing.assert_allclose(first, second, atol=atol)
    for table in range(2):
        keys = [np.fromfile(folder / f"{p}{table}_sparse_6.model" / "key", np.int64) for p in (one, two)]
        np.testing.assert_array_equal(*keys)
        rows = [np.fromfile(folder / f"{p}{table}_sparse_6.model" / "emb_vector", np.float32) for p in (one, two)]
        np.testing.assert_allclose(*rows, atol=atol)
    texts = [np.loadtxt(folder / f"{prefix}_predictions") for prefix in (one, two)]
    assert texts[0].shape == (200,)
    np.testing.assert_allclose(*texts, atol=5 * atol)
    losses = [float((folder / f"{prefix}_loss").read_text()) for prefix in (one, two)]
    assert losses[0] == pytest.approx(losses[1], abs=5 * atol)


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


def test_a_program_is_started_again_once_per_gpu() -> None:
    script = start_command(["python", "-u", "train.py", "--steps", "3"], 4)
    assert script[1:] == [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "train.py", "--steps", "3"
    ]  # fmt: skip
    module = start_command(["python", "-m", "hotrow.training.hugectr", "train.py"], 2)
    assert module[-3:] == ["-m", "hotrow.training.hugectr", "train.py"]
