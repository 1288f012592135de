"""InferenceSession: one loaded model version, from a version directory to predictions."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inference_session.config import SessionConfig
from inference_session.dense_engine.create import check_precision
from inference_session.device.base import Device
from inference_session.device.discovery import open_devices
from inference_session.device.host import vectors_at_line
from inference_session.errors import HotrowError, SessionClosedError, UnavailableError, UnsupportedModelError, fresh
from inference_session.execution.fast_path import FastPath
from inference_session.execution.full_path import FullPath
from inference_session.execution.model import open_model
from inference_session.execution.phases import OnPhase, ignore_phase
from inference_session.execution.upkeep import SessionUpkeep
from inference_session.execution.warm_up import WarmUp
from inference_session.kernels.cpu import lookup as cpu
from inference_session.requests.batch import Request
from inference_session.requests.caller_arrays import (
    as_input,
    as_keys,
    as_rows,
    as_written_keys,
    check_arguments,
    is_on_gpu,
)
from inference_session.requests.canary import check_canary
from inference_session.requests.outputs import Answer
from inference_session.rows.base import look_up_keys
from inference_session.rows.dump import DumpReport, dump
from inference_session.rows.stats import RowStats
from inference_session.stats import SessionCounts, SessionStats
from inference_session.version_directory.version import VersionDirectory

if TYPE_CHECKING:
    from inference_session.sizing.key_recorder import KeyRecorder
    from inference_session.update_stream.stream_stats import StreamSnapshot

_KEYS_AT_ONCE = 1 << 16
"""Keys that `lookup` looks up at once; other requests run in between."""


class InferenceSession:
    """Answers requests from one version of a model, in this process: no server is needed.

        with InferenceSession.open("model_repository/ctr/1") as session:
            predictions = session.predict({"user_id": [[7]], "item_id": [[1]]})    # float32 [1, labels]

    Several threads may use a session at once. A process that is forked opens its own: in it, this one raises
    SessionClosedError. Threads that still predict as the process ends have to be joined first: Python before 3.14
    ends daemon threads in the middle of ONNX Runtime, which aborts the process. Sizes and shapes are those of the
    original model; `hotrow inspect` shows them.
    """

    @classmethod
    def open(
        cls, directory: str | Path, *, model: str = "", defaults: Mapping[str, Any] | None = None, **settings: Any
    ) -> InferenceSession:
        """Open a version directory: map its tables, load its network, warm both, and try its canary requests.

        Args:
            directory: `<repository>/<model>/<version>`.
            model: its name in stores, update streams and saved state. Empty: that of the folder.
            defaults: fields of SessionConfig, used where neither `settings` nor session.json has one.
            settings: fields of SessionConfig; they take precedence over those in session.json.

        Raises:
            ModelFormatError: a file is missing, damaged or not what session.json says; names it.
            ConfigurationError: a setting is unknown or its value not allowed.
            CanaryError: the version answers its canary requests wrongly.
            UnavailableError: the GPU has failed.
        """
        begin = time.perf_counter()
        version = VersionDirectory.read(directory, model)
        config = SessionConfig.resolve(settings, version.spec.settings, defaults or {})
        version.verify(checksums=config.verify == "full", has_store=config.has_store, state_dir=config.state_dir)
        devices = open_devices(config.device)
        config.check_devices(len(devices))
        check_precision(config, devices[0])
        with devices[0].opening():
            session = cls(version, config, devices)
            with closed_on_error(session):
                session._warm_up()
        with closed_on_error(session):
            if config.canary_requests:
                check_canary(session.run, version.model_file(config.canary_requests), config.canary_tolerance)
            session._begin_counting()
            session.upkeep.follow_updates()
        session._stats.load_s = time.perf_counter() - begin
        return session

    def __init__(self, version: VersionDirectory, config: SessionConfig, devices: Sequence[Device]) -> None:
        """Use `open`, which reads and checks the version directory."""
        self.version = version
        self.spec = spec = version.spec
        self.config = config
        self.directory = version.path
        self._closed = self._is_closing = True  # until everything below is set
        self._process_id = os.getpid()
        cpu.compile_kernels()
        self._model = model = open_model(version, config, devices)
        # Others may read these three, but only a session calls what changes them.
        self.layout, self.rows, self.replicas = model.layout, model.rows, model.replicas
        self.has_fast_path = self.replicas.all[0].staging_pool is not None
        """Whether `fast_path` answers any requests to this model."""
        self._writer = self.rows.writer
        self._stats = SessionStats(spec)
        self._record_keys(None)  # until warmed up
        self._rows_before: RowStats | None = None
        self.upkeep = SessionUpkeep(version, config, self.rows)
        """What goes on besides requests."""
        self._closed = self._is_closing = False
        _sessions.add(self)

    @property
    def failure(self) -> str | None:
        """Why requests can no longer be answered, for instance because a GPU has failed; None: they can."""
        return self.replicas.failure

    @property
    def num_devices(self) -> int:
        """The most batches that are computed at the same time, where that depends on devices."""
        return len(self.replicas.all)

    @property
    def label_names(self) -> tuple[str, ...]:
        """One name per column of the predictions."""
        return self.spec.labels

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables, as in the original model."""
        return tuple(table.name for table in self.spec.tables)

    def predict(self, inputs: Mapping[str, ArrayLike]) -> NDArray[np.float32]:
        """Predictions of all tasks: float32 [samples, labels], a column for each of `label_names`.

        Args:
            inputs: by name, all inputs of the model, in its shapes: arrays of its types, or lists that NumPy converts
                to them. No other thread may reshape or resize the arrays before the call returns.

        Raises:
            InvalidRequestError: an input is missing, unknown or malformed.
            UnknownKeyError: a key is unknown, and `unknown_keys` is `reject`.
            UnavailableError: a store is down that may have a key, and `on_store_failure` is `error`.
            UnsupportedModelError: the model has no output of shape [samples] or [samples, k].
        """
        if not self.spec.label_outputs:
            raise UnsupportedModelError(
                "no output of this model has the shape [samples] or [samples, k]; use run() instead"
            )
        labels = self.run(inputs, self.spec.label_outputs)
        return self.layout.outputs.predictions(list(labels.values()))

    def run(self, inputs: Mapping[str, ArrayLike], outputs: Sequence[str] | None = None) -> Answer:
        """Outputs of the model, as arrays by name.

        Inputs may also lie on a GPU, as arrays of CuPy or PyTorch. A session on that GPU reads them in place, if the
        model has neither bags by offsets, weights of keys, strings, computed keys nor context inputs; otherwise they
        are copied to the host. Arrays that are read in place must have the model's own types.

        Args:
            inputs: as for `predict`.
            outputs: names of outputs; the answer has this order. None: all of the original model, and `OUTPUT0`.

        Raises:
            InvalidRequestError: an input is missing, unknown or malformed, or an output unknown.
            UnknownKeyError, UnavailableError: as for `predict`.
        """
        if self._closed:
            self._check_open()
        fast = self.fast_path.answer_one(inputs, outputs)
        if fast is not None:
            return fast
        check_arguments(inputs, outputs)
        if any(map(is_on_gpu, inputs.values())):
            self._check_open()
            answer = self._full_path.answer_from_gpu(inputs, outputs)
        else:
            types = self._full_path.input_types
            arrays = {name: as_input(name, value, types.get(name)) for name, value in inputs.items()}
            answer = self.run_many([Request(arrays, outputs)])[0]
        if isinstance(answer, HotrowError):
            raise fresh(answer)
        return answer

    def run_many(self, requests: Sequence[Request], on_phase: OnPhase = ignore_phase) -> list[Answer | HotrowError]:
        """Answer several requests, with one look-up and one run of the dense network if their shapes allow that.

        Returns one result per request, in the same order: an answer as of `run`, or the error of that request, which
        does not affect the others. `on_phase` is called at each phase, for traces.
        """
        self._check_open()
        if answers := self.fast_path.answer(requests, on_phase):
            return [*answers]
        return self._full_path.answer(requests, on_phase)

    def lookup(self, table: str, keys: ArrayLike) -> NDArray[np.float32]:
        """Vectors of one table: float32 [n, embedding_dim].

        Args:
            table: its name or folder.
            keys: int64 [n]. Unknown keys get the table's default vector, whatever `unknown_keys` is.

        Raises:
            TableNotFoundError: no table has this name or folder.
            InvalidRequestError: keys are not integers [n].
            UnavailableError: a store is down that may have one of the keys, and `on_store_failure` is `error`.
        """
        self._check_open()
        spec = self.spec.table(table)
        wanted = as_keys(keys)
        vectors = vectors_at_line(len(wanted), spec.embedding_dim)
        number = self.spec.tables.index(spec)
        for begin in range(0, len(wanted), _KEYS_AT_ONCE):
            part = slice(begin, begin + _KEYS_AT_ONCE)
            arrays = wanted[part], vectors[part]
            self.replicas.run(lambda each, arrays=arrays: look_up_keys(each.network.reader, number, *arrays))  # type: ignore[misc]
        return vectors

    def update(self, table: str, keys: ArrayLike, vectors: ArrayLike) -> None:
        """Write rows to the stores, the persistent one first, and to the cache; look-ups that begin later return them.

        Args:
            table: its name or folder.
            keys: int64 [n]; if a key occurs twice, its last vector counts. Row numbers must be at least 0.
            vectors: float32 [n, embedding_dim].

        Raises:
            StoreError: the session has no store that takes writes.
            UnavailableError: the persistent store cannot take them at present, for instance because another process is
                the RocksDB's writer; any of the rows may have been written, and the call may be repeated.
        """
        self._check_open()
        spec = self.spec.table(table)
        self._writer.update(spec.folder, *as_rows(keys, vectors, spec))

    def erase(self, table: str, keys: ArrayLike) -> None:
        """Drop the rows of some keys, int64 [n]. Later look-ups answer the default vector, whatever the files hold.

        Errors are those of `update`.
        """
        self._check_open()
        spec = self.spec.table(table)
        self._writer.erase(spec.folder, as_written_keys(keys, spec))

    def refresh(self) -> None:
        """Read the cached rows again from the stores while requests continue. Without stores this does nothing.

        Raises:
            UnavailableError: a store is down. Rows that it may have are not changed.
        """
        self._check_open()
        self._writer.refresh()

    def dump(self, target: str | Path, progress: Callable[[int], None] | None = None) -> DumpReport:
        """Write all rows as they are served, updates applied, into a new folder. Updates wait until it is complete.

        The folder has a sparse folder of HugeCTR per table: `<table>/key` (int64) and `<table>/emb_vector` (float32).
        Returns the number of rows by table, `num_rows`.

        Args:
            target: a path, or `hdfs://HOST:PORT/path`; it appears when complete.
            progress: called with the number of rows read since the last call.

        Raises:
            ConfigurationError: the target exists.
            UnavailableError: a store is down.
        """
        self._check_open()
        return dump(self.rows, self.spec, target, progress)

    def stats(self) -> dict[str, Any]:
        """Counters since `open`, also after `close`.

        The reference page "Statistics" (docs/reference/statistics.md) defines each key.
        """
        return self.snapshot().as_dict()

    def snapshot(self) -> SessionSnapshot:
        """The same as `stats`, as objects."""
        rows = self.rows.stats()
        if self._rows_before is not None:
            rows = rows.after(self._rows_before)
        return SessionSnapshot(self._stats.snapshot(), rows, self.upkeep.update_stats())

    def close(self) -> None:
        """Stop answering: later requests and changes raise SessionClosedError. May be called twice.

        Without stores, running requests finish; with stores, those that still miss rows raise SessionClosedError.
        Where Ctrl-C interrupts it, the next call closes what is left.
        """
        if self._is_closing:
            return
        self._closed = self._is_closing = True
        try:
            self.upkeep.close()
            self.rows.close()
            self.replicas.close()
        except BaseException:
            self._is_closing = False
            raise

    def __enter__(self) -> InferenceSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=1)

    def __reduce__(self) -> NoReturn:
        # A copy would share what the first `close` closes.
        raise TypeError(
            f"an InferenceSession can be neither copied nor pickled: open {str(self.directory)!r} where it is used"
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<InferenceSession {str(self.directory)!r} [{len(self.spec.tables)} tables, {state}]>"

    def _check_open(self) -> None:
        if self._closed and self._process_id != os.getpid():
            raise SessionClosedError(
                f"the session of {str(self.directory)!r} was opened by process {self._process_id}, of which this one "
                "is a fork: open it after the fork"
            )
        if self._closed:
            raise SessionClosedError(f"the session of {str(self.directory)!r} has been closed")

    def _warm_up(self) -> None:
        """Prepare everything that the first requests need: the network, its memory, the hot rows."""
        seconds = self.config.warm_up_s / len(self.replicas.all)
        hot_keys = self.upkeep.read_hot_keys() if seconds else {}
        work = WarmUp(self.version, self.layout, self.fast_path, self._full_path, hot_keys, seconds)
        for replica in self.replicas.all:  # one by one, as only one may record
            replica.thread.run(partial(work.run, replica))
        if self.failure is not None:
            raise UnavailableError(self.failure)

    def _record_keys(self, recorder: KeyRecorder | None) -> None:
        """Answer requests from now on, and record their keys."""
        self.fast_path = FastPath(self._model, self._stats, recorder)
        """Answers most requests; `FastPath.run` takes a list of arrays."""
        self._full_path = FullPath(self._model, self._stats, recorder)

    def _begin_counting(self) -> None:
        """From now on, requests are counted, make rows hot, and are recorded if a setting asks for it."""
        self._stats.reset()
        self._rows_before = self.rows.stats()
        self.upkeep.begin(self._stats)
        self._record_keys(self.upkeep.recorder)


@contextlib.contextmanager
def closed_on_error(session: InferenceSession) -> Iterator[None]:
    """Close a session if the context ends with an error."""
    try:
        yield
    except BaseException:
        session.close()
        raise


_sessions: WeakSet[InferenceSession] = WeakSet()


def _leave_to_parent() -> None:
    """Close the sessions of a forked process: their connections are the parent's, and their threads are not here.

    None of them is ever freed, as ONNX Runtime and RocksDB would end those threads, and crash.
    """
    for session in tuple(_sessions):
        session._closed = session._is_closing = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))


os.register_at_fork(after_in_child=_leave_to_parent)


@dataclass(frozen=True)
class SessionSnapshot:
    """The statistics of a session at one moment."""

    session: SessionCounts
    rows: RowStats
    updates: StreamSnapshot | None
    """None: no update stream is followed."""

    def as_dict(self) -> dict[str, Any]:
        """By the names of docs/reference/statistics.md."""
        updates = {} if self.updates is None else asdict(self.updates)
        return {**asdict(self.session), **self.rows.as_dict(), "updates": updates}
