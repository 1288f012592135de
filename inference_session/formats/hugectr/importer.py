"""From HugeCTR's files to the native layout: the graph becomes ONNX, the tables are linked as they are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inference_session.config import SessionConfig
from inference_session.errors import ConfigurationError, ModelFormatError, UnsupportedModelError
from inference_session.formats.hugectr.csr import DENSE, HPS_COUNTS, HPS_KEYS, KEYS, OFFSETS, RequestFormat
from inference_session.formats.hugectr.graph import Graph, read_graph
from inference_session.formats.hugectr.onnx_graph import DenseNetwork, build_dense_network
from inference_session.formats.hugectr.ps_fields import KeyType, PsJson, PsModel
from inference_session.formats.hugectr.ps_json import read_ps_json
from inference_session.formats.manifest import write_manifest
from inference_session.formats.native import (
    DENSE_FILE,
    PREDICTIONS,
    TABLES_FOLDER,
    LookupSpec,
    ModelSpec,
    TableSpec,
    TensorSpec,
    folder_names,
)
from inference_session.formats.staging import stage_version
from inference_session.parameter_server.table_index import build_index

Progress = Callable[[int], None]
"""Told the number of bytes done since the last call, from any thread."""

_KEY_BYTES = 8
_FLOAT_BYTES = 4
_KEYS_PER_CHUNK = 1 << 20


@dataclass(frozen=True)
class ImportReport:
    """What became of one model."""

    model: str
    version_dir: Path
    spec: ModelSpec
    num_dense_parameters: int
    """0 for a model of tables alone."""
    ignored: tuple[str, ...]
    """Fields of ps.json that have no effect in this release."""
    unknown: tuple[str, ...]
    """Fields of ps.json that nobody knows."""

    def __str__(self) -> str:
        lines = [f"Imported {self.spec.source} as {self.version_dir}", f"Tables: {len(self.spec.tables)}"]
        lines += [f"  {table.name!r}: {table.num_rows} rows x {table.embedding_dim}" for table in self.spec.tables]
        if self.spec.labels:
            lines.append(f"Predictions: {', '.join(self.spec.labels)} ({self.num_dense_parameters} dense parameters)")
        if self.ignored:
            lines.append(f"Note: fields of ps.json without effect here: {', '.join(self.ignored)}")
        if self.unknown:
            lines.append(f"Note: unknown fields of ps.json: {', '.join(self.unknown)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _SourceTable:
    """One sparse folder of HugeCTR, and what it will be called."""

    name: str
    folder: Path
    embedding_dim: int
    default_value: float


def import_hugectr(
    ps_json: Path,
    repository: Path,
    *,
    model: str | None = None,
    version: int | None = None,
    progress: Progress | None = None,
) -> list[ImportReport]:
    """Import one model of ps.json, or all of them, into a model repository.

    Tables are hard links where the file system allows, else copies; they are never converted.

    Args:
        model: its name in ps.json; None: all.
        version: None: the one after the highest there is.
        progress: told the bytes of keys indexed, then those of all files read for their checksums.

    Raises:
        ConfigurationError: ps.json is wrong, or the version exists.
        ModelFormatError: a file is missing, damaged, or does not belong to the graph; names file and field.
        UnsupportedModelError: names the layer that cannot be served.
    """
    settings = read_ps_json(ps_json)
    models = settings.models if model is None else (settings.model(model),)
    return [_import_model(settings, item, repository, version, progress) for item in models]


def write_version(
    settings: PsJson, model: PsModel, directory: Path, progress: Progress | None = None
) -> tuple[ModelSpec, int]:
    """Write one model into an empty folder, complete with its manifest; what it is, and its dense parameters.

    `model` may differ from what ps.json says, as where config.pbtxt names other files. Errors as `import_hugectr`.
    """
    if model.graph_file:
        spec, num_parameters = _write_network(settings, model, directory, progress)
    else:
        spec, num_parameters = _tables_alone(settings, model, directory, progress), 0
    spec.write(directory)
    write_manifest(directory, progress)
    return spec, num_parameters


def _import_model(
    settings: PsJson, model: PsModel, repository: Path, version: int | None, progress: Progress | None
) -> ImportReport:
    with stage_version(repository, model.name, version) as (staging, version_dir):
        spec, num_parameters = write_version(settings, model, staging, progress)
    return ImportReport(model.name, version_dir, spec, num_parameters, settings.ignored, settings.unknown)


def _write_network(settings: PsJson, model: PsModel, staging: Path, progress: Progress | None) -> tuple[ModelSpec, int]:
    graph = read_graph(Path(model.graph_file))
    if len(graph.embeddings) != len(model.sparse_files):
        raise ConfigurationError(
            f"{settings.path}: model {model.name!r} has {len(model.sparse_files)} sparse_files, but "
            f"{model.graph_file} has {len(graph.embeddings)} embedding layers; one folder each"
        )
    statistics = Path(model.statistics_file) if model.statistics_file else None
    network = build_dense_network(graph, Path(model.dense_file), statistics)
    sources = [
        _SourceTable(embedding.name, _local(model, name), embedding.embedding_dim, model.default_value(i))
        for i, (embedding, name) in enumerate(zip(graph.embeddings, model.sparse_files, strict=True))
    ]
    tables = _link_tables(sources, settings.key_type, staging, progress)
    (staging / DENSE_FILE).write_bytes(network.model.SerializeToString())
    return _network_spec(settings, model, graph, network, tables), network.num_parameters


def _network_spec(
    settings: PsJson, model: PsModel, graph: Graph, network: DenseNetwork, tables: tuple[TableSpec, ...]
) -> ModelSpec:
    slots = tuple(embedding.slot_num for embedding in graph.embeddings)
    form = RequestFormat(graph.dense_dim, slots, settings.key_type, model.max_batch_size)
    lookups = [
        LookupSpec(table.folder, f"{KEYS}/{i}", embedding.name, pooling=embedding.combiner)
        for i, (table, embedding) in enumerate(zip(tables, graph.embeddings, strict=True))
    ]
    return ModelSpec(
        inputs=(
            TensorSpec(DENSE, "float32", (-1,)),
            TensorSpec(KEYS, settings.key_type, (-1,)),
            TensorSpec(OFFSETS, "int32", (-1,)),
        ),
        outputs=tuple(TensorSpec(label.name, "float32", (-1, label.dim)) for label in network.outputs),
        tables=tables,
        lookups=tuple(lookups),
        labels=tuple(
            label.name if label.dim == 1 else f"{label.name}_{column}"
            for label in network.outputs
            for column in range(label.dim)
        ),
        label_outputs=tuple(label.name for label in network.outputs),
        joinable=network.joinable,
        layout="hugectr",
        layout_options={**asdict(form), "dense_input": graph.dense_name},
        settings=_session_settings(settings, model),
        source=f"HugeCTR {settings.generation} {Path(model.graph_file).name}",
    )


def _tables_alone(settings: PsJson, model: PsModel, staging: Path, progress: Progress | None) -> ModelSpec:
    """A model of HPS: its answer is the vectors themselves."""
    names = model.table_names or tuple(f"sparse_embedding{i}" for i in range(len(model.sparse_files)))
    folders = [_local(model, name) for name in model.sparse_files]
    dims = model.embedding_dims or tuple(_embedding_dim(settings, model, folder) for folder in folders)
    sources = [
        _SourceTable(name, folder, dim, model.default_value(i))
        for i, (name, folder, dim) in enumerate(zip(names, folders, dims, strict=True))
    ]
    tables = _link_tables(sources, settings.key_type, staging, progress)
    return ModelSpec(
        inputs=(TensorSpec(HPS_KEYS, "int64", (-1,)), TensorSpec(HPS_COUNTS, "int32", (-1,))),
        outputs=(TensorSpec(PREDICTIONS, "float32", (-1,)),),
        tables=tables,
        lookups=tuple(
            LookupSpec(table.folder, f"{HPS_KEYS}/{i}", f"{PREDICTIONS}/{i}") for i, table in enumerate(tables)
        ),
        batched=False,
        layout="hps",
        settings=_session_settings(settings, model),
        source=f"HPS {settings.generation} {settings.path.name}",
    )


def _session_settings(settings: PsJson, model: PsModel) -> dict[str, str]:
    """What of ps.json this release's sessions have a setting for."""
    known = {item.name for item in fields(SessionConfig)}
    return {name: value for name, value in settings.session_settings(model).items() if name in known}


def _embedding_dim(settings: PsJson, model: PsModel, folder: Path) -> int:
    """What the sizes of a folder's files say, where ps.json says nothing."""
    num_rows = _size(folder / "key") // _KEY_BYTES
    if not num_rows:
        raise ConfigurationError(
            f"{settings.path}: model {model.name!r} needs 'embedding_vecsize_per_table', as {folder} has no row to tell"
        )
    return max(1, _size(folder / "emb_vector") // _FLOAT_BYTES // num_rows)


def _local(model: PsModel, name: str) -> Path:
    if "://" in name:
        raise UnsupportedModelError(f"model {model.name!r}: {name!r} is not on this machine; copy it here first")
    return Path(name)


def _link_tables(
    sources: list[_SourceTable], key_type: KeyType, staging: Path, progress: Progress | None
) -> tuple[TableSpec, ...]:
    tables = []
    for source, folder in zip(sources, folder_names([source.name for source in sources]), strict=True):
        target = staging / TABLES_FOLDER / folder
        num_rows = _num_rows(source)
        _link_table(source.folder, key_type, target)
        build_index(target, _mapped(target / "key"), progress and partial(_count_keys, progress))
        tables.append(
            TableSpec(source.name, folder, num_rows, source.embedding_dim, default_vector=source.default_value)
        )
    return tuple(tables)


def _count_keys(progress: Progress, num_keys: int) -> None:
    progress(num_keys * _KEY_BYTES)


def _link_table(source: Path, key_type: KeyType, target: Path) -> None:
    target.mkdir(parents=True)
    if key_type == "int64" or _all_uint32(source / "key"):
        _link(source / "key", target / "key")
    else:
        _write_uint32(source / "key", target / "key")
    _link(source / "emb_vector", target / "emb_vector")


def _num_rows(source: _SourceTable) -> int:
    """Rows of a sparse folder, by the sizes of both its files."""
    key_bytes, vector_bytes = _size(source.folder / "key"), _size(source.folder / "emb_vector")
    num_rows, rest = divmod(key_bytes, _KEY_BYTES)
    if rest:
        raise ModelFormatError(f"{source.folder / 'key'}: {key_bytes} bytes are no whole number of int64 keys")
    expected = num_rows * source.embedding_dim * _FLOAT_BYTES
    if vector_bytes != expected:
        raise ModelFormatError(
            f"{source.folder / 'emb_vector'}: {vector_bytes} bytes, expected {expected} "
            f"({num_rows} keys, embedding_dim {source.embedding_dim}, float32)"
        )
    return num_rows


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read: {error.strerror}") from error


def _link(source: Path, target: Path) -> None:
    """Share the file; where links are not possible (another file system, say), copy it."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def _all_uint32(path: Path) -> bool:
    """Whether a key file holds nothing but what uint32 can."""
    keys = _mapped(path)
    chunks = (keys[i : i + _KEYS_PER_CHUNK] for i in range(0, keys.size, _KEYS_PER_CHUNK))
    return all(((chunk >= 0) & (chunk < 1 << 32)).all() for chunk in chunks)


def _write_uint32(source: Path, target: Path) -> None:
    """HugeCTR casts the keys of a uint32 model when it loads them, so that -1 is found as 4294967295."""
    keys = _mapped(source)
    with target.open("wb") as file:
        for begin in range(0, keys.size, _KEYS_PER_CHUNK):
            file.write((keys[begin : begin + _KEYS_PER_CHUNK] & 0xFFFFFFFF).tobytes())


def _mapped(path: Path) -> NDArray[np.int64]:
    if not _size(path):
        return np.empty(0, np.int64)
    return np.memmap(path, "<i8", "r")
