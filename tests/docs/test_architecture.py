"""The paths that the page "Architecture" lists are those that requests, missing keys, updates and swaps take."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import numpy as np
import onnx
import pytest

from inference_session import InferenceSession, Request, stats
from inference_session.embedding_cache.cpu import CpuEmbeddingCache
from inference_session.execution.staging import forms
from inference_session.importers.onnx import import_onnx
from inference_session.kernels.cpu import lookup
from inference_session.model_spec import TableSpec
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.rocksdb.store import RocksDbStore
from inference_session.parameter_server.server import ParameterServer
from inference_session.parameter_server.tier import Tier
from inference_session.platform.json_records import own_fields
from inference_session.rows.base import RowWriter, look_up_keys
from inference_session.rows.stored import StoredRows
from inference_session.update_stream import Publisher
from inference_session.update_stream.kafka_stream import KafkaUpdateStream
from inference_session.urls.kafka_url import KafkaUrl
from inference_session.versions import VersionManager
from tests.testing import ROOT, small_model
from tests.testing.broker import Broker
from tests.testing.memory_store import MemoryStore
from tests.testing.onnx_models import two_lookups
from tests.testing.servers import PATIENCE_S
from tests.testing.stored_model import push

PAGE = ROOT / "docs" / "explanation" / "architecture.md"
LIBRARY = ROOT / "inference_session"


class Call(NamedTuple):
    """A call of a function of the library, and the calls that it was made in."""

    function: str
    module: str
    callers: tuple[str, ...]


def listings() -> dict[str, list[Call]]:
    """The listings of the page, by the function that each begins with; a function's only caller is the one above it."""
    found = {}
    for block in re.findall(r"```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        above: list[str] = []
        calls = []
        for line in block.splitlines():
            function, module = line.split()
            del above[(len(line) - len(line.lstrip())) // 4 :]
            calls.append(Call(function, module, tuple(above[-1:])))
            above.append(function)
        found[calls[0].function] = calls
    return found


def calls_of(act: Callable[[], object]) -> list[Call]:
    """All calls of the library's functions in this thread, in their order."""
    found: list[Call] = []
    stack: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            function, path = _name(frame), Path(frame.f_code.co_filename)
            if LIBRARY in path.parents:
                found.append(Call(function, path.relative_to(LIBRARY).as_posix(), tuple(stack)))
            stack.append(function)
        elif event == "return" and stack:
            stack.pop()

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return found


def num_modules(act: Callable[[], object]) -> int:
    """The modules of the library whose functions are called."""
    return len({call.module for call in calls_of(act)})


def said() -> str:
    """The page's text in one line."""
    return " ".join(PAGE.read_text(encoding="utf-8").split())


def _name(frame: FrameType) -> str:
    """The function's name, with that of the class that has it."""
    name, self = frame.f_code.co_name, frame.f_locals.get("self")
    kind = frame.f_locals.get("cls") if self is None else type(self)
    owners = [cls for cls in kind.__mro__ if name in vars(cls)] if isinstance(kind, type) else []
    owner = next((cls for cls in owners if _code(vars(cls)[name]) is frame.f_code), None)
    return name if owner is None else f"{owner.__name__}.{name}"


def _code(member: object) -> object:
    return getattr(getattr(member, "fget", None) or getattr(member, "__func__", member), "__code__", None)


def assert_as_listed(act: Callable[[], object], first: str) -> None:
    """The functions of a listing are called, in its order, each within the one that it is indented under."""
    calls = iter(calls_of(act))
    for wanted in listings()[first]:
        for call in calls:
            if call[:2] == wanted[:2] and set(wanted.callers) <= set(call.callers):
                break
        else:
            pytest.fail(f"{wanted.function} ({wanted.module}) is not called there")


def test_a_request_of_any_kind(tmp_path: Path) -> None:
    """Rows of files, and an input that the fast path does not take."""
    small_model.write(tmp_path / "small" / "1")
    with InferenceSession.open(tmp_path / "small" / "1", device="cpu") as session:
        inputs = session.layout.generated(2).inputs
        request = Request({**inputs, "codes": np.asfortranarray(inputs["codes"])})
        assert_as_listed(lambda: session.run_many([request]), "InferenceSession.run_many")
        assert f"a request through `run_many` passes {num_modules(lambda: session.run_many([request]))}." in said()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Numba tells profilers of kernels up to Python 3.11")
def test_a_request_on_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of the demo. Numba reports calls of kernels, other than those that `of_ints` makes."""
    for module in (forms, lookup, stats):
        monkeypatch.setattr(module, "of_ints", lambda kernel: kernel)
    with InferenceSession.open(ROOT / "model_repository" / "movielens" / "1", device="cpu") as session:
        inputs = session.layout.generated(2).inputs
        arrays = [inputs[tensor.name] for tensor in session.spec.inputs]
        assert_as_listed(lambda: session.fast_path.run(arrays, 1), "FastPath.run")
        number = num_modules(lambda: session.fast_path.run(arrays, 1))
        assert f"A request on the fast path passes {number} modules of the library" in said()


def test_a_missing_key(tmp_path: Path) -> None:
    """A volatile tier over a RocksDB that has the row."""
    lower = RocksDbStore(tmp_path / "db", Namespace("model", "1"), {"t": 2}, writable=True)
    lower.insert("t", np.array([5]), np.ones((1, 2), np.float32))
    tiers = [Tier("volatile", MemoryStore({"t": 2}), volatile=True, cache_missed_keys=True), Tier("persistent", lower)]
    rows = StoredRows([TableSpec("t", "t", 9, 2)], [CpuEmbeddingCache({"t": 2}, 1 << 20)], ParameterServer(tiers))
    out = np.zeros((1, 2), np.float32)
    assert_as_listed(lambda: look_up_keys(rows.readers[0], 0, np.array([5]), out), "StoredReader.look_up")
    assert (out == 1).all()
    rows.close()


def test_an_update(tmp_path: Path) -> None:
    """A RocksDB over table files."""
    directory = tmp_path / "small" / "1"
    small_model.write(directory)
    url = f"rocksdb://{tmp_path}/db"
    push(directory, url)
    with InferenceSession.open(directory, persistent_store=url, cache_bytes=1 << 20, device="cpu") as session:
        rows = np.ones((1, 4), np.float32)
        assert_as_listed(lambda: session.update("user.weight", [3], rows), "InferenceSession.update")


def test_a_replacement_in_place(tmp_path: Path) -> None:
    """Of a version whose rows are in table files."""
    directory = tmp_path / "small" / "1"
    small_model.write(directory, seed=1)
    with VersionManager(directory, partial(InferenceSession.open, directory, device="cpu")) as manager:
        shutil.rmtree(directory)
        small_model.write(directory, seed=2)
        assert_as_listed(manager.update, "VersionManager.update")


def test_an_update_from_kafka(broker: Broker, tmp_path: Path) -> None:
    """Of a row in a RocksDB over table files; the stream's own thread waits meanwhile."""
    directory = tmp_path / "listed" / "1"
    small_model.write(directory)
    url = f"rocksdb://{tmp_path}/db"
    push(directory, url)
    with InferenceSession.open(directory, persistent_store=url, cache_bytes=1 << 20, device="cpu") as session:
        rows = session.rows.writer
        stream = KafkaUpdateStream(KafkaUrl.parse(broker.url), "listed", "1", session.spec.tables, rows)
        with contextlib.closing(stream), stream.held():
            with Publisher(broker.url, "listed") as publisher:
                publisher.publish("user.weight", [3], np.ones((1, 4), np.float32))

            def follow() -> None:
                deadline = time.monotonic() + PATIENCE_S
                while note_of(rows) is None and time.monotonic() < deadline:
                    stream._step()

            assert_as_listed(follow, "KafkaUpdateStream._step")
        np.testing.assert_array_equal(session.lookup("user.weight", [3]), np.ones((1, 4)))


def note_of(rows: RowWriter) -> object:
    """How far the updates of the table are saved."""
    return own_fields(rows.note("user_weight")).get("offsets")


def test_an_import(tmp_path: Path) -> None:
    """Of a model whose keys are computed."""
    onnx.save(two_lookups(), tmp_path / "model.onnx")
    assert_as_listed(lambda: import_onnx(tmp_path / "model.onnx", tmp_path / "repository", "m"), "import_onnx")


def test_the_modules_that_it_names_exist() -> None:
    """Paths in `inference_session/`, and those of `triton_backend/backend/` that are named by themselves."""
    for path in re.findall(r"`([\w/]+/\w+\.(?:py|cu))`", PAGE.read_text(encoding="utf-8")):
        assert (LIBRARY / path).exists() or (ROOT / path).exists(), path


@pytest.mark.parametrize("package", ["importers/onnx", "importers/onnx/lookups"])
def test_the_map_of_a_package_names_all_of_its_modules(package: str) -> None:
    """In the first column of its docstring; a `/` marks a folder."""
    lines = (LIBRARY / package / "__init__.py").read_text(encoding="utf-8").partition('\n"""')[0].splitlines()[2:]
    named = [name for line in lines for name in re.split(r" {2,}", line)[0].split(", ")]
    paths = {path.parent if path.name == "__init__.py" else path for path in (LIBRARY / package).rglob("*.py")}
    own = [path for path in paths if path.parent == LIBRARY / package]
    assert sorted(named) == sorted(path.stem if path.suffix else f"{path.name}/" for path in own)
