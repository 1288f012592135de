"""Ranks candidates, and keeps results per context: a context that recurs is not computed again.

The key of a kept result is the bytes of the context's inputs. The result is used until one of the rows that were
looked up for it changes (parameter_server/write_log.py). The ranking network is divided in two for this
(dense_engine/rewrites/context_parts.py).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.config import SessionConfig
from inference_session.dense_engine.base import DenseEngine
from inference_session.dense_engine.onnx import OnnxEngine
from inference_session.dense_engine.rewrites.context_parts import ContextParts, divide
from inference_session.dense_engine.vectors import VectorEngine
from inference_session.errors import ConfigurationError
from inference_session.execution.network import Network, RunResult
from inference_session.model_spec import RANKING_FILE, RANKING_KEYS_FILE, LookupSpec, NamedArrays
from inference_session.parameter_server.write_log import WriteLog
from inference_session.requests.batch import CheckedRequest, JoinedBatch, RaggedBags
from inference_session.requests.ranking_layout import RankingLayout
from inference_session.rows.base import Rows
from inference_session.tables.row_numbers import stored_keys
from inference_session.version_directory.version import VersionDirectory

_ENTRY_BYTES = 500
"""Memory of an entry in addition to its arrays."""


class Context(NamedTuple):
    """The results for one context."""

    values: NamedArrays
    """Arrays of one row each."""
    slots: NDArray[np.int64]
    """WriteLog.slots of the rows that were looked up."""
    moment: int
    num_bytes: int


class ContextMemory:
    """Contexts by the bytes of their inputs, in bounded memory. Evicts the least recently used one. Thread-safe."""

    def __init__(self, max_bytes: int, log: WriteLog) -> None:
        self._max_bytes = max_bytes
        self.log = log
        """Says which contexts are older than a row that they were computed from."""
        self._contexts: OrderedDict[bytes, Context] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Context | None:
        """The kept results of a context; None where none exist, or a row that it looked up has changed since."""
        with self._lock:
            context = self._contexts.get(key)
            if context is None:
                return None
            if self.log.any_written(context.slots, context.moment):
                self._drop(key)
                return None
            self._contexts.move_to_end(key)
            return context

    def put(self, key: bytes, context: Context) -> None:
        """Keep a context, if it fits at all."""
        with self._lock:
            if key in self._contexts:
                self._drop(key)
            self._contexts[key] = context
            self._num_bytes += context.num_bytes
            while self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._contexts)))

    def _drop(self, key: bytes) -> None:
        self._num_bytes -= self._contexts.pop(key).num_bytes


@dataclass
class WantedContexts:
    """The contexts of some requests."""

    keys: list[bytes]
    """The key of each context, in order."""
    found: dict[bytes, Context]
    missing: dict[bytes, NamedArrays]
    """The inputs of the contexts that are not kept, by their keys."""
    moment: int
    """The moment of the write log before anything was read."""


class KeptContexts:
    """The two parts of a ranking network, and the memory between them.

    Args:
        contexts: computes, at one row per context, what `candidates` reads.
        values: what `candidates` reads that `contexts` computes.
        vectors: what `candidates` reads that `contexts` looks up.
        memory: of contexts that were computed.
        keeps_unknown: whether contexts with unknown keys are kept. In table files, unknown keys stay unknown.
    """

    def __init__(
        self,
        layout: RankingLayout,
        contexts: Network,
        candidates: Network,
        *,
        values: Sequence[str],
        vectors: Sequence[str],
        memory: ContextMemory,
        keeps_unknown: bool,
    ) -> None:
        self.contexts = contexts
        self.candidates = candidates
        self._layout = layout
        self.values, self._vectors = values, vectors
        self._memory, self._log = memory, memory.log
        self._keeps_unknown = keeps_unknown

    def find(self, requests: Sequence[CheckedRequest]) -> WantedContexts:
        """The contexts of the requests, and their kept results."""
        moment = self._log.moment
        every = [(_key(row), row) for request in requests for row in self._rows(request)]
        keys, rows = [key for key, _ in every], dict(every)
        found = {key: context for key in rows if (context := self._memory.get(key)) is not None}
        return WantedContexts(keys, found, {key: row for key, row in rows.items() if key not in found}, moment)

    def batch_of(self, wanted: WantedContexts) -> JoinedBatch:
        """The inputs of the contexts that are missing, for `contexts` to compute `values` of."""
        return self._layout.of_contexts(list(wanted.missing.values()))

    def add(self, wanted: WantedContexts, batch: JoinedBatch, ran: RunResult) -> None:
        """Add the results for the batch of missing contexts to `wanted`, and keep them."""
        values = {**ran.outputs, **{name: batch.array(name) for name in self._vectors}}
        slots = self._slots(batch, len(wanted.missing))
        for i, key in enumerate(wanted.missing):
            own = {name: array[i : i + 1].copy() for name, array in values.items()}
            num_bytes = sum(array.nbytes for array in own.values()) + slots[i].nbytes + len(key) + _ENTRY_BYTES
            wanted.found[key] = Context(own, slots[i], wanted.moment, num_bytes)
            if self._keeps_unknown or not ran.num_unknown.any():
                self._memory.put(key, wanted.found[key])

    def fill(self, batch: JoinedBatch, wanted: WantedContexts) -> None:
        """Add to a batch what `candidates` reads of its contexts."""
        contexts = [wanted.found[key] for key in wanted.keys]
        for name in (*self.values, *self._vectors):
            parts = [context.values[name] for context in contexts]
            batch.add({name: parts[0] if len(parts) == 1 else np.concatenate(parts)})

    def _rows(self, request: CheckedRequest) -> list[NamedArrays]:
        """The inputs of each context of a request.

        A copy: in memory shared with a client they could change after the key was made of them, and what is kept for
        that key would then be another context's.
        """
        names = self.contexts.spec.context
        arrays: dict[str, Any] = {name: np.array(request.inputs[name]) for name in names}
        return [{name: arrays[name][i : i + 1] for name in names} for i in range(len(arrays[names[0]]))]

    def _slots(self, batch: JoinedBatch, num_rows: int) -> list[NDArray[np.int64]]:
        """For each context, WriteLog.slots of its rows."""
        specs = {table.folder: table for table in self.contexts.spec.tables}
        found: list[list[NDArray[np.int64]]] = [[] for _ in range(num_rows)]
        for lookup in self.contexts.spec.lookups:
            for i, keys in enumerate(_keys_of(lookup, batch)):
                stored = stored_keys(specs[lookup.table], keys.astype(np.int64, copy=False))
                found[i].append(self._log.slots(lookup.table, stored))
        return [np.unique(np.concatenate(own)) if own else np.zeros(0, np.int64) for own in found]


def _keys_of(lookup: LookupSpec, batch: JoinedBatch) -> list[NDArray[np.int64]]:
    """The keys of each context."""
    part = batch.parts(lookup.keys)[0]
    if isinstance(part, RaggedBags):
        size = len(part.begins) // part.shape[0]
        bags = [part.values[begin:end] for begin, end in zip(part.begins, part.ends, strict=True)]
        return [np.concatenate(bags[i * size : (i + 1) * size]) for i in range(part.shape[0])]
    keys = batch.array(lookup.keys)
    columns = keys if lookup.columns is None else keys[:, slice(*lookup.columns)]
    return [row.reshape(-1) for row in columns]


def _key(row: NamedArrays) -> bytes:
    """The bytes of a context's inputs, and their shapes."""
    shapes = repr([array.shape for array in row.values()]).encode()
    return b"".join([shapes, *(_bytes(array) for array in row.values())])


def _bytes(array: NDArray[Any]) -> bytes:
    return repr(array.tolist()).encode() if array.dtype == object else array.tobytes()


def open_kept_contexts(
    version: VersionDirectory, config: SessionConfig, rows: Rows, layout: RankingLayout
) -> KeptContexts:
    """Divide the ranking network of a version.

    Raises:
        ConfigurationError: the network cannot be divided so.
    """
    spec, directory, reader = version.spec, version.path, rows.readers[0]
    lookups = spec.ranking.lookups if spec.ranking else ()
    keys = divide(directory / RANKING_KEYS_FILE, spec.context) if (directory / RANKING_KEYS_FILE).exists() else None
    known = {*spec.context, *(keys.outputs if keys else ())}
    if (keys and keys.values) or any(lookup.bags for lookup in lookups):
        raise ConfigurationError(
            f"setting 'context_cache_bytes': {directory} computes the keys of the context and of the candidates "
            "together, so contexts cannot be kept"
        )
    own = tuple(lookup for lookup in lookups if known.issuperset(lookup.reads))
    vectors = {lookup.dense_input for lookup in own}
    parts = divide(directory / RANKING_FILE, {*spec.context, *vectors})
    others = tuple(lookup for lookup in lookups if lookup not in own)
    contexts, candidates = _engines(config, parts, sorted(vectors))
    context_keys, candidate_keys = _key_engines(keys)
    return KeptContexts(
        layout,
        Network(replace(spec, lookups=own), reader, contexts, context_keys, keys_follow_inputs=True),
        Network(replace(spec, lookups=others), reader, candidates, candidate_keys, keys_follow_inputs=True),
        values=parts.values,
        vectors=sorted(vectors.intersection(parts.inputs)),
        memory=ContextMemory(config.context_cache_bytes, rows.writer.log),
        keeps_unknown=not config.has_store,
    )


def _engines(config: SessionConfig, parts: ContextParts, vectors: Sequence[str]) -> tuple[DenseEngine, DenseEngine]:
    """The dense engines of the contexts' part and of the candidates'. The former may only pass its vectors on."""
    open_part = partial(OnnxEngine, num_threads=config.num_dense_threads)
    contexts = open_part(parts.context) if parts.values else VectorEngine(vectors)
    return contexts, open_part(parts.candidates)


def _key_engines(keys: ContextParts | None) -> tuple[OnnxEngine | None, OnnxEngine | None]:
    """What computes the keys of the contexts, and those of the candidates; None: all of them are inputs."""
    if keys is None:
        return None, None
    contexts = OnnxEngine(keys.context, num_threads=1) if keys.outputs else None
    return contexts, OnnxEngine(keys.candidates, num_threads=1) if keys.has_candidates else None
