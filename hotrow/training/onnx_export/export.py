"""`export`: all ranks write a live model as a version directory."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hotrow.training.checks import check, is_whole
from hotrow.training.model_notes import exporting
from hotrow.training.onnx_export.assembly import assemble
from hotrow.training.onnx_export.cutting import Cut, find_cuts
from hotrow.training.onnx_export.dense_network import (
    computes_in,
    first_lines,
    named_outputs,
    table_names,
    trace,
    unwrapped,
    waited,
)
from hotrow.training.onnx_export.exported_table import ExportedTable, RankRows
from hotrow.training.onnx_export.inputs import Form, ServedInputs
from hotrow.training.ranks import Ranks
from hotrow.training.tables import FileWriter, Table, as_vectors, chunks, create_file, write_table
from inference_session import InferenceSession
from inference_session.errors import ConfigurationError, HotrowError, ModelFormatError, UnsupportedModelError
from inference_session.importers.report import ImportReport
from inference_session.model_source import local_folder
from inference_session.model_spec import KEY_FILE, TABLES_FOLDER, VECTOR_FILE, ModelSpec, NamedArrays, folder_names
from inference_session.platform.drafts import check_space, draft_version
from inference_session.version_directory.manifest import describe_version
from inference_session.version_directory.publishing import check_networks, share_unchanged
from triton_backend.repository.config_writer import write_model_config

_LOG = logging.getLogger(__name__)
_SHARED_FILE = ".ranks"
_TOLERANCE = 1e-5
"""Tolerance of answers, absolute and relative: float32 sums in another order."""
_FLOAT16_TOLERANCE = 4e-3
"""The same where the network computes in float16: about four times the distance of its numbers."""


def export(
    model: nn.Module,
    *,
    example: Any,
    inputs: Form | Mapping[str, Form] | None = None,
    outputs: Sequence[str],
    repository: str | Path,
    name: str,
    version: int | None = None,
) -> int:
    """Write the current state of a model in training as `<repository>/<name>/<version>`; returns the version.

    The tables of nn.Embedding, nn.EmbeddingBag, `HashEmbedding`, `HashEmbeddingBag` and TorchRec's collections (sharded
    or not, with managed collisions or not) are written to files. The rest of the model becomes the dense network.
    Before the version appears, its answers to the example are compared with the live model's. It appears completely
    or not at all.

    All ranks of a distributed job call this; each writes its own rows, so the repository must be in a file system
    that they share. The example may be a different one on each rank.

    Args:
        example: what `forward` takes: one batch; a tuple for several arguments; a dict for named arguments.
            Served inputs have the names of forward's parameters, of the fields of a dataclass or the keys of a dict,
            and of the features of a KeyedJaggedTensor. Inputs that no served output needs, such as labels, are left
            out.
        inputs: the form in which clients send lists of ids: `padded(max_len=...)`, `lengths()`, or a dict of these by
            feature.
        outputs: keys of the dict, or fields of the dataclass or named tuple, that forward returns. Or new names of all
            that it returns, in its order. Losses (tensors without dimensions) and inputs that forward returns
            unchanged are not counted if there are fewer names than tensors.
        repository: the model repository; created if it does not exist.
        name: the model's folder in it.
        version: if None, one above the highest that exists.

    Raises:
        ConfigurationError: the example, the outputs or the names do not fit, or the version exists.
        UnsupportedModelError: a module cannot be cut out, or the network cannot be traced; the message names it.
        UnavailableError: the disk has too little space; another process writes this version; a rank failed, or does
            not see the repository.
        OSError: the file system refuses a write.
    """
    ranks = Ranks()
    began = datetime.now(timezone.utc)
    _check_names(name, version)
    folder = local_folder(repository)
    plan = ranks.together(lambda: _Plan.make(model, example, inputs, outputs))
    expected = ranks.together(lambda: plan.run_live(model))
    job = _Export(plan, ranks, folder, name, version, began)
    return job.run(expected)


def _check_names(name: Any, version: Any) -> None:
    if not isinstance(name, str):
        raise ConfigurationError(f"name is {name!r}; give the model's name as text")
    check(version is None or is_whole(version), "version", version, "a whole number, or None for the next one")


@dataclass
class _Plan:
    """The inputs of an export, on this rank."""

    network: nn.Module
    """Unwrapped."""
    cuts: list[Cut]
    inputs: ServedInputs
    outputs: list[str]
    chosen: list[int]

    @classmethod
    def make(
        cls, model: nn.Module, example: Any, forms: Form | Mapping[str, Form] | None, outputs: Sequence[str]
    ) -> _Plan:
        check(isinstance(model, nn.Module), "model", type(model).__name__, "a torch.nn.Module that has its weights")
        network = unwrapped(model)
        names = [outputs] if isinstance(outputs, str) else list(outputs or ())
        if not names or len(set(names)) < len(names) or not all(isinstance(name, str) and name for name in names):
            raise ConfigurationError(f"outputs are {names!r}; give at least one, each with a different name")
        _refuse_fsdp(network)
        cuts = find_cuts(network)
        return cls(network, cuts, ServedInputs(network, example, forms), names, [])

    def run_live(self, model: nn.Module) -> list[NDArray[Any]]:
        """The live model's outputs for the example; all ranks run it, as sharded modules need."""
        with _evaluating(model), _noting_orders(self.cuts):
            returned = _forward(model, *self.inputs.original)
        tensors = [tensor for _, tensor in returned]
        self.chosen = _chosen(returned, self.outputs, self.inputs)
        for name, index in zip(self.outputs, self.chosen, strict=True):
            if tensors[index].dtype is torch.bfloat16:
                raise UnsupportedModelError(f"output {name!r} is bfloat16, which is not served; return it as .float()")
        return [tensors[index].detach().cpu().numpy() for index in self.chosen]


def _refuse_fsdp(network: nn.Module) -> None:
    """Its weights are whole only while they are used, and an export would keep them so: training could not go on."""
    for path, module in network.named_modules():
        if isinstance(module, FSDPModule):
            raise UnsupportedModelError(
                f"{path or 'the model'}: fully_shard divides its weights; save a training.Checkpoint, restore it into "
                "a model that is not divided, and export that"
            )


def _forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str | None, Tensor]]:
    try:
        return named_outputs(model(*args, **kwargs))
    except HotrowError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"the model cannot compute the example: {first_lines(error)}; give a batch as in training"
        ) from error


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the live model into evaluation mode without reduced precision, and restores its mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    precision = torch.get_float32_matmul_precision()
    model.eval()
    try:
        with exporting(), torch.no_grad(), torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            torch.set_float32_matmul_precision("highest")
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for module, training in modes:
            module.training = training


@contextmanager
def _noting_orders(cuts: Sequence[Cut]) -> Iterator[None]:
    """Note the order in which collections of the live model output their vectors: sharding may change it."""

    def noting(cut: Cut) -> Callable[..., Any]:
        def note(_module: nn.Module, _args: Any, output: Any) -> Any:
            # An awaitable may be waited for only once, so the model gets its result.
            parts = [waited(part) for part in output] if isinstance(output, tuple) else [waited(output)]
            if hasattr(parts[0], "length_per_key") and hasattr(parts[0], "keys"):
                cut.order[:] = list(parts[0].keys())
            return tuple(parts) if isinstance(output, tuple) else parts[0]

        return note

    with ExitStack() as hooks:
        for cut in cuts:
            hooks.callback(cut.module.register_forward_hook(noting(cut)).remove)
        yield


def _chosen(returned: list[tuple[str | None, Tensor]], names: list[str], inputs: ServedInputs) -> list[int]:
    """The output tensors of forward that the names belong to: by its keys, or else in its order."""
    places = {key: i for i, (key, _) in enumerate(returned) if key is not None}
    if all(name in places for name in names):
        return [places[name] for name in names]
    chosen = _in_order([tensor for _, tensor in returned], names, inputs)
    for name, place in zip(names, chosen, strict=True):
        if places.get(name, place) != place:
            raise ConfigurationError(
                f"outputs names {name!r} in the place of {returned[place][0]!r}; give keys of forward's output alone "
                f"({', '.join(places)}), or new names in its order"
            )
    return chosen


def _in_order(tensors: list[Tensor], names: list[str], inputs: ServedInputs) -> list[int]:
    if len(tensors) == len(names):
        return list(range(len(tensors)))
    served = [i for i, tensor in enumerate(tensors) if tensor.dim() and not inputs.is_given(tensor)]
    if len(served) == len(names):
        return served
    shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors) or "none"
    raise ConfigurationError(
        f"outputs names {len(names)} tensors ({', '.join(names)}), but forward returns {len(tensors)}, of shapes "
        f"{shapes}; name each"
    )


@dataclass
class _Export:
    """One export, on this rank."""

    plan: _Plan
    ranks: Ranks
    repository: Path
    name: str
    version: int | None
    began: datetime

    def run(self, expected: list[NDArray[Any]]) -> int:
        """All of it; returns the version."""
        with ExitStack() as stack:
            draft, target = self._draft(stack)
            files = self._files()
            self.ranks.first(lambda: self._create(draft, files))
            network, checksums = self.ranks.together(lambda: self._write_and_trace(draft, files))
            known = {name: checksum for of_rank in self.ranks.gather(checksums) for name, checksum in of_rank.items()}
            self.ranks.first(lambda: self._finish(draft, target, network, files, expected, known))
            self.ranks.first(stack.close)  # the version appears
        return int(target.name)

    def _draft(self, stack: ExitStack) -> tuple[Path, Path]:
        """The draft, which all ranks see, and what it becomes."""
        token = uuid.uuid4().hex

        def begin() -> tuple[Path, Path, str]:
            draft, target = stack.enter_context(draft_version(self.repository, self.name, self.version))
            (draft / _SHARED_FILE).write_text(token)
            return draft.absolute(), target.absolute(), token

        draft, target, told = self.ranks.first(begin)
        self.ranks.together(lambda: _check_shared(draft, told))
        return draft, target

    def _files(self) -> list[ExportedTable]:
        tables = [table for cut in self.plan.cuts for table in cut.tables]
        folders = folder_names([table.name for table in tables])
        of_ranks = self.ranks.gather([_stored_rows(table) for table in tables])
        files = []
        for table, folder, parts in zip(tables, folders, zip(*of_ranks, strict=True), strict=True):
            stored = [part for part in parts if part is not None]
            count = sum(part.count for part in stored) if table.has_keys else table.num_rows
            if not count and table.hash_table is None:
                raise UnsupportedModelError(
                    f"{table.path}: table {table.name!r} has no rows yet; train before exporting"
                )
            if table.dtype is torch.float64:
                raise UnsupportedModelError(
                    f"{table.path}: table {table.name!r} is float64, and tables are stored as float32 or float16; "
                    "convert the model with .float()"
                )
            files.append(ExportedTable(table, max(count, 1), folder, stored, is_empty=not count))
        return files

    def _create(self, draft: Path, files: list[ExportedTable]) -> None:
        num_bytes = sum(file.num_rows * (file.table.row_bytes + 8 * file.table.has_keys) for file in files)
        check_space(self.repository, num_bytes, "the tables need")
        for file in files:
            create_file(draft / file.location, file.num_rows * file.table.row_bytes)
            if file.table.has_keys:
                create_file(draft / file.key_location, file.num_rows * 8)

    def _write_and_trace(self, draft: Path, files: list[ExportedTable]) -> tuple[Any, dict[str, str]]:
        """Write this rank's rows while rank 0 traces the network.

        Returns the network on rank 0, None elsewhere, and the checksums of files that this rank wrote alone.
        """
        plan = self.plan
        for file in files:
            if file.table.shards_of is not None:
                kind = getattr(torch, file.table.file_type)
                file.table.unknown_vectors = torch.tensor(file.unknown_vectors, dtype=kind, device=file.table.device)
        with ThreadPoolExecutor(1) as background:
            checksums = background.submit(self._write, draft, files)
            is_traced = self.ranks.is_first
            traced = (plan.network, plan.cuts, plan.inputs, plan.chosen, plan.outputs, files)
            return (trace(*traced) if is_traced else None), checksums.result()

    def _write(self, draft: Path, files: list[ExportedTable]) -> dict[str, str]:
        """Write the rows of this rank; returns the checksums of files that it wrote alone."""
        checksums: dict[str, str | None] = {}
        with torch.no_grad():
            for file in files:
                if file.table.has_keys:
                    first = sum(part.count for part in file.parts[: self.ranks.rank])
                    checksums.update(_write_stored(draft, file, first))
                elif self.ranks.is_first or not file.table.is_replicated():
                    checksums[file.location] = write_table(draft / file.location, file.table, file.table.shards())
        return {name: checksum for name, checksum in checksums.items() if checksum is not None}

    def _finish(
        self,
        draft: Path,
        target: Path,
        network: ModelProto,
        files: list[ExportedTable],
        expected: list[NDArray[Any]],
        checksums: dict[str, str],
    ) -> None:
        """Take the network apart, describe and verify, in the draft."""
        (draft / _SHARED_FILE).unlink()
        plan = self.plan
        report = _assembled(draft, target, network, files)
        for note in report.notes:
            _LOG.warning("%s: %s", target, note)
        spec = self._spec(report.spec, files)
        _empty_files(draft, spec)
        describe_version(spec, draft, known=checksums)
        check_networks(draft, spec.source)  # training must not end with what a network may end
        tolerance = _FLOAT16_TOLERANCE if computes_in(network, TensorProto.FLOAT16) else _TOLERANCE
        _verify(draft, spec, plan.inputs.arrays(), expected, tolerance)
        write_model_config(draft, spec, self.name)
        share_unchanged(draft)

    def _spec(self, spec: ModelSpec, files: list[ExportedTable]) -> ModelSpec:
        keyed = {file.folder: file for file in files if file.table.has_keys}
        tables = tuple(
            keyed[table.folder].described(table) if table.folder in keyed else table for table in spec.tables
        )
        moment = self.began.isoformat()
        source = f"{type(self.plan.network).__name__}, exported in training"
        return replace(spec, tables=tables, source=source, settings={**spec.settings, "update_since": moment})


def _empty_files(draft: Path, spec: ModelSpec) -> None:
    """Remove the row with which a table without rows was traced."""
    for table in spec.tables:
        if not table.num_rows:
            for name in (KEY_FILE, VECTOR_FILE):
                os.truncate(draft / TABLES_FOLDER / table.folder / name, 0)


def _check_shared(draft: Path, token: str) -> None:
    try:
        found = (draft / _SHARED_FILE).read_text()
    except OSError:
        found = ""
    if found != token:
        raise ConfigurationError(
            f"{draft} is not visible to all ranks; the repository must be in a file system that they share"
        )


def _stored_rows(table: Table) -> RankRows | None:
    if not table.has_keys:
        return None
    known = table.known_keys()
    (unknown,) = _rows_at(table, torch.tensor([known.unknown_row]))
    first_row = min((shard.first_row for shard in table.shards()), default=0)
    return RankRows(known.num_served, first_row, tuple(float(element) for element in unknown))


def _rows_at(table: Table, rows: Tensor) -> NDArray[Any]:
    """Rows, by their numbers in the whole table, of the shard that this rank holds."""
    for shard in table.shards():
        local = rows.to(shard.tensor.device) - shard.first_row
        if bool(((local >= 0) & (local < shard.tensor.shape[0])).all()):
            return as_vectors(shard.tensor[local], table)
    raise UnsupportedModelError(f"{table.path}: table {table.name!r} has rows on another rank than its ids")


def _write_stored(draft: Path, file: ExportedTable, first: int) -> dict[str, str | None]:
    """Write keys and rows of this rank, from that row of the file on; returns the files' checksums, if known."""
    table = file.table
    known = table.known_keys()
    count = known.num_served
    hashed = count == file.num_rows
    with FileWriter(draft / file.key_location, hashed=hashed) as writer:
        writer.write(first * 8, known.keys[:count].cpu().numpy())
        checksums = {file.key_location: writer.finish()}
    with FileWriter(draft / file.location, hashed=hashed) as writer:
        for rows in chunks(count, table.row_bytes):
            writer.write((first + rows.start) * table.row_bytes, _rows_at(table, known.rows[rows]))
        return {**checksums, file.location: writer.finish()}


def _assembled(draft: Path, target: Path, network: ModelProto, files: Sequence[ExportedTable]) -> ImportReport:
    try:
        return assemble(draft, target, network, dict(zip(table_names(files), files, strict=True)))
    except ModelFormatError as error:
        if computes_in(network, TensorProto.BFLOAT16):
            raise UnsupportedModelError(
                "the model computes in bfloat16, for which ONNX Runtime lacks operators; convert it with .float(), and "
                "leave torch.autocast out of its forward"
            ) from error
        raise


def _verify(draft: Path, spec: ModelSpec, arrays: NamedArrays, expected: list[NDArray[Any]], tolerance: float) -> None:
    """UnsupportedModelError if the draft answers the example differently from the live model."""
    sent = {tensor.name: arrays[tensor.name] for tensor in spec.inputs}
    with InferenceSession.open(draft, device="cpu", update_stream="") as session:
        answers = session.run(sent, [tensor.name for tensor in spec.outputs])
    for tensor, live in zip(spec.outputs, expected, strict=True):
        found = np.asarray(answers[tensor.name])
        if found.shape != live.shape:
            raise UnsupportedModelError(
                f"output {tensor.name!r} has shape {list(found.shape)} when served, {list(live.shape)} in training"
            )
        if not np.allclose(found, live, rtol=tolerance, atol=tolerance, equal_nan=True):
            worst = float(np.nanmax(np.abs(found.astype(np.float64) - live.astype(np.float64))))
            raise UnsupportedModelError(
                f"output {tensor.name!r} differs from the live model's by up to {worst:.3g} on the example: what "
                "forward does in evaluation mode is not what was traced (does it depend on Python values?)"
            )
