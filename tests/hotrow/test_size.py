"""`hotrow size`: its output as tables, JSON, picture and page."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from hotrow.commands.size import command
from inference_session import InferenceSession
from inference_session.errors import HotrowError
from inference_session.kernels.cuda.records import buckets_for_all, index_bytes
from inference_session.sizing.hit_rate import LruCurve
from inference_session.sizing.memory import rocksdb_bytes
from inference_session.version_directory.session_file import read_spec
from tests.testing import small_model
from tests.testing.browser import Look
from tests.testing.hugectr_source import Source
from tests.testing.model_settings import add_settings, settings_text

if TYPE_CHECKING:
    from playwright.sync_api import Browser

INDEX_ON_DEVICE = index_bytes(buckets_for_all(30), marks=False, numbers=True)
"""Of the 30 stored keys of the small model."""


@pytest.fixture
def version_dir(tmp_path: Path) -> Path:
    """A model with three tables."""
    small_model.write(tmp_path / "ctr" / "1")
    return tmp_path / "ctr" / "1"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """20,000 keys of `hashed`, 600 of them distinct."""
    path = tmp_path / "keys.npy"
    np.save(path, np.random.default_rng(0).zipf(1.3, 20_000) % 600)
    return path


def _run(*arguments: object) -> Result:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    if isinstance(result.exception, (HotrowError, OSError)):
        raise result.exception
    return result


def _json(*arguments: object) -> dict[str, Any]:
    return json.loads(_run(*arguments, "--json").stdout)


def test_memory_without_a_trace(version_dir: Path) -> None:
    """Every part is listed with its exact bytes, and a model's folder means its highest version."""
    document = _json(version_dir.parent, "--processes", 3, "--cache-bytes", "1KiB")

    parts = {item["name"]: item for item in document["memory"]}
    assert parts["vectors"]["total_bytes"] == 50 * 4 * 4 + 40 * 3 * 2 + 30 * 2 * 4
    assert parts["keys"]["total_bytes"] == 30 * 8
    index = version_dir / "tables" / "hashed" / "index"
    InferenceSession.open(version_dir).close()
    assert parts["index"]["total_bytes"] == index.stat().st_size
    assert (parts["cache"]["each_bytes"], parts["cache"]["total_bytes"]) == (1024, 3 * 1024)
    assert document["total_bytes"] == sum(item["total_bytes"] for item in document["memory"])
    assert document["swap_bytes"] == 2 * document["total_bytes"]
    assert "trace" not in document


def test_processes_are_the_configured_instances(version_dir: Path) -> None:
    """What each process needs is counted once for each instance in config.pbtxt, unless told otherwise."""
    (version_dir.parent / "config.pbtxt").write_text(
        'name: "m"\nbackend: "hotrow"\ninstance_group [ { count: 4 kind: KIND_CPU } ]\n', encoding="utf-8"
    )
    for directory in (version_dir, version_dir.parent):
        copies = {item["name"]: item["copies"] for item in _json(directory)["memory"]}
        assert (copies["program"], copies["vectors"]) == (4, 1)
    copies = {item["name"]: item["copies"] for item in _json(version_dir, "--processes", 2)["memory"]}
    assert copies["program"] == 2


def test_devices_hold_tables_and_network(version_dir: Path) -> None:
    """With GPUs each has a process, all vectors and an index of stored keys, counted per device."""
    document = _json(version_dir, "--devices", 2)

    networks = sum((version_dir / name).stat().st_size for name in ("dense.onnx", "keys.onnx"))
    vectors = 50 * 4 * 4 + 40 * 3 * 2 + 30 * 2 * 4
    assert document["cache_bytes"] == vectors + INDEX_ON_DEVICE
    assert document["device_bytes"] == document["cache_bytes"] + networks
    assert all(item["copies"] == 2 for item in document["memory"] if item["place"] != "page cache")


@pytest.mark.parametrize(
    ("cache_bytes", "placed"),
    [
        (0, 0),
        (40 * 3 * 2 - 1, 0),
        (40 * 3 * 2 + 30 * 2 * 4 + INDEX_ON_DEVICE, 480),
        (480 + INDEX_ON_DEVICE + 799, 480),
        (480 + INDEX_ON_DEVICE + 800, 1280),
    ],
)
def test_tables_that_do_not_fit_a_device(version_dir: Path, cache_bytes: int, placed: int) -> None:
    """The smallest tables lie on the device, the others in pinned memory of each process; indexes are on the device."""
    parts = {item["name"]: item for item in _json(version_dir, "--devices=1", "--cache-bytes", cache_bytes)["memory"]}

    assert parts["vectors on device"]["total_bytes"] == placed
    assert (parts["pinned vectors"]["total_bytes"], parts["pinned vectors"]["place"]) == (1280 - placed, "process")
    assert parts["index on device"]["total_bytes"] == INDEX_ON_DEVICE
    assert parts["cache"]["total_bytes"] == 0


@pytest.mark.parametrize(
    ("shard", "cache_bytes", "largest"),
    [("auto", 480 + 400, "shards"), ("auto", 639, "host"), ("none", 480 + 400, "host"), ("auto", 1280, "device")],
)
def test_tables_on_several_devices(version_dir: Path, shard: str, cache_bytes: int, largest: str) -> None:
    """The largest table is sharded if a copy does not fit on each device; all is said before anything is loaded."""
    size = cache_bytes + INDEX_ON_DEVICE
    document = _json(version_dir, "--devices=2", "--shard", shard, "--cache-bytes", size)
    parts = {item["name"]: item for item in document["memory"]}

    assert document["placement"] == {"user.weight": largest, "code": "device", "hashed": "device"}
    assert parts["program"]["copies"] == 2
    assert parts["vectors on device"]["each_bytes"] == 480 + 800 * (largest == "device")
    assert parts["pinned vectors"]["each_bytes"] == 800 * (largest == "host")
    assert ("shards on device" in parts) == (largest == "shards")
    if largest == "shards":
        assert (parts["shards on device"]["each_bytes"], parts["shards on device"]["copies"]) == (400, 2)


def test_settings_tell_what_is_sharded(version_dir: Path) -> None:
    """Without --shard the model's settings count, whether one process has all GPUs or each has one."""
    config = version_dir.parent / "config.pbtxt"
    for device, place, processes in (("cuda:0,1", "shards", 1), ("auto", "shards", 2)):
        config.write_text(settings_text({"device": device, "shard": "rows"}))
        document = _json(version_dir, "--devices", 2)
        assert set(document["placement"].values()) == {place}
        assert {item["copies"] for item in document["memory"] if item["name"] == "program"} == {processes}


def test_one_process_may_have_a_cache_on_each_device(version_dir: Path) -> None:
    """With stores and several GPUs in the settings."""
    settings = settings_text({"device": "cuda:0,1", "volatile_store": "redis://h"})
    (version_dir.parent / "config.pbtxt").write_text(settings)
    copies = {item["name"]: item["copies"] for item in _json(version_dir, "--devices", 2)["memory"]}
    assert (copies["cache"], copies["dense network"], copies["program"]) == (2, 2, 1)


def test_rows_of_stores_are_not_on_devices(version_dir: Path) -> None:
    """A GPU has the cache over the stores, and the network."""
    (version_dir.parent / "config.pbtxt").write_text(settings_text({"volatile_store": "redis://h"}))
    document = _json(version_dir, "--devices", 2)
    on_device = {item["name"]: item["each_bytes"] for item in document["memory"] if item["place"] == "device"}
    assert list(on_device) == ["cache", "dense network"]
    assert on_device["cache"] == document["cache_bytes"] > 0


def test_filters_and_indexes_of_a_rocksdb_are_counted(version_dir: Path) -> None:
    """Once for each process."""
    (version_dir.parent / "config.pbtxt").write_text(settings_text({"persistent_store": "rocksdb:///d"}))
    [item] = [item for item in _json(version_dir, "--processes", 3)["memory"] if item["name"] == "RocksDB"]
    assert (item["place"], item["copies"]) == ("process", 3)
    assert item["each_bytes"] == sum(map(rocksdb_bytes, read_spec(version_dir).tables)) > 0


def test_rows_that_a_stream_changes_are_on_devices(version_dir: Path) -> None:
    """Those of the files, as without the stream; what it will change is not known."""
    before = _json(version_dir, "--devices", 2)
    (version_dir.parent / "config.pbtxt").write_text(settings_text({"update_stream": "kafka://h:9092"}))
    assert _json(version_dir, "--devices", 2) == before


def test_settings_tell_the_cache(version_dir: Path) -> None:
    """Without --cache-bytes the model's own settings count, of which a cache without stores is none."""
    config = version_dir.parent / "config.pbtxt"
    config.write_text(settings_text({"cache_bytes": 5000}))
    assert _json(version_dir)["cache_bytes"] == 0

    add_settings(config, {"volatile_store": "redis://h"})
    assert _json(version_dir)["cache_bytes"] == 5000


def test_tables_that_only_stores_have(version_dir: Path) -> None:
    """They take no memory of this machine's page cache, and the output says where their rows are."""
    config = version_dir.parent / "config.pbtxt"
    config.write_text(settings_text({"volatile_store": "redis://h"}))
    shutil.rmtree(version_dir / "tables")

    assert all(item["total_bytes"] == 0 for item in _json(version_dir)["memory"] if item["place"] == "page cache")
    assert "rows come from the stores" in _run(version_dir).stdout


def test_hugectr_s_files_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A HugeCTR model folder is sized as the version that its load creates, under its own name."""
    monkeypatch.setenv("HOTROW_CACHE_DIR", str(tmp_path / "cache"))
    source = Source(tmp_path / "small", num_rows=(40, 60))
    source.ps_json()
    (source.folder / "config.pbtxt").write_text('backend: "hugectr"\n')
    (source.folder / "3").mkdir()

    documents = [_json(directory) for directory in (source.folder, source.folder / "3")]

    assert documents[0] == documents[1]
    assert documents[0]["version_dir"] == str(source.folder / "3")
    parts = {item["name"]: item["total_bytes"] for item in documents[0]["memory"]}
    assert parts["keys"] == 8 * (40 + 60)


def test_hit_rates_of_a_trace(version_dir: Path, keys: Path) -> None:
    """Rows shown have LRU's exact hit rate; the recommendation reaches its target."""
    document = _json(version_dir, "--trace", f"hashed={keys}", "--cache-bytes", "8KiB", "--target", 0.5)

    trace = document["trace"]
    lru = LruCurve(np.load(keys))
    table = trace["tables"]["hashed"]
    assert (table["keys"], table["distinct_keys"], table["sample_rate"]) == (20_000, lru.num_distinct, 1)
    assert all(point["lru"] == lru.hit_rate(point["rows"]) for point in table["hit_rates"])
    assert trace["recommended"]["hit_rate"] >= 0.5 * trace["best_hit_rate"]
    assert (trace["sampled"], trace["error"]) == (False, 0)
    assert 0 < trace["hit_rate"] <= trace["best_hit_rate"]


def test_tables_in_one_file_and_unknown_rows(version_dir: Path, tmp_path: Path) -> None:
    """A CSV may hold several tables, by name or folder; row numbers that do not exist are counted apart."""
    path = tmp_path / "keys.csv"
    path.write_text("table,key\n" + "user.weight,1\nuser_weight,2\nhashed,7\nuser.weight,1\nuser.weight,50\n")

    tables = _json(version_dir, "--trace", path)["trace"]["tables"]

    assert (tables["user_weight"]["keys"], tables["user_weight"]["unknown_keys"]) == (3, 1)
    assert tables["hashed"]["keys"] == 1


def test_a_long_trace_is_sampled_and_says_so(version_dir: Path, keys: Path) -> None:
    """The error is printed next to the figures that it concerns."""
    result = _run(version_dir, "--trace", f"hashed={keys}", "--sampled-keys", 12_000)

    assert "from a sample of 1 in" in result.stdout
    assert "±" in result.stdout


def test_a_recording_is_a_trace(version_dir: Path, tmp_path: Path) -> None:
    """`hotrow size` reads the recording of a session directly."""
    rng = np.random.default_rng(0)
    with InferenceSession.open(version_dir, record_keys=str(tmp_path / "keys")) as session:
        for _ in range(5):
            session.run(small_model.random_inputs(10, rng))
    (recording,) = (tmp_path / "keys").iterdir()

    tables = _json(version_dir, "--trace", recording)["trace"]["tables"]

    # Negative row numbers, which the cache never holds, are not counted among its keys.
    assert tables["hashed"]["keys"] == 250
    assert tables["user_weight"]["keys"] + tables["user_weight"]["unknown_keys"] == 100


def test_plots_are_a_picture_and_a_page(version_dir: Path, keys: Path, tmp_path: Path) -> None:
    """The page needs nothing from elsewhere, and no name in it is taken for markup."""
    picture, page = tmp_path / "curves.png", tmp_path / "curves.html"
    session = version_dir / "session.json"
    session.write_text(session.read_text().replace('"hashed"', '"<b>hashed"', 1))

    result = _run(version_dir, "--trace", f"hashed={keys}", "--plot", picture, "--plot", page)

    assert result.exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "<svg" in text
    assert "Recommended: cache_bytes" in text
    assert "src=" not in text
    assert "&lt;b&gt;hashed" in text
    assert "<b>hashed" not in text


@pytest.mark.parametrize("name", ["curves.png", "curves.html"])
def test_a_full_disk_names_the_plot_and_leaves_none(
    version_dir: Path, keys: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an empty one nor a part; one that was there stays."""
    (tmp_path / name).write_text("before")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))

    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / name}'"):
        _run(version_dir, "--trace", f"hashed={keys}", "--plot", tmp_path / name)

    assert (tmp_path / name).read_text() == "before"
    assert not list(tmp_path.glob(".tmp-*"))


def test_the_page_in_a_browser(browser: Browser, version_dir: Path, keys: Path, tmp_path: Path) -> None:
    """It draws the curves, fits a phone, logs no error and requests nothing else."""
    page = tmp_path / "curves.html"
    _run(version_dir, "--trace", f"hashed={keys}", "--plot", page)

    look = Look(browser, page, width=390, dark=True)

    assert look.tab.evaluate("document.documentElement.scrollWidth") == 390
    assert look.tab.locator("svg").is_visible()
    assert look.requests == [page.as_uri()]
    assert look.complaints == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--trace", "{keys}"], "name the table whose keys these are: --trace TABLE=.*; tables: 'user.weight'"),
        (["--trace", "other={keys}"], "no table 'other'; tables: 'user.weight'"),
        (["--plot", "x.png"], "--plot needs --trace"),
    ],
)
def test_mistakes_are_explained(version_dir: Path, keys: Path, arguments: list[str], complaint: str) -> None:
    """Each error names the right form."""
    arguments = [argument.replace("{keys}", str(keys)) for argument in arguments]

    with pytest.raises((HotrowError, FileNotFoundError), match=complaint):
        _run(version_dir, *arguments)


@pytest.mark.parametrize("value", ["x", "-1", "1.5.2", "3 zebras"])
def test_bytes_that_are_none(version_dir: Path, value: str) -> None:
    """Sizes are whole numbers, or numbers of KiB, MiB, GiB, TiB."""
    assert "is not a number of bytes" in _run(version_dir, f"--cache-bytes={value}").stderr


def test_as_a_process(version_dir: Path, keys: Path) -> None:
    """In a pipe it prints plain tables; a directory that is no model's is one line and exit code 1."""
    run = [sys.executable, "-m", "hotrow", "size"]

    good = subprocess.run([*run, version_dir, "--trace", f"hashed={keys}"], capture_output=True, text=True, check=True)
    bad = subprocess.run([*run, keys.parent], capture_output=True, text=True, check=False)

    assert "Recommended: cache_bytes" in good.stdout
    assert "\x1b" not in good.stdout + good.stderr
    assert bad.returncode == 1
    assert bad.stderr.startswith(f"hotrow: {keys.parent / 'session.json'}: no such file")
