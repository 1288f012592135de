"""Where a session's look-ups read rows: from mapped files, or from a cache over the parameter server."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from inference_session.config import SessionConfig
from inference_session.embedding_cache.cpu_cache import CpuEmbeddingCache, bytes_to_hold
from inference_session.embedding_cache.kernels import cpu
from inference_session.embedding_cache.kernels.hash_index import BUCKET_BYTES
from inference_session.embedding_cache.kernels.layout import SEGMENT, TABLE, PoolingCode
from inference_session.embedding_cache.kernels.missing import collect_keys, write_vectors
from inference_session.embedding_cache.kernels.updated_table import UpdatedArrays, count_deleted
from inference_session.embedding_cache.late_inserts import LateInserts
from inference_session.embedding_cache.null_cache import NullEmbeddingCache, empty_tables
from inference_session.embedding_cache.readers import Readers
from inference_session.embedding_cache.updated_table import UpdatedTable
from inference_session.errors import StoreError, UnavailableError
from inference_session.formats.native import TABLES_FOLDER, ModelSpec, TableSpec
from inference_session.hot_keys import HotKeys
from inference_session.mapped_pages import available_bytes, map_pages
from inference_session.pacing import paced
from inference_session.parameter_server.base import FetchRequest, Rows
from inference_session.parameter_server.create import create_parameter_server
from inference_session.parameter_server.recent_writes import RecentWrites
from inference_session.parameter_server.server import ParameterServer
from inference_session.parameter_server.table_file import TableFile

if TYPE_CHECKING:
    from inference_session.gpu_context import GpuContext

HostCache: TypeAlias = "CpuEmbeddingCache | NullEmbeddingCache"

_NOTHING_HELD = contextlib.nullcontext()
_KEYS_PER_BUCKET = 8
_KEYS_PER_REFRESH = 256
"""Few enough that a request which meets them in a store, or waits for the interpreter meanwhile, hardly notices."""
_LINE_BYTES = 64
_CLOSE_S = 10.0
_KEYS_PER_FETCH = 1 << 13
_NO_POSITIONS = np.empty(0, np.int64)


class RowSource(ABC):
    """The rows of all tables of a model. Thread-safe."""

    @abstractmethod
    def look_up(self, segments: NDArray[np.void], num_keys: NDArray[np.int64], num_unknown: NDArray[np.int64]) -> None:
        """Answer SEGMENT records of so many keys each; num_unknown[s] receives the keys of segment s that were answered
        with their table's default vector.

        Tables are counted in the order of the model's spec. Whoever filled the segments vouches for every address.
        """

    def request(self) -> contextlib.AbstractContextManager[None]:
        """What a request holds from its look-up to its predictions: a GPU, where the rows are on one."""
        return _NOTHING_HELD

    def empty(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """An array that `look_up` may write vectors to."""
        return np.empty(shape, np.float32)

    def stage(self, array: NDArray[Any]) -> NDArray[Any]:
        """The contiguous array where `look_up` can read it, until the request ends."""
        return array

    def counts(self, num_segments: int) -> NDArray[np.int64]:
        """Zeros that `look_up` may count in."""
        return np.zeros(num_segments, np.int64)

    def settled(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Counts of a look-up once it is done, for use after the request."""
        return counts

    def update(self, table: int, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:  # noqa: ARG002
        """Write rows, keys int64 [n] and vectors float32 [n, embedding_dim]; look-ups that begin later answer them.

        Raises:
            StoreError: there is no store that takes writes.
            UnavailableError: a store cannot take them at present.
        """
        raise StoreError(
            "rows in table files are never changed; set volatile_store or persistent_store, or update_stream"
        )

    def erase(self, table: int, keys: NDArray[np.int64]) -> None:  # noqa: ARG002
        """Drop rows, as `update` writes them: their keys are answered with the default vector, whatever is in files."""
        raise StoreError(
            "rows in table files are never erased; set volatile_store or persistent_store, or update_stream"
        )

    def forget(self, table: int, keys: NDArray[np.int64]) -> None:  # noqa: B027
        """Have look-ups that begin later read these rows anew, which another process has changed in the stores."""

    @property
    def is_durable(self) -> bool:
        """Whether what `update` has written outlives this process: whether `save_note` works."""
        return False

    def note(self, table: int) -> str | None:  # noqa: ARG002
        """The text kept beside the table's rows where they are durable; None: there is none."""
        return None

    def save_note(self, table: int, text: str) -> None:
        """Keep a text beside the table's rows, once what has been written before it is durable; errors of `update`."""
        raise StoreError(f"a note on table {table} cannot be kept: no persistent store takes writes ({text!r})")

    def refresh(self) -> None:  # noqa: B027
        """Read again what is cached, where anything is."""

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Hold back all changes that this process makes to rows; look-ups go on."""
        yield

    @abstractmethod
    def scan(self, table: int) -> Iterator[Rows]:
        """All rows of a table in batches, as look-ups answer them; a row may come more than once.

        Raises:
            UnavailableError: a store is down.
        """

    def hot_keys(self) -> HotKeys:
        """Which cached rows are hot; nothing where nothing is cached."""
        return {}

    def warm_up(self, hot_keys: HotKeys, deadline: float) -> None:  # noqa: B027
        """Have rows at hand before a request wants them: these where there is a cache. Ends at `deadline`, a value of
        time.monotonic(), at the latest.
        """

    def forget_lookups(self) -> None:  # noqa: B027
        """Count look-ups of the cache from 0 again."""

    def stats(self) -> dict[str, Any]:
        """What there is to say of the cache (`cache`) and the tiers (`tiers`)."""
        return {"cache": {}, "tiers": {}}

    @abstractmethod
    def close(self) -> None:
        """Give up what is held open. May be called more than once."""

    def fetch(self, table: int, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        """The vectors of one table: keys int64 [n] to `out`, float32 [n, embedding_dim], both contiguous."""
        segment = np.zeros(1, SEGMENT)
        segment["table"], segment["keys_address"] = table, keys.ctypes.data
        segment["key_bytes"] = segment["key_stride"] = segment["row_stride"] = 8
        segment["num_rows"], segment["keys_per_row"] = len(keys), 1
        segment["output_address"], segment["output_stride"] = out.ctypes.data, out.strides[0]
        self.look_up(segment, np.array([len(keys)]), np.zeros(1, np.int64))


class MappedRows(RowSource):
    """The rows of a version's table files, all of them there."""

    def __init__(self, tables: Sequence[TableFile], *, num_threads: int) -> None:
        """`num_threads`: threads over which a large look-up is split."""
        self._tables = tables
        self._records = np.array([table.record() for table in tables], TABLE)
        self._num_threads = num_threads

    def look_up(
        self,
        segments: NDArray[np.void],
        num_keys: NDArray[np.int64],  # noqa: ARG002
        num_unknown: NDArray[np.int64],
    ) -> None:
        """See RowSource."""
        cpu.lookup(self._records, segments, num_unknown, _NO_POSITIONS, self._num_threads)

    def warm_up(self, hot_keys: HotKeys, deadline: float) -> None:  # noqa: ARG002
        """See RowSource: all rows are mapped, so that no request has to wait for the kernel to do it."""
        arrays = [array for table in self._tables for array in table.arrays()]
        if sum(array.nbytes for array in arrays) <= available_bytes():
            for array in arrays:
                map_pages(array, deadline)

    def scan(self, table: int) -> Iterator[Rows]:
        """See RowSource."""
        return self._tables[table].scan()

    def close(self) -> None:
        """See RowSource. The files stay mapped for look-ups under way."""
        for table in self._tables:
            table.close()


class UpdatableRows(MappedRows):
    """The rows of a version's table files, and in front of them those that were changed since, in memory.

    A table without changes is read as MappedRows does; otherwise keys are searched among the changed rows first.
    """

    def __init__(self, tables: Sequence[TableFile], *, num_threads: int) -> None:
        """As MappedRows."""
        super().__init__(tables, num_threads=num_threads)
        self._specs = [table.spec for table in tables]
        self._readers = Readers()
        defaults = [np.full(spec.embedding_dim, spec.default_vector, np.float32) for spec in self._specs]
        self._updated = [UpdatedTable(default, self._readers) for default in defaults]
        self._state = _UpdatedState(self._records, np.zeros(len(tables), np.int64), ())
        self._writing = threading.Lock()
        count_deleted(np.zeros(0, SEGMENT), self._records, self._state.deleted_addresses, _NO_POSITIONS)  # compiles

    def look_up(
        self,
        segments: NDArray[np.void],
        num_keys: NDArray[np.int64],  # noqa: ARG002
        num_unknown: NDArray[np.int64],
    ) -> None:
        """See RowSource."""
        reader = self._readers.enter()
        try:
            state = self._state
            cpu.lookup(state.records, segments, num_unknown, _NO_POSITIONS, self._num_threads)
            if state.deleted_addresses.any():
                count_deleted(segments, state.records, state.deleted_addresses, num_unknown)
        finally:
            self._readers.leave(reader)

    def update(self, table: int, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """See RowSource."""
        aliases, original = _aliases(self._specs[table], keys)
        rows = vectors if aliases is keys else vectors[original]
        with self._writing:
            self._updated[table].insert(aliases, rows)
            self._publish()

    def erase(self, table: int, keys: NDArray[np.int64]) -> None:
        """See RowSource."""
        with self._writing:
            self._updated[table].erase(_aliases(self._specs[table], keys)[0])
            self._publish()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """See RowSource."""
        with self._writing:
            yield

    def scan(self, table: int) -> Iterator[Rows]:
        """See RowSource."""
        changed, vectors, deleted = self._updated[table].held()
        # A row number that counts from the end is the row's other key.
        kept = ~deleted if self._specs[table].keys == "stored" else ~deleted & (changed >= 0)
        yield changed[kept], vectors[kept]
        for keys, rows in self._tables[table].scan():
            unchanged = ~np.isin(keys, changed)
            yield keys[unchanged], rows[unchanged]

    def stats(self) -> dict[str, Any]:
        """See RowSource. The changed rows are under `updated`."""
        updated = {
            spec.folder: {"rows": table.num_rows, "bytes": table.num_bytes}
            for spec, table in zip(self._specs, self._updated, strict=True)
        }
        return {**super().stats(), "updated": updated}

    def _publish(self) -> None:
        """Have later look-ups find the changed rows. Must be called while holding `_writing`."""
        num_tables = len(self._specs)
        records = np.concatenate([self._records, self._records])
        addresses = np.zeros(num_tables, np.int64)
        for t, table in enumerate(self._updated):
            if table.num_rows:
                records[t] = table.record(self._records[t]["default_address"], num_tables + t)
                addresses[t] = table.arrays.deleted.ctypes.data if table.any_deleted else 0
        self._state = _UpdatedState(records, addresses, tuple(table.arrays for table in self._updated))


class _UpdatedState(NamedTuple):
    """What one look-up of UpdatableRows reads."""

    records: NDArray[np.void]
    """TABLE records to begin with, then those of the files behind them."""
    deleted_addresses: NDArray[np.int64]
    """By table, of UpdatedArrays.deleted; 0: nothing has been deleted."""
    held: tuple[UpdatedArrays, ...]
    """What the records lead to."""


class CachedRows(RowSource):
    """The rows of a parameter server, the hottest of them in a cache.

    What the cache has goes straight to the outputs, in one call of the kernel. Keys that it has not are collected, each
    once per table, fetched, and completed from there; what was found goes to the cache, default vectors never do.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        cache: HostCache,
        server: ParameterServer,
        *,
        num_threads: int,
        refresh_interval_s: float = 0.0,
        async_from: float | None = None,
    ) -> None:
        """Put a cache over a parameter server; both become this object's to close.

        Args:
            specs: the tables, which cache and server know by their folders.
            cache: of the same tables in the same order.
            server: where what is missing comes from.
            num_threads: threads over which a large look-up is split.
            refresh_interval_s: time between two refreshes in the background; 0: none.
            async_from: hit rate from which on missing keys are answered with default vectors, and fetched after that;
                None: look-ups always wait for them.
        """
        self._specs = specs
        self._cache = cache
        self._server = server
        self._num_threads = num_threads
        self._dims = np.array([spec.embedding_dim for spec in specs], np.int64)
        self._nothing = [0] * len(specs)
        self._defaults = [np.full(spec.embedding_dim, spec.default_vector, np.float32) for spec in specs]
        _Overlay(self._dims, np.zeros(0, SEGMENT), _NO_POSITIONS, _NO_POSITIONS).write(_NO_POSITIONS)  # compiles
        self._async_from = math.inf if async_from is None else async_from
        self._late = None if async_from is None else LateInserts(self._insert_late)
        self._updating = threading.Lock()
        self._caching = threading.Lock()  # held while rows go into the cache; taken after `_updating`
        self._writes = [RecentWrites() for _ in specs]
        server.on_drop(self._forget)
        self._closing = threading.Event()
        self._refresher: threading.Thread | None = None
        if refresh_interval_s:
            self._refresher = threading.Thread(
                target=self._refresh_often, args=(refresh_interval_s,), name="hotrow-refresh", daemon=True
            )
            self._refresher.start()

    def look_up(self, segments: NDArray[np.void], num_keys: NDArray[np.int64], num_unknown: NDArray[np.int64]) -> None:
        """See RowSource.

        Raises:
            UnavailableError: a tier is down that may have one of the keys, and the settings want no default instead.
        """
        num_missing = np.zeros(len(segments), np.int64)
        positions = np.empty(num_keys.sum(), np.int64)
        with self._cache.reading() as records:
            count = cpu.lookup(records, segments, num_missing, positions, self._num_threads)
        missing = self._by_table(segments, num_missing) if count else self._nothing
        self._cache.count_lookups(range(len(self._specs)), self._by_table(segments, num_keys), missing)
        num_unknown[:] = 0
        if count:
            overlay = _Overlay(self._dims, segments, num_missing, positions[:count])
            if self._late is not None and count <= (1 - self._async_from) * num_keys.sum():
                self._fill_by_default(overlay)
                self._finish(overlay, num_keys, num_unknown)
                self._late.put(overlay)
            else:
                self._fetch(overlay)
                self._finish(overlay, num_keys, num_unknown)
                # Not before: these rows might have taken the place of some that were about to be pooled.
                self._keep(overlay)

    def update(self, table: int, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """See RowSource. In the cache, of those rows only that it holds: nobody may ever ask for the others."""
        folder = self._specs[table].folder
        aliases, original = _aliases(self._specs[table], keys)
        insert = partial(self._server.insert, folder, keys, vectors)
        rows = vectors if aliases is keys else vectors[original]
        self._write(table, aliases, insert, partial(self._cache.update, folder, aliases, rows))

    def erase(self, table: int, keys: NDArray[np.int64]) -> None:
        """See RowSource."""
        folder = self._specs[table].folder
        aliases, _ = _aliases(self._specs[table], keys)
        self._write(
            table, aliases, partial(self._server.erase, folder, keys), partial(self._cache.erase, folder, aliases)
        )

    @property
    def is_durable(self) -> bool:
        """See RowSource."""
        return self._server.is_durable

    def note(self, table: int) -> str | None:
        """See RowSource."""
        return self._server.note(self._specs[table].folder)

    def save_note(self, table: int, text: str) -> None:
        """See RowSource."""
        self._server.save_note(self._specs[table].folder, text)

    def forget(self, table: int, keys: NDArray[np.int64]) -> None:
        """See RowSource."""
        self._server.forget(self._specs[table].folder, keys)
        self._forget(self._specs[table].folder, keys)

    def refresh(self) -> None:
        """See RowSource. UnavailableError where a tier is down; rows that it may have stay as they are."""
        self._refresh_all(over_s=0.0)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """See RowSource."""
        with self._server.frozen():
            yield

    def scan(self, table: int) -> Iterator[Rows]:
        """See RowSource."""
        return self._server.scan(self._specs[table].folder)

    def hot_keys(self) -> HotKeys:
        """See RowSource."""
        return {spec.folder: self._cache.hottest(spec.folder) for spec in self._specs}

    def warm_up(self, hot_keys: HotKeys, deadline: float) -> None:
        """See RowSource. The hottest rows of all tables come first."""
        capacities = {table: counts["capacity"] for table, counts in self._cache.stats()["tables"].items()}
        wanted = {table: hot_keys.get(table, _NO_POSITIONS)[:capacity] for table, capacity in capacities.items()}
        for begin in range(0, max(map(len, wanted.values()), default=0), _KEYS_PER_FETCH):
            for table, keys in enumerate(wanted.values()):
                if time.monotonic() > deadline:
                    return
                self._bring_in(table, keys[begin : begin + _KEYS_PER_FETCH])

    def forget_lookups(self) -> None:
        """See RowSource."""
        self._cache.forget_lookups()

    def stats(self) -> dict[str, Any]:
        """See RowSource, EmbeddingCache.stats and ParameterServer.stats."""
        dropped = {} if self._late is None else {"dropped_inserts": self._late.num_dropped}
        return {"cache": self._cache.stats(), **dropped, **self._server.stats()}

    def close(self) -> None:
        """See RowSource."""
        self._closing.set()
        if self._refresher is not None:
            self._refresher.join(_CLOSE_S)
        if self._late is not None:
            self._late.close()
        self._server.close()
        self._cache.close()

    def _refresh_often(self, interval_s: float) -> None:
        """Half of the interval is for a round, which takes longer where it must, and half for nothing."""
        while not self._closing.wait(interval_s / 2):
            # While a tier is down, which is logged elsewhere, the rows stay as they are.
            with contextlib.suppress(UnavailableError):
                self._refresh_all(over_s=interval_s / 2)

    def _refresh_all(self, over_s: float) -> None:
        """Read all cached rows again, beside requests; see `paced`."""
        self._server.refresh()
        parts = [
            (table, keys[begin : begin + _KEYS_PER_REFRESH])
            for table, keys in enumerate(self._cache.dump(spec.folder) for spec in self._specs)
            for begin in range(0, len(keys), _KEYS_PER_REFRESH)
        ]
        for table, keys in paced(parts, self._closing, over_s=over_s):
            self._refresh(table, keys)

    def _write(self, table: int, keys: NDArray[np.int64], write: Callable[[], None], then: Callable[[], None]) -> None:
        """Write to the stores, then to the cache: one write after the other, so that both see them in the same order.

        Rows that were fetched before are not cached any more after it.
        """
        # Where stores fail they may have any of the rows.
        to_cache: Callable[[], None] = partial(self._cache.erase, self._specs[table].folder, keys)
        with self._updating:
            try:
                write()
                to_cache = then
            finally:
                with self._caching:
                    self._writes[table].add(keys)
                    to_cache()

    def _forget(self, folder: str, keys: NDArray[np.int64] | None) -> None:
        """Drop cached rows that the parameter server has had to drop from a tier."""
        table = next(i for i, spec in enumerate(self._specs) if spec.folder == folder)
        with self._caching:
            if keys is None:
                self._writes[table].add_all()
                self._cache.clear(folder)
            else:
                aliases, _ = _aliases(self._specs[table], keys)
                self._writes[table].add(aliases)
                self._cache.erase(folder, aliases)

    def _refresh(self, table: int, keys: NDArray[np.int64]) -> None:
        """Read some cached rows again; those that are written meanwhile are left to that write."""
        folder = self._specs[table].folder
        request = FetchRequest(
            folder, self._stored_keys(table, keys), np.empty((len(keys), self._specs[table].embedding_dim), np.float32)
        )
        moment = self._writes[table].moment
        # A key is not found only if no tier has it.
        found = self._server.fetch_unique([request], on_store_failure="error")[0]
        with self._caching:
            current = ~self._writes[table].written(keys, moment)
            self._cache.update(folder, keys[found & current], request.out[found & current])
            self._cache.erase(folder, keys[~found & current])

    def _bring_in(self, table: int, keys: NDArray[np.int64]) -> None:
        """Cache the rows of some keys, as far as there are any, and they are not written meanwhile."""
        folder = self._specs[table].folder
        vectors = np.empty((len(keys), self._specs[table].embedding_dim), np.float32)
        moment = self._writes[table].moment
        found = self._server.fetch_unique([FetchRequest(folder, self._stored_keys(table, keys), vectors)])[0]
        with self._caching:
            current = found & ~self._writes[table].written(keys, moment)
            self._cache.insert(folder, keys[current], vectors[current])

    def _finish(self, overlay: _Overlay, num_keys: NDArray[np.int64], num_unknown: NDArray[np.int64]) -> None:
        """Complete the segments that have missing keys from the overlay, whose vectors are there."""
        overlay.write(num_unknown)
        pooled = np.flatnonzero((overlay.segments["pooling"] != PoolingCode.NONE) & (overlay.counts > 0))
        if len(pooled) and self._pool_again(overlay.segments[pooled], overlay):
            num_unknown[pooled] = self._pool_without_cache(overlay.segments[pooled], num_keys[pooled])

    def _fill_by_default(self, overlay: _Overlay) -> None:
        for t, part in overlay.parts.items():
            part.vectors[:] = self._defaults[t]

    def _insert_late(self, overlay: _Overlay) -> None:
        self._fetch(overlay)
        self._keep(overlay)

    def _pool_again(self, segments: NDArray[np.void], overlay: _Overlay) -> int:
        """Look pooled segments up again, now with what was fetched; returns how many keys are missing still, because
        the cache has dropped their rows meanwhile.
        """
        with self._cache.reading() as records:
            tables = np.concatenate([records, overlay.records])
            tables["next_table"][: len(records)] = np.arange(len(records), len(tables))
            return cpu.lookup(tables, segments, np.zeros(len(segments), np.int64), _NO_POSITIONS, self._num_threads)

    def _pool_without_cache(self, segments: NDArray[np.void], num_keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Fetch all keys of pooled segments and look them up there alone: nothing can vanish in between, so this is
        the end of it. Returns the unknown keys per segment.
        """
        positions = np.empty(num_keys.sum(), np.int64)
        num_unknown = np.zeros_like(num_keys)
        cpu.lookup(empty_tables(self._dims), segments, num_unknown, positions, self._num_threads)
        overlay = _Overlay(self._dims, segments, num_keys, positions)
        self._fetch(overlay)
        overlay.write(num_unknown)
        cpu.lookup(overlay.records, segments, np.zeros_like(num_keys), _NO_POSITIONS, self._num_threads)
        return num_unknown

    def _fetch(self, overlay: _Overlay) -> None:
        """Fill in the vectors."""
        overlay.moments = {t: self._writes[t].moment for t in overlay.parts}
        requests = [
            FetchRequest(self._specs[t].folder, self._stored_keys(t, part.keys), part.vectors)
            for t, part in overlay.parts.items()
        ]
        for (t, part), found in zip(overlay.parts.items(), self._server.fetch_unique(requests), strict=True):
            part.found[:] = found
            part.vectors[~found] = self._defaults[t]

    def _keep(self, overlay: _Overlay) -> None:
        """Cache the rows that were found, and not written since."""
        for t, part in overlay.parts.items():
            with self._caching:
                current = part.found & ~self._writes[t].written(part.keys, overlay.moments[t])
                if current.any():
                    self._cache.insert(self._specs[t].folder, part.keys[current], part.vectors[current])

    def _stored_keys(self, table: int, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The keys that stores know: row numbers that count from the end become those that count from the start."""
        spec = self._specs[table]
        return keys if spec.keys == "stored" else keys + spec.num_rows * (keys < 0)

    def _by_table(self, segments: NDArray[np.void], counts: NDArray[np.int64]) -> list[int]:
        sums: list[int] = np.bincount(segments["table"], counts, len(self._specs)).astype(np.int64).tolist()
        return sums


class _Part(NamedTuple):
    """The rows of one table in an overlay."""

    keys: NDArray[np.int64]
    """[n], each once."""
    vectors: NDArray[np.float32]
    """[n, embedding_dim], to be filled in."""
    found: NDArray[np.bool_]
    """[n], to be filled in: False where the vector is the default."""


class _Overlay:
    """The keys that a look-up has not found, as tables of their own (kernels/missing.py)."""

    def __init__(
        self,
        dims: NDArray[np.int64],
        segments: NDArray[np.void],
        counts: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> None:
        """Collect the keys at `positions`, counts[s] of them of segment s."""
        self.segments = segments
        self.counts = counts
        self._positions = positions
        num_keys = np.bincount(segments["table"], counts, len(dims)).astype(np.int64)
        self._begins = np.cumsum(num_keys) - num_keys
        num_buckets = num_keys // _KEYS_PER_BUCKET + 1
        buckets_before = np.cumsum(num_buckets) - num_buckets
        self._buckets = _at_line(BUCKET_BYTES * int(num_buckets.sum()))
        self._keys = np.empty(len(positions), np.int64)
        self._found = np.zeros(len(positions), np.bool_)
        self._rows = np.empty(len(positions), np.int64)
        self.records = empty_tables(dims)
        self.records["num_buckets"] = num_buckets
        self.records["index_address"] = _address(self._buckets) + BUCKET_BYTES * buckets_before
        self.records["keys_address"] = _address(self._keys) + 8 * self._begins
        collect_keys(segments, counts, positions, self.records, self._rows)
        self.parts = self._allocate(dims)
        self.moments: dict[int, int] = {}
        """By table, how many writes there had been when the vectors were fetched."""

    def write(self, num_unknown: NDArray[np.int64]) -> None:
        """Copy the vectors to the outputs that are not pooled; num_unknown[s] receives the keys not found."""
        missing = (self.segments, self.counts, self._positions)
        write_vectors(*missing, self.records, self._rows, self._found, self._begins, num_unknown)

    def _allocate(self, dims: NDArray[np.int64]) -> dict[int, _Part]:
        """Room for the vectors of the keys there are, by table."""
        num_rows = self.records["num_rows"]
        num_elements = num_rows * dims
        ends = np.cumsum(num_elements)
        self._vectors = np.empty(num_elements.sum(), np.float32)
        self.records["vectors_address"] = _address(self._vectors) + 4 * (ends - num_elements)
        parts = {}
        for t in np.flatnonzero(num_rows).tolist():
            rows = slice(self._begins[t], self._begins[t] + num_rows[t])
            vectors = self._vectors[ends[t] - num_elements[t] : ends[t]].reshape(-1, dims[t])
            parts[t] = _Part(self._keys[rows], vectors, self._found[rows])
        return parts


def create_row_source(
    spec: ModelSpec, config: SessionConfig, directory: Path, gpu: GpuContext | None = None
) -> RowSource:
    """The rows of a version directory: its own files, or with a store in the settings that store's, through a cache.

    With a GPU, rows that do not change are looked up there, others on the host.

    Raises what `TableFile.open`, `create_parameter_server` and `create_embedding_cache` do.
    """
    num_threads = config.num_lookup_threads
    if not config.has_store:
        folder, verify = directory / TABLES_FOLDER, config.verify == "full"
        files = [TableFile.open(folder / table.folder, table, verify_index=verify) for table in spec.tables]
        if gpu is not None and config.update_stream is None:
            from inference_session.gpu_rows import GpuRows

            return GpuRows(files, gpu, num_threads=num_threads, cache_bytes=config.cache_bytes)
        source = MappedRows if config.update_stream is None else UpdatableRows
        return source(files, num_threads=num_threads)
    cache = _create_cache(spec, config)
    try:
        server = create_parameter_server(spec, config, directory)
    except BaseException:
        cache.close()
        raise
    may_default = config.insert_mode == "async" and config.unknown_keys == "default_vector"
    return CachedRows(
        spec.tables,
        cache,
        server,
        num_threads=num_threads,
        refresh_interval_s=config.refresh_interval_s,
        async_from=config.hit_rate_threshold if may_default else None,
    )


def _aliases(spec: TableSpec, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All keys that may mean these rows, also row numbers counted from the end; and each one's position in `keys`."""
    every = np.arange(len(keys))
    if spec.keys == "stored":
        return keys, every
    inside = np.flatnonzero((keys >= 0) & (keys < spec.num_rows))
    if not len(inside):
        return keys, every
    return np.concatenate([keys, keys[inside] - spec.num_rows]), np.concatenate([every, inside])


def resolved_cache_bytes(spec: ModelSpec, config: SessionConfig) -> int:
    """The bytes of the cache over stores that these settings ask for; 0: none."""
    if config.cache_bytes is not None:
        return config.cache_bytes
    if not config.cache_fraction:
        return 0
    dims = {table.folder: table.embedding_dim for table in spec.tables}
    parts = {table.folder: math.ceil(table.num_rows * config.cache_fraction) for table in spec.tables}
    return bytes_to_hold(dims, parts)


def _create_cache(spec: ModelSpec, config: SessionConfig) -> HostCache:
    dims = {table.folder: table.embedding_dim for table in spec.tables}
    num_rows = {table.folder: table.num_rows for table in spec.tables}
    cache_bytes = resolved_cache_bytes(spec, config)
    if cache_bytes == 0 or not dims:
        return NullEmbeddingCache(dims)
    return CpuEmbeddingCache(dims, cache_bytes, num_rows=num_rows, num_threads=config.num_lookup_threads)


def _at_line(num_bytes: int) -> NDArray[np.uint8]:
    """Zeros that begin at a cache line."""
    memory = np.zeros(num_bytes + _LINE_BYTES, np.uint8)
    return memory[-_address(memory) % _LINE_BYTES :][:num_bytes]


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
