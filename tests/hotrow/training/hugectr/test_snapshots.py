"""Snapshots of training are complete or absent, on this machine and on HDFS, which training data also come from."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch

from hotrow.training.hugectr import DataReaderType_t, Model
from hotrow.training.hugectr.snapshots.snapshot import SnapshotNames
from inference_session.importers.hugectr.data_source import DataSourceParams
from inference_session.model_source import Copy
from inference_session.model_source.create import create_source
from tests.testing.hadoop import Hdfs
from tests.testing.hugectr_training_samples import SAMPLES, make_data, make_model
from tests.testing.training_jobs import run_processes

pytestmark = pytest.mark.training

NAMES = SnapshotNames("a", 1)
STEPS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")
"""Operations on files of which Python raises audit events."""


def test_a_save_that_is_killed_at_any_step_leaves_no_half_of_a_model(tmp_path: Path) -> None:
    """SIGKILL before each operation on a file in turn, each time with the files that the previous one left."""
    run_processes(_kill_at_each_step, tmp_path)
    assert int((tmp_path / "kills").read_text()) > 20


def _trained_model(folder: Path) -> Model:
    """After a step, in a process of its own, which works in that folder from now on."""
    torch.set_num_threads(1)
    os.chdir(folder)
    make_data(SAMPLES["din_parquet"], folder)
    model = make_model(SAMPLES["din_parquet"], folder)
    model.start_data_reading()
    model.train()
    model.get_data_reader_train().stop()
    return model


def _kill_at_each_step(_rank: int, folder: Path) -> None:
    model = _trained_model(folder)
    _fill(model, 0)
    model.save_params_to_files("a", 1)
    _check_snapshot(model)
    for number in range(1, 1000):
        _fill(model, number)
        child = os.fork()
        if child == 0:
            _save(model, killed_before=number)
        _, status = os.waitpid(child, 0)
        _check_snapshot(model)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            assert Path(NAMES.dense).exists()
            assert not list(Path().glob(".tmp-*"))
            Path("kills").write_text(str(number))
            return
        assert os.WTERMSIG(status) == signal.SIGKILL


def _fill(model: Model, number: int) -> None:
    """So that each file shows which save wrote it."""
    trainer = model.trainer
    optimizer = trainer.dense_optimizer
    dense = [*trainer.weights, *(state for states in optimizer.states for state in states.values())]
    tables = [tensor for table in trainer.tables for tensor in (table.weight, *table.states)]
    statistics = [tensor for pair in trainer.network.statistics() for tensor in pair]
    for tensor in (*dense, *tables, *statistics):
        tensor.data.fill_(float(number))


def _save(model: Model, *, killed_before: int) -> None:
    """Runs in a separate process, which ends here."""
    left = killed_before

    def count(event: str, _arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event in STEPS:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    try:
        model.save_params_to_files("a", 1)
        os._exit(0)
    finally:
        os._exit(1)


def _check_snapshot(model: Model) -> None:
    """If the dense weights exist, all other files are of the same save."""
    if not Path(NAMES.dense).exists():
        return
    files = [NAMES.dense, NAMES.dense_states]
    for number, table in enumerate(model.trainer.tables):
        files += [f"{NAMES.sparse(number)}/emb_vector", NAMES.sparse_states(number)]
        assert np.fromfile(f"{NAMES.sparse(number)}/key", np.int64).tolist() == table.keys.tolist()
        assert Path(f"{NAMES.sparse_states(number)}.json").exists()
    assert Path(f"{NAMES.dense_states}.json").exists()
    assert len({value for file in files for value in np.fromfile(file, np.float32).tolist()}) == 1


def test_jobs_that_save_the_same_names_at_once_leave_one_whole_model(tmp_path: Path) -> None:
    """Three jobs in one working directory: each save succeeds, and the files in place are of one of them."""
    run_processes(_save_at_once, tmp_path)


def _save_at_once(_rank: int, folder: Path) -> None:
    model = _trained_model(folder)
    children = []
    for number in range(3):
        if not (child := os.fork()):
            _save_often(model, number)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert Path(NAMES.dense).exists()
    _check_snapshot(model)


def _save_often(model: Model, number: int) -> None:
    """Runs in a separate process, which ends here."""
    try:
        _fill(model, number)
        for _ in range(20):
            model.save_params_to_files("a", 1)
        os._exit(0)
    finally:
        traceback.print_exc()
        os._exit(1)


@pytest.mark.parametrize("name", ["wdl", "wdl_bin", "wdl_parquet"])
def test_data_come_from_hdfs_and_models_go_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hdfs: Hdfs, name: str
) -> None:
    """In each format; what is saved there is loaded again, and trains on."""
    monkeypatch.setenv("HOTROW_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    sample, data, home = SAMPLES[name], tmp_path / "data", f"/training-{name}"
    data.mkdir()
    make_data(sample, data)
    local = make_model(sample, data)
    _train(local, 3)
    if sample.reader is not DataReaderType_t.Raw:
        for path in data.glob("*.txt"):
            path.write_text(path.read_text().replace(str(data), f"{home}/data"))
    with Copy(data, f"{hdfs.url}{home}/data") as copy:
        copy.run()
    port = int(hdfs.host.rpartition(":")[2])
    params = DataSourceParams(use_hdfs=True, namenode="127.0.0.1", port=port, hdfs_model_home=f"{home}/models")

    remote = make_model(sample, Path(home) / "data", data_source_params=params)
    _train(remote, 3)
    remote.save_params_to_files("wdl", 3)

    names = SnapshotNames("wdl", 3)
    tables = range(len(sample.tables))
    files = [names.dense, names.dense_states, *map(names.sparse, tables), *map(names.sparse_states, tables)]
    with create_source(f"{hdfs.url}{home}/models") as source:
        assert {entry.path for entry in source.entries()} >= set(files)
    assert not list(tmp_path.glob("wdl*"))
    restored = make_model(sample, Path(home) / "data", data_source_params=params, seed=9)
    places = [f"{home}/models/{file}" for file in files]
    restored.load_dense_weights(places[0])
    restored.load_dense_optimizer_states(places[1])
    restored.load_sparse_weights(places[2 : 2 + len(tables)])
    restored.load_sparse_optimizer_states(places[2 + len(tables) :])
    for model in (remote, restored):
        assert _rows(model) == _rows(local)
        for ours, theirs in zip(model.trainer.weights, local.trainer.weights, strict=True):
            assert torch.equal(ours, theirs)


def _train(model: Model, count: int) -> None:
    torch.manual_seed(0)  # of dropout
    model.start_data_reading()
    for _ in range(count):
        assert model.train()


def _rows(model: Model) -> list[dict[int, list[float]]]:
    return [dict(zip(table.keys.tolist(), table.weight.tolist(), strict=True)) for table in model.trainer.tables]
