"""HugeCTR's Python API of releases before 3.1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotrow.training import hugectr
from inference_session.errors import UnsupportedModelError
from tests.testing.hugectr_configurations import dcn_configuration
from tests.testing.hugectr_training_samples import SAMPLES, make_data

pytestmark = pytest.mark.training


def session(**solver: Any) -> Any:
    settings = {"batchsize": 64, "batchsize_eval": 100, "max_eval_batches": 2, "i64_input_key": True, "model_file": ""}
    return hugectr.Session(hugectr.solver_parser_helper(**{**settings, **solver}), "dcn.json", True, "temporary")


def test_a_session_trains_a_configuration_in_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files begin another one, and it evaluates batch by batch or at once."""
    monkeypatch.chdir(tmp_path)
    make_data(SAMPLES["dcn"], tmp_path)
    Path("dcn.json").write_text(json.dumps(dcn_configuration()))
    schedule = hugectr.get_learning_rate_scheduler("dcn.json")
    first = session()
    first.start_data_reading()
    first.get_model_oversubscriber().update("file.keyset")
    found = []
    for _ in range(30):
        first.set_learning_rate(schedule.get_next())
        assert first.train()
        found.append(first.get_current_loss())
    assert np.mean(found[-8:]) < np.mean(found[:8])
    first.check_overflow()
    first.copy_weights_for_evaluation()
    metrics = dict(first.evaluation("predictions", "labels"))
    assert {*metrics} == {"AUC"}
    assert len(Path("predictions").read_text().split()) == 200
    first.download_params_to_files("./dcn", 30)

    again = session(model_file="dcn_dense_30.model", embedding_files=["dcn0_sparse_30.model"], repeat_dataset=False)
    again.get_data_reader_train().set_file_list_source("train.txt")
    again.get_data_reader_eval().set_file_list_source("eval.txt")
    assert dict(again.evaluation()) == pytest.approx(metrics, abs=1e-6)
    assert again.train()


def test_the_model_of_release_3_0_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"\['max_iter', 'num_epochs'\] are not supported: .*CreateSolver"):
        hugectr.solver_parser_helper(num_epochs=0, max_iter=10000)
