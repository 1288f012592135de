"""Loading, reloading and unloading versions while a real server runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.testing import ROOT
from tests.testing.model_settings import settings_text
from tests.testing.served import Serve, Served, start
from tests.testing.served_requests import DENSE, IDS, ask, counted_since, counters, settled
from tests.testing.servers import wait_until
from tests.testing.triton_models import ctr_answer, flat_answer, write_ctr, write_flat

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def server(tritonserver: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One for tests that load models of their own; it serves `ctr`."""
    repository = tmp_path_factory.mktemp("repository")
    write_ctr(repository / "ctr" / "1")
    served = start(repository)
    yield served
    served.close()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with version 1 of `ctr`."""
    write_ctr(tmp_path / "repository" / "ctr" / "1")
    return tmp_path / "repository"


def ask_ctr(client: Any, name: str = "ctr") -> Any:
    """The predictions of one request to `ctr`, or to such a model of another name."""
    return ask(client, name, {"ids": IDS, "dense": DENSE}).as_numpy("OUTPUT0")


def write_with(served: Served, name: str, settings: str) -> None:
    """A model like `ctr`, with more in its config.pbtxt."""
    write_ctr(served.repository / name / "1")
    with (served.repository / name / "config.pbtxt").open("a", encoding="utf-8") as config:
        config.write(settings)


def touch(version_dir: Path) -> None:
    """Make Triton take a version for changed."""
    (version_dir / "touched").touch()
    (version_dir / "touched").unlink()


def test_a_version_is_loaded_while_its_metrics_cannot_be_recorded(
    tritonserver: None, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the disk of temporary files is full: it serves, and has its metrics once there is room."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    served = start(repository)
    try:
        (records,) = tmp_path.glob("hotrow-serve-*/*/metrics")
        records.rename(tmp_path / "away")
        records.touch()
        write_ctr(repository / "ctr" / "2", scale=2.0)
        client = served.grpc_client()
        client.load_model("ctr")
        np.testing.assert_array_equal(ask_ctr(client), ctr_answer(IDS, DENSE, scale=2.0))
        records.unlink()
        (tmp_path / "away").rename(records)
        wait_until(lambda: counters(served, version="2").get("hotrow_requests_total") == 1, "the metrics")
    finally:
        served.close()


def test_reloads_in_place_keep_serving_and_counting(server: Served) -> None:
    """Five reloads of one version: every request between them is answered, and none is lost from the counters."""
    before = settled(server, "ctr")
    with server.grpc_client() as client:
        for _ in range(5):
            for _ in range(5):
                np.testing.assert_array_equal(ask_ctr(client), ctr_answer(IDS, DENSE))
            touch(server.repository / "ctr" / "1")
            client.load_model("ctr")
        ask_ctr(client)

    assert counted_since(server, "ctr", before, 26)["hotrow_requests_total"] == 26


def test_a_damaged_version_is_refused_and_the_old_one_serves(server: Served) -> None:
    """A version whose bytes are damaged does not load; the error names the file, and the old version goes on."""
    write_ctr(server.repository / "ctr" / "2", scale=3)
    vectors = server.repository / "ctr" / "2" / "tables" / "item" / "emb_vector"
    vectors.write_bytes(b"\x01" + vectors.read_bytes()[1:])
    with server.grpc_client() as client:
        with pytest.raises(InferenceServerException, match="emb_vector: damaged"):
            client.load_model("ctr")

        np.testing.assert_array_equal(ask_ctr(client), ctr_answer(IDS, DENSE))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"colour": "red"}, "unknown setting 'colour'"),
        ({"verify": "maybe"}, "setting 'verify' cannot be 'maybe'"),
        ({"max_samples_per_request": "0"}, "'max_samples_per_request' cannot be '0'"),
    ],
)
def test_wrong_settings_are_refused(server: Served, settings: dict[str, str], message: str) -> None:
    """A parameter that is no setting, or has no allowed value, keeps the model from loading and is named."""
    write_with(server, "wrong", settings_text(settings))
    try:
        with server.grpc_client() as client, pytest.raises(InferenceServerException, match=message):
            client.load_model("wrong")
    finally:  # the next test's server is this one
        shutil.rmtree(server.repository / "wrong")


def test_tritons_own_parameters_are_none_of_ours(server: Served) -> None:
    """Parameters in capitals belong to Triton's Python backend and are left to it."""
    write_with(server, "both", settings_text({"FORCE_CPU_ONLY_INPUT_TENSORS": "yes", "unknown_keys": "reject"}))

    with server.grpc_client() as client:
        client.load_model("both")
        np.testing.assert_array_equal(ask_ctr(client, "both"), ctr_answer(IDS, DENSE))
        with pytest.raises(InferenceServerException, match="unknown keys: ") as caught:
            ask(client, "both", {"ids": IDS + 1000, "dense": DENSE})
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_a_response_cache_is_warned_of(server: Served) -> None:
    """Triton answers from it whatever has become of the rows, so the server's log says so."""
    write_with(server, "cached", "response_cache { enable: true }\n")

    with server.grpc_client() as client:
        client.load_model("cached")
        np.testing.assert_array_equal(ask_ctr(client, "cached"), ctr_answer(IDS, DENSE))
    warning = "model 'cached' has response_cache: Triton repeats old answers"
    wait_until(lambda: warning in "".join(server.errors), "the warning")


def test_a_model_that_may_get_no_samples_is_warned_of(server: Served) -> None:
    """Its users let Triton count samples where no input has a fixed size: a request without any ends the server."""
    write_flat(server.repository / "counted" / "1")
    one = "data_type: TYPE_{} dims: [ 1 ] reshape {{ shape: [ ] }} }}\n"
    lines = [
        'backend: "hotrow" max_batch_size: 8\n',
        f'input {{ name: "item" {one.format("INT64")}',
        f'input {{ name: "price" {one.format("FP32")}',
        f'output {{ name: "score" {one.format("FP32")}',
    ]
    (server.repository / "counted" / "config.pbtxt").write_text("".join(lines), encoding="utf-8")
    items, prices = np.array([[3], [4]]), np.ones((2, 1), np.float32)

    with server.grpc_client() as client:
        client.load_model("counted")
        answer = ask(client, "counted", {"item": items, "price": prices}).as_numpy("score")
    np.testing.assert_array_equal(answer[:, 0], flat_answer(items[:, 0], prices[:, 0]))
    warning = "model 'counted' has a max_batch_size, but no input of a fixed size: a request of 0 samples ends Triton"
    wait_until(lambda: warning in "".join(server.errors), "the warning")


def test_metrics_may_be_off(serve: Serve, repository: Path) -> None:
    """A server without metrics serves anyway."""
    served = serve(repository, "--", "--allow-metrics=false")

    with served.grpc_client() as client:
        np.testing.assert_array_equal(ask_ctr(client), ctr_answer(IDS, DENSE))


def test_requests_that_wait_are_answered_before_an_unload(serve: Serve, tmp_path: Path) -> None:
    """Requests in our own queue are answered when their model is unloaded meanwhile."""
    write_flat(tmp_path / "flat" / "1")
    served = serve(tmp_path)
    arrays = {"item": np.arange(50), "price": np.ones(50, np.float32)}
    expected = flat_answer(arrays["item"], arrays["price"])

    def send(_: int) -> bool:
        """Whether it was answered; it may only be refused once the model is gone."""
        try:
            answer = ask(client, "flat", arrays).as_numpy("score")
        except InferenceServerException as error:
            assert error.status() in ("StatusCode.UNAVAILABLE", "StatusCode.NOT_FOUND")  # noqa: PT017
            return False
        np.testing.assert_array_equal(answer, expected)
        return True

    with served.grpc_client() as client, ThreadPoolExecutor(16) as threads:
        answers = threads.map(send, range(500))
        assert next(iter(answers))
        client.unload_model("flat")
        list(answers)
    assert served.stop() == 0


def test_a_standalone_version_needs_no_backend_of_ours(serve: Serve, repository: Path) -> None:
    """`import --standalone` serves through Triton's python backend, whose process ends without a crash."""
    config = repository / "ctr" / "config.pbtxt"
    config.write_text(config.read_text(encoding="utf-8").replace('"hotrow"', '"python"'), encoding="utf-8")
    code = "import faulthandler\n\nfaulthandler.enable()\nfrom triton_backend.backend.model import TritonPythonModel\n"
    (repository / "ctr" / "1" / "model.py").write_text(code, encoding="utf-8")
    served = serve(repository, "--verbose")

    with served.grpc_client() as client:
        np.testing.assert_array_equal(ask_ctr(client), ctr_answer(IDS, DENSE))
    assert served.stop() == 0
    served.close()
    assert not [line for line in served.errors if "Fatal Python error" in line]


def test_a_process_that_has_answered_errors_ends_without_a_crash(serve: Serve, tmp_path: Path) -> None:
    """Requests must be gone by then, as Triton frees their memory: an error led back to itself, and to its request."""
    repository = tmp_path / "repository"
    write_ctr(repository / "ctr" / "1")
    write_flat(repository / "flat" / "1")
    code = f"import faulthandler, sys\n\nfaulthandler.enable()\nsys.path.insert(0, {str(ROOT)!r})\n"
    code += "from triton_backend.backend.model import TritonPythonModel\n"
    for model in ("ctr", "flat"):
        config = repository / model / "config.pbtxt"
        text = config.read_text(encoding="utf-8").replace('"hotrow"', '"python"')
        config.write_text(text + settings_text({"unknown_keys": "reject"}), encoding="utf-8")
        (repository / model / "1" / "model.py").write_text(code, encoding="utf-8")
    served = serve(repository)

    with served.grpc_client() as client:
        for model, arrays in [
            ("ctr", {"ids": IDS - 1000, "dense": DENSE}),
            ("flat", {"item": np.array([-1000]), "price": np.ones(1, np.float32)}),
            ("flat", {"item": np.array([1, 2]), "price": np.ones(1, np.float32)}),
        ]:
            with pytest.raises(InferenceServerException):
                ask(client, model, arrays)
    assert served.stop() == 0
    served.close()
    assert not [line for line in served.errors if "Fatal Python error" in line]
