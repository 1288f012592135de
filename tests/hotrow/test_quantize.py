"""`--tables` of the imports and `hotrow quantize`: what they write, report and refuse."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result

from hotrow.command_line import cli
from inference_session import InferenceSession
from inference_session.errors import HotrowError
from inference_session.requests.canary import record_canary
from inference_session.version_directory import manifest
from tests.testing import small_model
from tests.testing.example_models import ExampleModels
from tests.testing.model_settings import add_settings
from tests.testing.onnx_models import model_of, table


def run(*arguments: object) -> Result:
    """`hotrow` with these arguments."""
    return CliRunner().invoke(cli, list(map(str, arguments)))


@pytest.fixture
def version_dir(tmp_path: Path) -> Path:
    """The small model as version 1 of `ctr`."""
    small_model.write(tmp_path / "ctr" / "1")
    return tmp_path / "ctr" / "1"


def inputs(num_samples: int) -> small_model.Arrays:
    """A request to the small model."""
    return small_model.random_inputs(num_samples, np.random.default_rng(1))


@pytest.mark.parametrize(("tables", "row_bytes", "tolerance"), [("float16", 128, 0.01), ("int8", 72, 0.1)])
def test_an_onnx_model_is_imported_with_smaller_tables(
    tables: str, row_bytes: int, tolerance: float, tmp_path: Path
) -> None:
    """It answers nearly as the same model with float32 tables; `inspect` and `size` report its type and bytes."""
    graph = "agraph (int64[N, 3] x) => (float[N, 64] y) { g = Gather(W, x) y = ReduceSum <keepdims = 0> (g, axes) }"
    onnx.save(model_of(graph, {"W": table(dim=64), "axes": np.array([1])}), tmp_path / "model.onnx")
    repository = tmp_path / "repository"
    for name, kind in (("exact", "float32"), ("small", tables)):
        done = run(
            "import", "onnx", tmp_path / "model.onnx", "--name", name, "--repository", repository, "--tables", kind
        )
        assert done.exit_code == 0, done.output
        assert f"1000 rows x 64 {kind}" in done.output

    shown = json.loads(run("inspect", repository / "small" / "1", "--json", "--verify").output)
    assert (shown["tables"][0]["dtype"], shown["tables"][0]["bytes"]) == (tables, 1000 * row_bytes)
    assert tables in run("inspect", repository / "small" / "1").output
    sized = json.loads(run("size", repository / "small", "--json").output)
    assert {item["name"]: item["total_bytes"] for item in sized["memory"]}["vectors"] == 1000 * row_bytes
    asked = {"x": np.random.default_rng(0).integers(0, 1000, (50, 3))}
    with (
        InferenceSession.open(repository / "exact" / "1", device="cpu") as exact,
        InferenceSession.open(repository / "small" / "1", device="cpu") as small,
    ):
        answers = [session.run(asked, ["y"])["y"] for session in (exact, small)]
    assert 0 < np.abs(answers[0] - answers[1]).max() < tolerance


def test_a_model_of_hugectr_is_imported_with_int8_tables(models: ExampleModels, tmp_path: Path) -> None:
    """The original's files do not change, the table of 1 element stays float32, predictions are near."""
    folder = models.wide_and_deep
    before = (folder / "hugectr_wdl1_sparse_0.model" / "emb_vector").read_bytes()
    done = run("import", "hugectr", folder / "ps.json", "--repository", tmp_path, "--tables", "int8")

    assert done.exit_code == 0, done.output
    assert "13000 rows x 16 int8" in done.output
    assert "6000 rows x 1 float32" in done.output
    assert (folder / "hugectr_wdl1_sparse_0.model" / "emb_vector").read_bytes() == before
    with (
        InferenceSession.open(tmp_path / "hugectr_wdl" / "1", device="cpu") as session,
        np.load(folder / "requests.npz") as requests,
        np.load(folder / "expected.npz") as expected,
    ):
        for name in expected:
            asked = {key.rpartition("__")[2]: requests[key] for key in requests if key.startswith(f"{name}__")}
            np.testing.assert_allclose(session.predict(asked), expected[name], rtol=0, atol=0.01)


@pytest.mark.parametrize(
    ("model", "ps_json"), [("wide_and_deep", "ps.json"), ("wide_and_deep", "hps_ps.json"), ("cross_network", "ps.json")]
)
def test_random_requests_are_made_for_models_of_hugectr(
    model: str, ps_json: str, models: ExampleModels, tmp_path: Path
) -> None:
    """Requests with known keys: without any, all answers would be equal."""
    assert run("import", "hugectr", getattr(models, model) / ps_json, "--repository", tmp_path).exit_code == 0
    (version_dir,) = tmp_path.glob("*/1")
    done = run("quantize", version_dir, "--tables", "int8", "--json")

    assert done.exit_code == 0, done.output
    assert 0 < json.loads(done.output)["quality"]["differences"][-1]["largest"] < 0.01


def test_the_next_version_is_written_and_compared(version_dir: Path) -> None:
    """The report names tables, bytes and the differences of each output."""
    done = run("quantize", version_dir, "--tables", "int8")

    assert done.exit_code == 0, done.output
    assert f"Wrote {version_dir.with_name('2')}, quantized from {version_dir}" in done.output
    assert "'user.weight': 50 rows x 4, float32 → int8, 600 bytes" in done.output
    assert "'code': 40 rows x 3, stays float16, 240 bytes" in done.output
    assert "Bytes of all tables: 1520 before, 1320 after (0.87)" in done.output
    assert "Answers to random requests" in done.output
    assert run("inspect", version_dir.with_name("2"), "--verify").exit_code == 0


def test_differences_are_those_of_the_answers(version_dir: Path, tmp_path: Path) -> None:
    """Compared with the answers of both versions, for more samples than are run at once."""
    np.savez(tmp_path / "requests.npz", **inputs(3000))
    target = tmp_path / "elsewhere" / "7"
    options = ("--requests", tmp_path / "requests.npz", "--output", target, "--json")
    report = json.loads(run("quantize", version_dir, "--tables", "float16", *options).output)

    with InferenceSession.open(version_dir) as old, InferenceSession.open(target) as new:
        before, after = old.run(inputs(3000)), new.run(inputs(3000))
    assert [item["output"] for item in report["quality"]["differences"]] == list(before)
    for item in report["quality"]["differences"]:
        off = np.abs(before[item["output"]].astype(float) - after[item["output"]])
        assert item["largest"] == pytest.approx(off.max(), rel=0.1)
        assert item["mean"] == pytest.approx(off.mean(), rel=0.1)


def test_a_version_that_is_too_far_off_is_not_written(version_dir: Path) -> None:
    """The command prints the report and the reason, and leaves nothing behind."""
    done = run("quantize", version_dir, "--tables", "int8", "--max-error", "1e-9")

    assert done.exit_code != 0
    assert isinstance(done.exception, HotrowError)
    assert "more than --max-error 1e-09; nothing was written" in str(done.exception)
    assert "largest difference" in done.output
    assert [path.name for path in version_dir.parent.iterdir()] == ["1"]


def test_the_models_canary_is_the_request(version_dir: Path, tmp_path: Path) -> None:
    """Where config.pbtxt names one and --requests does not."""
    with InferenceSession.open(version_dir) as session:
        record_canary(session.run, inputs(5), tmp_path / "canary.npz")
    add_settings(version_dir.parent / "config.pbtxt", {"canary_requests": tmp_path / "canary.npz"})

    assert f"Answers to {tmp_path / 'canary.npz'}" in run("quantize", version_dir, "--tables", "int8").output


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_auc_of_each_label_is_told(kind: str, version_dir: Path, tmp_path: Path) -> None:
    """Labels are columns of one array, or arrays of their own."""
    labels = np.random.default_rng(0).integers(0, 2, (200, 2))
    np.savez(tmp_path / "requests.npz", **inputs(200))
    np.save(tmp_path / "labels.npy", labels)
    np.savez(tmp_path / "labels.npz", click=labels[:, 0], stay=labels[:, 1:])
    options = ("--requests", tmp_path / "requests.npz", "--labels", tmp_path / f"labels.{kind}", "--json")
    aucs = json.loads(run("quantize", version_dir, "--tables", "int8", *options).output)["quality"]["aucs"]

    with InferenceSession.open(version_dir) as old, InferenceSession.open(version_dir.with_name("2")) as new:
        scores = [session.predict(inputs(200)) for session in (old, new)]
    assert [item["label"] for item in aucs] == ["click", "stay"]
    for column, item in enumerate(aucs):
        assert item["before"] == pytest.approx(slow_auc(labels[:, column], scores[0][:, column]))
        assert item["after"] == pytest.approx(slow_auc(labels[:, column], scores[1][:, column]))


def test_labels_that_are_all_the_same_have_no_auc(version_dir: Path, tmp_path: Path) -> None:
    """The report says why, and JSON has null: NaN is none of its numbers."""
    np.savez(tmp_path / "requests.npz", **inputs(5))
    np.save(tmp_path / "labels.npy", np.array([[0, 1]] * 4 + [[1, 1]]))
    options = ("--requests", tmp_path / "requests.npz", "--labels", tmp_path / "labels.npy")

    text = run("quantize", version_dir, "--tables", "int8", *options).output
    assert "AUC of 'stay': none, because all samples have the same label" in text
    found = run("quantize", version_dir, "--tables", "int8", *options, "--json").output
    click, stay = json.loads(found)["quality"]["aucs"]
    assert isinstance(click["before"], float)
    assert stay == {"label": "stay", "before": None, "after": None}


def slow_auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """By all pairs."""
    pairs = [(a > b) + (a == b) / 2 for a in scores[labels == 1] for b in scores[labels == 0]]
    return float(np.mean(pairs))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--labels", "labels.npy"), "--labels needs --requests"),
        (("--requests", "broken.npz"), "not an .npz file"),
        (("--requests", "other.npz"), "is missing"),
        (("--requests", "empty.npz", "--max-error", "0"), "empty.npz: the request has no sample"),
        (("--requests", "requests.npz", "--labels", "short.npy"), r"shape [3, 2], expected [5, 2]"),
        (("--requests", "requests.npz", "--labels", "broken.npz"), "expected 0 and 1"),
        (("--requests", "requests.npz", "--labels", "stars.npy"), "labels stars.npy: holds 5, expected 0 and 1"),
        (("--requests", "requests.npz", "--labels", "other.npz"), "an array for each of 'click', 'stay'"),
    ],
)
def test_what_does_not_fit_is_refused(
    options: tuple[str, ...], message: str, version_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are not archives, requests and labels of another model; nothing is written."""
    monkeypatch.chdir(tmp_path)
    np.savez("requests.npz", **inputs(5))
    np.savez("empty.npz", **inputs(0))
    np.savez("other.npz", x=np.zeros(3))
    np.save("labels.npy", np.zeros((5, 2)))
    np.save("short.npy", np.zeros((3, 2)))
    np.save("stars.npy", np.full((5, 2), 5))
    Path("broken.npz").write_bytes(b"nothing")
    done = run("quantize", version_dir, "--tables", "int8", *options)

    assert done.exit_code != 0
    assert message in f"{done.output} {done.exception}"
    assert [path.name for path in version_dir.parent.iterdir()] == ["1"]


def test_a_folder_that_is_no_version_needs_an_output(version_dir: Path) -> None:
    """A folder without a number has no next version; for the folder of a model, one of its versions is named."""
    named = run("quantize", version_dir.parent, "--tables", "int8").exception
    folder = version_dir.rename(version_dir.with_name("trained"))
    assert str(named).endswith(f"give one of its version directories, such as {version_dir}")
    assert "give --output" in run("quantize", folder, "--tables", "int8").output
    assert run("quantize", folder, "--tables", "int8", "--output", version_dir).exit_code == 0


def test_stores_and_streams_of_the_model_are_left_alone(version_dir: Path) -> None:
    """Answers come from the files: no store is needed."""
    session_file = version_dir / "session.json"
    document = json.loads(session_file.read_text(encoding="utf-8"))
    document["settings"] = {"volatile_store": "redis://127.0.0.1:1/0", "update_stream": "kafka://127.0.0.1:1"}
    session_file.write_text(json.dumps(document), encoding="utf-8")
    manifest.write_manifest(version_dir)
    assert run("quantize", version_dir, "--tables", "int8").exit_code == 0
    assert sorted(path.name for path in version_dir.parent.iterdir()) == ["1", "2"]


_ENDED_BY_A_SIGNAL = """
import os, shutil, signal, sys
from hotrow.answer_quality import comparison
from hotrow.__main__ import main
number = int(sys.argv.pop())
comparison.compare = lambda *_: os.kill(os.getpid(), number)
remove = shutil.rmtree
def remove_while_interrupted_again(*arguments, **named):
    if number != signal.SIGINT:
        os.kill(os.getpid(), number)
    remove(*arguments, **named)
shutil.rmtree = remove_while_interrupted_again
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing(number: signal.Signals, version_dir: Path, tmp_path: Path) -> None:
    """It comes when all tables have been written. SIGTERM and SIGHUP come again while they are removed; a closed
    terminal sends SIGHUP twice.
    """
    asked = ("quantize", version_dir, "--tables", "int8", "--output", tmp_path / "smaller", number.value)
    done = subprocess.run(
        [sys.executable, "-c", _ENDED_BY_A_SIGNAL, *map(str, asked)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.strip() == "Aborted!"
    assert [path.name for path in tmp_path.iterdir()] == ["ctr"]
