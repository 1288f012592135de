"""HugeCTR's own names, for offline scripts: only the import line changes.

    from inference_session.hugectr import CreateInferenceSession, InferenceParams

Settings are those of ps.json, with the same checks; docs/reference/hugectr.md says what each does here.
Relative paths count from the working directory. Models are imported into a cache folder (HOTROW_CACHE_DIR) and opened
from there.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inference_session.errors import ConfigurationError, InvalidRequestError, TableNotFoundError
from inference_session.importers.hugectr.data_source import (
    DataSource,
    DataSourceParams,
    DataSourceType_t,
    FileSystemType_t,
)
from inference_session.importers.hugectr.import_cache import cached_import
from inference_session.importers.hugectr.json_file import JsonFile
from inference_session.importers.hugectr.ps_fields import PsJson, PsModel
from inference_session.importers.hugectr.ps_json import parse_ps_json, read_ps_json
from inference_session.requests.caller_arrays import has_masked
from inference_session.requests.hugectr_csr import DENSE, KEYS, OFFSETS
from inference_session.requests.lent_tensors import borrowed_array
from inference_session.session import InferenceSession

__all__ = [
    "HPS", "CreateInferenceSession", "DataSource", "DataSourceParams", "DataSourceType_t", "DatabaseOverflowPolicy_t",
    "DatabaseType_t", "EmbeddingCacheType_t", "FileSystemType_t", "InferenceParams", "ParameterServerConfig",
    "PersistentDatabaseParams", "UpdateSourceParams", "UpdateSourceType_t", "VolatileDatabaseParams", "inference",
]  # fmt: skip

inference = sys.modules[__name__]
"""HugeCTR's submodule: `from inference_session import hugectr` stands for `import hugectr`."""


class DatabaseType_t(str, Enum):  # noqa: N801  HugeCTR's name
    """Kinds of `volatile_db` and `persistent_db`."""

    disabled = "disabled"
    hash_map = "hash_map"
    parallel_hash_map = "parallel_hash_map"
    multi_process_hash_map = "multi_process_hash_map"
    redis_cluster = "redis_cluster"
    rocks_db = "rocks_db"


class DatabaseOverflowPolicy_t(str, Enum):  # noqa: N801  HugeCTR's name
    """Which rows a full `volatile_db` evicts."""

    evict_oldest = "evict_oldest"
    evict_random = "evict_random"
    evict_least_used = "evict_least_used"


class UpdateSourceType_t(str, Enum):  # noqa: N801  HugeCTR's name
    """Kinds of `update_source`."""

    null = "null"
    kafka_message_queue = "kafka_message_queue"


class EmbeddingCacheType_t(str, Enum):  # noqa: N801  HugeCTR's name
    """Kinds of `embedding_cache_type`."""

    Dynamic = "dynamic"
    UVM = "uvm"
    Static = "static"
    Stochastic = "stochastic"


class _Section:
    """A section of ps.json; its fields are attributes, and may be set later."""

    _kind = "type"

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def document(self) -> dict[str, Any]:
        """The section as ps.json has it."""
        fields = dict(vars(self))
        return {"type": fields.pop(self._kind), **fields}

    def __repr__(self) -> str:
        # Show no more of it: it may hold a password.
        return f"<{type(self).__name__} {str(self.document()['type'])!r}>"


class VolatileDatabaseParams(_Section):
    """`volatile_db` of ps.json, its fields as keywords."""

    def __init__(self, type: str = "parallel_hash_map", **settings: Any) -> None:  # noqa: A002  HugeCTR's name
        super().__init__(type=type, **settings)


class PersistentDatabaseParams(_Section):
    """`persistent_db` of ps.json, its fields as keywords; 3.4 calls the type `backend`."""

    _kind = "backend"

    def __init__(self, backend: str = "disabled", **settings: Any) -> None:
        super().__init__(backend=backend, **settings)


class UpdateSourceParams(_Section):
    """`update_source` of ps.json, its fields as keywords."""

    def __init__(self, type: str = "null", **settings: Any) -> None:  # noqa: A002  HugeCTR's name
        super().__init__(type=type, **settings)


_REQUIRED: Any = object()
"""Marks a required parameter that follows parameters with defaults."""


def _of_ps_json(name: str = "", default: Any = None) -> Any:
    """A parameter that ps.json has under that name; omitted there if it is None."""
    return field(default=default, metadata={"name": name})


@dataclass
class InferenceParams:
    """One model: the parameters of 3.4 by position or keyword, and those of 24.06 by keyword."""

    model_name: str = field(metadata={"name": "model"})
    max_batchsize: int = field(metadata={"name": "max_batch_size"})
    hit_rate_threshold: float = field(metadata={"name": ""})
    dense_model_file: str = field(metadata={"name": "dense_file"})
    sparse_model_files: Sequence[str] = field(metadata={"name": "sparse_files"})
    device_id: int = 0
    use_gpu_embedding_cache: bool = _of_ps_json("gpucache", _REQUIRED)
    cache_size_percentage: float = _of_ps_json("gpucacheper", _REQUIRED)
    i64_input_key: bool = _REQUIRED
    use_mixed_precision: bool = False
    scaler: float = 1.0
    use_algorithm_search: bool = True
    use_cuda_graph: bool = True
    number_of_worker_buffers_in_pool: int = _of_ps_json("num_of_worker_buffer_in_pool", 2)
    number_of_refresh_buffers_in_pool: int = _of_ps_json("num_of_refresher_buffer_in_pool", 1)
    cache_refresh_percentage_per_iteration: float = _of_ps_json(default=0.1)
    deployed_devices: Sequence[int] = _of_ps_json("deployed_device_list", (0,))
    default_value_for_each_table: Sequence[float] = _of_ps_json(default=(0.0,))
    volatile_db: VolatileDatabaseParams | None = None
    persistent_db: PersistentDatabaseParams | None = None
    update_source: UpdateSourceParams | None = None
    maxnum_des_feature_per_sample: int | None = _of_ps_json()
    refresh_delay: float | None = _of_ps_json()
    refresh_interval: float | None = _of_ps_json()
    maxnum_catfeature_query_per_table_per_sample: Sequence[int] | None = _of_ps_json()
    embedding_vecsize_per_table: Sequence[int] | None = _of_ps_json()
    embedding_table_names: Sequence[str] | None = _of_ps_json()
    network_file: str | None = _of_ps_json()
    label_dim: int | None = _of_ps_json()
    slot_num: int | None = _of_ps_json()
    non_trainable_params_file: str | None = _of_ps_json()
    use_static_table: bool | None = _of_ps_json()
    use_context_stream: bool | None = _of_ps_json()
    embedding_cache_type: str | None = _of_ps_json()
    enable_pagelock: bool | None = _of_ps_json()
    fp8_quant: bool | None = _of_ps_json()
    use_hctr_cache_implementation: bool | None = _of_ps_json()
    thread_pool_size: int | None = _of_ps_json()
    init_ec: bool | None = _of_ps_json()
    fuse_embedding_table: bool | None = _of_ps_json()

    def __post_init__(self) -> None:
        missing = [name for name, value in vars(self).items() if value is _REQUIRED]
        if missing:
            raise TypeError(f"InferenceParams of model {self.model_name!r} needs {', '.join(missing)}")

    def document(self) -> dict[str, Any]:
        """The model's entry in ps.json."""
        named = {
            item.metadata["name"] or item.name: getattr(self, item.name)
            for item in self.__dataclass_fields__.values()
            if "name" in item.metadata
        }
        return {name: value for name, value in named.items() if value is not None}


@dataclass
class ParameterServerConfig:
    """What `HPS` takes in place of a ps.json; dicts are by model name, with one element per table."""

    emb_table_name: Mapping[str, Sequence[str]]
    embedding_vec_size: Mapping[str, Sequence[int]]
    max_feature_num_per_sample_per_emb_table: Mapping[str, Sequence[int]]
    inference_params_array: Sequence[InferenceParams]
    volatile_db: VolatileDatabaseParams | None = None
    persistent_db: PersistentDatabaseParams | None = None
    update_source: UpdateSourceParams | None = None

    def parsed(self) -> PsJson:
        """The same in the form of ps.json."""
        models = []
        for params in self.inference_params_array:
            name = params.model_name
            tables = {
                "embedding_table_names": self.emb_table_name.get(name),
                "embedding_vecsize_per_table": self.embedding_vec_size.get(name),
                "maxnum_catfeature_query_per_table_per_sample": self.max_feature_num_per_sample_per_emb_table.get(name),
            }
            models.append({**params.document(), **{key: value for key, value in tables.items() if value is not None}})
        kinds = {params.i64_input_key for params in self.inference_params_array}
        if len(kinds) > 1:
            raise ConfigurationError(
                "i64_input_key differs between the models; use the same type of keys for all of them"
            )
        return _parsed("ParameterServerConfig", models, self, i64_input_key=kinds != {False})


class CreateInferenceSession:
    """An opened model. The class has the name of the function that creates a session in HugeCTR.

    Args:
        model_config_path: the graph JSON.
        inference_params: everything else.

    Raises:
        ConfigurationError, ModelFormatError, UnsupportedModelError: see `import_hugectr`.
    """

    def __init__(self, model_config_path: str | Path, inference_params: InferenceParams) -> None:
        graph_file = Path(model_config_path).absolute()
        document = {**inference_params.document(), "network_file": str(graph_file)}
        self._ps_json = _parsed(
            "InferenceParams", [document], inference_params, i64_input_key=inference_params.i64_input_key
        )
        self._owner = graph_file.parent
        self._opened = self._open()

    def predict(self, dense_feature: ArrayLike, embeddingcolumns: ArrayLike, row_ptrs: ArrayLike) -> list[float]:
        """Predictions, num_samples x label_dim of them, by sample.

        Args:
            dense_feature: float32 [num_samples * dense_dim], dense features by sample.
            embeddingcolumns: keys [n]: sample after sample, and table after table within a sample.
            row_ptrs: int32 [m], per table a block of num_samples x slots + 1 offsets, from 0, by sample and slot.

        Raises:
            InvalidRequestError: names the input, what was found and what is expected.
        """
        keys_type = np.dtype(self._ps_json.key_type)
        inputs = {
            DENSE: _floats("dense_feature", dense_feature),
            KEYS: _integers("embeddingcolumns", embeddingcolumns, keys_type),
            OFFSETS: _integers("row_ptrs", row_ptrs, np.dtype(np.int32)),
        }
        opened = self._opened  # another thread may replace it meanwhile
        predictions: list[float] = opened.session.predict(inputs).ravel().tolist()
        return predictions

    def refresh_embedding_cache(self) -> None:
        """Read the model's files again, if they have changed, and use them from now on.

        Predictions of other threads that are under way finish with what was read before.
        """
        self._opened = self._open()

    def __reduce__(self) -> NoReturn:
        _refuse_copy(self)

    def __repr__(self) -> str:
        return f"<CreateInferenceSession of model {self._ps_json.models[0].name!r}>"

    def _open(self) -> _SessionOwner:
        return _SessionOwner(_open(self._ps_json, self._ps_json.models[0], self._owner))


def _refuse_copy(opener: CreateInferenceSession | HPS) -> NoReturn:
    # The sessions of a copy would be closed once the original is collected.
    raise TypeError(f"{opener!r} can be neither copied nor pickled: make one where it is used")


class _SessionOwner:
    """Closes a session once nothing refers to this object."""

    def __init__(self, session: InferenceSession) -> None:
        self.session = session
        weakref.finalize(self, session.close)


class HPS:
    """The tables of all models of a ps.json, by number.

    Raises:
        ConfigurationError, ModelFormatError: see `import_hugectr`.
    """

    def __init__(self, ps_config: str | Path | ParameterServerConfig) -> None:
        parsed = ps_config.parsed() if isinstance(ps_config, ParameterServerConfig) else read_ps_json(Path(ps_config))
        self._sessions: dict[str, InferenceSession] = {}
        for model in parsed.models:
            self._sessions[model.name] = _open(parsed, replace(model, graph_file=""), parsed.path.parent)
            weakref.finalize(self, self._sessions[model.name].close)

    def lookup(self, keys: ArrayLike, model_name: str, table_id: int, device_id: int = 0) -> NDArray[np.float32]:  # noqa: ARG002
        """The vectors of keys, float32 [n, embedding_dim]; for an unknown key the table's default vector.

        Args:
            keys: int64 [n].
            table_id: the table's place in the model's `sparse_files`, from 0.
            device_id: without effect: look-ups run where the rows of the model are.

        Raises:
            ConfigurationError, TableNotFoundError: no such model, or it has no such table.
            InvalidRequestError: keys are not integers.
        """
        session = self._sessions.get(model_name)
        if session is None:
            raise ConfigurationError(f"no model {model_name!r}; known models: {', '.join(map(repr, self._sessions))}")
        tables = session.spec.tables
        if not isinstance(table_id, (int, np.integer)) or not 0 <= table_id < len(tables):
            raise TableNotFoundError(
                f"model {model_name!r} has no table {table_id!r}; it has {len(tables)}, numbered from 0"
            )
        return session.lookup(tables[table_id].name, _integers("keys", keys, np.dtype(np.int64)))

    def lookup_fromdlpack(self, keys: Any, out_tensor: Any, model_name: str, table_id: int, device_id: int = 0) -> None:
        """The same for DLPack capsules in host memory, which stay usable: int64 keys, and float32 room for vectors.

        Raises:
            InvalidRequestError: a capsule holds something else, or has no room for the vectors.
        """
        vectors = self.lookup(borrowed_array("keys", keys, np.int64), model_name, table_id, device_id)
        room = borrowed_array("out_tensor", out_tensor, np.float32)
        if len(room) < vectors.size:
            raise InvalidRequestError(
                f"out_tensor has room for {len(room)} elements, but the vectors need {vectors.size}"
            )
        room[: vectors.size] = vectors.ravel()

    def __reduce__(self) -> NoReturn:
        _refuse_copy(self)

    def __repr__(self) -> str:
        return f"<HPS of models {', '.join(map(repr, self._sessions))}>"


def _parsed(
    source: str, models: list[dict[str, Any]], stores: InferenceParams | ParameterServerConfig, *, i64_input_key: bool
) -> PsJson:
    """Parameters as ps.json, read and checked as one."""
    document: dict[str, Any] = {"supportlonglong": i64_input_key, "models": models}
    for name in ("volatile_db", "persistent_db", "update_source"):
        if (store := getattr(stores, name)) is not None:
            document[name] = store.document()
    text = json.dumps(document, indent=1, default=str)
    return parse_ps_json(JsonFile(Path.cwd() / source, text, json.loads(text), ConfigurationError))


def _open(ps_json: PsJson, model: PsModel, owner: Path) -> InferenceSession:
    with cached_import(ps_json, model, owner) as version_dir:
        return InferenceSession.open(version_dir)


def _flat(name: str, values: ArrayLike) -> NDArray[Any]:
    if has_masked(values):
        raise InvalidRequestError(f"{name} has masked elements: fill them first")
    return np.asarray(values).ravel()


def _floats(name: str, values: ArrayLike) -> NDArray[np.float32]:
    try:
        array = _flat(name, values)
    except ValueError as error:
        raise InvalidRequestError(f"{name} cannot be converted to a flat array of float32: {error}") from error
    if array.dtype.kind not in "fiu":
        raise InvalidRequestError(f"{name} holds a value that is not a number")
    with np.errstate(over="ignore"):  # what is too large for float32 is infinite, as over Triton
        return array.astype(np.float32)


def _integers(name: str, values: ArrayLike, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A flat array of that type; nothing is rounded or wraps around."""
    try:
        array = _flat(name, values)
    except ValueError as error:
        raise InvalidRequestError(f"{name} cannot be converted to a flat array of {dtype}: {error}") from error
    limits = np.iinfo(dtype)
    if array.size and (array.dtype.kind not in "iu" or int(array.min()) < limits.min or int(array.max()) > limits.max):
        raise InvalidRequestError(f"{name} holds a value that is not a whole number from {limits.min} to {limits.max}")
    return array.astype(dtype)
