"""`hugectr.inference` after training: predictions of data sets, as HugeCTR's scripts ask for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hotrow.training import hugectr
from hotrow.training.hugectr.trainer.metrics import auc
from inference_session.errors import ConfigurationError, InvalidRequestError, ModelFormatError
from tests.testing.hugectr_training_samples import SAMPLES, Sample, make_data, make_model

pytestmark = pytest.mark.training
SWAPPED = replace(SAMPLES["wdl"], tables=SAMPLES["wdl"].tables[::-1])
"""Its tables are not in the order of its sparse inputs."""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)


def trained(sample: Sample) -> hugectr.Model:
    make_data(sample, Path())
    model = make_model(sample, Path())
    model.start_data_reading()
    for _ in range(20):
        model.train()
    model.save_params_to_files("sample", 20)
    model.graph_to_json("graph.json")
    return model


def session_of(sample: Sample) -> Any:
    numbers = range(len(sample.tables))
    statistics = Path("sample_dense_20.model.ntp.json")
    params = hugectr.inference.InferenceParams(
        "sample", 200, 1.0, "sample_dense_20.model", [f"sample{i}_sparse_20.model" for i in numbers], 0, False, 1.0,
        sample.is_long, default_value_for_each_table=[0.0 for _ in numbers],
        non_trainable_params_file=str(statistics) if statistics.exists() else None,
    )  # fmt: skip
    return hugectr.inference.CreateInferenceSession("graph.json", params)


def source_of(sample: Sample) -> dict[str, Any]:
    array = sample.slot_sizes if sample.slot_size_array is None else sample.slot_size_array
    is_parquet = sample.reader is hugectr.DataReaderType_t.Parquet
    return {
        "source": "eval.txt", "data_reader_type": sample.reader, "check_type": sample.check,
        "slot_size_array": list(array) if is_parquet else [],
    }  # fmt: skip


@pytest.mark.parametrize(
    "sample", [SWAPPED, *(SAMPLES[name] for name in ("dcn_bin", "criteo_multi_hot", "din_parquet", "mmoe_parquet"))]
)
def test_a_data_set_is_predicted_as_the_trainer_evaluates_it(sample: Sample) -> None:
    model = trained(sample)
    for _ in range(3):
        assert model.eval()
        model.export_predictions("predictions", "labels")
    model.get_data_reader_train().stop()
    model.get_data_reader_eval().stop()
    width = len(sample.labels)
    expected = np.array(Path("predictions").read_text().split(), np.float32).reshape(600, -1)
    labels = np.array(Path("labels").read_text().split(), np.float32).reshape(600, width)

    session, source = session_of(sample), source_of(sample)
    found = session.predict(3, *source.values())

    assert found.shape == ((600,) if width == 1 else (600, width))
    np.testing.assert_allclose(found.reshape(600, -1), expected, atol=1e-6)
    wanted = [auc(column, label) for column, label in zip(expected.T, labels.T, strict=True)]
    assert session.evaluate(num_batches=3, **source) == pytest.approx(np.mean(wanted), abs=1e-4)
    again = session.predict(num_batches=7, **source)  # 1,000 samples, from the beginning again
    np.testing.assert_array_equal(again[1000:], again[:400])


def test_bad_sources_are_refused() -> None:
    sample = SAMPLES["wdl"]
    model = trained(sample)
    model.get_data_reader_train().stop()
    model.get_data_reader_eval().stop()
    session, source = session_of(sample), source_of(sample)
    with pytest.raises(ConfigurationError, match="num_batches is 0; allowed: whole numbers from 1"):
        session.predict(0, *source.values())
    with pytest.raises(ConfigurationError, match=r"absent.txt: no such file"):
        session.evaluate(num_batches=1, **{**source, "source": "absent.txt"})
    Path("empty.txt").write_text("0\n")
    with pytest.raises(ModelFormatError, match="empty"):
        session.evaluate(num_batches=1, **{**source, "source": "empty.txt"})
    with pytest.raises(InvalidRequestError, match="ROWINDEX"):
        session.predict([0.0] * sample.dense_dim, [], [0])
