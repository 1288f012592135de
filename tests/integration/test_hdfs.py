"""Models that lie on HDFS: imported from there, and served from there."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from onnx.reference import ReferenceEvaluator

from hotrow.command_line import cli
from inference_session import InferenceSession
from inference_session.errors import ConfigurationError, HotrowError, ModelFormatError
from inference_session.hugectr import HPS, DataSource, DataSourceParams
from inference_session.importers.hugectr import import_hugectr
from inference_session.model_source import Copy, create_source
from inference_session.model_source.fetch import fetch
from inference_session.version_directory.manifest import verify
from tests.testing.hadoop import Hdfs
from tests.testing.hugectr_source import Source, place_small
from tests.testing.onnx_models import KEYS, redirect, two_lookups, write_split
from tests.testing.served import Serve
from tests.testing.served_requests import ask
from tests.testing.sources import put
from tests.testing.triton_models import ctr_answer, write_ctr

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("HOTROW_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def remote(hdfs: Hdfs) -> str:
    """A folder on HDFS that does not exist yet."""
    return f"{hdfs.url}/models/{os.getpid()}-{next(_numbers)}"


def upload(folder: Path, url: str) -> None:
    with Copy(folder, url) as copy:
        copy.run()


def run(*arguments: str) -> None:
    """Run the command line; raises what it would report."""
    CliRunner().invoke(cli, arguments, catch_exceptions=False, standalone_mode=False)


def test_an_onnx_model_with_external_data_is_imported(remote: str, tmp_path: Path, cache: Path) -> None:
    """Only the model and the files next to it that it names are copied; none of them stays in the cache."""
    (tmp_path / "model").mkdir()
    path = write_split(tmp_path / "model")
    (tmp_path / "model" / "unrelated").write_bytes(b"1" * 100)
    upload(path.parent, remote)

    run("import", "onnx", f"{remote}/model.onnx", "--name", "m", "--repository", str(tmp_path / "r"))

    assert not [file for file in cache.rglob("*") if file.is_file() and file.name != "lock"]
    expected: Any = ReferenceEvaluator(two_lookups()).run(None, {"keys": KEYS})
    with InferenceSession.open(tmp_path / "r" / "m" / "1", verify="full") as session:
        np.testing.assert_allclose(session.run({"keys": KEYS})["y"], expected[0], rtol=1e-6)


def test_a_damaged_copy_in_the_cache_is_copied_again(
    remote: str, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Cached files are read before they are used: a file without its own manifest has no other protection."""
    (tmp_path / "model").mkdir()
    upload(write_split(tmp_path / "model").parent, remote)
    copy = fetch(f"{remote}/model.onnx")
    assert fetch(f"{remote}/model.onnx") == copy
    assert not caplog.records
    content = copy.read_bytes()
    copy.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    assert fetch(f"{remote}/model.onnx").read_bytes() == content
    assert "model.onnx: damaged" in caplog.text


def test_external_data_elsewhere_are_not_fetched(remote: str, tmp_path: Path) -> None:
    """A model that names files outside of its folder is refused, and nothing is imported."""
    (tmp_path / "model").mkdir()
    path = write_split(tmp_path / "model")
    redirect(path, location="../secret")
    upload(path.parent, remote)
    with pytest.raises(ModelFormatError, match=r"hdfs://.*'\.\./secret', outside the model's folder"):
        run("import", "onnx", f"{remote}/model.onnx", "--name", "m", "--repository", str(tmp_path / "r"))
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("relative", [True, False])
def test_hugectr_files_are_imported(remote: str, tmp_path: Path, relative: bool) -> None:
    """ps.json and all that it names, by relative names and by URLs, give the same import as local files."""
    source = Source(tmp_path / "source")
    (local,) = import_hugectr(source.ps_json(), tmp_path / "local")
    if not relative:
        source.model["sparse_files"] = [f"{remote}/{name}" for name in source.model["sparse_files"]]
        source.model["dense_file"] = f"{remote}/dense.model"
    source.ps_json()
    upload(source.folder, remote)

    run("import", "hugectr", f"{remote}/ps.json", "--repository", str(tmp_path / "r"))

    version = tmp_path / "r" / "small" / "1"
    verify(version, checksums=True)
    for file in (local.version_dir / "tables").rglob("*"):
        if file.is_file():
            assert (version / file.relative_to(local.version_dir)).read_bytes() == file.read_bytes()


def test_a_file_that_is_not_there_is_named(remote: str, tmp_path: Path) -> None:
    """The URL of a missing file is in the error, and nothing is imported."""
    source = Source(tmp_path / "source")
    source.model["sparse_files"][1] = f"{remote}/nothing"
    with pytest.raises(HotrowError, match=r"hdfs://.*/nothing: no such file"):
        import_hugectr(source.ps_json(), tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_hps_reads_tables_of_hdfs_again_when_they_change(remote: str, tmp_path: Path) -> None:
    """A local ps.json may name tables on HDFS: they are copied once, and again when they have changed."""
    source = Source(tmp_path / "source")
    upload(source.folder, remote)
    folders = [f"{remote}/{table}_sparse.model" for table in range(2)]
    tables = {"model": "small", "sparse_files": folders, "embedding_table_names": ["a", "b"], "max_batch_size": 4}
    tables |= {"embedding_vecsize_per_table": [1, 4], "maxnum_catfeature_query_per_table_per_sample": [2, 2]}
    ps_json = tmp_path / "ps.json"
    ps_json.write_text(json.dumps({"supportlonglong": True, "models": [tables]}))

    np.testing.assert_array_equal(HPS(ps_json).lookup(source.keys[1], "small", 1), source.vectors[1])
    with create_source(folders[1]) as place:
        place.remove("emb_vector")
        put(place, "emb_vector", (2 * source.vectors[1]).tobytes())
    np.testing.assert_array_equal(HPS(ps_json).lookup(source.keys[1], "small", 1), 2 * source.vectors[1])


def test_hugectrs_data_source_moves_files_here(hdfs: Hdfs, remote: str, tmp_path: Path) -> None:
    """`DataSource(params).move_to_local()` copies what both sides name."""
    source = Source(tmp_path / "source")
    upload(source.folder, remote)
    path = remote.removeprefix(hdfs.url)
    params = DataSourceParams(
        use_hdfs=True,
        namenode="127.0.0.1",
        port=hdfs.http_port,
        hdfs_dense_model=f"{path}/dense.model",
        hdfs_sparse_model=[f"{path}/0_sparse.model", f"{path}/1_sparse.model"],
        local_dense_model=str(tmp_path / "dense"),
        local_sparse_model=[str(tmp_path / "0"), str(tmp_path / "1")],
    )
    DataSource(params).move_to_local()

    assert (tmp_path / "dense").read_bytes() == (source.folder / "dense.model").read_bytes()
    assert (tmp_path / "1" / "key").read_bytes() == source.keys[1].tobytes()
    with pytest.raises(ConfigurationError, match="1 hdfs_sparse_model, but 2 local_sparse_model"):
        DataSource(DataSourceParams(True, hdfs_sparse_model=["a"], local_sparse_model=["b", "c"])).move_to_local()


@pytest.mark.triton
def test_a_repository_on_hdfs_is_served(serve: Serve, remote: str, tmp_path: Path) -> None:
    """Models of either kind, those asked for, are served from a copy, and a damaged one is not served at all."""
    repository = tmp_path / "repository"
    repository.mkdir()
    write_ctr(repository / "ctr" / "1")
    write_ctr(repository / "ctr" / "2", scale=3.0)
    write_ctr(repository / "damaged" / "1")
    place_small(repository / "small", source := Source(repository / "small"))
    vectors = repository / "damaged" / "1" / "tables" / "item" / "emb_vector"
    content = bytearray(vectors.read_bytes())
    content[5] ^= 1
    with create_source(remote) as place:
        for path in sorted(repository.rglob("*")):
            name = path.relative_to(repository).as_posix()
            if path.is_dir():
                place.make_folder(name)
            else:
                put(place, name, bytes(content) if path == vectors else path.read_bytes())

    with serve(remote, "--model", "ctr", "--model", "small").grpc_client() as client:
        ids, dense = np.array([[0, 1, 2]]), np.ones((1, 2), np.float32)
        np.testing.assert_allclose(
            ask(client, "ctr", {"ids": ids, "dense": dense}).as_numpy("OUTPUT0"),
            ctr_answer(ids, dense, scale=3.0),
            rtol=1e-5,
        )
        assert ask(client, "small", source.request()).as_numpy("OUTPUT0").shape[0] > 0
    with pytest.raises(AssertionError, match="emb_vector: damaged, its checksum"):
        serve(remote)
