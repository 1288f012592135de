"""`Checkpoint`: saves what training needs to go on, in a local folder or on HDFS, completely or not at all."""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from hotrow.training.checkpoints.files import METADATA_FILE, CheckpointReader
from hotrow.training.checkpoints.training_state import TrainingState
from hotrow.training.checks import whole
from hotrow.training.model_notes import PUBLISHERS, RESTORED, RestoredState
from hotrow.training.onnx_export.dense_network import unwrapped
from hotrow.training.ranks import Ranks
from inference_session.errors import ConfigurationError, HotrowError, ModelFormatError
from inference_session.model_source import Copy, create_source, is_url
from inference_session.model_source.base import ModelSource
from inference_session.platform.drafts import ABANDONED_S, draft_folder, remove_abandoned, working_folder

DESCRIPTION_FILE = "checkpoint.json"
FORMAT = 1
_UNCONFIRMED = "unconfirmed_"


class Checkpoint:
    """Saves and restores a model and its optimizers: dense weights, tables, and the states of the optimizers.

        checkpoint = Checkpoint(model, optimizer, "hdfs://namenode:9870/ckpt/ctr")
        start = checkpoint.restore()        # 0 if there is none
        for step, batch in enumerate(loader, start):
            ...
            if step % 10_000 == 0:
                checkpoint.save(step)

    Below the place, each checkpoint is a folder named after its step: torch's distributed checkpoint, and
    `checkpoint.json`. It appears when it is complete. Any number of ranks may restore what another number has saved.
    All ranks call `save` and `restore`; a folder must be in a file system that they share.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        place: str | Path,
        *,
        keep: int = 2,
    ) -> None:
        """Check the arguments. This reads and writes nothing.

        Args:
            model: the model in training. The states of TorchRec's fused optimizers are saved with it.
            optimizer: one or several, always in the same order.
            place: a folder, or hdfs://HOST:PORT/path.
            keep: how many checkpoints stay; older ones are removed after one has been saved.

        Raises:
            ConfigurationError: an argument is not allowed.
        """
        if not isinstance(model, nn.Module):
            raise ConfigurationError(f"model is a {type(model).__name__}; give a torch.nn.Module")
        if not isinstance(place, (str, Path)) or not str(place):
            raise ConfigurationError(f"place is {place!r}; give a folder or an hdfs:// URL")
        self._model, self._place, self._keep = unwrapped(model), str(place), whole("keep", keep)
        optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        self._state = TrainingState(model, optimizers)
        self._ranks = Ranks()
        with create_source(place):
            pass  # a malformed URL is refused here

    def save(self, step: int) -> None:
        """Save the state after a step; returns when the checkpoint is in its place.

        Raises:
            ConfigurationError: a checkpoint of this step exists already.
            UnavailableError: the place does not answer, or a rank failed.
            OSError: it cannot be written.
        """
        step = whole("step", step, 0)
        moment = min(self._ranks.gather(self._moment()))
        with torch.no_grad():
            tensors, others = self._ranks.together(self._state.collect)
        others = {name: value for of_rank in self._ranks.gather(others) for name, value in of_rank.items()}
        tensors.update(self._state.hashed_rows(self._ranks))
        description = {"format": FORMAT, "step": step, "moment": moment.isoformat(), "state": others}
        if is_url(self._place):
            self._save_remotely(step, tensors, description)
        else:
            self._save_here(step, tensors, description)
        self._ranks.first(self._remove_older)

    def restore(self, step: int | None = None) -> int:
        """Restore model and optimizers from a checkpoint, the newest if None; returns the step to go on with.

        That is the step after the saved one, or 0 if no checkpoint exists. An `UpdatePublisher` of this model
        then publishes the rows again that the servers have from the lost steps.

        Raises:
            ModelFormatError: the checkpoint is damaged, or incomplete.
            ConfigurationError: no checkpoint of this step exists, or it is of another model.
            UnavailableError: the place does not answer, or a rank failed.
        """
        steps, damaged = self._ranks.first(lambda: (self.steps(), self._incomplete()))
        if step is None and damaged:
            raise ModelFormatError(
                f"{self._place}/{damaged[-1]}: the newest checkpoint has no {DESCRIPTION_FILE}; remove its folder, or "
                "name the step to restore"
            )
        if step is None and not steps:
            return 0
        chosen = steps[-1] if step is None else step
        if chosen not in steps:
            raise ConfigurationError(f"{self._place}: no checkpoint of step {chosen}; available: {steps}")
        restored = self._ranks.together(lambda: self._load(chosen))
        RESTORED[self._model] = restored
        return chosen + 1

    def steps(self) -> list[int]:
        """The steps that have checkpoints, ascending."""
        return self._folders_with(DESCRIPTION_FILE)

    def _incomplete(self) -> list[int]:
        """Steps after the newest checkpoint whose folders have lost their description."""
        newest = max(self.steps(), default=-1)
        return [step for step in self._folders_with(METADATA_FILE) if step > newest]

    def _folders_with(self, file: str) -> list[int]:
        with create_source(self._place) as source:
            if source.stat("") is None:
                return []
            paths = [entry.path for entry in source.entries()]
        folders = [path.partition("/")[0] for path in paths if path.partition("/")[2] == file]
        return sorted(int(name) for name in folders if name.isdecimal())

    # Writing

    def _moment(self) -> datetime:
        """What was published before is known to be of this model: after a restore, only once that was taken back."""
        restored = RESTORED.get(self._model)
        return datetime.now(timezone.utc) if restored is None else restored.moment

    def _save_here(self, step: int, tensors: dict[str, Any], description: dict[str, Any]) -> None:
        place = Path(self._place).absolute()
        with _held(self._ranks, lambda: draft_folder(place / str(step))) as draft:
            if self._ranks.is_first:
                remove_abandoned(place, r"\.tmp-[0-9]+")
            self._write(draft, tensors)
            if self._ranks.is_first:
                _describe(draft, description)

    def _save_remotely(self, step: int, tensors: dict[str, Any], description: dict[str, Any]) -> None:
        """Each rank writes its own files here and copies them to a folder next to the target; rank 0 renames it."""
        draft, target = f".tmp-{step}", str(step)
        temporary = working_folder(Path(tempfile.gettempdir()), "hotrow-checkpoint-", abandoned_s=ABANDONED_S)
        with temporary as folder, create_source(self._place) as source:

            def begin() -> None:
                if source.stat(target) is not None:
                    raise ConfigurationError(f"{source.name_of(target)}: already exists; this step was saved before")
                source.remove(draft)
                source.make_folder(draft)

            self._ranks.first(begin)
            self._write(folder, tensors)
            if self._ranks.is_first:
                _describe(folder, description)
            self._ranks.together(lambda: self._copy_all(folder, draft))
            self._ranks.first(lambda: source.rename(draft, target))

    def _copy_all(self, folder: Path, draft: str) -> None:
        for path in sorted(folder.iterdir()):
            with Copy(path, f"{self._place.rstrip('/')}/{draft}/{path.name}") as copy:
                copy.run()

    def _write(self, folder: Path, tensors: dict[str, Any]) -> None:
        """The files of one rank."""
        if keys := self._unconfirmed():
            _save_keys(folder / f"{_UNCONFIRMED}{self._ranks.rank}.npz", keys)
        try:
            with _alone():
                distributed_checkpoint.save(
                    tensors,
                    storage_writer=distributed_checkpoint.FileSystemWriter(folder),
                    process_group=self._ranks.group,
                    no_dist=self._ranks.size == 1,
                )
        except HotrowError:
            raise
        except (Exception, CheckpointException) as error:
            raise _translated(error, f"{folder}: the checkpoint cannot be written") from error

    def _unconfirmed(self) -> dict[str, NDArray[np.int64]]:
        """Keys that the brokers have not confirmed, by the folder of their table; also those of a restored state."""
        publisher, restored = PUBLISHERS.get(self._model), RESTORED.get(self._model)
        return _united([publisher.unconfirmed() if publisher else {}, restored.unconfirmed if restored else {}])

    def _remove_older(self) -> None:
        with create_source(self._place) as source:
            for step in self.steps()[: -self._keep]:
                source.remove(str(step))

    # Reading

    def _load(self, step: int) -> RestoredState:
        place = f"{self._place.rstrip('/')}/{step}"
        with create_source(place) as source:
            description = _description(source)
            _check_metadata(source, description)
            unconfirmed = _unconfirmed(source)
            try:
                reader = CheckpointReader(source)
                saved = reader.read_metadata().state_dict_metadata
                tensors = self._state.targets(saved, place)
                targets = [name for of_rank in self._ranks.gather(list(tensors)) for name in of_rank]
                self._state.check_fits(saved, description["state"], targets, place)
                with _alone():
                    distributed_checkpoint.load(
                        tensors, storage_reader=reader, process_group=self._ranks.group, no_dist=self._ranks.size == 1
                    )
                self._state.load_hashed(self._ranks, saved, partial(_read_alone, source))
            except HotrowError:
                raise
            except (Exception, CheckpointException) as error:
                raise _translated(error, f"{place}: the checkpoint cannot be restored") from error
            self._state.apply(tensors, description["state"])
            return RestoredState(datetime.fromisoformat(description["moment"]), unconfirmed)


def _read_alone(source: ModelSource, tensors: dict[str, Any]) -> None:
    """Fill tensors out of a checkpoint; other ranks need not."""
    with _alone():
        distributed_checkpoint.load(tensors, storage_reader=CheckpointReader(source), no_dist=True)


@contextmanager
def _alone() -> Iterator[None]:
    """Without torch's warning, for each checkpoint, that a process alone may have been meant to be one of several."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _describe(folder: Path, description: Mapping[str, Any]) -> None:
    digest = {"metadata_sha256": _digest((folder / METADATA_FILE).read_bytes())}
    (folder / DESCRIPTION_FILE).write_text(json.dumps({**description, **digest}, indent=1) + "\n", encoding="utf-8")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _description(source: ModelSource) -> dict[str, Any]:
    name = source.name_of(DESCRIPTION_FILE)
    try:
        document = json.loads(_content(source, DESCRIPTION_FILE))
        if document["format"] != FORMAT:
            raise ModelFormatError(f"{name}: format {document['format']!r}, but this version of hotrow reads {FORMAT}")
        datetime.fromisoformat(document["moment"])
        document["state"].items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFormatError(f"{name}: not the description of a checkpoint: {error!r}") from error
    return dict(document)


def _check_metadata(source: ModelSource, description: Mapping[str, Any]) -> None:
    """ModelFormatError if the metadata are not those that were saved; releases up to 0.1.0 noted no checksum."""
    digest = _digest(_content(source, METADATA_FILE))
    if description.get("metadata_sha256", digest) != digest:
        raise ModelFormatError(f"{source.name_of(METADATA_FILE)}: damaged: {DESCRIPTION_FILE} has another checksum")


def _content(source: ModelSource, path: str) -> bytes:
    entry = source.stat(path)
    if entry is None:
        raise ModelFormatError(f"{source.name_of(path)}: no such file; the checkpoint is incomplete")
    return source.read(path, 0, entry.num_bytes)


def _unconfirmed(source: ModelSource) -> dict[str, NDArray[np.int64]]:
    """Keys of all ranks that the brokers had not confirmed, by the folder of their table."""
    paths = [entry.path for entry in source.entries()]
    return _united([_saved_keys(source, path) for path in paths if path.startswith(_UNCONFIRMED)])


def _united(parts: Sequence[Mapping[str, NDArray[np.int64]]]) -> dict[str, NDArray[np.int64]]:
    """The keys of several parts, by table."""
    tables = {table for part in parts for table in part}
    return {table: np.unique(np.concatenate([part[table] for part in parts if table in part])) for table in tables}


def _save_keys(path: Path, keys: Mapping[str, NDArray[np.int64]]) -> None:
    """As np.savez does, which takes no table by the name of one of its own arguments."""
    with zipfile.ZipFile(path, "w") as archive:
        for table, array in keys.items():
            with archive.open(f"{table}.npy", "w") as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def _saved_keys(source: ModelSource, path: str) -> dict[str, NDArray[np.int64]]:
    try:
        with np.load(io.BytesIO(_content(source, path)), allow_pickle=False) as arrays:
            return {table: arrays[table].astype(np.int64) for table in arrays.files}
    except (
        ValueError,
        KeyError,
        EOFError,
        OSError,
        zipfile.BadZipFile,
        zlib.error,
        AttributeError,
        TypeError,
    ) as error:
        raise ModelFormatError(f"{source.name_of(path)}: damaged: {error!r}") from error


@contextmanager
def _held(ranks: Ranks, begin: Callable[[], Any]) -> Iterator[Path]:
    """A draft that rank 0 holds and all write to; it appears when none has failed."""
    draft = begin()

    def enter() -> Path:
        return draft.__enter__()

    folder = ranks.first(enter)
    try:
        yield folder
        ranks.together(lambda: None)
    except BaseException as error:
        if ranks.is_first:
            draft.__exit__(type(error), error, error.__traceback__)
        raise
    ranks.first(lambda: draft.__exit__(None, None, None))


def _translated(error: BaseException, what: str) -> HotrowError | OSError:
    """Turns the error of torch's checkpoint, which holds the errors of all ranks, into one of our errors."""
    causes = [cause[0] for cause in getattr(error, "failures", {}).values()] or [error]
    for cause in causes:
        if isinstance(cause, (HotrowError, OSError)):
            return cause
    return ModelFormatError(f"{what}: {' '.join(str(causes[0]).split())[:300]}")
