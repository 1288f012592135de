"""Optimizer states that HugeCTR wrote are loaded: without keys, in the order of the snapshot's sparse weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hotrow.training.hugectr import DataReaderType_t, Layer_t, Model, Optimizer_t, Update_t
from inference_session.errors import ModelFormatError, UnsupportedModelError
from tests.testing.hugectr_training_samples import LOCALIZED, Sample, binary, layer, make_data, make_model

pytestmark = pytest.mark.training

DIM, WORKSPACE_MB = 3, 10  # make_model gives each table this workspace
ROWS_PER_GPU = WORKSPACE_MB * 1024 * 1024 // (4 * DIM)
OPTIMIZERS: dict[tuple[Optimizer_t, Update_t], list[int]] = {
    (Optimizer_t.Adam, Update_t.Global): [0, 1],
    (Optimizer_t.Adam, Update_t.LazyGlobal): [0, 1],
    (Optimizer_t.AdaGrad, Update_t.Local): [0],
    (Optimizer_t.MomentumSGD, Update_t.Local): [0],
    (Optimizer_t.Nesterov, Update_t.Global): [0],
    (Optimizer_t.Ftrl, Update_t.Local): [1, 0],
    (Optimizer_t.SGD, Update_t.Local): [],
}
"""The states of a file, in its order, by their numbers here."""


@pytest.fixture(autouse=True)
def _at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)


def network(model: Model) -> None:
    layer(model, Layer_t.Reshape, "table", "flat", leading_dim=2 * DIM)
    layer(model, Layer_t.InnerProduct, "flat", "fc", num_output=1)
    binary(model, "fc")


def sample(kind: Optimizer_t, update: Update_t, **changes: Any) -> Sample:
    optimizer = {"optimizer_type": kind, "update_type": update, "momentum_factor": 0.5, "initial_accu_value": 0.1}
    made = {
        "reader": DataReaderType_t.Norm, "dense_dim": 1, "sparse": (("data", 2, False, 2),),
        "tables": (("table", "data", DIM, "sum"),), "network": network, "slot_sizes": (40, 30), "nnz": (2, 1),
        "optimizer": optimizer, **changes,
    }  # fmt: skip
    return Sample(**made)


def trained(of: Sample, **solver: Any) -> Model:
    make_data(of, Path.cwd())
    model = make_model(of, Path.cwd(), **solver)
    model.start_data_reading()
    for _ in range(4):
        model.train()
    return model


def write_as_hugectr(model: Model, states: Sequence[int], num_gpus: int, dtype: str = "<f4") -> None:
    """`key` and `emb_vector` by GPU, in the order of rows there; states with room for all rows of a GPU."""
    table = model.trainer.tables[0]
    order = np.random.default_rng(1).permutation(table.num_rows)
    keys = table.keys.numpy()[order]
    by_gpu = [order[keys % num_gpus == gpu] for gpu in range(num_gpus)]
    order = np.concatenate(by_gpu)
    folder = Path("h0_sparse_1.model")
    folder.mkdir()
    table.keys.numpy()[order].astype("<i8").tofile(folder / "key")
    table.weight.numpy()[order].astype("<f4").tofile(folder / "emb_vector")
    with Path("h0_opt_sparse_1.model").open("wb") as file:
        for number in states:
            for rows in by_gpu:
                part = np.full((ROWS_PER_GPU, DIM), 7.0, dtype)  # what is not used
                part[: len(rows)] = table.states[number].numpy()[rows]
                file.write(part.tobytes())


def loaded(of: Sample, **solver: Any) -> Model:
    model = make_model(of, Path.cwd(), **solver)
    model.load_sparse_weights(["h0_sparse_1.model"])
    model.load_sparse_optimizer_states({"table": "h0_opt_sparse_1.model"})
    return model


def states_by_key(model: Model, numbers: Sequence[int]) -> dict[int, list[list[float]]]:
    table = model.trainer.tables[0]
    return {
        key: [table.weight[row].tolist(), *(table.states[number][row].tolist() for number in numbers)]
        for row, key in enumerate(table.keys.tolist())
    }


@pytest.mark.parametrize("num_gpus", [1, 3])
@pytest.mark.parametrize(("kind", "update"), OPTIMIZERS)
def test_states_of_hugectr_are_loaded(kind: Optimizer_t, update: Update_t, num_gpus: int) -> None:
    """Those of each optimizer, written on one GPU and on several."""
    of, numbers = sample(kind, update), OPTIMIZERS[kind, update]
    model = trained(of)
    write_as_hugectr(model, numbers, num_gpus)
    again = loaded(of, vvgpu=[list(range(num_gpus))])
    assert states_by_key(again, numbers) == states_by_key(model, numbers)
    again.start_data_reading()
    assert again.train()


def test_states_of_mixed_precision_are_halves() -> None:
    of = sample(Optimizer_t.AdaGrad, Update_t.Local)
    model = trained(of)
    write_as_hugectr(model, [0], 1, "<f2")
    again = loaded(of, use_mixed_precision=True, scaler=1024.0)
    for key, (_, found) in states_by_key(again, [0]).items():
        np.testing.assert_allclose(found, states_by_key(model, [0])[key][1], rtol=1e-3)


def test_dense_states_of_mixed_precision_are_halves() -> None:
    of = sample(Optimizer_t.Adam, Update_t.Global)
    trained(of).save_params_to_files("a", 1)
    states = np.fromfile("a_opt_dense_1.model", "<f4")
    states.astype("<f2").tofile("h_opt_dense_1.model")
    again = make_model(of, Path.cwd())
    again.load_dense_optimizer_states("h_opt_dense_1.model")
    again.save_params_to_files("b", 1)
    np.testing.assert_allclose(np.fromfile("b_opt_dense_1.model", "<f4"), states, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "solver", "error", "message"),
    [
        ({}, {"vvgpu": [[0, 1]]}, ModelFormatError, r"bytes, expected \d+: 1 states of \d+ rows on each of 2 GPUs"),
        ({}, {"use_mixed_precision": True, "scaler": 128.0}, ModelFormatError, "3 float16 each. vvgpu, the optimizer"),
        ({"embedding": LOCALIZED}, {"vvgpu": [[0, 1]]}, UnsupportedModelError, "for a Localized embedding.*by slot"),
    ],
)
def test_states_of_other_settings_are_refused(
    changes: dict[str, Any], solver: dict[str, Any], error: type[Exception], message: str
) -> None:
    """With what to do: the call may be left out."""
    model = trained(sample(Optimizer_t.AdaGrad, Update_t.Local))
    write_as_hugectr(model, [0], 1)
    with pytest.raises(error, match=rf"{message}.*Or leave load_sparse_optimizer_states out"):
        loaded(sample(Optimizer_t.AdaGrad, Update_t.Local, **changes), **solver)


def test_keys_in_another_order_than_that_of_gpus_are_refused() -> None:
    of = sample(Optimizer_t.AdaGrad, Update_t.Local)
    write_as_hugectr(trained(of), [0], 2)
    keys = np.fromfile("h0_sparse_1.model/key", "<i8")
    np.roll(keys, 1).tofile("h0_sparse_1.model/key")
    with pytest.raises(ModelFormatError, match="not as HugeCTR writes them on 2 GPUs"):
        loaded(of, vvgpu=[[0], [1]])


def test_rows_come_before_their_states() -> None:
    of = sample(Optimizer_t.AdaGrad, Update_t.Local)
    model = trained(of)
    write_as_hugectr(model, [0], 1)
    with pytest.raises(ModelFormatError, match=r"HugeCTR wrote no keys with it\. Load the sparse weights"):
        model.load_sparse_optimizer_states(["h0_opt_sparse_1.model"])
