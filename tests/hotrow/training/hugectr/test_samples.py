"""HugeCTR's sample scripts by their layers: they train, and what is served after an import is what was trained."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hotrow.training import hugectr
from hotrow.training.hugectr import DenseLayer, Layer_t, Model
from inference_session import InferenceSession
from inference_session.errors import UnsupportedModelError
from inference_session.importers.hugectr import import_hugectr
from tests.testing.hugectr_training_samples import SAMPLES, Sample, losses, make_data, make_model, write_ps_json

pytestmark = pytest.mark.training


def served(session: InferenceSession, block: hugectr.readers.block.Block, sample: Sample) -> NDArray[np.float32]:
    """What the session answers for a batch, sent as HugeCTR's clients do."""
    num_samples = len(block)
    by_sample = [
        [
            bags.keys[bags.offsets[i * n] : bags.offsets[(i + 1) * n]]
            for bags in block.bags
            for n in [_slots(bags, num_samples)]
        ]
        for i in range(num_samples)
    ]
    keys = np.concatenate([part for parts in by_sample for part in parts])
    inputs = {
        "DES": block.dense.ravel(),
        "CATCOLUMN": keys.astype(np.int64 if sample.is_long else np.uint32),
        "ROWINDEX": np.concatenate([bags.offsets for bags in block.bags]).astype(np.int32),
    }
    return np.asarray(session.predict(inputs)).reshape(num_samples, -1)


def _slots(bags: hugectr.readers.block.Bags, num_samples: int) -> int:
    return (len(bags.offsets) - 1) // num_samples


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_trained_is_what_is_served(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sample = SAMPLES[name]
    make_data(sample, tmp_path)
    model = make_model(sample, tmp_path)
    model.summary()
    model.fit(max_iter=61, display=1, eval_interval=60, snapshot=60, snapshot_prefix="sample")
    printed = capsys.readouterr().out
    found = losses(printed)
    assert len(found) == 60
    assert np.mean(found[-8:]) < np.mean(found[:8]) - 0.005
    assert "Evaluation, " in printed

    model.graph_to_json("graph.json")
    (report,) = import_hugectr(write_ps_json(tmp_path, sample, "sample", 60, max_batch=200), tmp_path / "repository")
    reader = model.get_data_reader_eval()
    reader.set_source()
    again = make_model(sample, tmp_path)
    again.load_dense_weights("sample_dense_60.model")
    again.load_sparse_weights([f"sample{i}_sparse_60.model" for i in range(len(sample.tables))])
    again.start_data_reading()
    block = reader.next_batch()
    assert block is not None
    assert again.eval()
    again.export_predictions("predictions", "labels")
    expected = np.array(Path("predictions").read_text().split(), np.float32).reshape(200, -1)
    np.testing.assert_array_equal(np.array(Path("labels").read_text().split(), np.float32), block.labels.ravel())
    with InferenceSession.open(report.version_dir) as session:
        answers = served(session, block, sample)
        assert session.label_names == tuple(sample.labels)
    np.testing.assert_allclose(answers, expected, atol=1e-6)
    reader.stop()


def test_a_layer_that_cannot_be_served_is_refused_by_name() -> None:
    for layer in (Layer_t.GRU, Layer_t.Gather, Layer_t.Select):
        with pytest.raises(UnsupportedModelError, match=rf"DenseLayer {layer.value} .*'top'.* is not supported"):
            DenseLayer(layer, ["query", "key"], ["top"], num_output=4)


def test_hotrow_and_hugectr_read_one_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, sample in SAMPLES.items():
        make_model(sample, tmp_path).graph_to_json(f"{name}.json")
        document = json.loads(Path(f"{name}.json").read_text())
        rebuilt = make_bare(sample, tmp_path)
        rebuilt.construct_from_json(f"{name}.json", include_dense_network=True)
        rebuilt.graph_to_json("again.json")
        assert json.loads(Path("again.json").read_text()) == document


def make_bare(sample: Sample, folder: Path) -> Model:
    reader = hugectr.DataReaderParams(
        sample.reader, str(folder / "train.txt"), eval_source=str(folder / "eval.txt"), check_type=sample.check
    )
    solver = hugectr.CreateSolver(batchsize=100, i64_input_key=sample.is_long)
    return Model(solver, reader, hugectr.CreateOptimizer(**sample.optimizer))
