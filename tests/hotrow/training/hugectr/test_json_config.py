"""`hotrow train`, and the JSON configurations that it reads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotrow.training.hugectr.graph.json_config import read_configuration, train
from inference_session.errors import ConfigurationError
from inference_session.importers.hugectr import import_hugectr
from tests.testing.hugectr_configurations import dcn_configuration
from tests.testing.hugectr_training_samples import SAMPLES, losses, make_data, write_ps_json

pytestmark = pytest.mark.training


def test_a_configuration_trains_and_its_files_are_imported(tmp_path: Path) -> None:
    make_data(SAMPLES["dcn"], tmp_path)
    (tmp_path / "dcn.json").write_text(json.dumps(dcn_configuration(), indent=2))
    command = [sys.executable, "-m", "hotrow", "train", "dcn.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(losses(done.stdout)) == 6
    assert re.search(r"^Evaluation, AverageLoss: 0\.\d+$", done.stdout, re.MULTILINE)
    for name in ("dcn_dense_20.model", "dcn_dense_31.model", "dcn0_sparse_31.model/key", "dcn_opt_dense_31.model"):
        assert (tmp_path / name).exists()
    (tmp_path / "dcn_graph.json").rename(tmp_path / "graph.json")
    ps_json = write_ps_json(tmp_path, SAMPLES["dcn"], "dcn", 31, max_batch=64)
    (report,) = import_hugectr(ps_json, tmp_path / "repository")
    assert (report.version_dir / "dense.onnx").exists()


def test_scripts_and_configurations_taken_for_each_other_are_told_apart(tmp_path: Path) -> None:
    """Each is told the command that runs it."""
    answers = []
    for module, name in (("hotrow", "wdl.py"), ("hotrow.training.hugectr", "wdl.json")):
        (tmp_path / name).write_text("{}")
        command = [sys.executable, "-m", module, *(["train"] if module == "hotrow" else []), name]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
        answers.append((done.returncode, done.stderr))

    assert answers == [
        (1, "hotrow: wdl.py: a script is run by `python -m hotrow.training.hugectr wdl.py`\n"),
        (1, "hotrow: wdl.json: a JSON configuration is trained by `hotrow train wdl.json`\n"),
    ]


def test_training_goes_on_from_the_files_that_the_solver_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_data(SAMPLES["dcn"], tmp_path)
    document = dcn_configuration()
    Path("a.json").write_text(json.dumps(document))
    train(read_configuration(Path("a.json")))
    document["solver"] |= {
        "dense_model_file": "dcn_dense_31.model", "sparse_model_file": ["dcn0_sparse_31.model"],
        "dense_opt_states_file": "dcn_opt_dense_31.model", "sparse_opt_states_file": "dcn0_opt_sparse_31.model",
        "snapshot_prefix": "more/dcn",
    }  # fmt: skip
    Path("b.json").write_text(json.dumps(document))
    model = train(read_configuration(Path("b.json")))
    assert model.trainer.dense_optimizer.num_steps == 62
    assert Path("more/dcn_dense_31.model").exists()
    assert Path("more/dcn_graph.json").exists()


def test_the_final_files_are_numbered_by_the_iterations_of_all_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The schedule also gives a rate when an epoch has no batch left."""
    monkeypatch.chdir(tmp_path)
    make_data(SAMPLES["dcn"], tmp_path)
    document = dcn_configuration()
    del document["solver"]["max_iter"]
    document["solver"] |= {"num_epochs": 3, "snapshot": 1000}
    Path("a.json").write_text(json.dumps(document))
    model = train(read_configuration(Path("a.json")))
    count = model.trainer.dense_optimizer.num_steps
    printed = capsys.readouterr().out
    assert f"Finish 3 epochs {count} global iterations" in printed
    assert "No snapshot" not in printed  # these files are written in any case
    assert Path(f"dcn_dense_{count}.model").exists()


def test_evaluations_are_written_where_the_solver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each anew, also where a run before has left files."""
    monkeypatch.chdir(tmp_path)
    make_data(SAMPLES["dcn"], tmp_path)
    document = dcn_configuration()
    document["solver"] |= {"export_predictions_prefix": "out", "max_iter": 21}
    Path("a.json").write_text(json.dumps(document))
    Path("out_label_10").write_text("1 0 ")
    train(read_configuration(Path("a.json")))
    for number in (10, 20):
        predictions, labels = (np.loadtxt(f"out_{kind}_{number}") for kind in ("prediction", "label"))
        assert predictions.shape == labels.shape == (200,)
        assert ((predictions > 0) & (predictions < 1)).all()
        assert {*labels.tolist()} == {0.0, 1.0}


def test_fields_of_other_releases_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`Multiply` of release 2.3, which is WeightMultiply, and `auc_threshold`, a target of AUC."""
    monkeypatch.chdir(tmp_path)
    make_data(SAMPLES["dcn"], tmp_path)
    document = dcn_configuration()
    document["solver"] |= {"auc_threshold": 0.01, "eval_metrics": ["AUC"]}
    document["layers"][3:5] = [
        {"type": "Multiply", "bottom": "dense", "top": "multiply1", "weight_dims": [13, 4]},
        {"type": "Concat", "bottom": ["reshape1", "multiply1"], "top": "concat1"},
        document["layers"][4],
    ]
    Path("a.json").write_text(json.dumps(document))
    train(read_configuration(Path("a.json")))
    assert "Hit target accuracy AUC 0.010000 at 10 / 31 iterations" in capsys.readouterr().out
    kinds = [layer["type"] for layer in json.loads(Path("dcn_graph.json").read_text())["layers"]]
    assert "WeightMultiply" in kinds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"solver": {"batch": 1, "max_iter": 1}}, r"config\.json:\d+: field 'solver.batch': unknown; allowed: "),
        ({"solver": {}}, "one of max_iter and num_epochs is required"),
        ({"solver": {"max_iter": 1, "mixed_precision": 0}}, "scaler is 0; allowed"),
        ({"solver": {"max_iter": 1, "eval_metrics": ["Best"]}}, "no metric 'Best'"),
        ({"solver": {"max_iter": "x"}}, r"field 'solver\.max_iter': found 'x'; allowed: whole numbers from 1"),
        ({"solver": {"max_iter": 1, "display": None}}, r"'solver\.display': found None; allowed: whole numbers"),
        ({"solver": {"max_iter": 1, "gpu": 0}}, r"'solver\.gpu': found 0; allowed: a list of GPUs"),
        ({"solver": {"max_iter": 1, "model_name": 3}}, r"'solver\.model_name': found 3; allowed: text"),
        ({"solver": {"max_iter": 1, "eval_metrics": "AUC"}}, r"'solver\.eval_metrics': found 'AUC'; allowed: a list"),
        ({"solver": {"max_iter": 1, "auc_threshold": "x"}}, "auc_threshold is 'x'; allowed: numbers from 0"),
        ({"solver": {"max_iter": 1, "export_predictions_prefix": 1}}, r"found 1; allowed: text"),
        ({"optimizer": {"type": "Best"}}, "'Best' is no Optimizer_t; allowed: 'Adam'"),
        ({"solver": {"max_iter": 1, "batchsize_eval": 2**40}}, "batchsize_eval is 1099511627776; allowed: whole"),
        ({"layers": []}, "the first layer must be of type 'Data'"),
        ({"layers": [{"type": "Data", "format": "Text"}]}, "found 'Text'; allowed: Norm, Raw, Parquet"),
        ({"layers": [{"type": "Data"}]}, "source and eval_source name the data"),
        (
            {"layers": [{"type": "Data", "source": [1], "eval_source": "a"}]},
            r"DataReaderParams: source is \[1\]; allowed: a name, or a list of names",
        ),
        ({"optimizer": 3}, "field 'optimizer': an object is required"),
    ],
)
def test_what_is_wrong_with_a_configuration_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**dcn_configuration(), **change}, indent=1))
    with pytest.raises(ConfigurationError, match=message):
        read_configuration(path)


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (5, {"type": "InnerProduct", "bottom": "concat1"}, "layer 'InnerProduct': field 'top' is missing"),
        (0, {"dense": {"top": [[]], "dense_dim": 13}}, r"Input: dense_name is \[\[\]\]; allowed: a name"),
        (0, {"label": {"top": [[]], "label_dim": 1}}, r"Input: label_names is \[\[\]\]; allowed: a name"),
        (0, {"sparse": [[0]]}, r"field 'sparse' holds \[0\]; an object for each"),
        (1, {"optimizer": "Adam"}, "field 'optimizer' is 'Adam'; an object is required"),
        (1, {"optimizer": {"type": "Adam", "adam_hparam": 3}}, "field 'adam_hparam': an object is required"),
        (1, {"sparse_embedding_hparam": {"embedding_vec_size": None, "combiner": 0}}, "embedding_vec_size is None"),
    ],
)
def test_a_layer_that_is_refused_is_named_with_its_line(
    tmp_path: Path, number: int, change: dict[str, Any], message: str
) -> None:
    document = dcn_configuration()
    layer = document["layers"][number]
    document["layers"][number] = change if "type" in change else {**layer, **change}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(document, indent=1))
    make_data(SAMPLES["dcn"], tmp_path)
    with pytest.raises(ConfigurationError, match=rf"config\.json:\d+: field 'layers\[{number}\]': .*{message}"):
        train(read_configuration(path))
