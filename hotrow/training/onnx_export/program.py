"""`hotrow import torch`: imports a torch.export program, with a distributed checkpoint if given, as a version.

The program's archive is copied without its tables' values and without pickled data; the copy is read
by torch. Tables are copied from the archive, or the checkpoint, to their files in pieces.
"""

from __future__ import annotations

import json
import math
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from onnx import ModelProto
from torch import Tensor
from torch.export.graph_signature import InputKind, TensorArgument

from hotrow.training.checkpoints.files import METADATA_FILE, CheckpointReader
from hotrow.training.onnx_export.assembly import assemble
from hotrow.training.onnx_export.dense_network import external_tensor, first_lines, forget_sources, quiet
from hotrow.training.onnx_export.exported_table import ExportedTable
from hotrow.training.onnx_export.near_constants import optimized
from hotrow.training.tables import Shard, Table, chunks, create_file, write_table
from inference_session.errors import ConfigurationError, HotrowError, ModelFormatError, UnsupportedModelError, as_thrown
from inference_session.importers.report import ImportReport
from inference_session.model_source import create_source
from inference_session.model_spec import ModelSpec, folder_names
from inference_session.platform.drafts import draft_version
from inference_session.platform.progress import Progress
from inference_session.version_directory.publishing import finish_version

_WEIGHTS, _CONFIG, _SAMPLES = "data/weights/", "_weights_config.json", "data/sample_inputs/"
_DAMAGE = (zipfile.BadZipFile, zlib.error, KeyError, NotImplementedError, EOFError)
"""Errors that reading a damaged archive raises."""
_LOOKUPS = ("aten.embedding", "aten.embedding_bag", "aten._embedding_bag")


def import_program(
    program: Path,
    repository: Path,
    name: str,
    *,
    checkpoint: str | Path | None = None,
    version: int | None = None,
    progress: Progress | None = None,
    complete: Callable[[Path, ModelSpec], object] | None = None,
) -> ImportReport:
    """Import a file of torch.export.save as `<repository>/<name>/<version>`, completely or not at all.

    Args:
        program: the .pt2 file. Inputs have the names of forward's parameters, outputs the keys of the dict that it
            returns, else output_0, output_1 …
        checkpoint: a folder or URL of a distributed checkpoint whose weights replace the program's own;
            weights that it lacks come from the program.
        version: if None, one above the highest that exists.
        progress: called with the bytes of tables written.
        complete: called with the draft before it appears.

    Raises:
        ModelFormatError: a file is damaged, or of another format.
        UnsupportedModelError: the program has no table, or cannot be written as ONNX.
        ConfigurationError: the version exists, or the checkpoint has none of the program's weights.
    """
    with tempfile.TemporaryDirectory(prefix="hotrow-program-") as folder:
        archive = _Archive(program)
        loaded = archive.load(Path(folder) / "program.pt2")
        weights = _Weights(archive, None if checkpoint is None else _SavedWeights(checkpoint))
        tables = _tables(loaded, archive)
        weights.fill(loaded, set(tables))
        with draft_version(repository, name, version) as (draft, target):
            files = _write_tables(draft, tables, weights, progress)
            report = assemble(draft, target, _network(loaded, files), files)
            spec = replace(report.spec, source=program.name)
            finish_version(draft, spec, None, complete)
    return ImportReport(target, spec, notes=(*report.notes, *weights.notes()))


# The archive


class _Payload(NamedTuple):
    """The place of a weight's values in the archive."""

    entry: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def _config_entry(names: list[str]) -> str:
    for name in names:
        if name.endswith(_CONFIG) and _WEIGHTS in name:
            return name
    hint = "; a file of torch.save is a pickle, which is never read: export the live model" if _is_pickle(names) else ""
    raise ValueError(f"no entry {_WEIGHTS}…{_CONFIG}{hint}")


def _is_pickle(names: Iterable[str]) -> bool:
    """Whether an archive is what torch.save writes."""
    return any(name.endswith("/data.pkl") for name in names)


class _Archive:
    """A .pt2 file, read without torch."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with zipfile.ZipFile(path) as archive:
                self._names = archive.namelist()
                self._config_entry = _config_entry(self._names)
                self.config: dict[str, Any] = json.loads(archive.read(self._config_entry))
                self._sizes = {item.filename: item.file_size for item in archive.infolist()}
            self._folder = self._config_entry.partition("data/")[0]
            self.payloads = {name: self._payload(name, item) for name, item in self.config["config"].items()}
        except OSError as error:
            raise ModelFormatError(f"{path}: not readable: {error.strerror}") from error
        except ModelFormatError:
            raise
        except (*_DAMAGE, ValueError, TypeError, AttributeError) as error:
            raise ModelFormatError(
                f"{path}: not a program written by torch.export.save of torch 2.9 or newer: {error!r}"
            ) from error

    def load(self, copy: Path) -> Any:
        """The program, read by torch; a weight that may be a table has one element that stands for all."""
        with self._open() as source, zipfile.ZipFile(copy, "w", zipfile.ZIP_STORED) as target:
            self._copy_slim(source, target)
        with quiet():
            try:
                return torch.export.load(copy)
            except Exception as error:
                raise ModelFormatError(f"{self._path}: torch cannot read it: {first_lines(error)}") from error

    @contextmanager
    def values(self, payload: _Payload) -> Iterator[IO[bytes]]:
        """The values of a weight, to be read in order; ModelFormatError if they are damaged."""
        with self._open() as archive, archive.open(payload.entry) as file:
            yield file

    @contextmanager
    def _open(self) -> Iterator[zipfile.ZipFile]:
        try:
            with zipfile.ZipFile(self._path) as archive:
                yield archive
        except _DAMAGE as error:
            raise ModelFormatError(f"{self._path}: damaged: {error}") from as_thrown(error)

    def _copy_slim(self, source: zipfile.ZipFile, target: zipfile.ZipFile) -> None:
        slim = {name: payload for name, payload in self.payloads.items() if _may_be_table(payload)}
        left_out = {payload.entry for payload in slim.values()}
        for name in self._names:
            if name == self._config_entry:
                target.writestr(name, json.dumps(self._slim_config(slim)))
            elif name in left_out:
                target.writestr(name, bytes(8))
            else:
                # Samples are pickled, and not needed.
                target.writestr(name, b"" if _SAMPLES in name else source.read(name))

    def _slim_config(self, slim: Mapping[str, _Payload]) -> dict[str, Any]:
        config = json.loads(json.dumps(self.config))
        for name in slim:
            config["config"][name]["tensor_meta"]["strides"] = [{"as_int": 0}, {"as_int": 0}]
        return dict(config)

    def _payload(self, name: str, item: dict[str, Any]) -> _Payload:
        if item["use_pickle"]:
            raise ModelFormatError(
                f"{self._path}: {name!r} is pickled, and pickled data is never read; save the program on the CPU"
            )
        meta = item["tensor_meta"]
        shape = tuple(size["as_int"] for size in meta["sizes"])
        strides = tuple(stride["as_int"] for stride in meta["strides"])
        dtype = _dtype(meta["dtype"])
        entry = f"{self._folder}{_WEIGHTS}{item['path_name']}"
        plain = meta["storage_offset"]["as_int"] == 0 and strides == _contiguous(shape)
        needed = math.prod(shape) * dtype.itemsize
        if plain and self._sizes[entry] < needed:
            raise ModelFormatError(
                f"{self._path}: {name!r} needs {needed} bytes, but {entry!r} has only {self._sizes[entry]}"
            )
        return _Payload(entry if plain else "", shape, dtype)


def _dtype(number: int) -> torch.dtype:
    from torch._export.serde.serialize import _SERIALIZE_TO_TORCH_DTYPE

    return _SERIALIZE_TO_TORCH_DTYPE[number]


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _may_be_table(payload: _Payload) -> bool:
    return bool(payload.entry) and len(payload.shape) == 2 and payload.dtype in (torch.float32, torch.float16)


def _tables(program: Any, archive: _Archive) -> dict[str, Table]:
    """The weights that the program looks up by rows, by their names in it."""
    given = {**program.graph_signature.inputs_to_parameters, **program.graph_signature.inputs_to_buffers}
    found: dict[str, Table] = {}
    for node in program.graph.nodes:
        if node.op != "call_function" or not str(node.target).startswith(_LOOKUPS):
            continue
        weight = given.get(getattr(node.args[0], "name", ""))
        payload = archive.payloads.get(weight or "")
        if weight is None or payload is None or not _may_be_table(payload):
            continue
        name = weight.removesuffix(".weight")
        found[weight] = Table(
            name=name,
            path=name,
            num_rows=payload.shape[0],
            embedding_dim=payload.shape[1],
            dtype=payload.dtype,
            weight=lambda: None,
            device=torch.device("cpu"),
        )
    if not found:
        raise UnsupportedModelError(
            "the program looks up no float32 or float16 table; export it with torch.onnx and import that with "
            "`hotrow import onnx`"
        )
    return found


# The weights


class _SavedWeights:
    """A distributed checkpoint."""

    def __init__(self, place: str | Path) -> None:
        self.place = str(place)
        self.source = create_source(place)
        if self.source.stat(METADATA_FILE) is None:
            has_folder = self.source.stat("") is not None
            found = f"no {METADATA_FILE} in it; give the folder of one checkpoint, such as {self.place}/STEP"
            raise ModelFormatError(f"{self.place}: {found if has_folder else 'no such folder'}")
        self.reader = CheckpointReader(self.source)
        self.metadata = self.reader.read_metadata()
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=True)

    def name_of(self, weight: str) -> str | None:
        """The name of a program's weight in the checkpoint: the same, prefixed by the names of the model's wrappers."""
        names = [
            name
            for name in self.metadata.state_dict_metadata
            if (name == weight or name.endswith(f".{weight}")) and not name.startswith(("optimizer.", "fused."))
        ]
        names = [weight] if weight in names else names
        if len(names) > 1:
            raise ConfigurationError(f"{self.place}: {weight!r} could be any of {', '.join(map(repr, names))}")
        return names[0] if names else None

    def check_shape(self, name: str, weight: str, shape: tuple[int, ...]) -> None:
        """ConfigurationError unless a tensor has the shape of a program's weight."""
        size = getattr(self.metadata.state_dict_metadata[name], "size", None)
        if size is None or tuple(size) != shape:
            raise ConfigurationError(
                f"{self.place}: {name!r} has shape {list(size or ())}, {weight!r} of the program {list(shape)}"
            )

    def pieces(self, name: str) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """The parts of a tensor, as ranks saved them, one after the other: where each begins, and its values."""
        entry = self.metadata.state_dict_metadata[name]
        sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
        num_found = 0
        for index, info in self.metadata.storage_data.items():
            if index.fqn == name:
                tensor = self._piece(info)
                begin = tuple(index.offset or (0,) * tensor.dim())
                if sizes.get(begin) != tuple(tensor.shape):
                    raise ModelFormatError(f"{self.place}: a part of {name!r} has the shape {list(tensor.shape)}")
                num_found += tensor.numel()
                yield begin, tensor
        if num_found != math.prod(entry.size):
            raise ModelFormatError(
                f"{self.place}: {name!r} has {math.prod(entry.size)} elements, of which {num_found} are there"
            )

    def _piece(self, info: Any) -> Tensor:
        path = self.reader.fs.concat_path(self.reader.path, info.relative_path)
        with self.reader.fs.create_stream(path, "rb") as stream:
            part = self.reader._slice_file(stream, info)
            try:
                tensor = torch.load(part, map_location="cpu", weights_only=True)
            except HotrowError:
                raise
            except Exception as error:
                raise ModelFormatError(
                    f"{self.source.name_of(info.relative_path)}: damaged: {first_lines(error)}"
                ) from error
        if not isinstance(tensor, Tensor):
            raise ModelFormatError(f"{self.source.name_of(info.relative_path)}: holds no tensor where one was saved")
        return tensor


@dataclass
class _Weights:
    """The values of a program's weights: from the checkpoint if it has them, else from the archive."""

    archive: _Archive
    saved: _SavedWeights | None

    def fill(self, program: Any, tables: set[str]) -> None:
        """Put the values of all weights other than tables into the program."""
        is_found = False
        for name, payload in self.archive.payloads.items():
            other = self.saved.name_of(name) if self.saved else None
            if self.saved and other is not None:
                self.saved.check_shape(other, name, payload.shape)
                is_found = True
            if name not in tables and (other is not None or _may_be_table(payload)):
                values = self._whole(name, torch.empty(payload.shape, dtype=payload.dtype))
                program.state_dict[name] = torch.nn.Parameter(values, requires_grad=False)
        if self.saved and not is_found:
            raise ConfigurationError(f"{self.saved.place}: contains none of the program's weights")

    def _whole(self, name: str, values: Tensor) -> Tensor:
        """`values`, filled with all shards of a weight."""
        for shard in self.shards(name):
            offsets = (shard.first_row, shard.first_column)[: values.dim()]
            places = zip(offsets, shard.tensor.shape, strict=False)
            values[tuple(slice(begin, begin + size) for begin, size in places)] = shard.tensor
        return values

    def notes(self) -> tuple[str, ...]:
        """Which weights a checkpoint lacks, if there is one."""
        if self.saved is None:
            return ()
        own = [name for name in self.archive.payloads if self.saved.name_of(name) is None]
        return (f"not in the checkpoint, so taken from the program: {', '.join(map(repr, own))}",) if own else ()

    def shards(self, name: str) -> Iterator[Shard]:
        """The parts of a weight; of the checkpoint as ranks saved them, of the archive some megabytes at a time."""
        other = self.saved.name_of(name) if self.saved else None
        if self.saved is not None and other is not None:
            for offsets, tensor in self.saved.pieces(other):
                first_row, first_column = [*offsets, 0, 0][:2]
                yield Shard(first_row, first_column, tensor)
            return
        payload = self.archive.payloads[name]
        row_bytes = max(1, math.prod(payload.shape[1:]) * payload.dtype.itemsize)
        with self.archive.values(payload) as file:
            for rows in chunks(payload.shape[0] if payload.shape else 1, row_bytes):
                content = file.read((rows.stop - rows.start) * row_bytes)
                yield Shard(rows.start, 0, _tensor(content, payload))


def _tensor(content: bytes, payload: _Payload) -> Tensor:
    flat = torch.frombuffer(bytearray(content), dtype=payload.dtype)
    return flat.reshape(-1, *payload.shape[1:]) if payload.shape else flat.reshape(())


def _write_tables(
    draft: Path, tables: Mapping[str, Table], weights: _Weights, progress: Progress | None
) -> dict[str, ExportedTable]:
    folders = folder_names([table.name for table in tables.values()])
    files: dict[str, ExportedTable] = {}
    for (name, table), folder in zip(tables.items(), folders, strict=True):
        files[name] = ExportedTable(table, table.num_rows, folder)
        path = draft / files[name].location
        create_file(path, table.num_rows * table.row_bytes)
        for shard in weights.shards(name):
            write_table(path, table, [shard])
            if progress:
                progress(shard.tensor.numel() * shard.tensor.element_size())
    return files


def _network(program: Any, files: Mapping[str, ExportedTable]) -> ModelProto:
    """The program as ONNX, its tables as external data."""
    keys = program.call_spec.out_spec.context if program.call_spec.out_spec.type is dict else None
    count = len(program.graph_signature.user_outputs)
    outputs = list(keys) if keys and len(keys) == count else [f"output_{number}" for number in range(count)]
    with quiet():
        try:
            exported: Any = torch.onnx.export(
                program,
                input_names=_parameter_names(program),
                output_names=outputs,
                dynamo=True,
                external_data=False,
                verbose=False,
                optimize=False,
            )
            _unbind(exported.model.graph, files)
            model = optimized(exported)
        except Exception as error:
            raise UnsupportedModelError(f"the program cannot be written as ONNX: {first_lines(error)}") from error
    return _bound(model, files)


def _parameter_names(program: Any) -> list[str] | None:
    """Those of forward, as they are: torch writes them in lower case. None where not each of them is one tensor."""
    signature = program.module_call_graph[0].signature
    names = signature.forward_arg_names if signature is not None else None
    parameters = [each for group in program.call_spec.in_spec.children_specs for each in group.children_specs]
    inputs = [each.arg for each in program.graph_signature.input_specs if each.kind is InputKind.USER_INPUT]
    is_one_tensor_each = all(each.type is None for each in parameters) and all(
        isinstance(each, TensorArgument) for each in inputs
    )
    if names is None or not is_one_tensor_each or not len(names) == len(parameters) == len(inputs):
        return None
    return list(names)


def _unbind(graph: Any, files: Mapping[str, ExportedTable]) -> None:
    """Make tables into inputs: the ONNX optimizer would compute with the stand-ins for their values."""
    for name in files:
        value = graph.initializers.pop(name)
        value.const_value = None
        graph.inputs.append(value)


def _bound(model: ModelProto, files: Mapping[str, ExportedTable]) -> ModelProto:
    """Make these inputs into external data."""
    inputs = [value for value in model.graph.input if value.name not in files]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.graph.initializer.extend(external_tensor(name, file) for name, file in files.items())
    forget_sources(model)
    return model
