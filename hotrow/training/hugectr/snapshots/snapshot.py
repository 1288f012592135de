"""The files of a model: dense weights, tables, optimizer states and running statistics, as HugeCTR names them.

A snapshot is first a draft, then put in place file by file; the dense weights, which every model needs, come last.
"""

from __future__ import annotations

import json
import re
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.training.checks import is_whole
from hotrow.training.hugectr.snapshots.original_states import WAY_OUT, OriginalLayout
from hotrow.training.hugectr.trainer.embedding import EmbeddingTable
from hotrow.training.hugectr.trainer.optimizers import Rule
from hotrow.training.hugectr.trainer.processes import Processes
from hotrow.training.hugectr.trainer.trainer import Trainer
from inference_session.errors import ConfigurationError, ModelFormatError
from inference_session.importers.hugectr.data_source import DataSourceParams
from inference_session.importers.hugectr.dense_weights import Statistics, StatisticsFile
from inference_session.importers.hugectr.json_file import read_json
from inference_session.importers.hugectr.ps_fields import KeyType
from inference_session.importers.hugectr.sparse_folder import SparseFolder
from inference_session.model_source import Copy
from inference_session.model_source.create import create_source, split_place
from inference_session.model_source.fetch import fetch
from inference_session.model_spec import KEY_FILE, VECTOR_FILE
from inference_session.platform.drafts import ABANDONED_S, working_folder
from inference_session.platform.file_locks import locked
from inference_session.platform.large_pages import open_for_writing

_ROWS_PER_WRITE = 1 << 20
_BYTES_AT_ONCE = 8 << 20
_STATISTICS = ".ntp.json"
_KEYS = ".key"
_WEIGHTS_NAME = re.compile(r"(?<!_opt)_dense_\d+\.model$")


@dataclass(frozen=True)
class SnapshotNames:
    """HugeCTR's names of the files."""

    prefix: str
    iteration: int

    @property
    def dense(self) -> str:
        """Dense weights."""
        return f"{self.prefix}_dense_{self.iteration}.model"

    @property
    def dense_states(self) -> str:
        """Optimizer states of the dense network."""
        return f"{self.prefix}_opt_dense_{self.iteration}.model"

    def sparse(self, table: int) -> str:
        """The folder of a table."""
        return f"{self.prefix}{table}_sparse_{self.iteration}.model"

    def sparse_states(self, table: int) -> str:
        """Optimizer states of a table."""
        return f"{self.prefix}{table}_opt_sparse_{self.iteration}.model"


def save_snapshot(trainer: Trainer, prefix: str, iteration: int, params: DataSourceParams) -> None:
    """Write all files of a model, in the working directory or in `local_model_home` or `hdfs_model_home`.

    All processes call it; process 0 writes, and the others send it their rows.

    Raises:
        OSError, UnavailableError: the files cannot be written; the files in place then are no complete model.
    """
    if trainer.processes.rank > 0:
        for column in (column for table in trainer.tables for column in table.columns):
            for _ in trainer.processes.rows_of_all(column):
                pass
        return
    home = params.hdfs_model_home if params.is_hdfs else params.local_model_home
    whole = params.place_of(f"{home}/{prefix}_" if home else f"{prefix}_")
    folder, stem = split_place(whole)
    names = SnapshotNames(stem.removesuffix("_"), iteration)
    with _draft(folder, names) as draft:
        written = _write_all(trainer, names, draft)
        _put_in_place(draft, folder, written)


def _draft(folder: str, names: SnapshotNames) -> AbstractContextManager[Path]:
    """A folder for the files of an unfinished snapshot: in the folder where they go to, or on this machine."""
    if "://" in folder:
        return working_folder(Path(tempfile.gettempdir()), "hotrow-snapshot-", abandoned_s=ABANDONED_S)
    Path(folder).mkdir(parents=True, exist_ok=True)
    return working_folder(Path(folder), f".tmp-{names.prefix}_")


def _write_all(trainer: Trainer, names: SnapshotNames, draft: Path) -> list[str]:
    """The written files, in the order in which they are to appear; the dense weights last."""
    written = []
    for number, table in enumerate(trainer.tables):
        written += _write_table(table, trainer.processes, names, number, draft)
    optimizer = trainer.dense_optimizer
    columns = [
        torch.cat([states[name].reshape(-1) for states in optimizer.states]) if optimizer.states else torch.empty(0)
        for name in optimizer.rule.state_names
    ]
    kind = optimizer.rule.__class__.__name__
    written += _write_states(draft, names.dense_states, columns, kind, optimizer.num_steps, {})
    if statistics := trainer.network.statistics():
        _write_statistics(draft / (names.dense + _STATISTICS), statistics)
        written.append(names.dense + _STATISTICS)
    _write_floats(draft / names.dense, [weight.detach() for weight in trainer.weights])
    return [*written, names.dense]


def _write_table(
    table: EmbeddingTable, processes: Processes, names: SnapshotNames, number: int, draft: Path
) -> list[str]:
    """Rows and states of all processes, and with the states the keys that they are of."""
    folder, states = draft / names.sparse(number), names.sparse_states(number)
    keys, vectors, *columns = (processes.rows_of_all(column) for column in table.columns)
    _write_rows(folder, keys, vectors)
    with (folder / KEY_FILE).open("rb") as file:
        _write(draft / f"{states}{_KEYS}", iter(partial(file.read, _BYTES_AT_ONCE), b""))
    about = {"num_rows": (folder / KEY_FILE).stat().st_size // 8, "keys": _digest(folder / KEY_FILE)}
    parts = (part for column in columns for part in column)
    written = _write_states(draft, states, parts, table.rule.__class__.__name__, table.rows.steps, about)
    return [names.sparse(number), f"{states}{_KEYS}", *written]


def save_table(table: EmbeddingTable, processes: Processes, folder: Path) -> None:
    """Write keys and vectors of all processes, which all call it, into a folder; one of that name is replaced.

    Raises:
        OSError: the folder cannot be written.
    """
    keys, vectors = (processes.rows_of_all(column) for column in (table.keys, table.weight))
    if processes.rank > 0:
        for _ in (*keys, *vectors):
            pass
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with working_folder(folder.parent, f".tmp-{folder.name}_") as draft:
        _write_rows(draft / folder.name, keys, vectors)
        with _alone_in(str(folder.parent)):
            if folder.exists():
                folder.rename(draft / f"{folder.name}.replaced")  # removed only once the new one is in place
            (draft / folder.name).rename(folder)


def _write_rows(folder: Path, keys: Iterable[Tensor], vectors: Iterable[Tensor]) -> None:
    folder.mkdir()
    _write(folder / KEY_FILE, (part.cpu().numpy().astype("<i8") for part in keys))
    _write_floats(folder / VECTOR_FILE, vectors)


def _write_states(
    draft: Path, name: str, states: Iterable[Tensor], optimizer: str, num_steps: int, about: dict[str, Any]
) -> list[str]:
    """Concatenated states, and in a separate JSON what HugeCTR does not save: the steps so far, and the optimizer."""
    _write_floats(draft / name, states)
    _write(draft / f"{name}.json", [json.dumps({"optimizer": optimizer, "num_steps": num_steps, **about}).encode()])
    return [f"{name}.json", name]


def _write_statistics(path: Path, statistics: Sequence[tuple[Tensor, Tensor]]) -> None:
    layers = [
        {"type": "BatchNorm", "mean": mean.cpu().tolist(), "var": variance.cpu().tolist()}
        for mean, variance in statistics
    ]
    _write(path, [json.dumps({"layers": layers}, indent=2).encode()])


def _write_floats(path: Path, tensors: Iterable[Tensor]) -> None:
    parts = (part for tensor in tensors for part in tensor.split(_ROWS_PER_WRITE))
    _write(path, (part.cpu().numpy().astype("<f4") for part in parts))


def _write(path: Path, parts: Any) -> None:
    with open_for_writing(path) as file:
        for part in parts:
            file.write(part.tobytes() if isinstance(part, np.ndarray) else part)
        file.flush()


def _put_in_place(draft: Path, folder: str, names: Sequence[str]) -> None:
    """Remove an earlier snapshot of these names, its dense weights first, then put the new one in place."""
    with _alone_in(folder):
        with create_source(folder) as place:
            for name in reversed(names):
                place.remove(name)
        for name in names:
            if "://" in folder:
                with Copy(draft / name, f"{folder.rstrip('/')}/{name}") as copy:
                    copy.run()
            else:
                (draft / name).rename(Path(folder) / name)


@contextmanager
def _alone_in(folder: str) -> Iterator[None]:
    """Wait for jobs of this machine that put files in place there: those of two jobs would become one model."""
    with ExitStack() as held:
        if "://" not in folder:
            with suppress(OSError):  # a file system without locks
                held.enter_context(locked(Path(folder), partial(_say_that_it_waits, folder)))
        yield


def _say_that_it_waits(folder: str) -> None:
    print(f"{folder or '.'}: waiting for another job, which is saving there", flush=True)


def load_dense_weights(trainer: Trainer, place: str, params: DataSourceParams) -> None:
    """Read dense weights, and the running statistics of a network that has some. An error changes nothing.

    Raises:
        ModelFormatError: a file does not have the size that the network needs, or its statistics are of other layers.
        OSError, UnavailableError: a file cannot be read.
    """
    weights = [weight.data for weight in trainer.weights]
    floats = _floats(fetch(params.place_of(place)), _num_elements(weights))
    running = trainer.network.statistics()
    found = _read_statistics(fetch(params.place_of(place + _STATISTICS)), running) if running else []
    _fill(weights, floats)
    for (mean, variance), values in zip(running, found, strict=True):
        mean.copy_(torch.from_numpy(values.mean))
        variance.copy_(torch.from_numpy(values.variance))


def _read_statistics(path: Path, running: Sequence[tuple[Tensor, Tensor]]) -> list[Statistics]:
    file = StatisticsFile(path)
    found = [file.take(f"BatchNorm layer {number}", len(mean)) for number, (mean, _) in enumerate(running, 1)]
    file.finish()
    return found


def load_dense_states(trainer: Trainer, place: str, params: DataSourceParams) -> None:
    """Read optimizer states of the dense network; errors as `load_dense_weights`, also where they are its weights."""
    optimizer = trainer.dense_optimizer
    about = _about_states(place, params, optimizer.rule.__class__.__name__)
    path = fetch(params.place_of(place))
    tensors = [states[name] for name in optimizer.rule.state_names for states in optimizer.states]
    num_halves = path.stat().st_size // 2 if path.exists() and not about else -1
    # HugeCTR 3 writes halves in mixed precision.
    count = _num_elements(tensors)
    floats = _floats(path, count, "<f2" if num_halves == count else "<f4")
    if not about:
        _refuse_weights(place, floats, optimizer.rule)
    _fill(tensors, floats)
    optimizer.num_steps = about.get("num_steps", 0)


def _refuse_weights(place: str, floats: NDArray[np.float32], rule: Rule) -> None:
    """Raise where states that HugeCTR wrote are none: only the file's name and its values may show that."""
    by_name = zip(rule.state_names, np.split(floats, max(len(rule.state_names), 1)), strict=False)
    if _WEIGHTS_NAME.search(place) or any((values < 0).any() for name, values in by_name if name in rule.squares):
        raise ModelFormatError(
            f"{place}: not optimizer states of {rule.__class__.__name__!r}, but perhaps dense weights, or in another "
            f"order than {', '.join(rule.state_names)}; HugeCTR names states <prefix>_opt_dense_<iteration>.model"
        )


def load_tables(tables: Sequence[tuple[EmbeddingTable, str]], params: DataSourceParams, key_type: KeyType) -> None:
    """Read tables, each from its folder, and replace their rows; errors as `load_dense_weights`.

    All sizes are checked first: a folder of another model changes no table.
    """
    folders = [SparseFolder(fetch(params.place_of(place)), table.embedding_dim, key_type) for table, place in tables]
    for folder in folders:
        _ = folder.num_rows
    for (table, place), folder in zip(tables, folders, strict=True):
        _load_table(table, place, folder)


def _load_table(table: EmbeddingTable, place: str, folder: SparseFolder) -> None:
    chunks = [(part[kept], vectors[kept]) for part, vectors in folder.chunks() for kept in [table.keeps(part)]]
    keys = np.concatenate([np.empty(0, np.int64), *(part for part, _ in chunks)])
    vectors = np.concatenate([np.empty((0, table.embedding_dim), np.float32), *(part for _, part in chunks)])
    table.load(keys, vectors)
    table.read_from = place


def load_table_states(
    table: EmbeddingTable, place: str, params: DataSourceParams, layout: OriginalLayout, key_type: KeyType
) -> None:
    """Read optimizer states of a table whose rows were read before; `layout` is that of files that HugeCTR wrote.

    Raises:
        ModelFormatError, OSError, UnavailableError: as `load_dense_weights`; also if the states are of another table.
        UnsupportedModelError: as `OriginalLayout.read`.
    """
    path, names = fetch(params.place_of(place)), table.rule.state_names
    about = _about_states(place, params, table.rule.__class__.__name__)
    if not names:
        return
    if about or _is_there(f"{place}{_KEYS}", params):
        keys, order = _keys_of_states(fetch(params.place_of(f"{place}{_KEYS}")), about), names
        floats = _floats(path, len(names) * len(keys) * table.embedding_dim)
        states: Iterable[NDArray[np.float32]] = floats.reshape(len(names), len(keys), table.embedding_dim)
    else:
        keys, order = _keys_of_rows(table, path, params, key_type), table.rule.original_states
        states = layout.read(_existing(path), keys, len(order), table.embedding_dim)
    rows = table.rows_of(keys)
    if not np.array_equal(rows > 0, table.keeps(keys)) or np.count_nonzero(rows) != table.num_rows:
        raise ModelFormatError(
            f"{path}: states of {len(keys)} rows, which are not those of the table {table.name!r}. Load the sparse "
            "weights of the same snapshot first"
        )
    for name, values in zip(order, states, strict=True):
        table.set_state(name, rows[rows > 0], values[rows > 0])
    table.rows.steps = about.get("num_steps", 0)


def _keys_of_rows(table: EmbeddingTable, path: Path, params: DataSourceParams, key_type: KeyType) -> NDArray[np.int64]:
    """The keys of the sparse weights that were read last, in their order."""
    if not table.read_from:
        raise ModelFormatError(
            f"{path}: HugeCTR wrote no keys with it. Load the sparse weights of the same snapshot first, which have "
            f"them. {WAY_OUT}"
        )
    folder = SparseFolder(fetch(params.place_of(table.read_from)), table.embedding_dim, key_type)
    return np.concatenate([np.empty(0, np.int64), *folder.key_chunks()])


def _keys_of_states(path: Path, about: Mapping[str, Any]) -> NDArray[np.int64]:
    if "num_rows" not in about:
        name = path.name.removesuffix(_KEYS)
        raise ModelFormatError(f"{path}: {name}.json, which belongs to it, is missing or not that of a table")
    if not path.exists():
        raise ModelFormatError(f"{path}: no such file; it holds the keys of the states next to it")
    if path.stat().st_size / 8 != about["num_rows"] or _digest(path) != about.get("keys"):
        raise ModelFormatError(f"{path}: not the {about['num_rows']} keys that the states next to it were saved with")
    return np.fromfile(path, "<i8").astype(np.int64, copy=False)


def _about_states(place: str, params: DataSourceParams, optimizer: str) -> dict[str, Any]:
    """The content of the JSON that belongs to a file of states; empty if HugeCTR wrote the file."""
    if not _is_there(f"{place}.json", params):
        return {}
    path = fetch(params.place_of(f"{place}.json"))
    document = read_json(path, ModelFormatError).document
    if document.get("optimizer") != optimizer:
        raise ModelFormatError(f"{path}: states of {document.get('optimizer')!r}; the model trains with {optimizer!r}")
    steps: Any = document.get("num_steps")
    if not is_whole(steps) or steps < 0:
        raise ModelFormatError(f"{path}: field 'num_steps' is {steps!r}, expected a whole number from 0")
    return document


def _is_there(place: str, params: DataSourceParams) -> bool:
    folder, name = split_place(params.place_of(place))
    with create_source(folder) as source:
        return source.stat(name) is not None


def _num_elements(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _fill(tensors: Sequence[Tensor], floats: NDArray[np.float32]) -> None:
    begin = 0
    for tensor in tensors:
        tensor.copy_(torch.from_numpy(floats[begin : begin + tensor.numel()].reshape(tensor.shape)))
        begin += tensor.numel()


def _existing(path: Path) -> Path:
    if not path.exists():
        raise ConfigurationError(f"{path}: no such file; paths count from the working directory, {Path.cwd()}")
    return path


def _floats(path: Path, count: int, dtype: str = "<f4") -> NDArray[np.float32]:
    num_bytes, expected = _existing(path).stat().st_size, count * np.dtype(dtype).itemsize
    if num_bytes != expected:
        raise ModelFormatError(f"{path}: {num_bytes} bytes, expected {expected}; does it belong to another model?")
    return np.fromfile(path, dtype).astype(np.float32, copy=False)


def _digest(path: Path) -> int:
    digest = 0
    with path.open("rb") as file:
        while part := file.read(_BYTES_AT_ONCE):
            digest = zlib.crc32(part, digest)
    return digest
