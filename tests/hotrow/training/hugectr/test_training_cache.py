"""HugeCTR's embedding training cache: tables in memory that begin from folders, are saved there, and tell changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hotrow.training import hugectr
from hotrow.training.hugectr import Model, Optimizer_t, Update_t
from hotrow.training.hugectr.trainer.batch import DeviceBags
from hotrow.training.hugectr.trainer.embedding import EmbeddingTable
from inference_session import InferenceSession
from inference_session.errors import ConfigurationError, UnsupportedModelError
from inference_session.importers.hugectr import import_hugectr
from inference_session.update_stream import Publisher
from tests.testing.broker import Broker
from tests.testing.hugectr_training_samples import SAMPLES, add_embeddings, make_data, write_ps_json
from tests.testing.servers import wait_until

pytestmark = pytest.mark.training

SAMPLE = SAMPLES["gmf"]


def model_with_cache(folder: Path, **solver: Any) -> Model:
    cache = hugectr.CreateETC(
        [hugectr.TrainPSType_t.Cached], [str(folder / "table")], [str(folder)], [hugectr.CreateHMemCache(2, 0.5, 0)]
    )
    reader = hugectr.DataReaderParams(
        SAMPLE.reader, [str(folder / "train.txt")] * 2, ["first.keyset", "second.keyset"],
        eval_source=str(folder / "eval.txt"), check_type=SAMPLE.check,
    )  # fmt: skip
    settings = {"batchsize": 100, "batchsize_eval": 200, "max_eval_batches": 1, "i64_input_key": True, **solver}
    optimizer = hugectr.CreateOptimizer(Optimizer_t.AdaGrad, Update_t.Local)
    model = Model(hugectr.CreateSolver(**{"repeat_dataset": False, **settings}), reader, optimizer, cache)
    sparse = [hugectr.DataReaderSparseParam(*arguments) for arguments in SAMPLE.sparse]
    model.add(hugectr.Input(1, "label", SAMPLE.dense_dim, "dense", sparse))
    add_embeddings(model, SAMPLE, optimizer)
    SAMPLE.network(model)
    model.compile()
    return model


def test_a_model_trains_on_all_sources_and_goes_on_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_data(SAMPLE, tmp_path)
    model = model_with_cache(tmp_path)
    model.fit(num_epochs=1, display=0, eval_interval=0)
    assert "1 epochs 40 global iterations" in capsys.readouterr().out  # 2 sources of 2,000 samples
    ((keys, vectors),) = model.get_incremental_model()
    (table,) = model.trainer.tables
    np.testing.assert_array_equal(keys, table.keys)
    np.testing.assert_array_equal(vectors, table.weight)
    ((none, _),) = model.get_incremental_model()
    assert not len(none)
    model.save_params_to_files("m")
    for name in ("key", "emb_vector"):
        assert Path("table", name).read_bytes() == Path("m0_sparse_0.model", name).read_bytes()

    model.set_source(source=["train.txt"], keyset=["third.keyset"], eval_source="eval.txt")
    model.fit(num_epochs=1, display=0, eval_interval=0)
    assert "1 epochs 20 global iterations" in capsys.readouterr().out
    model.save_params_to_files("m", 20)
    again = model_with_cache(tmp_path)
    again.load_dense_weights("m_dense_20.model")
    for each in (model, again):
        each.get_embedding_training_cache().update("fourth.keyset")
        each.get_data_reader_eval().set_source()
        assert each.eval()
    assert model._last_eval is not None
    assert again._last_eval is not None
    np.testing.assert_array_equal(again._last_eval[0], model._last_eval[0])


def test_changes_are_published_to_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broker: Broker) -> None:
    monkeypatch.chdir(tmp_path)
    make_data(SAMPLE, tmp_path)
    model = model_with_cache(tmp_path)
    model.fit(num_epochs=1, display=0, eval_interval=0)
    model.get_incremental_model()
    model.save_params_to_files("m", 40)
    model.graph_to_json("graph.json")
    (report,) = import_hugectr(write_ps_json(tmp_path, SAMPLE, "m", 40, max_batch=200), tmp_path / "repository")
    model.fit(num_epochs=1, display=0, eval_interval=0)
    (table,) = model.trainer.tables

    with InferenceSession.open(report.version_dir, device="cpu", update_stream=broker.url) as session:
        assert not np.array_equal(session.lookup(table.name, table.keys.numpy()), table.weight)
        with Publisher(broker.url, "sample") as publisher:
            for name, rows in zip([table.name], model.get_incremental_model(), strict=True):
                publisher.publish(name, *rows)
        wait_until(lambda: np.array_equal(session.lookup(table.name, table.keys.numpy()), table.weight), "the new rows")


@pytest.mark.parametrize(("update", "expected"), [(Update_t.Local, [5, 7]), (Update_t.Global, [3, 5, 7])])
def test_changes_are_the_rows_that_the_optimizer_changed(update: Update_t, expected: list[int]) -> None:
    """Rows of the last batches, those that are new among them; with Adam and `Global`, all rows."""
    table = EmbeddingTable("table", 4, hugectr.CreateOptimizer(Optimizer_t.Adam, update))
    table.track_changes()
    learn(table, 3, 5)
    table.take_changes()
    before = dict(zip(table.keys.tolist(), table.weight.clone(), strict=True))
    learn(table, 7, 5)
    keys, vectors = table.take_changes()
    assert sorted(keys.tolist()) == expected
    rows = dict(zip(table.keys.tolist(), table.weight, strict=True))
    for key, vector in zip(keys.tolist(), vectors, strict=True):
        np.testing.assert_array_equal(vector, rows[key])
    assert all(torch.equal(before[key], rows[key]) for key in before.keys() - {*expected})


def learn(table: EmbeddingTable, *keys: int) -> None:
    rows = table.touch(DeviceBags(torch.tensor(keys), slice(0, len(keys)), None, 1))
    table.update(rows, torch.ones(len(keys), 4), 0.1)


def without_cache() -> Model:
    reader = hugectr.DataReaderParams(SAMPLE.reader, "a", eval_source="b", check_type=SAMPLE.check)
    return Model(hugectr.CreateSolver(), reader, hugectr.CreateOptimizer())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: model_with_cache(Path("x"), repeat_dataset=True), "is for epoch mode: repeat_dataset=False"),
        (lambda: hugectr.CreateETC([], ["hdfs://name/table"]), "'hdfs://name/table' is not supported; name folders"),
        (lambda: without_cache().get_embedding_training_cache(), "comes after Model.compile"),
        (lambda: without_cache().set_source(["a"], ["k"], "b"), r"several sources need a training cache"),
        (lambda: without_cache().dump_incremental_model_2kafka(), "publish what Model.get_incremental_model"),
    ],
)
def test_misuse_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ConfigurationError, UnsupportedModelError), match=message):
        call()
