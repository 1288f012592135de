"""HugeCTR's and HPS's own model folders, config.pbtxt untouched, on a real server."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from inference_session.importers.hugectr import import_hugectr
from tests.testing import served_requests
from tests.testing.broker import Broker
from tests.testing.command_line import hotrow, run_main
from tests.testing.example_models import ExampleModels
from tests.testing.hugectr_evaluator import Evaluator
from tests.testing.hugectr_source import Requests, Source, array_of, place_small, requests_of
from tests.testing.model_settings import settings_text
from tests.testing.programs import run_program
from tests.testing.served import Serve, Served, is_ready, start
from tests.testing.served_requests import counted_since, settled
from tests.testing.servers import wait_until
from tests.testing.triton_models import write_ctr
from triton_backend.repository.config_writer import write_model_config

pytestmark = pytest.mark.triton

SMALL_MODELS: dict[str, dict[str, Any]] = {
    **{f"rows_{num_rows}": {"num_rows": (num_rows, num_rows)} for num_rows in (0, 1, 65)},
    "labels": {"label_dim": 3},
    "short_keys": {},
}
"""What is said of the source of each; those of few rows have none, one, and more than a set of HugeCTR's cache holds.
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 64
input [ { name: "KEYS" data_type: TYPE_INT64 dims: [ -1 ] }, { name: "NUMKEYS" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
ensemble_scheduling { step [ {
  model_name: "hugectr_wdl_hps" model_version: -1
  input_map [ { key: "KEYS" value: "KEYS" }, { key: "NUMKEYS" value: "NUMKEYS" } ]
  output_map { key: "OUTPUT0" value: "OUTPUT0" }
} ] }
"""


def place(source: Path, folder: Path, *, prefix: str = "") -> Path:
    """Copy a user's files to a model folder, with a version directory that is empty."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("v2"))
    for path in (folder, *folder.rglob("*")):  # the files may be read-only
        path.chmod(0o755 if path.is_dir() else 0o644)
    for name in ("config.pbtxt", "ps.json"):
        shutil.copyfile(source / f"{prefix}{name}", folder / name)
    (folder / "1").mkdir()
    return folder


@pytest.fixture(scope="module")
def in_place(tritonserver: None, models: ExampleModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server for all tests that do no more than ask: the example models, and small ones."""
    repository = tmp_path_factory.mktemp("in_place")
    for folder in (models.wide_and_deep, models.cross_network):
        place(folder, repository / folder.name)
    place(models.wide_and_deep, repository / "hugectr_wdl_hps", prefix="hps_")
    (repository / "ensemble/1").mkdir(parents=True)
    (repository / "ensemble/config.pbtxt").write_text(ENSEMBLE, encoding="utf-8")
    for name, options in SMALL_MODELS.items():
        source = Source(repository / name, **options)
        source.settings["supportlonglong"] = name != "short_keys"
        place_small(repository / name, source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOTROW_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        served = start(repository)
    yield served
    status = served.stop()
    served.close()
    assert status == 0


def ask(client: Any, model: str, arrays: Mapping[str, NDArray[Any]], outputs: list[str] | None = None) -> Any:
    """OUTPUT0 of one request."""
    return served_requests.ask(client, model, arrays, outputs or ["OUTPUT0"]).as_numpy("OUTPUT0")


def counted(client: Any, model: str) -> tuple[int, int]:
    """Requests that a model has answered, and how often it has computed; counted a moment after the answer."""
    (stats,) = client.get_inference_statistics(model, as_json=True)["model_stats"]
    return int(stats["inference_stats"]["success"].get("count", 0)), int(stats.get("execution_count", 0))


def await_joined(client: Any, model: str, num_requests: int, ask_all: Callable[[], None], *, alone: bool) -> None:
    """Ask until some requests have been computed together; once, if they are sent one after the other."""

    def are_joined() -> bool:
        answered, computed = counted(client, model)
        ask_all()
        wait_until(lambda: counted(client, model)[0] >= answered + num_requests, "all requests to be counted")
        return alone or counted(client, model)[1] - computed < num_requests

    wait_until(are_joined, "requests to be joined")


def ask_or_refuse(client: Any, model: str, arrays: Mapping[str, NDArray[Any]], outputs: list[str]) -> Any:
    """OUTPUT0, or None where the server says that the request is wrong."""
    try:
        return ask(client, model, arrays, outputs)
    except InferenceServerException as error:
        if error.status() != "StatusCode.INVALID_ARGUMENT":
            raise
        return None


def assert_answers(client: Any, model: str, requests: Requests, expected: Path) -> None:
    """Every request gets the answer of the archive, one label as [num_samples]."""
    with np.load(expected) as answers:
        assert set(answers) == set(requests)
        for name, inputs in requests.items():
            found = ask(client, model, inputs)
            assert found.shape == (answers[name].size,)
            np.testing.assert_allclose(found, answers[name].ravel(), rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("model", ["wide_and_deep", "cross_network"])
def test_a_users_folder_answers_as_hugectr_would(in_place: Served, models: ExampleModels, model: str) -> None:
    """Over gRPC and HTTP, every request, from the files as they were written."""
    folder: Path = getattr(models, model)
    name = folder.name
    requests = requests_of(folder / "requests.npz")

    with in_place.grpc_client() as grpc, in_place.http_client() as http:
        assert_answers(grpc, name, requests, folder / "expected.npz")
        assert_answers(http, name, requests, folder / "expected.npz")
    assert (in_place.repository / name / "config.pbtxt").read_bytes() == (folder / "config.pbtxt").read_bytes()


@pytest.mark.parametrize("model", ["hugectr_wdl_hps", "ensemble"])
def test_tables_alone_answer_as_hps_would(in_place: Served, models: ExampleModels, model: str) -> None:
    """KEYS and NUMKEYS give the vectors, flat; as a step of an ensemble, as those of Merlin Systems have it, too."""
    folder = models.wide_and_deep

    with in_place.grpc_client() as grpc, in_place.http_client() as http:
        for client in (grpc, http):
            assert_answers(client, model, requests_of(folder / "hps_requests.npz"), folder / "hps_expected.npz")


def test_a_missing_gpu_is_said_once(in_place: Served) -> None:
    """One line for all models that ask for a GPU, and no other word about it."""

    def said() -> list[str]:
        return [line for line in in_place.errors if "GPU" in line]

    wait_until(lambda: bool(said()), "a word about it")
    assert len(said()) == 1
    assert "no GPU on this machine; models of KIND_GPU run on the CPU: hugectr_dcn, hugectr_wdl" in said()[0]


def test_malformed_requests_get_what_they_must(in_place: Served, models: ExampleModels) -> None:
    """Each is refused or answered as its file says; a good request at the same time is answered as usual."""
    folder = models.wide_and_deep
    cases = json.loads((folder / "malformed.json").read_text(encoding="utf-8"))["cases"]
    good = requests_of(folder / "requests.npz")["one_sample"]
    with np.load(folder / "expected.npz") as answers:
        right = answers["one_sample"].ravel()

    with in_place.grpc_client() as client, ThreadPoolExecutor(1) as thread:
        for case in cases:
            inputs = {name: array_of(tensor) for name, tensor in case["inputs"].items()}
            mate = thread.submit(ask, client, "hugectr_wdl", good)
            answer = ask_or_refuse(client, case["model"], inputs, case["requested_outputs"])
            expect = case["expect"]
            assert expect["outcome"] in ("either", "error" if answer is None else "ok"), case["id"]
            if answer is not None:
                for row, expected in zip(expect.get("check_rows", ()), expect.get("expected_rows", ()), strict=True):
                    np.testing.assert_allclose(np.atleast_1d(answer[row]), expected, rtol=0, atol=1e-5)
            np.testing.assert_allclose(mate.result(), right, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "files", "concurrency"),
    [("hugectr_wdl", "", 1), ("hugectr_wdl", "", 8), ("hugectr_wdl", "", 64), ("hugectr_wdl_hps", "hps_", 16)],
)
def test_requests_at_once_are_joined(
    in_place: Served, models: ExampleModels, model: str, files: str, concurrency: int
) -> None:
    """However many wait, all get right answers; requests that wait together are computed together."""
    folder = models.wide_and_deep
    requests = requests_of(folder / f"{files}requests.npz")
    with np.load(folder / f"{files}expected.npz") as archive:
        answers = dict(archive)
    names = [name for _ in range(20) for name in requests]
    with in_place.grpc_client() as client, ThreadPoolExecutor(concurrency) as threads:

        def ask_all() -> None:
            found = threads.map(lambda name: ask(client, model, requests[name]), names)
            for name, answer in zip(names, found, strict=True):
                np.testing.assert_allclose(answer, answers[name].ravel(), rtol=0, atol=0 if files else 1e-5)

        await_joined(client, model, len(names), ask_all, alone=concurrency == 1)


@pytest.mark.parametrize("model", SMALL_MODELS)
def test_small_models_are_served(in_place: Served, tmp_path: Path, model: str) -> None:
    """Tables of few rows; several tasks, as [num_samples, label_dim]; UINT32 keys with `supportlonglong` false."""
    (report,) = import_hugectr(in_place.repository / model / "ps.json", tmp_path)
    source = Source(tmp_path / "source", **SMALL_MODELS[model])
    request = source.request("uint32") if model == "short_keys" else source.request()
    expected = Evaluator(report.version_dir).predict(request)

    with in_place.grpc_client() as grpc, in_place.http_client() as http:
        for client in (grpc, http):
            answer = ask(client, model, request)
            assert answer.shape == (expected.shape if model == "labels" else (expected.size,))
            np.testing.assert_allclose(answer, expected.reshape(answer.shape), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["hugectr_wdl", "hugectr_dcn", "hugectr_wdl_hps", "labels", "short_keys"])
def test_models_are_healthy(in_place: Served, name: str) -> None:
    """`hotrow health` gets an answer although it does not know how tensors must agree; no request fails."""
    before = settled(in_place, name)

    ended = run_main("health", "--model", name, "--url", in_place.grpc, "--timeout", 60)
    assert (ended.code, ended.err) == (0, "")

    grown = counted_since(in_place, name, before, 1)
    assert grown["hotrow_requests_total"] == 1
    assert grown["hotrow_failed_requests_total"] == 0


def test_a_model_of_another_machine_is_healthy(
    in_place: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `hotrow health` cannot read the server's key, a refusal by the model is an answer."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # read as a process starts

    options = ("--model", "hugectr_wdl", "--url", in_place.grpc, "--timeout", "60")
    run_program(sys.executable, "-m", "hotrow", "health", *options)


def switch_to_v2(v2: Path, folder: Path, *, keep_rows: bool) -> None:
    """The steps of a HugeCTR user: new weights, a config.pbtxt that names them, a new version number."""
    for path in v2.glob("*_1.model"):
        copy = shutil.copytree if path.is_dir() else shutil.copyfile
        copy(path, folder / path.name)
    config = (v2 / "config.pbtxt").read_text(encoding="utf-8")
    if keep_rows:
        earlier = "hugectr_wdl0_sparse_0.model, hugectr_wdl1_sparse_0.model"
        config += settings_text({"keep_rows_of": earlier})
    staged = folder / ".config"
    staged.write_text(config, encoding="utf-8")
    (folder / "2").mkdir()
    staged.replace(folder / "config.pbtxt")


@pytest.mark.parametrize("keep_rows", [False, True])
def test_a_load_call_switches_to_new_files(
    serve: Serve, models: ExampleModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, keep_rows: bool
) -> None:
    """The version in the user's own config.pbtxt serves once the Load call returns; going back works, too."""
    monkeypatch.setenv("HOTROW_CACHE_DIR", str(tmp_path / "cache"))
    folder = models.wide_and_deep
    expected = "expected_upsert.npz" if keep_rows else "expected.npz"
    requests = requests_of(folder / "requests.npz")
    placed = place(folder, tmp_path / "repository/hugectr_wdl")
    served = serve(tmp_path / "repository")
    with served.grpc_client() as client:
        assert_answers(client, "hugectr_wdl", requests, folder / "expected.npz")

        switch_to_v2(folder / "v2", placed, keep_rows=keep_rows)
        client.load_model("hugectr_wdl")
        assert_answers(client, "hugectr_wdl", requests, folder / "v2" / expected)

        shutil.copyfile(folder / "config.pbtxt", placed / "config.pbtxt")
        client.load_model("hugectr_wdl")
        assert_answers(client, "hugectr_wdl", requests, folder / "expected.npz")


def test_versions_come_back_by_their_numbers(
    serve: Serve, models: ExampleModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hotrow load --version` takes a new config.pbtxt up; `roll-back` serves what was served before it, and is kept
    when the backend process is lost; `load` goes on.
    """
    monkeypatch.setenv("HOTROW_CACHE_DIR", str(tmp_path / "cache"))
    folder, name = models.wide_and_deep, "hugectr_wdl"
    requests = requests_of(folder / "requests.npz")
    placed = place(folder, tmp_path / "repository" / name)
    served = serve(tmp_path / "repository")
    url = ("--url", served.grpc)

    def check(expected: Path) -> None:
        with served.grpc_client() as client:
            # A process that is killed while it shares a lock may take the server down, which is started again then.
            wait_until(lambda: is_ready(client, name), "the model to be ready")
            assert_answers(client, name, requests, expected)

    switch_to_v2(folder / "v2", placed, keep_rows=False)
    hotrow("load", name, "--version", 2, *url)
    check(folder / "v2" / "expected.npz")

    hotrow("roll-back", name, *url)
    check(folder / "expected.npz")
    served.stub(name, version=1).kill()
    wait_until(lambda: any("serves again" in line for line in served.errors), "a new backend process")
    check(folder / "expected.npz")

    hotrow("load", name, *url)
    check(folder / "v2" / "expected.npz")


def test_a_load_of_broken_files_leaves_the_old_version(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that fails says what is wrong, and the model goes on answering."""
    monkeypatch.setenv("HOTROW_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "repository/small"
    folder.mkdir(parents=True)
    source = Source(folder)
    place_small(folder, source)
    served = serve(tmp_path / "repository")
    with served.grpc_client() as client:
        before = ask(client, "small", source.request())
        (folder / "dense.model").write_bytes(b"short")

        with pytest.raises(InferenceServerException, match=r"dense\.model"):
            client.load_model("small")

        np.testing.assert_array_equal(ask(client, "small", source.request()), before)


def test_errors_of_models_beside_them_name_the_users_files(serve: Serve, tmp_path: Path) -> None:
    """Triton sees links to them; the user has to fix errors in the original folder."""
    folder, ctr = tmp_path / "repository/small", tmp_path / "repository/ctr"
    folder.mkdir(parents=True)
    place_small(folder, Source(folder))
    write_ctr(ctr / "1")
    served = serve(tmp_path / "repository")
    write_ctr(ctr / "2", scale=2.0)
    (ctr / "2/tables/item/emb_vector").write_bytes(b"short")

    with served.grpc_client() as client, pytest.raises(InferenceServerException) as refusal:
        client.load_model("ctr")

    assert str(ctr / "2/tables/item/emb_vector") in str(refusal.value)


def test_an_imported_model_keeps_its_requests(serve: Serve, models: ExampleModels, tmp_path: Path) -> None:
    """After `hotrow import hugectr` clients send what they sent before, and Triton joins it."""
    for ps_json in (models.cross_network / "ps.json", models.wide_and_deep / "hps_ps.json"):
        import_hugectr(
            ps_json,
            tmp_path,
            complete=lambda staged, spec, model: write_model_config(
                staged, spec, model.name, max_batch_size=model.max_batch_size
            ),
        )
    served = serve(tmp_path)

    with served.grpc_client() as grpc, served.http_client() as http:
        for client in (grpc, http):
            dcn, wdl = models.cross_network, models.wide_and_deep
            assert_answers(client, "hugectr_dcn", requests_of(dcn / "requests.npz"), dcn / "expected.npz")
            assert_answers(client, "hugectr_wdl_hps", requests_of(wdl / "hps_requests.npz"), wdl / "hps_expected.npz")


def test_updates_come_from_the_brokers_of_ps_json(serve: Serve, tmp_path: Path) -> None:
    """Rows that a trainer publishes to HugeCTR's topics are served without a setting in config.pbtxt."""
    newer = Source(tmp_path / "newer")
    newer.vectors[1] += 1
    newer.write_table(1)
    newer.ps_json()
    (report,) = import_hugectr(newer.folder / "ps.json", tmp_path / "imported")
    request = newer.request()
    expected = Evaluator(report.version_dir).predict(request).ravel()
    repository = tmp_path / "repository"
    repository.mkdir()
    with Broker() as broker:
        source = Source(repository / "small")
        source.settings["update_source"] = {"type": "kafka_message_queue", "brokers": broker.address}
        place_small(source.folder, source)
        rows = zip(newer.keys[1], newer.vectors[1], strict=True)
        broker.send("hctr_et.small.deep", *((key.tobytes(), vector.tobytes()) for key, vector in rows))
        served = serve(repository)
        with served.grpc_client() as client:
            wait_until(
                lambda: np.allclose(ask(client, "small", request), expected, rtol=0, atol=1e-5),
                "the published rows to be served",
            )
