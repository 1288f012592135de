"""The checks of `hotrow doctor` of a model repository, and of what its models need."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from hotrow.dense_network import ENGINE_SETTING, SETTING, DenseSettings
from hotrow.doctor.findings import Finding
from hotrow.doctor.machine import may
from hotrow.doctor.services import check_services
from hotrow.output.formatting import counted, in_units, in_words
from inference_session.errors import ConfigurationError, HotrowError
from inference_session.model_source import is_url
from inference_session.model_spec import DENSE_FILE, INDEX_FILE, KEY_FILE, SESSION_FILE, TABLES_FOLDER, VECTOR_FILE
from inference_session.platform.mapped_large_pages import large_page_fraction, large_page_setting
from inference_session.platform.memory import available_bytes
from inference_session.sizing.memory import PROCESS_BYTES, MemoryItem, bytes_in, memory_items
from inference_session.version_directory.session_file import read_spec
from triton_backend.backend.settings import own_settings
from triton_backend.repository.in_place import InPlaceModel, in_place_backend, read_model_folder
from triton_backend.repository.model_config import configured_cache_bytes
from triton_backend.repository.servable import ServableModel, find_models, read_config

_ENOUGH_LARGE_PAGES = 0.5
PACKAGES = {
    "rocksdict": ("rocksdb", "store rocksdb://", ("rocksdb://",)),
    "confluent_kafka": ("kafka", "update streams kafka://", ("kafka://",)),
    "hdfs": ("hdfs", "sources hdfs://", ("hdfs://",)),
    "tritonclient": (
        "client",
        "`hotrow load`, `versions`, `roll-back`, `health`, `smoke-test`, `follow`, `top --url` and the examples",
        (),
    ),
    "openvino": ("openvino", "dense_precision bfloat16", ("bfloat16",)),
    "matplotlib": ("report", "`hotrow size --plot`", ()),
}
"""By module: hotrow's extra that installs it, its purpose, and prefixes of settings' values that need it."""


class _Needs(NamedTuple):
    """The requirements of a model."""

    items: list[MemoryItem]
    urls: set[str]
    """The values of its settings, including secrets: never show them."""
    tables: list[Path] = []  # noqa: RUF012  a default that is never changed
    """Vector files that are memory-mapped."""
    dense: DenseSettings | None = None
    """None: it has no dense network."""


def check_repository(repository: Path) -> Iterator[Finding]:
    try:
        models = find_models(repository.absolute())
        needs = [_needs(repository.absolute(), model) for model in models]
    except (HotrowError, OSError) as error:
        yield Finding(
            "repository", "problem", in_words(error), "correct or remove what is named; `hotrow import` creates models"
        )
        yield from check_packages(set())
        return
    yield Finding("repository", "ok", f"{counted(len(models), 'model')}: {', '.join(model.name for model in models)}")
    yield from check_permissions(repository)
    for model, need in zip(models, needs, strict=True):
        if need.dense is not None:
            yield _dense_network(model.name, need.dense)
    yield from _large_pages([path for need in needs for path in need.tables])
    yield _memory([item for need in needs for item in need.items])
    urls = {url for need in needs for url in need.urls}
    yield from check_services(urls)
    yield from check_packages(urls)


def check_permissions(repository: Path) -> Iterator[Finding]:
    paths = [repository, *repository.rglob("*")]
    closed = [path for path in paths if not may(path, os.R_OK | (os.X_OK if path.is_dir() else 0))]
    # HugeCTR's own folders get none: a copy is served.
    keys = [path for path in paths if path.name == KEY_FILE and path.parent.parent.name == TABLES_FOLDER]
    tables = [path.parent for path in keys if not (path.parent / INDEX_FILE).exists()]
    unwritable = [folder for folder in tables if not may(folder, os.W_OK)]
    if closed:
        message = f"{closed[0]} cannot be read by user {os.geteuid()}{_others(closed)}"
        yield Finding("permissions", "problem", message, f"chmod -R a+rX {repository}")
    if unwritable:
        message = (
            f"{unwritable[0]} has no index and is not writable, so each process builds its own{_others(unwritable)}"
        )
        fix = "open the version once where its folder is writable; InferenceSession.open writes the index there"
        yield Finding("permissions", "warning", message, fix)
    if not closed and not unwritable:
        yield Finding("permissions", "ok", f"all of {len(paths)} files and folders can be read")


def _large_pages(tables: list[Path]) -> Iterator[Finding]:
    """How much of the tables is mapped in pages of 2 MiB (docs/explanation/performance.md: Measured)."""
    known = {path: fraction for path in tables if (fraction := large_page_fraction(path)) is not None}
    if not known:
        return
    total = sum(path.stat().st_size for path in known)
    share = sum(fraction * path.stat().st_size for path, fraction in known.items()) / total
    setting = large_page_setting()
    text = f"{share:.0%} of {in_units(total)} of tables are mapped in pages of 2 MiB"
    text += f"; transparent_hugepage: {setting}" if setting else ""
    fix = (
        "copy the versions with `hotrow copy`, which writes whole pages: look-ups in tables of 4 M rows took half to"
        " two thirds of the time; the file system has to be XFS, or ext4 on Linux 6.16 or newer"
    )
    yield Finding("large pages", "ok", text, fix if share < _ENOUGH_LARGE_PAGES else "")


def _dense_network(model: str, settings: DenseSettings) -> Finding:
    """Which library computes the network of a model."""
    from inference_session.dense_engine.openvino import unusable_bfloat16
    from inference_session.device.discovery import unusable_tensorrt

    text = f"{model}: {settings.engine_name}, {settings.precision}"
    if settings.precision == "bfloat16" and (reason := unusable_bfloat16()):
        return Finding("dense network", "problem", f"{text}: {reason}", f"set {SETTING} of {model} to float32")
    if settings.engine == "tensorrt" and (reason := unusable_tensorrt()):
        fix = f"set {ENGINE_SETTING} of {model} to onnxruntime"
        return Finding("dense network", "problem", f"{text}: {reason}", fix)
    return Finding("dense network", "ok", text)


def _others(paths: list[Path]) -> str:
    return f"; {len(paths) - 1} more have the same problem" if len(paths) > 1 else ""


def _memory(items: list[MemoryItem]) -> Finding:
    available = available_bytes()
    private, files = bytes_in(items, "process"), bytes_in(items, "page cache")
    text = f"{in_units(available)} available; processes need {in_units(private)}, tables {in_units(files)}"
    fix = "more memory, a smaller cache_bytes, or fewer models on this machine; `hotrow size` shows what needs it"
    if private > available:
        return Finding("memory", "problem", f"{text}: too little", fix)
    if private + files > available:
        return Finding("memory", "warning", f"{text}: tables will be read from disk again and again", fix)
    if 2 * (private + files) > available:
        return Finding("memory", "warning", f"{text}: too little for two versions of each, as during swaps", fix)
    return Finding("memory", "ok", text)


def _needs(repository: Path, model: ServableModel) -> _Needs:
    """The needs of its highest version; nothing if another backend serves it."""
    folder = repository / model.name
    parameters = read_config(folder).parameters
    if backend := in_place_backend(model.backend):
        return _needs_in_place(read_model_folder(folder, model.name, parameters, backend))
    version_dir = folder / str(model.versions[-1])
    if not (version_dir / SESSION_FILE).exists():
        return _Needs([], set())
    try:
        own_settings(parameters)
    except ConfigurationError as error:
        raise ConfigurationError(f"model {model.name!r}: {error}") from None
    spec = read_spec(version_dir)
    items = memory_items(spec, version_dir, cache_bytes=configured_cache_bytes(spec, version_dir))
    settings = {**spec.settings, **parameters}
    dense = DenseSettings.of(settings) if (version_dir / DENSE_FILE).exists() else None
    tables = [version_dir / TABLES_FOLDER / table.folder / VECTOR_FILE for table in spec.tables]
    return _Needs(items, set(map(str, settings.values())), [path for path in tables if path.exists()], dense)


def _needs_in_place(found: InPlaceModel) -> _Needs:
    """The needs of HugeCTR's files, from their sizes: what a load makes of them takes about as much."""
    settings = found.ps_json.session_settings(found.model) | dict(found.session_settings)
    sources = found.model.sparse_files
    files = [Path(source, name) for source in sources if not is_url(source) for name in (KEY_FILE, VECTOR_FILE)]
    items = [
        MemoryItem("files", "page cache", sum(file.stat().st_size for file in files), 1),
        MemoryItem("program", "process", PROCESS_BYTES, 1),
    ]
    dense = DenseSettings.of(settings) if found.model.graph_file else None
    tables = [path for path in files if path.name == VECTOR_FILE]
    return _Needs(items, {*settings.values(), *sources}, tables, dense)


def check_packages(urls: set[str]) -> Iterator[Finding]:
    for module, (extra, purpose, schemes) in PACKAGES.items():
        needed = any(url.startswith(scheme) for url in urls for scheme in schemes)
        if find_spec(module) is not None:
            yield Finding(module, "ok", f"installed, for {purpose}")
        elif needed:
            message = f"not installed, but models in the repository need it for {purpose}"
            yield Finding(module, "problem", message, f'pip install "hotrow[{extra}]"')
        else:
            yield Finding(module, "ok", f'not installed; for {purpose}: pip install "hotrow[{extra}]"')
