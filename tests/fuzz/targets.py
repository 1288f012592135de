"""The targets of fuzzing: valid files, and their readers."""

from __future__ import annotations

import gzip
import json
import shutil
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, urlsplit

import numpy as np
import onnx
from numpy.typing import NDArray

from hotrow.metrics.page import MetricsPage
from inference_session import InferenceSession
from inference_session.errors import HotrowError
from inference_session.importers.hugectr.graph import read_graph
from inference_session.importers.hugectr.importer import import_hugectr
from inference_session.importers.hugectr.onnx_graph import build_dense_network
from inference_session.importers.hugectr.ps_json import read_ps_json
from inference_session.importers.onnx import import_onnx
from inference_session.model_source import hdfs_source
from inference_session.model_source.copy import Copy
from inference_session.model_source.create import create_source
from inference_session.model_spec import TableSpec
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.redis.replies import CURSOR, REPLY, read_rows
from inference_session.parameter_server.rocksdb.store import RocksDbStore, list_rocksdb_tables
from inference_session.requests.canary import check_canary
from inference_session.rows.hot_keys import read_hot_keys, write_hot_keys
from inference_session.sizing.key_recorder import read_recording
from inference_session.sizing.trace_file import read_trace
from inference_session.tables.table_file import TableFile, write_table
from inference_session.update_stream.encodings import KeyValue, decode, encode_batch
from inference_session.version_directory import manifest
from inference_session.version_directory.session_file import read_spec
from inference_session.version_directory.verified_files import VerifiedFiles
from tests.fuzz.target import Target
from tests.testing import small_model
from tests.testing.hugectr_graphs import GraphMaker
from tests.testing.hugectr_source import Source
from tests.testing.onnx_models import model_of, table
from triton_backend.client.recorded_requests import read_requests
from triton_backend.repository.config_writer import write_model_config
from triton_backend.repository.model_config import ModelConfig


def _small_model(folder: Path) -> Path:
    small_model.write(folder / "m/1")
    return folder / "m/1"


def _version_files(folder: Path) -> list[Path]:
    version = _small_model(folder)
    return [path for path in sorted(version.rglob("*")) if path.is_file()]


def _serve_version(folder: Path) -> None:
    with InferenceSession.open(folder / "m/1", dense_threads=1) as session:
        session.run(small_model.random_inputs(3, np.random.default_rng(0)))


def _verify_version(folder: Path) -> None:
    read_spec(folder / "m/1")
    manifest.verify(folder / "m/1", checksums=True)


_TABLE = TableSpec("t", "t", 500, 3)


def _table_files(folder: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    write_table(folder / "t", [rng.standard_normal((500, 3), np.float32)], keys=[rng.permutation(1000)[:500]])
    return [folder / "t" / name for name in ("key", "emb_vector", "index")]


def _look_up(folder: Path) -> None:
    for verify in (False, True):
        file = TableFile.open(folder / "t", _TABLE, verify_index=verify)
        try:
            for _, vectors in file.scan():
                assert vectors.shape[1] == _TABLE.embedding_dim
            file.fetch(np.arange(-5, 1100), np.empty((1105, 3), np.float32))
        finally:
            file.close()


def _hugectr_files(folder: Path) -> list[Path]:
    source = Source(folder / "source")
    source.ps_json()
    return [path for path in sorted((folder / "source").rglob("*")) if path.is_file()]


def _ps_json(folder: Path) -> list[Path]:
    return [path for path in _hugectr_files(folder) if path.name == "ps.json"]


def _read_ps_json(folder: Path) -> None:
    read_ps_json(folder / "source/ps.json")


def _import_hugectr(folder: Path) -> None:
    shutil.rmtree(folder / "repository", ignore_errors=True)
    import_hugectr(folder / "source/ps.json", folder / "repository")


def _graph_files(folder: Path) -> list[Path]:
    maker = GraphMaker(1, dense_dim=3, embeddings=[("emb", 2, 4)])
    wide = maker.add("Concat", ["dense", maker.add("Reshape", "emb", leading_dim=8)])
    normal = maker.add(
        "BatchNorm", maker.add("MultiCross", wide, mc_param={"num_layers": 2}), bn_param={"factor": 0.9, "eps": 1e-3}
    )
    maker.loss(maker.add("InnerProduct", maker.add("ReLU", normal), fc_param={"num_output": 1}))
    return [path for path in maker.write(folder) if path is not None]


def _build_network(folder: Path) -> None:
    build_dense_network(read_graph(folder / "graph.json"), folder / "dense.model", folder / "statistics.json")


def _onnx_model(folder: Path) -> list[Path]:
    graph = """g (int64[N, 3] ids, float[N, 2] dense) => (float[N, 1] click) {
        vectors = Gather(items, ids)
        pooled = ReduceSum<keepdims = 0>(vectors, axis)
        wide = Concat<axis = 1>(pooled, dense)
        logit = MatMul(wide, weights)
        click = Sigmoid(logit)
    }"""
    constants = {"items": table(40), "axis": np.array([1]), "weights": np.ones((6, 1), np.float32)}
    onnx.save(model_of(graph, {**constants}), folder / "model.onnx")
    return [folder / "model.onnx"]


def _import_onnx(folder: Path) -> None:
    shutil.rmtree(folder / "repository", ignore_errors=True)
    import_onnx(folder / "model.onnx", folder / "repository", "m", min_rows=10)


def _config(folder: Path) -> list[Path]:
    return [write_model_config(_small_model(folder), small_model.SPEC, "m")]


def _traces(folder: Path) -> list[Path]:
    keys = np.random.default_rng(0).integers(0, 1000, 300)
    np.save(folder / "t.npy", keys)
    (folder / "t.txt").write_text(" ".join(map(str, keys)), encoding="utf-8")
    (folder / "t.csv").write_text("table,key\n" + "".join(f"a,{key}\n" for key in keys), encoding="utf-8")
    keys.tofile(folder / "t.bin")
    (folder / "t.txt.gz").write_bytes(gzip.compress((folder / "t.txt").read_bytes()))
    return sorted(folder.iterdir())


def _read_traces(folder: Path) -> None:
    for path in folder.iterdir():
        for part in read_trace(path):
            assert part.keys.dtype == np.int64


def _recording(folder: Path) -> list[Path]:
    version = _small_model(folder)
    with InferenceSession.open(version, record_keys=str(folder / "recordings")) as session:
        session.run(small_model.random_inputs(30, np.random.default_rng(0)))
    return [path for path in sorted((folder / "recordings").rglob("*")) if path.is_file()]


def _read_recordings(folder: Path) -> None:
    for recording in (folder / "recordings").iterdir():
        for part in read_recording(recording):
            assert part.keys.dtype == np.int64


_DIM = 4
_RNG = np.random.default_rng(0)
_BATCH = encode_batch(np.arange(6), _RNG.standard_normal((6, _DIM), np.float32))
_ROW = _RNG.standard_normal(_DIM, np.float32).tobytes()


class _NameNode(BaseHTTPRequestHandler):
    """Answers each request with the content of a file in the folder."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    folder: Path

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path, operation = url.path.removeprefix("/webhdfs/v1"), parse_qs(url.query)["op"][0]
        file = self.folder / f"{operation}{path.replace('/', '-')}"
        status = 200 if file.is_file() else 404
        content = (file if status == 200 else self.folder / "error").read_bytes()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Nothing is logged."""


@cache
def _name_node(folder: Path) -> str:
    """Starts one that lives until the process ends; returns its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("NameNode", (_NameNode,), {"folder": folder}))
    Thread(target=server.serve_forever, daemon=True).start()
    hdfs_source.PAUSES_S = (0.0,)  # type: ignore[assignment]  # what may pass does not, here
    return f"127.0.0.1:{server.server_port}"


def _hdfs_replies(folder: Path) -> list[Path]:
    (folder / "replies").mkdir(parents=True)
    for path, names in {"/m": ["a", "b"], "/m/b": ["c"]}.items():
        children = [_status(name, is_folder=name == "b") for name in names]
        replies = {"GETFILESTATUS": {"FileStatus": _status("", is_folder=True)}}
        replies["LISTSTATUS"] = {"FileStatuses": {"FileStatus": children}}
        for operation, reply in replies.items():
            (folder / "replies" / f"{operation}{path.replace('/', '-')}").write_text(json.dumps(reply))
    for path in ("/m/a", "/m/b/c"):
        name = path.replace("/", "-")
        (folder / f"replies/GETFILESTATUS{name}").write_text(json.dumps({"FileStatus": _status("", is_folder=False)}))
        (folder / f"replies/OPEN{name}").write_bytes(bytes(100))
    error = {"exception": "FileNotFoundException", "javaClassName": "java.io.FileNotFoundException", "message": "none"}
    (folder / "replies/error").write_text(json.dumps({"RemoteException": error}))
    return sorted((folder / "replies").iterdir())


def _status(name: str, *, is_folder: bool) -> dict[str, object]:
    size = 0 if is_folder else 100
    kind = "DIRECTORY" if is_folder else "FILE"
    return {"pathSuffix": name, "type": kind, "length": size, "modificationTime": 1700000000000, "fileId": 16387}


def _copy_from_hdfs(folder: Path) -> None:
    """Whatever the NameNode answers, no file is written outside of the copy."""
    target = folder / "copies/one/copy"
    shutil.rmtree(folder / "copies", ignore_errors=True)
    target.parent.mkdir(parents=True)
    url = f"hdfs://{_name_node(folder / 'replies')}/m"
    try:
        with create_source(url) as source:
            source.stat("nothing")
        with Copy(url, target) as copy:
            copy.run()
    finally:
        assert {path.name for path in (folder / "copies").iterdir()} == {"one"}
        assert {path.name for path in target.parent.iterdir()} <= {"copy", ".tmp-copy"}


_NAMESPACE = Namespace("m", "1")


def _rocksdb_files(folder: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    store = RocksDbStore(folder / "db", _NAMESPACE, {"a": 3, "b": 2}, writable=True)
    for table_name, dim in (("a", 3), ("b", 2)):
        store.insert(table_name, np.arange(500), rng.standard_normal((500, dim), np.float32))
        store.set_note(table_name, "whole")
    store.close()
    return [path for path in sorted((folder / "db").iterdir()) if path.stat().st_size]


def _use_rocksdb(folder: Path) -> None:
    """Reads a copy, because RocksDB repairs and compacts the files that it opens."""
    shutil.rmtree(folder / "copy", ignore_errors=True)
    shutil.copytree(folder / "db", folder / "copy")
    list_rocksdb_tables(folder / "copy")
    for writable in (False, True):
        store = RocksDbStore(folder / "copy", _NAMESPACE, {"a": 3, "b": 2}, writable=writable)
        try:
            _use_store(store, writable=writable)
        finally:
            store.close()


def _use_store(store: RocksDbStore, *, writable: bool) -> None:
    for name, dim in (("a", 3), ("b", 2)):
        store.note(name)
        store.fetch(name, np.arange(-5, 600), np.empty((605, dim), np.float32))
        for _, vectors in store.scan(name):
            assert vectors.shape[1] == dim
        if writable:
            store.insert(name, np.arange(9), np.ones((9, dim), np.float32))


def _messages(folder: Path) -> list[Path]:
    for name, content in (("key", b"\1" + bytes(7)), ("row", _ROW), ("batch", _BATCH)):
        (folder / name).write_bytes(content)
    return sorted(folder.iterdir())


def _decode(folder: Path) -> None:
    key, row, batch = ((folder / name).read_bytes() for name in ("key", "row", "batch"))
    whole: list[KeyValue] = [(bytes(8), _ROW), (b"", _BATCH)]
    foreign: list[list[KeyValue]] = [[(key, row)], [(key, None), (None, row)], [(b"", batch), (key, batch)]]
    for more in foreign:
        updates = decode([*whole, *more], _DIM, min_key=0)
        assert updates.vectors.shape == (len(updates.keys), _DIM)
        assert np.isfinite(updates.vectors).all()
        assert len({*updates.keys.tolist(), *updates.deleted.tolist()}) == len(updates.keys) + len(updates.deleted)


def _replies(folder: Path) -> list[Path]:
    row = b"$16\r\n" + bytes(range(16)) + b"\r\n"
    (folder / "replies").write_bytes(b"*3\r\n" + row + b"$-1\r\n" + row + b"*2\r\n" + row + row)
    return [folder / "replies"]


def _read_replies(folder: Path) -> None:
    """Reads as from a socket, in pieces; the kernel's outputs lie between guards."""
    data = np.frombuffer((folder / "replies").read_bytes() + b" ", np.uint8)
    guarded = np.full((9, 4), 7.0, np.float32)
    found = np.zeros(5, np.bool_)
    positions = np.arange(5)
    replies, cursor = np.zeros(2, REPLY), np.zeros(1, CURSOR)
    cursor["key"] = -1
    for i, (begin, count) in enumerate(((0, 3), (3, 2))):
        replies[i] = (count, 16, positions[begin:].ctypes.data, guarded[2:].ctypes.data, 16, found.ctypes.data)
    _feed(data[:-1], replies, cursor)
    assert (guarded[:2] == 7).all()
    assert (guarded[7:] == 7).all()


def _feed(data: NDArray[np.uint8], replies: NDArray[np.void], cursor: NDArray[np.void]) -> None:
    begin = 0
    for end in (*range(11, len(data), 11), len(data)):
        begin += read_rows(replies, cursor, data[begin:].ctypes.data, end - begin)
        if cursor["status"][0]:
            return


def _state_files(folder: Path) -> list[Path]:
    write_hot_keys(folder / "m.hot_keys", {"a": np.arange(9), "b": np.arange(3)})
    known = VerifiedFiles(folder / "m.verified")
    known.add((1, 2, 3, 4, 5), "00")
    known.save()
    return [folder / "m.hot_keys", folder / "m.verified"]


def _read_state(folder: Path) -> None:
    read_hot_keys(folder / "m.hot_keys")
    VerifiedFiles(folder / "m.verified").holds((1, 2, 3, 4, 5), "00")


def _canary(folder: Path) -> list[Path]:
    inputs = small_model.random_inputs(3, np.random.default_rng(0))
    arrays = {f"input/{name}": array for name, array in inputs.items()}
    np.savez(folder / "c.npz", **arrays, **{"output/click": np.zeros((3, 1), np.float32)})
    np.savez_compressed(folder / "compressed.npz", **arrays)
    return sorted(folder.iterdir())


def _check_canaries(folder: Path) -> None:
    for path in folder.iterdir():
        check_canary(lambda inputs: {"click": np.zeros((3, 1), np.float32)}, path, 1.0)


def _requests(folder: Path) -> list[Path]:
    tensors = [
        {"name": "ids", "shape": [1, 3], "datatype": "INT64", "data": [1, 2, 3]},
        {"name": "text", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]},
    ]
    (folder / "requests.json").write_text(json.dumps({"inputs": tensors}), encoding="utf-8")
    return [folder / "requests.json"]


def _metrics(folder: Path) -> list[Path]:
    page = '# HELP a b\n# TYPE a counter\na{m="x",n="y\\"z"} 1\nb 2.5e3 12\n'
    (folder / "page").write_text(page, encoding="utf-8")
    return [folder / "page"]


TARGETS = {
    "session_json": Target(lambda folder: [_small_model(folder) / "session.json"], lambda f: read_spec(f / "m/1")),
    "manifest": Target(lambda folder: [_small_model(folder) / "MANIFEST.json"], _verify_version),
    "version": Target(_version_files, _serve_version),
    "table": Target(_table_files, _look_up),
    "ps_json": Target(_ps_json, _read_ps_json),
    "hugectr_graph": Target(_graph_files, _build_network),
    "hugectr_import": Target(_hugectr_files, _import_hugectr),
    "onnx_import": Target(_onnx_model, _import_onnx),
    "config_pbtxt": Target(_config, lambda folder: ModelConfig.read(folder / "m/config.pbtxt")),
    "key_traces": Target(_traces, _read_traces),
    "key_recording": Target(_recording, _read_recordings),
    "hdfs_replies": Target(_hdfs_replies, _copy_from_hdfs, errors=(HotrowError, OSError)),
    "rocksdb": Target(_rocksdb_files, _use_rocksdb),
    "kafka_messages": Target(_messages, _decode),
    "redis_replies": Target(_replies, _read_replies),
    "state_files": Target(_state_files, _read_state),
    "canary": Target(_canary, _check_canaries),
    "recorded_requests": Target(_requests, lambda folder: read_requests(folder / "requests.json")),
    "metrics_page": Target(
        _metrics, lambda f: MetricsPage.parse((f / "page").read_bytes().decode("utf-8")), errors=(ValueError,)
    ),
}
TRAINING_TARGETS: dict[str, Target] = {}
if find_spec("torch"):
    from tests.fuzz import training_targets

    TRAINING_TARGETS.update(training_targets.TARGETS)
TARGETS |= TRAINING_TARGETS
