"""Every client example runs unchanged against a real server."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_session.importers.hugectr import import_hugectr
from inference_session.importers.hugectr.ps_fields import PsModel
from inference_session.model_spec import ModelSpec
from tests.testing import ROOT
from tests.testing.example_models import ExampleModels
from tests.testing.programs import run_program
from triton_backend.launcher.server import ServerOptions, TritonServer
from triton_backend.repository.config_writer import write_model_config

EXAMPLES = ROOT / "client_examples"
REPOSITORY = ROOT / "model_repository"


@pytest.fixture(scope="module")
def endpoints(tritonserver: None) -> Iterator[dict[str, str]]:
    """Addresses of a server that serves the example model."""
    options = ServerOptions(REPOSITORY, ("movielens",), http_port=0, grpc_port=0, metrics_port=0)
    with TritonServer.start(options) as server:
        yield server.endpoints


@pytest.mark.triton
@pytest.mark.parametrize(
    ("program", "endpoint"),
    [
        ("http_client.py", "HTTP"),
        ("grpc_client.py", "gRPC"),
        ("asyncio_grpc_client.py", "gRPC"),
        ("shared_memory_client.py", "gRPC"),
    ],
)
def test_a_client_prints_plausible_predictions(endpoints: dict[str, str], program: str, endpoint: str) -> None:
    """A good movie comes before a bad one, whatever the protocol."""
    url = endpoints[endpoint].removeprefix("http://")

    assert_plausible(run_program(sys.executable, EXAMPLES / program, "--url", url))


@pytest.mark.triton
def test_plain_json_prints_plausible_predictions(endpoints: dict[str, str]) -> None:
    """The same answer without any Triton library."""
    pytest.importorskip("requests")

    assert_plausible(run_program(sys.executable, EXAMPLES / "json_requests.py", "--url", endpoints["HTTP"]))


@pytest.mark.triton
def test_curl_gets_both_tasks(endpoints: dict[str, str]) -> None:
    """The JSON answer holds a probability for each task."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")

    answer = json.loads(run_program(EXAMPLES / "json_curl.sh", endpoints["HTTP"]))

    outputs = {output["name"]: output["data"] for output in answer["outputs"]}
    assert outputs.keys() == {"liked", "loved"}
    assert all(0 < value < 1 for values in outputs.values() for value in values)


def test_perf_analyzer_gets_ids_that_the_tables_hold(tmp_path: Path) -> None:
    """Entries are without the dimension of samples, and below the size of each table."""
    path = tmp_path / "movielens.json"

    run_program(
        *(sys.executable, EXAMPLES / "perf_analyzer_input.py", REPOSITORY / "movielens"),
        *("--output", path, "--entries", "20"),
    )

    entries = json.loads(path.read_text(encoding="utf-8"))["data"]
    assert len(entries) == 20
    assert entries[0]["liked_movies"]["shape"] == [10]
    assert entries[0]["mean_rating"]["shape"] == [1]
    genres = {key for entry in entries for key in entry["genres"]["content"]}
    assert genres == set(range(19))
    assert all(0 <= key < 1683 for entry in entries for key in entry["liked_movies"]["content"])


@pytest.mark.parametrize(("ps_json", "inputs"), [("ps.json", "DES"), ("hps_ps.json", "KEYS")])
def test_perf_analyzer_asks_models_of_hugectr(ps_json: str, inputs: str, models: ExampleModels, tmp_path: Path) -> None:
    """Packed requests of one sample, as the server takes them."""
    import_hugectr(models.wide_and_deep / ps_json, tmp_path, complete=_configured)
    (model,) = tmp_path.iterdir()
    path = tmp_path / "requests.json"

    run_program(sys.executable, EXAMPLES / "perf_analyzer_input.py", model, "--output", path, "--entries", "2")

    first, second = json.loads(path.read_text(encoding="utf-8"))["data"]
    assert inputs in first
    assert first != second


def _configured(version_dir: Path, spec: ModelSpec, item: PsModel) -> None:
    write_model_config(version_dir, spec, item.name, max_batch_size=item.max_batch_size)


def test_the_readme_names_every_example() -> None:
    """Users would not find an example that is missing there."""
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"client_examples/(\w+\.(?:py|sh))", text))

    assert {path.name for path in EXAMPLES.glob("*.[ps][yh]")} - {"example_request.py"} == named


def assert_plausible(output: str) -> None:
    """Five movies, the best first, with percentages."""
    titles = [line[:24].strip() for line in output.splitlines()]
    assert len(titles) == 5
    assert titles.index("Shawshank Redemption") < titles.index("Jungle2Jungle")
    assert output.count("%") == 10
