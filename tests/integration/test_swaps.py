"""Versions swapped on a real server under load: every answer is one version's, and none fails, whatever is loaded."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from inference_session import InferenceSession
from inference_session.errors import HotrowError
from inference_session.importers.onnx import import_onnx
from inference_session.platform.drafts import exchange
from inference_session.rows.hot_keys import read_hot_keys
from inference_session.version_directory.manifest import write_manifest
from tests.testing.command_line import hotrow
from tests.testing.example_models import ExampleModels
from tests.testing.hugectr_source import requests_of
from tests.testing.model_settings import add_settings
from tests.testing.served import Serve, Served, shared_memory
from tests.testing.served_requests import DENSE, IDS, ask, counters
from tests.testing.servers import PATIENCE_MS, PATIENCE_S, RedisServer, wait_until
from tests.testing.triton_models import ctr_answer, write_ctr
from triton_backend.backend.metric_records import NUM_KEPT
from triton_backend.client.server import RemoteServer
from triton_backend.repository.config_writer import write_model_config

pytestmark = pytest.mark.triton

Inputs = Mapping[str, NDArray[Any]]
Tell = Callable[[NDArray[Any], int], int]
"""tell(answer, request) → the version that gives this answer to that request; an assertion fails if there is none."""
CTR = {"ids": IDS, "dense": DENSE}
PAUSE_S = 0.04
"""Of a client, between two requests, so that versions are loaded by the same processors."""


class Load:
    """Clients that ask again and again, one request after the other; a context manager that ends them."""

    def __init__(self, served: Served, model: str, requests: list[Inputs], tell: Tell, *, num_clients: int = 3) -> None:
        self.seen: list[list[int]] = [[] for _ in range(num_clients)]
        """By client: the versions that its requests were answered by, in order."""
        self._done = threading.Event()
        self._threads = ThreadPoolExecutor(num_clients)

        def ask_on(first: int, seen: list[int]) -> None:
            with served.grpc_client() as client:
                while not self._done.is_set():
                    i = (first + len(seen)) % len(requests)
                    seen.append(tell(ask(client, model, requests[i]).as_numpy("OUTPUT0"), i))
                    self._done.wait(PAUSE_S)

        self._clients = [self._threads.submit(ask_on, first, seen) for first, seen in enumerate(self.seen)]

    def reaches(self, version: int) -> None:
        """Wait until the last answer of each client is of this version; the error that stopped a client is raised."""
        wait_until(
            lambda: any(client.done() for client in self._clients) or all(version in seen[-1:] for seen in self.seen),
            f"all clients to be answered by version {version}",
        )
        for client in self._clients:
            if client.done():
                client.result()

    def stop(self) -> list[list[int]]:
        """End the clients and return what they have seen; an error that stopped one of them before is raised."""
        self._done.set()
        for client in self._clients:
            client.result()
        return self.seen

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._threads.shutdown()


def telling(answers: Mapping[int, list[NDArray[Any]]], atol: float) -> Tell:
    """Compares with the answers of each version."""

    def tell(answer: NDArray[Any], request: int) -> int:
        fitting = [
            version
            for version, known in answers.items()
            if np.allclose(answer.ravel(), known[request].ravel(), rtol=0, atol=atol)
        ]
        assert len(fitting) == 1, f"request {request} was answered as by versions {fitting}"
        return fitting[0]

    return tell


tell_ctr = telling({n: [ctr_answer(IDS, DENSE, scale=2 * n - 1)] for n in range(1, 8)}, 0)
"""Version n of `ctr` scales by 2n - 1."""


def test_hugectr_versions_swap_whole(serve: Serve, models: ExampleModels, tmp_path: Path) -> None:
    """Dense weights and tables of hugectr_wdl change together: no answer mixes new weights and old rows."""
    source, repository = models.wide_and_deep, tmp_path / "repository"
    hotrow("import", "hugectr", source / "ps.json", "--repository", repository)
    hotrow("import", "hugectr", source / "v2" / "ps.json", "--repository", tmp_path / "next", "--version", 2)
    named = {name: inputs for name, inputs in requests_of(source / "requests.npz").items() if inputs["DES"].size}
    answers = {}
    for version, folder in ((1, source), (2, source / "v2")):
        with np.load(folder / "expected.npz") as expected:
            answers[version] = [expected[name] for name in named]
    differing = [i for i, (one, two) in enumerate(zip(*answers.values(), strict=True)) if abs(one - two).max() > 1e-3]
    requests = [list(named.values())[i] for i in differing]
    tell = telling({version: [known[i] for i in differing] for version, known in answers.items()}, 1e-5)
    served = serve(repository)
    one, two = repository / "hugectr_wdl/1", repository / "hugectr_wdl/2"

    with served.grpc_client() as client, Load(served, "hugectr_wdl", requests, tell) as load:
        load.reaches(1)
        for _ in range(2):
            shutil.copytree(tmp_path / "next/hugectr_wdl/2", two.with_name(".tmp-2"))
            two.with_name(".tmp-2").rename(two)
            client.load_model("hugectr_wdl")
            load.reaches(2)
            shutil.rmtree(two)
            os.utime(one)
            client.load_model("hugectr_wdl")
            load.reaches(1)
        load.stop()


def test_versions_of_a_multi_task_model_swap_whole(serve: Serve, models: ExampleModels, tmp_path: Path) -> None:
    """A model and another training of it: sums of the old tables' and the new ones' rows never show."""
    folder, name = models.multi_task, "multi_task"
    repository = tmp_path / "repository"
    report = import_onnx(folder / "model.onnx", repository, name, min_rows=100)
    write_model_config(report.version_dir, report.spec, name)
    perturbed = tmp_path / "next"
    shutil.copytree(report.version_dir, perturbed)
    rng = np.random.default_rng(0)
    for file in perturbed.glob("tables/*/emb_vector"):
        vectors = np.fromfile(file, np.float32)
        (vectors + rng.normal(0, 0.3, vectors.shape).astype(np.float32)).tofile(file)
    write_manifest(perturbed)
    inputs = dict(np.load(folder / "requests.npz"))
    requests = [{key: array[i : i + 32] for key, array in inputs.items()} for i in range(0, 512, 32)]
    answers = {}
    for version, directory in ((1, report.version_dir), (2, perturbed)):
        with InferenceSession.open(directory) as session:
            answers[version] = [session.predict(request) for request in requests]
    served = serve(repository)

    with (
        served.grpc_client() as client,
        Load(served, name, requests, telling(answers, 1e-5)) as load,
    ):
        load.reaches(1)
        shutil.copytree(perturbed, repository / name / ".tmp-2")
        (repository / name / ".tmp-2").rename(repository / name / "2")
        client.load_model(name)
        load.reaches(2)
        seen = load.stop()

    assert all(versions == sorted(versions) and set(versions) == {1, 2} for versions in seen)


def test_operators_at_once_leave_whole_versions(serve: Serve, tmp_path: Path) -> None:
    """Loads, unloads and choices of versions by several clients at once: each answer is that of the version which it
    names, and afterwards one version serves, in one process.
    """
    repository = tmp_path / "repository"
    for number in (1, 2, 3):
        write_ctr(repository / "ctr" / str(number), scale=2 * number - 1)
    served = serve(repository)
    ended = threading.Event()

    def operate(seed: int) -> None:
        rng = random.Random(seed)
        with served.grpc_client() as client, RemoteServer(served.grpc) as remote:
            actions: list[Callable[[], object]] = [
                lambda: client.load_model("ctr"),
                lambda: client.unload_model("ctr"),
                lambda: remote.load("ctr"),
                lambda: remote.load_versions("ctr", [rng.choice([1, 2, 3])]),
                lambda: remote.load_versions("ctr", [9]),
            ]
            for action in rng.choices(actions, k=5):
                with contextlib.suppress(InferenceServerException, HotrowError):  # another operator was first
                    action()

    def ask_on() -> int:
        num_answers = 0
        with served.grpc_client() as client:
            while not ended.is_set():
                with contextlib.suppress(InferenceServerException):  # it is unloaded
                    answer = ask(client, "ctr", CTR)
                    version = int(answer.get_response().model_version)
                    assert tell_ctr(answer.as_numpy("OUTPUT0"), 0) == version
                    num_answers += 1
                ended.wait(PAUSE_S)
        return num_answers

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask_on) for _ in range(2)]
        try:
            for operator in [pool.submit(operate, seed) for seed in range(2)]:
                operator.result()
            with RemoteServer(served.grpc) as remote:
                remote.load("ctr")
        finally:
            ended.set()
        assert all(client.result() >= 0 for client in asking)
    with RemoteServer(served.grpc) as remote:
        assert remote.ready_versions("ctr") == [3]
    wait_until(lambda: len(served.stubs()) == 1, "the processes of other versions to end")
    served.stub("ctr", 3)


def test_metrics_of_versions_that_are_gone_are_deleted_but_for_the_last(serve: Serve, tmp_path: Path) -> None:
    """However many versions come and go under load; one that comes back has metrics again, and the server lives."""
    repository = tmp_path / "repository"
    write_ctr(repository / "ctr" / "1")
    served = serve(repository)

    early = (0, 0, 0)

    def versions_shown() -> list[int]:
        with urllib.request.urlopen(served.metrics) as page:  # noqa: S310  a page of ours
            return sorted(set(map(int, re.findall(rb'hotrow_[^{]*{[^}]*version="(\d+)"', page.read()))))

    def held() -> tuple[int, int, int]:
        """Threads, handles and shared memory of the server."""
        return served.server().num_threads(), served.server().num_fds(), len(shared_memory(served.process.pid))

    with served.grpc_client() as client, Load(served, "ctr", [CTR], tell_ctr) as load:
        for number in range(2, 7):
            write_ctr(repository / "ctr" / str(number), scale=2 * number - 1)
            client.load_model("ctr")
            wait_until(lambda: len(served.stubs()) == 1, "the old version's process to end")
            load.reaches(number)
            early = held() if number == 4 else early
        wait_until(lambda: all(now <= then for now, then in zip(held(), early, strict=True)), f"no more than {early}")
        assert versions_shown() == [*range(5 - NUM_KEPT, 7)]  # version 5 was still served when 6 was loaded
        hotrow("load", "ctr", "--version", "1", "--url", served.grpc)
        load.reaches(1)
        load.stop()
        wait_until(lambda: counters(served, version="1")["hotrow_requests_total"] > 0, "the metrics of version 1")
        assert versions_shown() == [1, *range(6 - NUM_KEPT, 7)]


def damage(version_dir: Path, file: str, content: bytes | None = None) -> None:
    """Change a file's first byte, or all of it, but not the manifest."""
    path = version_dir / file
    old = path.read_bytes()
    path.write_bytes(bytes([old[0] ^ 1]) + old[1:] if content is None else content)


def lie_of_size(version_dir: Path) -> None:
    """A table that says it has more rows than its file, or any memory, could hold."""
    damage(
        version_dir, "session.json", (version_dir / "session.json").read_bytes().replace(b": 50", b": 50000000000000")
    )
    write_manifest(version_dir)


BAD: dict[str, Callable[[Path], None]] = {  # more kinds, without load: test_version_commands.py
    "checksum": lambda folder: damage(folder, "tables/item/emb_vector"),
    "missing file": lambda folder: (folder / "dense.onnx").unlink(),
    "too many rows": lie_of_size,
}


def test_bad_versions_never_disturb_the_good_one(serve: Serve, tmp_path: Path) -> None:
    """Each kind is refused under load, while all requests are answered by the old version; then a good one loads."""
    repository = tmp_path / "repository"
    write_ctr(repository / "ctr" / "1")
    served = serve(repository)

    with served.grpc_client() as client, Load(served, "ctr", [CTR], tell_ctr) as load:
        load.reaches(1)
        for name, spoil in BAD.items():
            version = repository / "ctr" / "2"
            write_ctr(tmp_path / "next" / "ctr" / "2", scale=3)
            spoil(tmp_path / "next" / "ctr" / "2")
            (tmp_path / "next" / "ctr" / "2").rename(version)
            with pytest.raises(InferenceServerException) as refused:
                client.load_model("ctr")
            assert str(version) in str(refused.value), name
            shutil.rmtree(version)
        assert tell_ctr(ask(client, "ctr", CTR).as_numpy("OUTPUT0"), 0) == 1
        write_ctr(repository / "ctr" / "2", scale=3)
        client.load_model("ctr")
        assert tell_ctr(ask(client, "ctr", CTR).as_numpy("OUTPUT0"), 0) == 2
        load.reaches(2)
        seen = load.stop()

    assert all(versions == sorted(versions) and set(versions) <= {1, 2} for versions in seen)
    wait_until(lambda: len(served.stubs()) == 1, "the stubs of all other versions to end")


def test_a_stub_that_is_killed_while_it_loads_takes_nothing_with_it(serve: Serve, tmp_path: Path) -> None:
    """A kill -9 in the middle of a load: the load fails, the old version answers all along, the next load works."""
    repository = tmp_path / "repository"
    write_ctr(repository / "ctr" / "1")
    served = serve(repository)
    pipe = tmp_path / "canary"
    os.mkfifo(pipe)

    with (
        served.grpc_client() as client,
        Load(served, "ctr", [CTR], tell_ctr, num_clients=2) as load,
        ThreadPoolExecutor(1) as thread,
    ):
        load.reaches(1)
        write_ctr(tmp_path / "next" / "ctr" / "2", scale=3)
        (tmp_path / "next" / "ctr" / "2").rename(repository / "ctr" / "2")
        with waiting_for_canary(repository / "ctr" / "config.pbtxt", pipe):
            loading = thread.submit(client.load_model, "ctr")
            with opened_pipe(pipe):
                served.stub("ctr", version=2).kill()
                with pytest.raises(InferenceServerException):
                    loading.result()
        assert tell_ctr(ask(client, "ctr", CTR).as_numpy("OUTPUT0"), 0) == 1
        shutil.rmtree(repository / "ctr" / "2")
        write_ctr(repository / "ctr" / "2", scale=3)
        client.load_model("ctr")
        load.reaches(2)
        seen = load.stop()

    assert all(versions == sorted(versions) for versions in seen)


@contextlib.contextmanager
def waiting_for_canary(config: Path, pipe: Path) -> Iterator[None]:
    """Let a load wait, when all else is done, for canary requests that come by a pipe."""
    text = config.read_text(encoding="utf-8")
    add_settings(config, {"canary_requests": pipe})
    yield
    config.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def opened_pipe(pipe: Path) -> Iterator[None]:
    """Open it for writing once a reader waits, and write nothing."""
    handles: list[int] = []

    def is_read() -> bool:
        with contextlib.suppress(OSError):  # no process reads it yet
            handles.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        return bool(handles)

    wait_until(is_read, "somebody to read the pipe")
    yield
    os.close(handles[0])


def test_wild_answers_to_canary_requests_refuse_a_version(serve: Serve, tmp_path: Path) -> None:
    """The load says which output is off by how much; the old version serves on; a near enough version loads."""
    repository = tmp_path / "repository"
    write_ctr(repository / "ctr" / "1")
    np.savez(tmp_path / "requests.npz", **CTR)
    hotrow("record-canary", repository / "ctr" / "1", tmp_path / "requests.npz", "--to", tmp_path / "canary.npz")
    add_settings(repository / "ctr" / "config.pbtxt", {"canary_requests": tmp_path / "canary.npz"})
    served = serve(repository)

    with served.grpc_client() as client:
        write_ctr(repository / "ctr" / "2", scale=100)
        with pytest.raises(InferenceServerException, match=r"canary requests: output 'click' differs"):
            client.load_model("ctr")
        assert tell_ctr(ask(client, "ctr", CTR).as_numpy("OUTPUT0"), 0) == 1
        shutil.rmtree(repository / "ctr" / "2")
        write_ctr(repository / "ctr" / "2", scale=1.001)
        client.load_model("ctr")


def test_content_is_replaced_in_place_under_load(serve: Serve, tmp_path: Path) -> None:
    """With watch_interval_s new content of the same version serves without a new process; a damaged one does not."""
    repository = tmp_path / "repository"
    write_ctr(repository / "ctr" / "1")
    add_settings(repository / "ctr" / "config.pbtxt", {"watch_interval_s": 0.1})
    served = serve(repository)
    before = served.stubs()

    def counted(name: str) -> float:
        return counters(served, model="ctr", version="1")[f"hotrow_{name}_total"]

    with Load(served, "ctr", [CTR], tell_ctr) as load:
        load.reaches(1)
        for number in range(2, 6):
            beside = tmp_path / "next" / "ctr" / "1"
            write_ctr(beside, scale=2 * number - 1)
            assert exchange(beside, repository / "ctr" / "1")
            wait_until(lambda number=number: counted("in_place_updates") == number - 1, "the update")
            load.reaches(number)
            shutil.rmtree(beside)
        write_ctr(beside, scale=11)
        damage(beside, "tables/item/emb_vector")
        assert exchange(beside, repository / "ctr" / "1")
        wait_until(lambda: counted("failed_in_place_updates") > 0, "the failed update")
        seen = load.stop()

    assert all(versions == sorted(versions) and versions[-1] == 5 for versions in seen)
    assert served.stubs() == before
    wait_until(lambda: counted("requests") == sum(map(len, seen)), "all requests to be counted")
    wait_until(lambda: any("emb_vector: damaged" in line for line in served.errors), "the log to say why")


def test_the_new_version_starts_with_the_hot_rows(serve: Serve, tmp_path: Path) -> None:
    """Over Redis, what the old version had cached is in the new one's cache before a request, also after a restart."""
    repository = tmp_path / "repository"
    write_ctr(repository / "ctr" / "1")
    with RedisServer() as redis:
        settings = {"volatile_store": redis.url, "cache_fraction": 1, "store_timeout_ms": PATIENCE_MS}
        add_settings(repository / "ctr" / "config.pbtxt", {**settings, "warm_up_s": PATIENCE_S})
        served = serve(repository)

        def hits_and_misses(version: str) -> tuple[float, float]:
            found = counters(served, model="ctr", version=version)
            return found["hotrow_cache_hits_total"], found["hotrow_cache_misses_total"]

        with served.grpc_client() as client:
            ask(client, "ctr", CTR)
            wait_until(lambda: sum(hits_and_misses("1")) == IDS.size, "the first keys to be counted")
            state = tmp_path / "cache" / "state"
            wait_until(
                lambda: any(len(read_hot_keys(file)["item"]) == 5 for file in state.glob("*/ctr.hot_keys")),
                "all five keys to be kept",
            )
            write_ctr(repository / "ctr" / "2", scale=3)
            client.load_model("ctr")
            assert tell_ctr(ask(client, "ctr", CTR).as_numpy("OUTPUT0"), 0) == 2
            wait_until(lambda: hits_and_misses("2") == (IDS.size, 0), "hits alone")
        assert served.stop() == 0
        served = serve(repository)
        with served.grpc_client() as client:
            assert tell_ctr(ask(client, "ctr", CTR).as_numpy("OUTPUT0"), 0) == 2
        wait_until(lambda: hits_and_misses("2") == (IDS.size, 0), "hits alone")
