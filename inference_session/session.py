"""InferenceSession: one loaded model version, from a version directory to predictions."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inference_session.config import SessionConfig
from inference_session.dense_engine import DenseEngine, OnnxEngine, VectorEngine, create_engine
from inference_session.device.base import Device
from inference_session.device.discovery import open_device
from inference_session.device.host import HOST
from inference_session.errors import (
    ConfigurationError,
    HotrowError,
    ModelFormatError,
    SessionClosedError,
    UnavailableError,
    UnknownKeyError,
    UnsupportedModelError,
)
from inference_session.execution.lookups import ModelLookups
from inference_session.execution.plan import ExecutionPlans
from inference_session.execution.stages import Mark, unmarked
from inference_session.kernels.cpu import lookup as cpu
from inference_session.kernels.records import Lookup
from inference_session.model_spec import DENSE_FILE, KEYS_FILE, SESSION_FILE, TABLES_FOLDER, ModelSpec
from inference_session.parameter_server.namespace import version_path
from inference_session.requests.batch import CheckedRequest, JoinedBatch, Request
from inference_session.requests.caller_arrays import as_input, as_keys, as_rows, as_written_keys
from inference_session.requests.canary import check_canary
from inference_session.requests.grouped import GroupedRequests
from inference_session.requests.layouts import layout_of
from inference_session.requests.outputs import Answer, Outputs
from inference_session.rows import create_rows, fetch
from inference_session.rows.dump import DumpReport, dump
from inference_session.rows.hot_keys import HotKeysWriter, read_hot_keys
from inference_session.rows.stats import RowStats
from inference_session.sizing.key_recorder import KeyRecorder, create_key_recorder
from inference_session.stats import SessionStats
from inference_session.version_directory import manifest
from inference_session.version_directory.verified_files import VerifiedFiles

if TYPE_CHECKING:
    from inference_session.update_stream.kafka_stream import KafkaUpdateStream

_log = logging.getLogger(__name__)

_WARM_UP_BATCHES = ((1, 1), (1, 64), (4, 1), (16, 1), (8, 64), (16, 1), (8, 64), (1, 64), (1, 1))
"""Requests and samples of each, run before a version serves: a network takes longer for a size that is new to it."""

_GPU_WARM_UP_BATCHES = ((1, 8), (1, 32), (1, 128), (1, 256), (1, 1024))
"""Batches that a GPU records as CUDA graphs as well."""


class InferenceSession:
    """Answers requests from one version of a model. Safe to use from several threads; knows nothing of Triton."""

    @classmethod
    def open(
        cls, directory: str | Path, *, defaults: Mapping[str, Any] | None = None, **settings: Any
    ) -> InferenceSession:
        """Open a version directory: map its tables, load its network, warm both, and try its canary requests.

        Args:
            directory: `<repository>/<model>/<version>`.
            defaults: fields of SessionConfig, for those that are in neither of the others.
            settings: fields of SessionConfig; they come before those in session.json.

        Raises:
            ModelFormatError: a file is missing, damaged or not what session.json says; names it.
            ConfigurationError: a setting is unknown or its value not allowed.
            CanaryError: it answers its canary requests wrongly.
            UnavailableError: the GPU has failed meanwhile.
        """
        begin = time.perf_counter()
        directory = Path(directory)
        spec = ModelSpec.read(directory)
        config = SessionConfig.resolve(settings, spec.settings, defaults or {})
        _verify(config, directory)
        device = open_device(config.device)
        with device.opening():
            session = cls(spec, config, directory, device)
            with session._closed_on_error():
                session._warm_up()
        with session._closed_on_error():
            if config.canary_requests:
                check_canary(session.run, directory.parent / config.canary_requests, config.canary_tolerance)
            session._start_counting()
            session._follow_updates()
        session._stats.load_s = time.perf_counter() - begin
        return session

    def __init__(self, spec: ModelSpec, config: SessionConfig, directory: Path, device: Device) -> None:
        """Use `open`, which reads and checks the version directory."""
        self.spec = spec
        self.config = config
        self.directory = directory
        self._closed = True  # until everything below is there
        cpu.compile_kernels()
        self._device = device
        layout = layout_of(spec)
        self._dense: DenseEngine
        if layout.has_network:
            self._dense = self._create_engine(directory / DENSE_FILE)
            _check_outputs(spec, directory, self._dense.output_names)
        else:
            self._dense = VectorEngine([lookup.dense_input for lookup in spec.lookups])
        has_key_graph = (directory / KEYS_FILE).exists()
        self._keys = OnnxEngine(directory / KEYS_FILE, num_threads=1) if has_key_graph else None
        key_inputs, computed = (self._keys.input_names, self._keys.output_names) if self._keys else (frozenset(), ())
        if layout.keys_follow_inputs:
            _check_links(spec, directory, self._dense, self._keys)
        self._input_types = {tensor.name: np.dtype(tensor.dtype) for tensor in spec.inputs}
        self._outputs = Outputs(spec)
        self._layout = layout(
            spec,
            self._outputs,
            network_inputs=self._dense.input_names | key_inputs,
            max_elements=config.max_keys_per_request,
        )
        self._stats = SessionStats(spec)
        self._rows = create_rows(spec, config, directory, self._device)
        self._rows_before: RowStats | None = None
        lookups = ModelLookups(
            spec, by_column=self._rows.device.reads_by_column, keys_follow_inputs=layout.keys_follow_inputs
        )
        self._plans = ExecutionPlans(lookups, self._rows, self._dense, computed)
        self._may_join = spec.joins_requests
        self._recorder: KeyRecorder | None = None
        self._hot_keys: HotKeysWriter | None = None
        self._updates: KafkaUpdateStream | None = None
        self._closed = False

    @property
    def failure(self) -> str | None:
        """Why no request can be answered any more, for instance because a GPU has failed; None: they can."""
        return self._device.failure

    @property
    def label_names(self) -> tuple[str, ...]:
        """One name per column of the predictions."""
        return self.spec.labels

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables, as in the original model."""
        return tuple(table.name for table in self.spec.tables)

    def predict(self, inputs: Mapping[str, ArrayLike]) -> NDArray[np.float32]:
        """All tasks side by side: float32 [samples, number of labels].

        Raises:
            InvalidRequestError: an input is missing, unknown or malformed.
            UnsupportedModelError: the model has no output of shape [samples] or [samples, k].
        """
        if not self.spec.label_outputs:
            raise UnsupportedModelError("no output of this model is [samples] or [samples, k]: use run() instead")
        return self._outputs.predictions(self.run(inputs, self.spec.label_outputs))

    def run(self, inputs: Mapping[str, ArrayLike], outputs: Sequence[str] | None = None) -> Answer:
        """The outputs of those names, in that order; None: all of the model's own, and the predictions.

        Raises:
            InvalidRequestError: an input is missing, unknown or malformed, or an output unknown.
        """
        arrays = {name: as_input(name, value, self._input_types.get(name)) for name, value in inputs.items()}
        answer = self.run_many([Request(arrays, outputs)])[0]
        if isinstance(answer, HotrowError):
            raise answer
        return answer

    def run_many(self, requests: Sequence[Request], mark: Mark = unmarked) -> list[Answer | HotrowError]:
        """Answer several requests with one look-up and one run of the dense network wherever their shapes allow.

        An answer that cannot be given is an error in its place; the other requests are not concerned. `mark` is told
        the stages from `look-up` on.
        """
        self._check_open()
        grouped = GroupedRequests(requests, self._layout, may_join=self._may_join)
        for group in grouped:
            try:
                grouped.answer(group, self._answer(group.requests, mark))
            except HotrowError as error:  # noqa: PERF203  no other group is concerned
                grouped.fail(group, error)
        self._stats.count_requests(len(requests), grouped.num_failed)
        return grouped.answers

    def _answer(self, requests: Sequence[CheckedRequest], mark: Mark = unmarked) -> list[Answer]:
        """The path of every request: keys, look-up, dense network, split."""
        if self.spec.batched and not any(request.num_samples for request in requests):
            return [self._outputs.of_no_samples(request.outputs) for request in requests]
        mark("look-up")
        batch = self._layout.join(requests)
        self._compute_keys(batch)
        plan = self._plans.of(batch, tuple(self._layout.wanted(requests)))
        with plan.held():
            lookup = plan.fill(batch)
            self._rows.look_up(lookup)
            self._record_keys(lookup)
            mark("network")
            outputs = plan.run_network(batch)
            num_unknown = plan.num_unknown(lookup)
        mark("answer")
        self._refuse_unknown(num_unknown)
        self._stats.count_batch(batch.num_samples, lookup.num_keys, num_unknown)
        return self._layout.split(outputs, requests)

    def _compute_keys(self, batch: JoinedBatch) -> None:
        """Keys that the model computes from its inputs."""
        if self._keys:
            names = sorted(self._keys.output_names)
            results = self._keys.run({name: batch.array(name) for name in self._keys.input_names}, names)
            batch.add(dict(zip(names, results, strict=True)))

    def _record_keys(self, lookup: Lookup) -> None:
        if self._recorder is not None:
            self._recorder.record(lookup.segments, lookup.num_keys)

    def _refuse_unknown(self, num_unknown: NDArray[np.int64]) -> None:
        if self.config.unknown_keys == "reject" and num_unknown.any():
            lookup = self.spec.lookups[int(np.flatnonzero(num_unknown)[0])]
            table = self.spec.table_in(lookup.table)
            raise UnknownKeyError(
                f"{num_unknown.sum()} keys are unknown, the first of them in table {table.name!r}, "
                f"which has {table.num_rows} rows; setting unknown_keys=default_vector would answer all the same"
            )

    def lookup(self, table: str, keys: ArrayLike) -> NDArray[np.float32]:
        """Vectors of one table: keys int64 [n] become float32 [n, embedding_dim]; unknown keys the default vector.

        Raises:
            TableNotFoundError: neither a table's name nor its folder.
            UnavailableError: a store is down that may have one of the keys, and the settings want no default instead.
        """
        self._check_open()
        spec = self.spec.table(table)
        wanted = as_keys(keys)
        vectors = np.empty((len(wanted), spec.embedding_dim), np.float32)
        fetch(self._rows, self.spec.tables.index(spec), wanted, vectors)
        return vectors

    def update(self, table: str, keys: ArrayLike, vectors: ArrayLike) -> None:
        """Write rows to the stores, the persistent one first, and to the cache; look-ups that begin later answer them.

        Args:
            table: its name or folder.
            keys: int64 [n]; of equal ones the last wins. In tables of row numbers, numbers from 0.
            vectors: float32 [n, embedding_dim].

        Raises:
            StoreError: no store that takes writes belongs to the session.
            UnavailableError: the persistent store cannot take them at present, for instance because another process is
                the RocksDB's writer; any of the rows may have been written, and the call may be repeated.
        """
        self._check_open()
        spec = self.spec.table(table)
        self._rows.writer.update(self.spec.tables.index(spec), *as_rows(keys, vectors, spec))

    def erase(self, table: str, keys: ArrayLike) -> None:
        """Drop rows, as `update` writes them: their keys, int64 [n], are unknown to the stores from now on."""
        self._check_open()
        spec = self.spec.table(table)
        self._rows.writer.erase(self.spec.tables.index(spec), as_written_keys(keys, spec))

    def refresh(self) -> None:
        """Read the cached rows again from the stores; requests go on meanwhile. Without stores this does nothing.

        Raises:
            UnavailableError: a store is down. Rows that it may have stay as they are.
        """
        self._check_open()
        self._rows.writer.refresh()

    def save_hot_keys(self) -> None:
        """Have the next session of the model, in whichever process, start with what is hot here now.

        Without a cache over stores, or without `state_dir`, this does nothing. It is done by itself every few seconds.
        """
        if self._hot_keys is not None:
            self._hot_keys.write()

    def dump(self, target: str | Path, progress: Callable[[int], None] | None = None) -> DumpReport:
        """Write all rows as they are served, updates applied, into a new folder with a sparse folder of HugeCTR per
        table; see inference_session/rows/dump.py. Requests are answered meanwhile, updates wait.

        Args:
            target: a path, or `hdfs://HOST:PORT/path`; appears when it is whole.
            progress: told the number of rows read since the last call.

        Raises:
            ConfigurationError: the target exists.
            UnavailableError: a store is down.
        """
        self._check_open()
        return dump(self._rows, self.spec, target, progress)

    def stats(self) -> dict[str, Any]:
        """Counters since `open`; docs/operations.md defines each key."""
        updates = {} if self._updates is None else self._updates.stats()
        return {**self._stats.snapshot(), **self._row_stats().as_dict(), "updates": updates}

    def close(self) -> None:
        """Answer no more: requests and changes are a SessionClosedError from now on. May be called twice.

        Without stores, what is under way is finished; with them it is a SessionClosedError where rows are missing.
        """
        if not self._closed:
            self._closed = True
            if self._updates is not None:
                self._updates.close()
            if self._hot_keys is not None:
                self._hot_keys.close()
                self._hot_keys = None  # it knows us: the memory would wait for the garbage collector
            self._rows.close()
            if self._recorder is not None:
                self._recorder.close()

    def __enter__(self) -> InferenceSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=1)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<InferenceSession {str(self.directory)!r} [{len(self.spec.tables)} tables, {state}]>"

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosedError(f"the session of {str(self.directory)!r} has been closed")

    def _create_engine(self, path: Path) -> OnnxEngine:
        """The dense engine: where nobody insists on a GPU, on the CPU if ONNX Runtime cannot use it after all."""
        try:
            return create_engine(path, self.config, self._device)
        except ConfigurationError as error:
            if self.config.device != "auto" or self._device is HOST:
                raise
            _log.warning("device auto: the CPU is used: %s", error)
            self._device = HOST
            return create_engine(path, self.config, HOST)

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _warm_up(self) -> None:
        """Have everything in place that the first requests need: the network, its memory, the hot rows."""
        self._run_made_up(1, 1)  # whatever it takes: kernels and network have to be there
        deadline = time.monotonic() + self.config.warm_up_s
        if self.config.warm_up_s:
            hot_keys = read_hot_keys(self._hot_keys_file) if self.config.state_dir else {}
            with contextlib.suppress(UnavailableError):  # some rows of a store that is down, or none, are enough
                self._rows.warm_up(hot_keys, deadline)
        for num_requests, num_samples in (*_WARM_UP_BATCHES, *(() if self._device is HOST else _GPU_WARM_UP_BATCHES)):
            if time.monotonic() < deadline:
                self._run_made_up(num_requests if self._may_join else 1, num_samples)
        self._dense.end_warm_up()
        if self.failure is not None:
            raise UnavailableError(self.failure)

    def _run_made_up(self, num_requests: int, num_samples: int) -> None:
        # Zeros need not be a sensible request, nor need all stores be up; a batch that fails is no request's end.
        with contextlib.suppress(HotrowError):
            self._answer([self._layout.check(self._layout.made_up(num_samples))] * num_requests)

    def _start_counting(self) -> None:
        """What comes from now on is counted, makes rows hot, and is recorded if so wished."""
        self._recorder = create_key_recorder(self.spec, self.config, self.directory)
        self._stats = SessionStats(self.spec)
        self._rows_before = self._rows.stats()
        cache = self._rows_before.cache
        if self.config.state_dir and cache is not None and cache.capacity:
            self._hot_keys = HotKeysWriter(self._hot_keys_file, self._rows.hot_keys, self._num_lookups)

    def _follow_updates(self) -> None:
        """Apply what changes from now on, and what has been published before, as far as that has not been done."""
        if self.config.update_stream is None:
            return
        from inference_session.update_stream.kafka_stream import KafkaUpdateStream

        folder = version_path(self.directory)
        self._updates = KafkaUpdateStream(
            self.config.update_stream,
            folder.parent.name,
            folder.name,
            self.spec.tables,
            self._rows.writer,
            topic_filter=self.config.update_filter,
            since=self.config.update_since,
            allow_non_finite=self.config.non_finite_updates == "apply",
        )
        self._updates.wait_until_current(self.config.catch_up_s)

    @property
    def _hot_keys_file(self) -> Path:
        return _state_file(self.config, self.directory, "hot_keys")

    def _row_stats(self) -> RowStats:
        """What has been counted of the rows since the session serves."""
        stats = self._rows.stats()
        return stats if self._rows_before is None else stats.after(self._rows_before)

    def _num_lookups(self) -> int:
        return sum(table["lookup_keys"] for table in self._stats.snapshot()["tables"].values())


def _verify(config: SessionConfig, directory: Path) -> None:
    """Compare the files with the manifest, as far as the settings want it and it has not been done before."""
    absent = frozenset({TABLES_FOLDER}) if config.has_store else frozenset()
    known = VerifiedFiles(_state_file(config, directory, "verified")) if config.state_dir else None
    manifest.verify(directory, checksums=config.verify == "full", absent=absent, known=known)
    if known is not None:
        known.save()


def _state_file(config: SessionConfig, directory: Path, kind: str) -> Path:
    """A file that all versions of the model share."""
    return Path(config.state_dir) / f"{version_path(directory).parent.name}.{kind}"


def _check_links(spec: ModelSpec, directory: Path, dense: DenseEngine, keys: OnnxEngine | None) -> None:
    """Refuse networks that session.json does not fit, before every request fails on them."""
    inputs = {tensor.name for tensor in spec.inputs}
    known = inputs | (keys.output_names if keys else frozenset())
    looked_up = {lookup.dense_input for lookup in spec.lookups}
    for reader, wanted, given in (
        (KEYS_FILE, keys.input_names if keys else frozenset(), inputs),
        ("a lookup", {name for lookup in spec.lookups for name in lookup.reads}, known),
        (DENSE_FILE, dense.input_names, known | looked_up),
    ):
        if missing := sorted(wanted - given):
            raise ModelFormatError(f"{directory / SESSION_FILE}: {reader} reads {missing[0]!r}, which nothing provides")


def _check_outputs(spec: ModelSpec, directory: Path, made: frozenset[str]) -> None:
    """Refuse a network that lacks an output of the model, as `_check_links` one that lacks an input."""
    if missing := [tensor.name for tensor in spec.outputs if tensor.name not in made]:
        raise ModelFormatError(f"{directory / SESSION_FILE}: output {missing[0]!r} is none of {DENSE_FILE}'s")
