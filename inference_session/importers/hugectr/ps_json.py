"""Reads ps.json of both generations into the objects of ps_fields.py."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from inference_session.errors import ConfigurationError
from inference_session.importers.hugectr import values
from inference_session.importers.hugectr.json_file import FieldPath, JsonFile, field_name, read_json, shown
from inference_session.importers.hugectr.ps_fields import (
    NEWER_NAMES,
    Generation,
    PersistentStore,
    PsJson,
    PsModel,
    UpdateSource,
    VolatileStore,
    acting_settings,
)
from inference_session.model_source import is_url
from inference_session.model_source.create import split_place
from inference_session.model_source.fetch import fetch

_log = logging.getLogger(__name__)

_MODEL_NAME = re.compile(r"[a-zA-Z0-9_\-]{1,120}")
_MAX_TABLES = 10_000


def read_ps_json(place: str | Path) -> PsJson:
    """Read and check ps.json, a path or an `hdfs://` URL; relative files count from its own folder.

    ConfigurationError names file, line, field, value and what is allowed. Unknown fields are logged once.
    """
    file = read_json(fetch(place).absolute(), ConfigurationError)
    return parse_ps_json(file, folder=split_place(place)[0] if is_url(place) else None)


def parse_ps_json(file: JsonFile, *, folder: str | None = None) -> PsJson:
    """The same for content already read. `folder`: where relative files count from; None: the file's own."""
    parsed = _Parser(file, folder or str(file.path.parent)).parse()
    if parsed.unknown:
        _log.warning("%s: ignoring unknown fields: %s", file.path, ", ".join(parsed.unknown))
    return parsed


Block = TypeVar("Block", VolatileStore, PersistentStore, UpdateSource, PsModel)

_TOP_FIELDS = frozenset({"supportlonglong", "models", "volatile_db", "persistent_db", "peristent_db", "update_source"})
_TOP_IGNORED = frozenset({"db_type", "fuse_embedding_table"})


class _Parser:
    def __init__(self, file: JsonFile, folder: str) -> None:
        self._file = file
        self._folder = folder
        self._ignored: list[str] = []
        self._unknown: list[str] = []
        self._generation = self._recognise()
        # A field without a setting in this release has no effect; the user must be told.
        self._acting = {"import"} | acting_settings()

    def parse(self) -> PsJson:
        document = self._file.document
        for name in document:
            if name in _TOP_IGNORED:
                self._ignored.append(field_name((name,)))
            elif name not in _TOP_FIELDS:
                self._unknown.append(field_name((name,)))
        # HugeCTR's own README misspells the field.
        persistent = "persistent_db" if "persistent_db" in document else "peristent_db"
        return PsJson(
            path=self._file.path,
            generation=self._generation,
            key_type="int64" if self._required(("supportlonglong",), values.flag) else "uint32",
            volatile=self._volatile(),
            persistent=self._block(PersistentStore, (persistent,), document.get(persistent, {})),
            updates=self._block(UpdateSource, ("update_source",), document.get("update_source", {})),
            models=self._models(),
            ignored=tuple(self._ignored),
            unknown=tuple(self._unknown),
        )

    def _recognise(self) -> Generation:
        """Which generation's defaults apply."""
        document = self._file.document
        raw_models = document.get("models")
        models = [model for model in raw_models if isinstance(model, dict)] if isinstance(raw_models, list) else []
        blocks = [(name, document.get(name)) for name in NEWER_NAMES]
        blocks += [("persistent_db", document.get("peristent_db")), *(("models", model) for model in models)]
        if "fuse_embedding_table" in document or any("network_file" not in model for model in models):
            return "24.06"
        newer = any(isinstance(raw, dict) and NEWER_NAMES[name] & set(raw) for name, raw in blocks)
        return "24.06" if newer else "3.4"

    def _volatile(self) -> VolatileStore:
        if "volatile_db" in self._file.document:
            return self._block(VolatileStore, ("volatile_db",), self._file.document["volatile_db"])
        # Both generations have a hash map where the block is absent; in 24.06 a block with only `type` has none.
        return replace(self._block(VolatileStore, ("volatile_db",), {}), kind="hash_map")

    def _models(self) -> tuple[PsModel, ...]:
        raw_models = self._file.document.get("models")
        if not isinstance(raw_models, list) or not raw_models:
            self._file.fail(("models",), f"expected a list of at least one model, found {shown(raw_models)}")
        models = tuple(self._model(("models", i), raw) for i, raw in enumerate(raw_models))
        names = [model.name for model in models]
        for i, name in enumerate(names):
            if name in names[:i]:
                self._file.fail(("models", i, "model"), f"{name!r} is used twice; every model needs its own name")
        return models

    def _model(self, at: FieldPath, raw: Any) -> PsModel:
        model = self._block(PsModel, at, raw)
        if not _MODEL_NAME.fullmatch(model.name):
            self._file.fail(
                (*at, "model"), f"{model.name!r}; allowed: 1 to 120 letters, digits, '_' and '-' (the model's name)"
            )
        if not 1 <= len(model.sparse_files) <= _MAX_TABLES:
            self._file.fail((*at, "sparse_files"), "expected a list of one folder per embedding table")
        for name in ("embedding_vecsize_per_table", "embedding_table_names"):
            found = len(raw.get(name) or model.sparse_files)
            if found != len(model.sparse_files):
                self._file.fail(
                    (*at, name), f"{found} values, but sparse_files has {len(model.sparse_files)}; give one per table"
                )
        if len(set(model.table_names)) < len(model.table_names):
            self._file.fail((*at, "embedding_table_names"), "a name is used twice; every table needs its own")
        if model.graph_file and not model.dense_file:
            self._file.fail((*at, "dense_file"), "required together with network_file")
        return model

    def _required(self, at: FieldPath, read: values.Reader[Any]) -> Any:
        raw = self._file.document.get(str(at[0]))
        if raw is None:
            graph = "; the file is a graph: give the ps.json that names it" if "layers" in self._file.document else ""
            self._file.fail(at, f"required, but missing{graph}")
        return self._value(at, read, raw)

    def _value(self, at: FieldPath, read: values.Reader[Any], raw: Any) -> Any:
        try:
            return read(raw)
        except ValueError as error:
            self._file.fail(at, f"value {'***' if at[-1] == 'password' else shown(raw)}; {error}")

    def _block(self, kind: type[Block], at: FieldPath, raw: Any) -> Block:
        if not isinstance(raw, dict):
            # The value may be a password in the wrong place.
            what = "a string" if isinstance(raw, str) else "a list" if isinstance(raw, list) else repr(raw)
            self._file.fail(at, f"expected an object, found {what}")
        known = kind.ignored.keys() | {name for item in fields(kind) for name in item.metadata["names"]}
        self._unknown += [field_name((*at, name)) for name in raw if name not in known]
        for name in [name for name in raw if name in kind.ignored]:
            self._value((*at, name), kind.ignored[name], raw[name])
            self._ignored.append(field_name((*at, name)))
        found: dict[str, Any] = {}
        for item in fields(kind):
            given = [name for name in item.metadata["names"] if name in raw]
            found[item.name] = item.metadata["defaults"][self._generation]
            for name in given[:1]:
                found[item.name] = self._value((*at, name), item.metadata["read"], raw[name])
            if item.metadata["acts_on"] not in self._acting:
                self._ignored += [field_name((*at, name)) for name in given]
            if item.name.endswith("_file") or item.name.endswith("_files"):
                found[item.name] = self._located(found[item.name])
        return kind(**found)

    def _located(self, files: Any) -> Any:
        """Local files, relative to the folder of ps.json; URLs and empty names stay."""
        if isinstance(files, tuple):
            return tuple(self._located(name) for name in files)
        return files if not files or is_url(files) else os.path.join(self._folder, files)  # noqa: PTH118  or a URL
