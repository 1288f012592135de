"""Contents of a version directory that replace each other while requests run."""

from __future__ import annotations

import dataclasses
import gc
import os
import shutil
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest

from inference_session import InferenceSession
from inference_session.errors import ConfigurationError, HotrowError, ModelFormatError, SessionClosedError
from inference_session.model_spec import ModelSpec, RankingSpec, TableSpec
from inference_session.platform.drafts import exchange
from inference_session.version_directory.manifest import describe_version, write_manifest
from inference_session.versions import VersionManager
from inference_session.versions.version_manager import check_same
from tests.testing import small_model
from tests.testing.servers import RedisServer, wait_until
from tests.testing.stored_model import push

REQUEST = small_model.random_inputs(4, np.random.default_rng(0))


def manage(directory: Path, **settings: object) -> VersionManager:
    """A manager of a version directory."""
    return VersionManager(directory, partial(InferenceSession.open, directory, **settings))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A version directory with the content of seed 1."""
    small_model.write(tmp_path / "model" / "1", seed=1)
    return tmp_path / "model" / "1"


def replace(directory: Path, seed: int) -> None:
    """Put the content of another seed in the directory's place."""
    beside = directory.with_name(f".tmp-{seed}")
    small_model.write(beside, seed=seed)
    assert exchange(beside, directory)
    shutil.rmtree(beside)


def answer(session: InferenceSession) -> np.ndarray:
    """Its predictions for the one request."""
    return session.predict(REQUEST)


def expected(seed: int) -> np.ndarray:
    """The answer of the content of that seed."""
    return small_model.expected(small_model.random_tables(seed), REQUEST)["OUTPUT0"]


def test_new_content_takes_over_and_old_leases_end_on_the_old(directory: Path) -> None:
    """A lease is on one content from its beginning to its end; the old session closes with its last lease."""
    with manage(directory) as versions, ThreadPoolExecutor(1) as thread:
        with versions.lease() as old:
            replace(directory, 2)
            updated = thread.submit(versions.update)
            wait_until(lambda: versions.stats()["in_place_updates"] == 1, "the update")
            with versions.lease() as new:
                np.testing.assert_allclose(answer(new), expected(2), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(answer(old), expected(1), rtol=1e-5, atol=1e-6)
            assert not updated.done()
        assert updated.result()

        assert repr(old).endswith("closed]>")
        assert not versions.update()


def test_close_waits_for_the_last_lease(directory: Path) -> None:
    """A lease that ends while another thread closes lets that thread go on."""
    versions = manage(directory)
    with ThreadPoolExecutor(1) as thread:
        with versions.lease() as session:
            closed = thread.submit(versions.close)
            wait_until(lambda: versions._active._retired, "close waits")
            np.testing.assert_allclose(answer(session), expected(1), rtol=1e-5, atol=1e-6)
            assert not closed.done()
        closed.result(timeout=60)


def test_close_ends_beside_threads_that_go_on_asking(directory: Path) -> None:
    """From then on they get an error: there was always another lease, and it waited for ever."""
    versions, begun = manage(directory), threading.Barrier(3)

    def ask() -> None:
        with versions.lease():
            begun.wait()
        while True:
            with versions.lease() as session:
                answer(session)

    with ThreadPoolExecutor(3) as threads:
        askers = [threads.submit(ask) for _ in range(2)]
        begun.wait()
        threads.submit(versions.close).result(timeout=60)
        for asker in askers:
            with pytest.raises(SessionClosedError, match="has been closed"):
                asker.result(timeout=60)
    with pytest.raises(SessionClosedError, match="has been closed"):
        versions.update()


def test_counters_go_on_over_updates(directory: Path) -> None:
    """The counts of earlier contents stay in the sums."""
    with manage(directory) as versions:
        for seed in (2, 3, 4):
            with versions.lease() as session:
                answer(session)
            replace(directory, seed)
            versions.update()
        stats = versions.stats()

    assert (stats["requests"], stats["samples"], stats["in_place_updates"]) == (3, 12, 3)
    assert stats["tables"]["user_weight"]["lookup_keys"] == 24


def test_requests_during_updates_are_each_answered_by_one_content(directory: Path) -> None:
    """While contents change under requests of several threads, each answer is that of one content, and none fails."""
    answers = [expected(seed) for seed in range(1, 7)]
    done = threading.Event()

    def ask(versions: VersionManager) -> int:
        asked = 0
        while not done.is_set():
            with versions.lease() as session:
                found = answer(session)
            assert any(np.allclose(found, one, rtol=1e-5, atol=1e-6) for one in answers)
            asked += 1
        return asked

    with manage(directory) as versions, ThreadPoolExecutor(3) as threads:
        askers = [threads.submit(ask, versions) for _ in range(3)]
        for seed in range(2, 7):
            replace(directory, seed)
            assert versions.update()
        done.set()

        assert min(asker.result() for asker in askers) > 0


def test_the_watch_finds_new_content_and_goes_on_after_bad_one(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With watch_interval_s content is taken over by itself; one that is damaged is logged, and the old one serves."""
    with manage(directory, watch_interval_s=0.02, verify="full") as versions:
        beside = directory.with_name(".tmp-2")
        small_model.write(beside, seed=2)
        with (beside / "dense.onnx").open("r+b") as file:
            file.write(b"\0")
        assert exchange(beside, directory)
        wait_until(lambda: versions.stats()["failed_in_place_updates"] > 0, "the failed update")
        with versions.lease() as session:
            np.testing.assert_allclose(answer(session), expected(1), rtol=1e-5, atol=1e-6)
        wait_until(lambda: "dense.onnx: damaged" in caplog.text, "the log to say why")

        replace(directory, 3)
        wait_until(lambda: versions.stats()["in_place_updates"] == 1, "the update")
        with versions.lease() as session:
            np.testing.assert_allclose(answer(session), expected(3), rtol=1e-5, atol=1e-6)


def test_files_may_be_replaced_one_by_one_with_the_manifest_last(directory: Path) -> None:
    """Until the manifest is replaced nothing happens, whatever is renamed into place before it."""
    beside = directory.with_name(".tmp-2")
    small_model.write(beside, seed=2)
    with manage(directory, verify="full") as versions:
        files = sorted(path.relative_to(beside) for path in beside.rglob("*") if path.is_file())
        for file in (file for file in files if file.name != "MANIFEST.json"):
            (beside / file).replace(directory / file)
            assert not versions.update()
            with versions.lease() as session:
                np.testing.assert_allclose(answer(session), expected(1), rtol=1e-5, atol=1e-6)
        (beside / "MANIFEST.json").replace(directory / "MANIFEST.json")

        assert versions.update()
        with versions.lease() as session:
            np.testing.assert_allclose(answer(session), expected(2), rtol=1e-5, atol=1e-6)


def test_content_for_other_requests_is_refused(directory: Path) -> None:
    """Triton and its clients have been told the inputs and outputs: these cannot change in place."""
    session_json = directory / "session.json"
    with manage(directory) as versions:
        beside = directory.with_name(".tmp-2")
        shutil.copytree(directory, beside)
        text = session_json.read_text(encoding="utf-8").replace('"click"', '"clicks"')
        (beside / "session.json").write_text(text, encoding="utf-8")
        write_manifest(beside)
        assert exchange(beside, directory)

        with pytest.raises(HotrowError):
            versions.update()
        assert versions.stats()["failed_in_place_updates"] == 1
        with versions.lease() as session:
            np.testing.assert_allclose(answer(session), expected(1), rtol=1e-5, atol=1e-6)


def test_other_labels_are_refused(directory: Path) -> None:
    """The message says what differs, and what to do."""
    with manage(directory) as versions:
        beside = directory.with_name(".tmp-2")
        shutil.copytree(directory, beside)
        text = (beside / "session.json").read_text(encoding="utf-8")
        (beside / "session.json").write_text(
            text.replace('"labels": [\n  "click"', '"labels": [\n  "tap"'), encoding="utf-8"
        )
        write_manifest(beside)
        assert exchange(beside, directory)

        with pytest.raises(ConfigurationError, match=r"'labels' of the new content is .*'tap'.*a new version"):
            versions.update()


OTHER = {
    "inputs": (*small_model.SPEC.inputs[1:], small_model.SPEC.inputs[0]),
    "outputs": small_model.SPEC.outputs[::-1],
    "tables": (),
    "lookups": small_model.SPEC.lookups[::-1],
    "labels": ("click", "leave"),
    "label_outputs": ("click",),
    "batched": False,
    "equal_sizes": ((("codes", 1), ("items", 1)),),
    "joinable": False,
    "layout": "hps",
    "layout_options": {"slots": [1]},
    "settings": {"unknown_keys": "reject"},
    "source": "another file",
    "ranking": RankingSpec(small_model.SPEC.lookups),
}
OTHER_TABLE: dict[str, object] = {
    "name": "users",
    "folder": "users",
    "num_rows": 51,
    "embedding_dim": 5,
    "dtype": "float16",
    "keys": "stored",
    "row_shape": (2, 2),
    "default_vector": 1.0,
}


@pytest.mark.parametrize("name", [field.name for field in fields(ModelSpec)])
def test_every_field_that_requests_depend_on_must_be_the_same(name: str) -> None:
    """A field that is new to session.json is compared, unless it is listed as content."""
    new = dataclasses.replace(small_model.SPEC, **{name: OTHER[name]})
    is_content = name in ("source", "ranking")
    with (
        nullcontext()
        if is_content
        else pytest.raises(ConfigurationError, match=f"field '{name}' of the new content is")
    ):
        check_same(small_model.SPEC, new)


@pytest.mark.parametrize("name", [field.name for field in fields(TableSpec)])
def test_rows_may_differ_but_not_what_a_table_is(name: str) -> None:
    """Other rows, more rows and rows of another type are content; names, keys and dimensions are not."""
    table = dataclasses.replace(small_model.TABLES[0], **{name: OTHER_TABLE[name]})
    new = dataclasses.replace(small_model.SPEC, tables=(table, *small_model.TABLES[1:]))
    is_content = name in ("num_rows", "dtype", "default_vector")
    with (
        nullcontext() if is_content else pytest.raises(ConfigurationError, match="field 'tables' of the new content is")
    ):
        check_same(small_model.SPEC, new)


@pytest.mark.parametrize(
    ("namespace", "message"),
    [("version", "rows of table .* from other files than"), ("shared", r"different rows \(tables/.*a new version")],
)
def test_other_rows_are_refused_where_stores_hold_the_old_ones(directory: Path, namespace: str, message: str) -> None:
    """Rows in stores belong to a version's number: a new network may take over in place, new tables may not."""
    settings = {"persistent_store": f"rocksdb://{pushed(directory)}", "store_namespace": namespace}
    with manage(directory, **settings) as versions:
        replace(directory, 2)
        with pytest.raises(ConfigurationError, match=message):
            versions.update()

        retrain(directory)
        assert versions.update()
        with versions.lease() as session:
            np.testing.assert_allclose(answer(session), expected(1), rtol=1e-5, atol=1e-6)


def test_a_replaced_session_is_gone_at_once(directory: Path, tmp_path: Path) -> None:
    """Its memory, and that of one that is refused, does not wait for the garbage collector, which under Triton never
    visits the first loaded objects; nor do the files that it has mapped, whose place on the disk is taken until then.
    """
    settings = {
        "persistent_store": f"rocksdb://{pushed(directory)}",
        "cache_bytes": 1 << 20,
        "state_dir": str(tmp_path / "state"),
        "warm_up_s": 10,
        "refresh_interval_s": 0.1,
    }
    gc.disable()
    try:
        with RedisServer() as redis, manage(directory, volatile_store=redis.url, **settings) as versions:
            with versions.lease() as session:
                answer(session)
            before = len(mapped_files(directory))
            replaced = weakref.ref(session)
            del session
            retrain(directory)
            assert versions.update()
            # A thread that has just worked for it may hold it for a moment.
            wait_until(lambda: replaced() is None, "the replaced session to be gone")
            wait_until(lambda: len(mapped_files(directory)) == before, f"no more than {before} mapped files")
            retrain(directory, labels=("tap", "stay"))
            assert is_refused(versions)
            wait_until(lambda: len(mapped_files(directory)) == before, f"no more than {before} mapped files again")
    finally:
        gc.enable()


def is_refused(versions: VersionManager) -> bool:
    """Whether an update is; its error, which leads to the session, is gone when this returns."""
    try:
        versions.update()
    except ConfigurationError:
        return True
    return False


def mapped_files(directory: Path) -> list[str]:
    """Files of a model's versions that this process has mapped, each as often as it has."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(directory.parent) in line]


def retrain(directory: Path, *, labels: tuple[str, ...] = small_model.SPEC.labels) -> None:
    """Put another network in place, over the same tables."""
    beside = directory.with_name(f".tmp-{'-'.join(labels)}")
    small_model.write(beside, seed=1)
    network = onnx.load(beside / "dense.onnx")
    network.producer_name = "another training"
    onnx.save(network, beside / "dense.onnx")
    describe_version(dataclasses.replace(small_model.SPEC, labels=labels), beside)
    assert exchange(beside, directory)


def pushed(directory: Path) -> Path:
    """A RocksDB with the rows of a version."""
    database = directory.parent.parent / "db"
    push(directory, f"rocksdb://{database}")
    return database


def test_a_folder_that_is_gone_for_a_moment_is_no_harm(directory: Path) -> None:
    """Between two renames there is no version directory: the present content keeps serving."""
    with manage(directory) as versions:
        directory.rename(directory.with_name("away"))
        with pytest.raises(ModelFormatError, match="no such file"):
            versions.update()
        with versions.lease() as session:
            answer(session)


def test_updates_leave_nothing_behind(directory: Path) -> None:
    """Thirty updates on, there are no more threads, file handles or mapped files than after the third."""

    def held() -> tuple[int, int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd")), len(mapped_files(directory))  # noqa: PTH208

    with manage(directory) as versions:
        counts = []
        for seed in range(2, 33):
            replace(directory, seed)
            assert versions.update()
            with versions.lease() as session:
                answer(session)
            del session
            counts.append(held())
        wait_until(
            lambda: all(now <= early for now, early in zip(held(), counts[2], strict=True)),
            f"no more to be held than {counts[2]}: {counts[-1]}",
        )
