"""`hotrow load`, `roll-back`, `versions`, `health`, `smoke-test` and `publish-version` against a real server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from hotrow.commands.load import STILL_LOADING
from inference_session.version_directory import manifest
from tests.testing.command_line import run_main
from tests.testing.model_settings import add_settings
from tests.testing.served import NUMPY_1, Served, start
from tests.testing.served_requests import DENSE, IDS, ask
from tests.testing.servers import wait_until
from tests.testing.triton_models import ctr_answer, write_bags, write_ctr, write_flat, write_types

pytestmark = pytest.mark.triton

SCALES = {1: 1.0, 2: 3.0, 3: 5.0}
"""What tells the versions of `ctr` apart."""


@pytest.fixture(scope="module")
def server(tritonserver: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose repository each test may change."""
    repository = tmp_path_factory.mktemp("repository")
    write_flat(repository / "flat" / "1")
    write_bags(repository / "bags" / "1")
    write_types(repository / "types" / "1", strings=NUMPY_1)
    served = start(repository)
    yield served
    served.close()


@pytest.fixture
def model(server: Served, request: pytest.FixtureRequest) -> str:
    """A model of the test's own, with versions 1 and 2; nothing of it is loaded."""
    name = f"ctr{abs(hash(request.node.nodeid))}"
    for version in (1, 2):
        write_ctr(server.repository / name / str(version), scale=SCALES[version])
    return name


def succeed(*arguments: object) -> str:
    """What a command prints that is expected to succeed; on a slow machine also that it takes long."""
    ended = run_main(*arguments)
    assert ended.code == 0
    assert not ended.err or STILL_LOADING in ended.err
    return ended.out


def fail(*arguments: object) -> str:
    """The one line of a command that is expected to fail."""
    ended = run_main(*arguments)
    assert ended.code == 1
    assert ended.err.startswith("hotrow: ")
    assert ended.err.count("\n") == 1
    return ended.err


def answers(server: Served, model: str) -> NDArray[np.float32]:
    """The predictions of the version that serves."""
    with server.grpc_client() as client:
        answer: NDArray[np.float32] = ask(client, model, {"ids": IDS, "dense": DENSE}).as_numpy("OUTPUT0")
    return answer


def serves(server: Served, model: str, version: int) -> bool:
    """Whether requests get the answers of that version."""
    return np.array_equal(answers(server, model), ctr_answer(IDS, DENSE, scale=SCALES[version]))


def test_a_new_model_goes_live_and_back(server: Served, model: str) -> None:
    """A model that came after the start is loaded, its newest version first; roll-back goes down to the lowest."""
    url = ("--url", server.grpc)
    assert succeed("load", model, *url) == f"{model}: version 2 serves\n"
    assert serves(server, model, 2)

    assert succeed("roll-back", model, *url) == f"{model}: version 1 serves (before: 2)\n"
    assert serves(server, model, 1)
    assert "version 1 is active, and there is no lower version" in fail("roll-back", model, *url)
    assert serves(server, model, 1)
    assert [line for line in server.errors if "is specified for model" in line] == []

    assert succeed("load", model, *url) == f"{model}: version 2 serves (before: 1)\n"
    assert serves(server, model, 2)


def test_versions_may_be_dates(server: Served, model: str) -> None:
    """Large numbers load and are listed like others; roll-back, which does not see the folder, says where it looked."""
    url, date = ("--url", server.grpc), 20260131120000
    write_ctr(server.repository / model / str(date), scale=SCALES[2])
    assert succeed("load", model, *url) == f"{model}: version {date} serves\n"
    assert succeed("versions", model, *url).startswith(f"{date} READY")

    assert ("no lower version among the versions loaded before and the 100 numbers below it") in fail(
        "roll-back", model, *url
    )
    assert succeed("load", model, "--version", 2, *url) == f"{model}: version 2 serves (before: {date})\n"
    assert succeed("load", model, *url) == f"{model}: version {date} serves (before: 2)\n"
    assert succeed("roll-back", model, *url) == f"{model}: version 2 serves (before: {date})\n"


def test_a_version_is_chosen_and_left_again(server: Served, model: str) -> None:
    """Exactly the version asked for serves, though newer ones are there; a load without one takes the newest."""
    url = ("--url", server.grpc)
    succeed("load", model, "--version", 1, *url)
    assert serves(server, model, 1)
    write_ctr(server.repository / model / "3", scale=SCALES[3])
    succeed("load", model, "--version", 2, *url)
    assert serves(server, model, 2)

    assert "has no version 9; loaded there so far: " in fail("load", model, "--version", 9, *url)
    assert serves(server, model, 2)
    succeed("load", model, *url)
    assert serves(server, model, 3)


@pytest.mark.parametrize(
    ("policy", "expected", "chosen"),
    [
        ("specific { versions: [1, 2] }", [1, 2], 3),
        ("latest { num_versions: 2 }", [2, 3], 3),
        ("all { }", [1, 2, 3], 1),
    ],
)
def test_no_version_chosen_means_the_policy_of_config_pbtxt(
    policy: str, expected: list[int], chosen: int, server: Served, model: str
) -> None:
    """It replaces a version that was chosen, or rolled back to, whatever is newest."""
    url = ("--url", server.grpc)
    write_ctr(server.repository / model / "3", scale=SCALES[3])
    config = server.repository / model / "config.pbtxt"
    config.write_text(f"{config.read_text(encoding='utf-8')}\nversion_policy {{ {policy} }}\n", encoding="utf-8")

    def ready() -> list[int]:
        lines = succeed("versions", model, *url).splitlines()
        return sorted(int(line.split()[0]) for line in lines if " READY" in line)

    succeed("load", model, *url)
    assert ready() == expected
    succeed("load", model, "--version", chosen, *url)
    assert ready() == [chosen]
    succeed("load", model, *url)
    assert ready() == expected
    assert serves(server, model, expected[-1])

    succeed("roll-back", model, *url)
    assert ready() == [expected[-1] - 1]
    succeed("load", model, *url)
    assert ready() == expected


def test_settings_that_triton_has_not_read_are_named(server: Served, model: str) -> None:
    """A choice of a version keeps the older ones, also for the load that ends it, until the file changes again."""
    url = ("--url", server.grpc)
    succeed("load", model, *url)
    config = server.repository / model / "config.pbtxt"
    add_settings(config, {"unknown_keys": "reject"})
    request = {"ids": IDS + 1000, "dense": DENSE}

    succeed("load", model, "--version", 1, *url)
    warning = f"model {model!r}: config.pbtxt has other values of 'unknown_keys' than Triton has given"
    wait_until(lambda: warning in "".join(server.errors), "the warning")
    with server.grpc_client() as client:
        ask(client, model, request)
        config.touch()
        succeed("load", model, *url)
        with pytest.raises(InferenceServerException, match="unknown keys: "):
            ask(client, model, request)


def test_versions_are_listed(server: Served, model: str) -> None:
    """A line per version, number and state first, then which one serves, for how long, and why another does not."""
    url = ("--url", server.grpc)
    succeed("load", model, "--version", 1, *url)
    write_ctr(server.repository / model / "3", scale=SCALES[3])
    (server.repository / model / "3" / "dense.onnx").unlink()
    fail("load", model, "--version", 3, *url)

    listed = json.loads(succeed("versions", model, *url, "--metrics-url", server.metrics, "--json"))
    lines = [line.split(maxsplit=2) for line in succeed("versions", model, *url).splitlines()]

    assert [line[:2] for line in lines if line[1] == "READY"] == [["1", "READY"]]
    assert [row["version"] for row in listed if row["serves"]] == [1]
    assert next(row for row in listed if row["version"] == 1)["age_s"] >= 0
    assert "dense.onnx: no such file" in next(row for row in listed if row["version"] == 3)["reason"]


def test_a_version_is_tested_beside_the_one_that_serves(server: Served, model: str, tmp_path: Path) -> None:
    """Blue and green: both are loaded, recorded requests tell how far they are apart, then one of them serves."""
    url = ("--url", server.grpc)
    requests = tmp_path / "requests.jsonl"
    tensors: dict[str, tuple[str, Any]] = {"ids": ("INT64", IDS), "dense": ("FP32", DENSE)}
    inputs = [
        {"name": name, "datatype": datatype, "shape": array.shape, "data": array.tolist()}
        for name, (datatype, array) in tensors.items()
    ]
    requests.write_text(json.dumps({"inputs": inputs}) + "\n", encoding="utf-8")
    test = ("smoke-test", model, "--version", 2, "--requests", requests, *url)

    succeed("load", model, "--version", 1, *url)
    assert "`hotrow load` with --version and --beside loads it" in fail(*test)
    never = ("smoke-test", model, "--version", 99, "--requests", requests, *url)
    assert "`hotrow load` with --version and --beside loads it" in fail(*never)
    succeed("load", model, "--version", 2, "--beside", *url)
    assert succeed(*test) == f"{model}: version 2 answered 1 request\n"
    assert "more than 0.1" in fail(*test, "--compare-with", 1, "--tolerance", 0.1)
    succeed(*test, "--compare-with", 1, "--tolerance", 1e6)
    succeed("load", model, "--version", 2, *url)

    def states() -> dict[int, str]:
        """The state of each version."""
        return {row["version"]: row["state"] for row in json.loads(succeed("versions", model, *url, "--json"))}

    assert states()[2] == "READY"
    wait_until(lambda: states()[1] in ("UNLOADING", "UNAVAILABLE"), "version 1 to leave")


def break_manifest(version_dir: Path, change: Callable[[Path], None]) -> None:
    """Change a version and write a manifest that agrees."""
    change(version_dir)
    manifest.write_manifest(version_dir)


def wider(version_dir: Path) -> None:
    """Let session.json say that rows are wider than they are."""
    path = version_dir / "session.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document["tables"][0]["embedding_dim"] = 5
    path.write_text(json.dumps(document), encoding="utf-8")


BAD_VERSIONS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing file": (lambda v: (v / "dense.onnx").unlink(), "dense.onnx"),
    "truncated table": (lambda v: (v / "tables/item/emb_vector").write_bytes(b"1234"), "emb_vector"),
    "wrong checksum": (lambda v: (v / "tables/item/emb_vector").write_bytes(bytes(800)), "emb_vector"),
    "wrong dims": (lambda v: break_manifest(v, wider), "emb_vector"),
    "broken session.json": (lambda v: (v / "session.json").write_text("{"), "session.json"),
    "broken dense.onnx": (
        lambda v: break_manifest(v, lambda w: (w / "dense.onnx").write_bytes(b"?") and None),
        "dense.onnx",
    ),
    "no manifest": (lambda v: (v / "MANIFEST.json").unlink(), "MANIFEST.json"),
    "empty folder": (lambda v: (shutil.rmtree(v), v.mkdir()), "MANIFEST.json"),
}


def test_bad_versions_are_named_and_the_old_one_serves(server: Served, model: str) -> None:
    """Whatever is wrong with a version, the command and the bare client get the file at fault, and no traceback."""
    url = ("--url", server.grpc)
    shutil.rmtree(server.repository / model / "2")
    succeed("load", model, *url)
    for kind, (spoil, file) in BAD_VERSIONS.items():
        version_dir = server.repository / model / "2"
        write_ctr(version_dir, scale=SCALES[2])
        spoil(version_dir)

        with server.grpc_client() as client, pytest.raises(InferenceServerException) as caught:
            client.load_model(model)
        message = str(caught.value.message())
        assert f"{version_dir}/" in message, kind
        assert f"/{file}" in message, kind
        assert "Traceback" not in message, kind
        assert "At:" not in message, kind
        assert serves(server, model, 1), kind
        shutil.rmtree(version_dir)

    write_ctr(server.repository / model / "2", scale=SCALES[2])
    (server.repository / model / "2" / "session.json").write_text("{", encoding="utf-8")
    assert "2/session.json" in fail("load", model, *url)
    shutil.rmtree(server.repository / model / "2")
    write_ctr(server.repository / model / "2", scale=SCALES[2])
    succeed("load", model, *url)
    assert serves(server, model, 2)


def test_a_folder_without_versions_is_named(server: Served, model: str) -> None:
    """No version was asked for, so none is called missing."""
    for version in (1, 2):
        shutil.rmtree(server.repository / model / str(version))

    assert f"the folder of model {model!r} has no version, or none" in fail("load", model, "--url", server.grpc)


def test_a_published_version_is_loaded(server: Served, model: str, tmp_path: Path) -> None:
    """From a folder anywhere into the repository, then live."""
    write_ctr(tmp_path / "trained" / "1", scale=SCALES[3])

    printed = succeed("publish-version", tmp_path / "trained" / "1", "--name", model, "--repository", server.repository)
    assert f"as {server.repository / model / '3'}" in printed
    assert "; 0 B shared" not in printed
    succeed("load", model, "--url", server.grpc)

    assert serves(server, model, 3)


@pytest.mark.parametrize("name", ["flat", "bags", "types"])
def test_health_is_an_answer(server: Served, name: str) -> None:
    """Models of any inputs answer a request that is made up for them."""
    assert f"{name}: version 1 answers" in succeed("health", "--model", name, "--url", server.grpc, "--timeout", 60)


def test_health_of_what_is_not_there(server: Served, model: str) -> None:
    """No such model, none of its versions loaded, no server, no gRPC port: one line each."""
    assert "has not loaded a model 'absent'; `hotrow load`" in fail("health", "--model", "absent", "--url", server.grpc)
    assert model in fail("health", "--model", model, "--url", server.grpc)
    assert "no server answers" in fail("health", "--model", model, "--url", "127.0.0.1:1")
    assert "not its gRPC port" in fail("health", "--model", model, "--url", server.http)
    assert "expected HOST:GRPC_PORT" in fail("health", "--model", model, "--url", "http://localhost:8001")


def test_health_of_a_stopped_server(server: Served) -> None:
    """The command does not wait for a server that takes the connection and does not answer."""
    process = server.server()
    process.suspend()
    try:
        # Its threads stop at different moments.
        wait_until(lambda: _is_stopped(process), "the server to stop")
        line = fail("health", "--model", "flat", "--url", server.grpc)
    finally:
        process.resume()
    assert "within" in line or "no server" in line


def _is_stopped(process: psutil.Process) -> bool:
    return all(psutil.Process(thread.id).status() == psutil.STATUS_STOPPED for thread in process.threads())


def test_what_a_server_does_not_know_is_one_line(server: Served) -> None:
    """Commands about a missing model list those that exist."""
    assert "has no model 'absent'; models: " in fail("versions", "absent", "--url", server.grpc)
    assert "has no model 'absent'" in fail("roll-back", "absent", "--url", server.grpc)
    assert "'absent': the server does not find this folder" in fail("load", "absent", "--url", server.grpc)


def test_a_restricted_server_wants_its_key(tritonserver: None, tmp_path: Path) -> None:
    """With --restrict-apis the commands need --key-file; health does not."""
    write_ctr(tmp_path / "repository" / "ctr" / "1")
    key = tmp_path / "key"
    key.write_text("s3cret\n", encoding="utf-8")
    served = start(tmp_path / "repository", "--restrict-apis", str(key))
    try:
        assert "only for clients with its key; give --key-file" in fail("load", "ctr", "--url", served.grpc)
        other = tmp_path / "other.key"
        other.write_text("another", encoding="utf-8")
        refused = fail("load", "ctr", "--url", served.grpc, "--key-file", other)
        assert "only for clients with its key; the key that was given is another" in refused
        succeed("load", "ctr", "--version", 1, "--url", served.grpc, "--key-file", key)
        succeed("health", "--model", "ctr", "--url", served.grpc, "--timeout", 60)
    finally:
        served.close()
