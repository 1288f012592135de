"""`hotrow serve --front`: requests that crash a bare Triton 24.10 stop at nginx or do no harm."""

from __future__ import annotations

import json
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpc_client
from click.testing import CliRunner
from tritonclient.utils import InferenceServerException

from hotrow.command_line import cli
from inference_session.errors import ConfigurationError
from tests.testing.certificates import Authority, tls_flags
from tests.testing.served import Serve, Served, is_running, name_of, shared_memory, start
from tests.testing.served_requests import DENSE, IDS, ask, post
from tests.testing.servers import PATIENCE_S, wait_until
from tests.testing.triton_models import ctr_answer, write_bags, write_ctr
from triton_backend.launcher import front
from triton_backend.launcher.front import MAX_BYTES, find_nginx

pytestmark = pytest.mark.triton
CTR = {"ids": IDS, "dense": DENSE}


@pytest.fixture(scope="module", autouse=True)
def nginx() -> None:
    """Skip where it is not installed."""
    try:
        find_nginx()
    except ConfigurationError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def fronted(tritonserver: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a front."""
    repository = tmp_path_factory.mktemp("fronted") / "repository"
    write_ctr(repository / "ctr" / "1")
    write_bags(repository / "bags" / "1")
    served = start(repository, "--front")
    yield served
    assert served.stop() == 0
    served.close()


def assert_answers(served: Served) -> None:
    """Right answers over both protocols."""
    for connect in (served.grpc_client, served.http_client):
        with connect() as client:
            np.testing.assert_array_equal(ask(client, "ctr", CTR).as_numpy("OUTPUT0"), ctr_answer(IDS, DENSE))


def nginx_of(served: Served) -> list[psutil.Process]:
    """Its processes, the first one before its workers, which it starts a little after it listens."""

    def found() -> list[psutil.Process]:
        return [process for process in served.family() if name_of(process) == "nginx"]

    wait_until(lambda: len(found()) > 1, "a worker of nginx")
    return found()


def tensors() -> list[Any]:
    """Input tensors of a request, for calls other than tritonclient's `infer`."""
    made = []
    for name, array, datatype in (("ids", IDS, "INT64"), ("dense", DENSE, "FP32")):
        tensor = grpc_client.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def cancel_some(served: Served, number: int, seed: int) -> None:
    """Cancel requests, at once or while they are computed."""
    rng = random.Random(seed)
    with served.grpc_client() as client:
        for _ in range(number):
            call = client.async_infer("ctr", tensors(), lambda result, error: None)
            if rng.random() < 0.7:
                threading.Event().wait(0.004 * rng.random())
            call.cancel()


def give_short_deadlines(served: Served, number: int, seed: int) -> None:
    """Deadlines of up to 4 ms, which most requests miss."""
    rng = random.Random(seed)
    with served.grpc_client() as client:
        for _ in range(number):
            with suppress(InferenceServerException):
                ask(client, "ctr", CTR, client_timeout=0.0002 + 0.004 * rng.random())


def close_channels(served: Served, number: int, seed: int) -> None:
    """Hang up with ten requests under way."""
    rng = random.Random(seed)
    own = [("grpc.use_local_subchannel_pool", 1)]
    for _ in range(number // 10):
        with grpc_client.InferenceServerClient(served.grpc, channel_args=own) as client:
            for _ in range(10):
                client.async_infer("ctr", tensors(), lambda result, error: None)
            threading.Event().wait(0.005 * rng.random())


def hang_up_http(served: Served, number: int, seed: int) -> None:
    """Reset HTTP connections with a request under way."""
    rng = random.Random(seed)
    host, port = served.http.split(":")
    body = json_body([1, 3], [1, 2, 3])
    head = b"POST /v2/models/ctr/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    for _ in range(number):
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
            connection.sendall(head + body)
            threading.Event().wait(0.003 * rng.random())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1" + bytes(7))


@pytest.mark.parametrize("give_up", [cancel_some, give_short_deadlines, close_channels, hang_up_http])
def test_a_server_survives_clients_that_give_up(fronted: Served, give_up: Callable[[Served, int, int], None]) -> None:
    """A bare server dies of signal 11 after 1,000 cancelled requests or missed deadlines."""
    server = fronted.server()

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(give_up, fronted, 130, seed) for seed in range(8)]:
            done.result()

    assert_answers(fronted)
    assert fronted.server() == server


def json_body(shape: object, data: object, key: str = "shape", **more: object) -> bytes:
    """A request of JSON whose tensor `ids` has this shape."""
    ids = {"name": "ids", key: shape, "datatype": "INT64", "data": data, **more}
    dense = {"name": "dense", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
    return json.dumps({"inputs": [ids, dense]}).encode()


HUGE: dict[str, bytes] = {
    "one size": json_body([10**12], [1, 2, 3]),
    "a product": json_body([10**6, 10**6], [1, 2, 3]),
    "many small sizes": json_body([99] * 7, [1, 2, 3]),
    "what hangs a bare server": json_body([10**9], [1, 2, 3]),
    "escaped key": json_body([10**12], [1, 2, 3], key="escaped").replace(b"escaped", b"sh\\u0061pe"),
    "escaped data": json_body([10**12], [1, 2, 3]).replace(b'"data"', b'"d\\u0061ta"'),
    "first of two": json_body([10**12], [1, 2, 3]).replace(b'"datatype"', b'"shape": [1, 3], "datatype"', 1),
    "last of two": json_body([1, 3], [1, 2, 3]).replace(b'"datatype"', b'"shape": [1000000000000], "datatype"', 1),
    "spread over lines": json_body([10**12], [1, 2, 3]).replace(b'"shape": [', b'"shape"\t:\n[\r\n'),
    "leading ones": json_body([1, 1, 1, 10**12], [1, 2, 3]),
    "leading zero": json_body([10**12], [1, 2, 3]).replace(b"[1000000000000]", b"[0000000000000000000001]"),
    "behind a string": json_body([10**12], [1, 2, 3], more='"\\" }{'),
    "an array of requests": b"[" + json_body([10**12], [1, 2, 3]) + b"]",
    "behind a mark": b"\xef\xbb\xbf" + json_body([10**12], [1, 2, 3]),
    "nested deep": b'{"a":' * 100_000 + json_body([10**12], [1, 2, 3]) + b"}" * 100_000,
}


DEEP: dict[str, bytes] = {
    "data": json_body([1, 3], "DEEP").replace(b'"DEEP"', b"[" * 60_000 + b"1, 2, 3" + b"]" * 60_000),
    "any field": b'{"inputs": ' + b"[0, [], " * 60_000 + b"1" + b"]" * 60_000 + b"}",
    "objects between": b'{"inputs": [' * 60_000 + b"1" + b"]}" * 60_000,
    "more than a tensor has dimensions": json_body([1, 3], "DEEP").replace(b'"DEEP"', b"[" * 17 + b"1" + b"]" * 17),
}


@pytest.mark.parametrize("case", DEEP)
def test_deep_arrays_are_refused(fronted: Served, case: str) -> None:
    """They overflow the stack of a bare server."""
    server = fronted.server()

    assert post(fronted, "ctr", DEEP[case])[0] == 400

    assert_answers(fronted)
    assert fronted.server() == server


@pytest.mark.parametrize("case", HUGE)
def test_huge_shapes_in_json_are_refused(fronted: Served, case: str) -> None:
    """However they are written; the server, which they would have crashed, keeps running."""
    server = fronted.server()

    status, answer = post(fronted, "ctr", HUGE[case])

    assert (status, list(answer)) == (400, ["error"])
    assert_answers(fronted)
    assert fronted.server() == server


def test_a_huge_shape_before_binary_data_is_refused(fronted: Served) -> None:
    """The JSON of a request with binary tensors is checked too, wherever the request says that it ends."""
    for length in (len(HUGE["one size"]), 10):
        body = HUGE["one size"] + bytes(64)
        assert post(fronted, "ctr", body, **{"Inference-Header-Content-Length": str(length)})[0] == 400
    assert_answers(fronted)


@pytest.mark.parametrize("shape", [[2**32, 2**32], [2**62, 4], [2**62, 0], [-5, -5], [10**9, 10**9]])
def test_a_shape_that_overflows_is_refused_before_binary_data(fronted: Served, shape: list[int]) -> None:
    """Triton takes [2^32, 2^32] for 0 elements. The backend process of a model with two open sizes would die of it."""
    num_bytes = 200 if shape == [-5, -5] else 0
    bag = {"name": "bag", "shape": shape, "datatype": "INT64", "parameters": {"binary_data_size": num_bytes}}
    header = json.dumps({"inputs": [bag]}).encode()
    process = fronted.stub("bags")

    status, _ = post(
        fronted, "bags", header + bytes(num_bytes), **{"Inference-Header-Content-Length": str(len(header))}
    )

    assert status == 400
    assert fronted.stub("bags") == process


def test_compressed_requests_are_refused(fronted: Served) -> None:
    """Nginx could not look into them."""
    status, answer = post(fronted, "ctr", HUGE["one size"], **{"Content-Encoding": "gzip"})

    assert status == 415
    assert "Content-Encoding" in answer["error"]


@pytest.mark.parametrize("num_samples", [1, 1000])
def test_json_of_any_sensible_shape_is_answered(fronted: Served, num_samples: int) -> None:
    """With strings that look like parts of JSON."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50, (num_samples, 3))
    dense = rng.integers(0, 9, (num_samples, 2)).astype(np.float32)
    inputs = [
        {"name": "ids", "shape": [num_samples, 3], "datatype": "INT64", "data": ids.tolist()},
        {"name": "dense", "shape": [num_samples, 2], "datatype": "FP32", "data": dense.tolist()},
    ]
    body = {"id": '"shape": [1e9]} \u00e9\n\\' + 20 * "[", "inputs": inputs, "outputs": [{"name": "OUTPUT0"}]}

    status, answer = post(fronted, "ctr", json.dumps(body, indent=1).encode())

    assert status == 200
    np.testing.assert_array_equal(np.reshape(answer["outputs"][0]["data"], (-1, 2)), ctr_answer(ids, dense))


def test_binary_tensors_may_be_large(fronted: Served) -> None:
    """More elements than JSON may have; and above the limit of a request, an error."""
    bag = np.zeros((1, 4_000_000), np.int64)
    with fronted.http_client() as client, fronted.grpc_client() as other:
        for each in (client, other):
            assert ask(each, "bags", {"bag": bag}).as_numpy("score").shape == (1, 1)
            with pytest.raises(InferenceServerException):
                ask(each, "bags", {"bag": np.repeat(bag, 3, axis=1)})
    assert_answers(fronted)


def test_errors_keep_their_codes(fronted: Served) -> None:
    """The server's errors arrive unchanged; the front refuses streams."""
    with fronted.grpc_client() as client:
        for model, arrays, status, message in (
            ("absent", CTR, "NOT_FOUND", "unknown model: 'absent'"),
            ("ctr", {"ids": IDS}, "INVALID_ARGUMENT", "dense"),
            ("ctr", {**CTR, "ids": IDS[:1]}, "INVALID_ARGUMENT", "ids"),
        ):
            with pytest.raises(InferenceServerException, match=message) as refused:
                ask(client, model, arrays)
            assert refused.value.status() == f"StatusCode.{status}"
        errors: list[Any] = []
        told = threading.Event()
        client.start_stream(lambda result, error: (errors.append(error), told.set()))
        with suppress(InferenceServerException):  # the stream may have ended already
            client.async_stream_infer("ctr", tensors())
        assert told.wait(PATIENCE_S)
        assert "takes no streams" in str(errors[0])


def test_commands_work_through_it(fronted: Served) -> None:
    """Loads, health and versions; the announced port is the front's."""
    with fronted.grpc_client() as client:
        client.load_model("ctr")
        assert client.get_model_metadata("ctr").versions == ["1"]
        assert client.is_server_ready()
    assert_answers(fronted)


def test_the_front_speaks_tls(serve: Serve, tmp_path: Path, authority: Authority) -> None:
    """For clients, with client certificates if required; the server behind it needs no TLS."""
    write_ctr(tmp_path / "repository" / "ctr" / "1")
    server, client = authority.issue("localhost"), authority.issue("client.example.org")
    served = serve(tmp_path / "repository", "--front", *tls_flags(server), "--tls-client-ca", str(authority.file))
    known = {"private_key": str(client.key), "certificate_chain": str(client.file)}

    for options, is_answered in ((known, True), ({}, False)):
        with grpc_client.InferenceServerClient(
            served.grpc.replace("127.0.0.1", "localhost"), ssl=True, root_certificates=str(authority.file), **options
        ) as connected:
            if is_answered:
                answer = ask(connected, "ctr", CTR).as_numpy("OUTPUT0")
                np.testing.assert_array_equal(answer, ctr_answer(IDS, DENSE))
            else:
                with pytest.raises(InferenceServerException):
                    ask(connected, "ctr", CTR)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_it(serve: Serve, tmp_path: Path, number: signal.Signals) -> None:
    """It ends with the launcher, though clients are connected; and if the launcher was killed, soon after."""
    write_ctr(tmp_path / "repository" / "ctr" / "1")
    served = serve(tmp_path / "repository", "--front")
    assert nginx_of(served)
    family = served.family()
    host, port = served.http.split(":")
    with socket.create_connection((host, int(port))) as idle, served.grpc_client() as client:
        idle.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle.recv(100)
        ask(client, "ctr", CTR)

        status = served.stop(number)

    assert status == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    wait_until(lambda: not any(is_running(process) for process in family), "the end of all processes")
    wait_until(lambda: not shared_memory(served.process.pid), "the end of their shared memory")


def test_a_front_that_was_killed_is_started_again(serve: Serve, tmp_path: Path) -> None:
    """On the same ports; so is a worker of it."""
    write_ctr(tmp_path / "repository" / "ctr" / "1")
    served = serve(tmp_path / "repository", "--front")
    first, *workers = nginx_of(served)

    first.kill()

    wait_until(lambda: any("nginx ended and is being restarted" in line for line in served.errors), "the log")
    wait_until(lambda: not any(is_running(process) for process in [first, *workers]), "the end of the old one")
    wait_until(lambda: answers(served), "an answer")


def answers(served: Served) -> bool:
    """Whether a request is answered at the moment."""
    with served.grpc_client() as client, suppress(InferenceServerException):
        return ask(client, "ctr", CTR, client_timeout=PATIENCE_S) is not None
    return False


def test_a_missing_nginx_is_an_error_that_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tritonserver: None
) -> None:
    """Before anything is started."""
    write_ctr(tmp_path / "repository" / "ctr" / "1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(front, "SYSTEM_FOLDERS", str(tmp_path))

    result = CliRunner().invoke(cli, ["serve", "--repository", str(tmp_path / "repository"), "--front"])

    assert isinstance(result.exception, ConfigurationError)
    assert "--front needs nginx, which is not installed" in str(result.exception)
    assert "apt-get install nginx-light" in str(result.exception)


def test_the_pattern_takes_time_in_proportion(fronted: Served) -> None:
    """The largest bodies of the kinds that make a pattern slow are refused or answered; other requests do not wait."""
    size = MAX_BYTES - 100
    for body in (b"{" * size, b'{"a":"' + b"\\\\" * (size // 2), b'{"' * (size // 2), b'{"a":[' + b"1," * (size // 2)):
        assert post(fronted, "ctr", body)[0] == 400
    assert_answers(fronted)
