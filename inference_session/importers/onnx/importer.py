"""`import_onnx`: an ONNX model in, a version directory in the native layout out."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto, defs, inliner

from inference_session.dense_engine.trial import try_to_open
from inference_session.errors import ConfigurationError, HotrowError, ModelFormatError, UnsupportedModelError, as_thrown
from inference_session.importers.onnx.canonical import CanonicalModel, to_canonical
from inference_session.importers.onnx.carve import CarvedModel, carve, keep_whole
from inference_session.importers.onnx.computed_tables import compute_tables
from inference_session.importers.onnx.empty_lists import guard_empty_lists, may_meet_empty_lists
from inference_session.importers.onnx.evaluation import open_network, save_network
from inference_session.importers.onnx.loops.bag_loops import bags_instead_of_loops
from inference_session.importers.onnx.loops.bounded_bags import cut_bags_by_bounds
from inference_session.importers.onnx.model_file import Blob, read_skeleton
from inference_session.importers.onnx.probe import PRIME_SIZES, Findings, Prober, close
from inference_session.importers.onnx.ranking.ranking_import import RankingImport
from inference_session.importers.onnx.ranking.trials import TOLERANCE, RankingTrials
from inference_session.importers.onnx.renaming import rename_inputs_and_outputs
from inference_session.importers.onnx.replay import Replay
from inference_session.importers.onnx.samples.independence import samples_are_independent
from inference_session.importers.onnx.spec import TablePlace, model_spec, table_folders
from inference_session.importers.onnx.types import NUMPY_TYPES, ValueType, value_type
from inference_session.importers.onnx.weights import Weight, refer_to, weight_of
from inference_session.importers.report import DenseInitializer, ImportReport, shortened
from inference_session.model_spec import (
    DENSE_FILE,
    KEYS_FILE,
    RANKING_FILE,
    RANKING_KEYS_FILE,
    TABLES_FOLDER,
    VECTOR_FILE,
    ModelSpec,
    NamedArrays,
    VectorType,
)
from inference_session.onnx_graphs import all_nodes, attribute
from inference_session.platform.drafts import check_space, draft_version, numbers_in
from inference_session.platform.large_pages import open_for_writing
from inference_session.platform.progress import Progress
from inference_session.version_directory.publishing import finish_version
from inference_session.version_directory.quantizing import quantize_tables
from inference_session.version_directory.session_file import read_spec

logger = logging.getLogger(__name__)

_ORIGINAL_FILE = ".original.onnx"
_REPLACEABLE_SINCE = 4
"""The version of ONNX's format in which inputs with initializers became optional; before, all had to be listed."""
_TOLERANCE = 1e-5
_DOMAINS = ("ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc")
"""Whose operators ONNX Runtime's packages have."""


def import_onnx(
    model: Path,
    repository: Path,
    name: str,
    *,
    version: int | None = None,
    min_rows: int = 1000,
    context: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    tables: VectorType = "float32",
    progress: Progress | None = None,
    complete: Callable[[Path, ModelSpec], object] | None = None,
) -> ImportReport:
    """Import an ONNX model as `<repository>/<name>/<version>`.

    The version appears whole or not at all. Tables are streamed, never held in memory, except those that the graph
    computes from constants; those of bfloat16 are stored as float32, which has all of its values.

    Args:
        model: the .onnx file; its external data must lie in the same folder.
        repository: the model repository; made if it does not exist.
        name: the model's folder in it.
        version: None: one above the highest that exists.
        min_rows: initializers with fewer rows stay in the dense network.
        context: the inputs that requests may give once for many candidates, by their new names; see the package
            `context`.
        rename: new names of inputs and outputs, by their names in the file.
        tables: how tables are stored, where that makes them smaller; see `quantizing.narrowed`.
        progress: called with the bytes of tables written, then read again for their checksums.
        complete: called with the draft before it appears, to add what a server needs (config.pbtxt); if
            it raises, nothing is imported.

    Raises:
        ModelFormatError: a file is damaged, missing, or no ONNX model; the message names it. Or `tables` cannot hold a
            row; names table and row.
        UnsupportedModelError: the model is sound but cannot be served.
        ConfigurationError: the version exists, or an argument is not allowed, such as a name in `rename` that is not
            there, reserved or taken.
    """
    if min_rows < 1:
        raise ConfigurationError(f"min_rows must be at least 1, found {min_rows}")
    model = Path(model)
    with _malformed_refused(model):
        source = _Source.read(model, rename or {})
        with draft_version(Path(repository), name, version) as (draft, version_dir):
            report = _Import(source, draft, version_dir, min_rows, progress, context=tuple(context)).run()
            report = replace(report, spec=quantize_tables(draft, report.spec, tables, progress))
            finish_version(draft, report.spec, progress, complete)
    return replace(report, notes=(*report.notes, *_renamed_tables(report)))


def import_draft(model: Path, draft: Path, version_dir: Path, places: Mapping[str, TablePlace]) -> ImportReport:
    """Take an ONNX model apart in a draft that already holds its tables.

    The caller writes session.json and the manifest, and removes the folders of tables that are not in the report.

    Args:
        model: the .onnx file, in the draft. Every initializer that `places` names is external data from the
            beginning of its table's file; all of them become tables, however few rows they have.
        version_dir: the future path of the draft.
        places: the names of tables, by the names of their initializers.

    Raises:
        ModelFormatError, UnsupportedModelError: as `import_onnx`.
    """
    with _malformed_refused(model):
        return _Import(_Source.read(model, {}), draft, version_dir, 1, None, places).run()


def _renamed_tables(report: ImportReport) -> tuple[str, ...]:
    """A note where tables are not called as in the version before: exporters number them anew at times."""
    folder, version = report.version_dir.parent, int(report.version_dir.name)
    older = [number for number in numbers_in(folder) if number < version]
    try:
        before = {table.folder for table in read_spec(folder / str(max(older))).tables} if older else set()
    except HotrowError:  # no version of ours
        return ()
    now = {table.folder for table in report.tables}
    gone, new = sorted(before - now), sorted(now - before)
    if not gone or not new:
        return ()
    note = (
        f"version {max(older)} has the tables {shortened(gone)}, in place of which this one has {shortened(new)}; "
        "stores and update streams go by these names: export both versions by the same program, from its start"
    )
    return (note,)


@contextmanager
def _malformed_refused(model: Path) -> Iterator[None]:
    """Report a malformed graph as such: no check in advance would find as much as taking it apart does."""
    try:
        yield
    except (HotrowError, OSError, MemoryError):
        raise
    except Exception as error:
        as_thrown(error)
        raise ModelFormatError(f"{model}: its graph is malformed: {error!r}") from error


@dataclass(frozen=True)
class _Source:
    """A model file as it was read, and the declarations of its inputs and outputs."""

    path: Path
    inputs: dict[str, ValueType]
    outputs: dict[str, ValueType]
    optional: tuple[str, ...] = ()
    """Inputs that have a value in the file, which a caller of ONNX Runtime may replace."""
    new_names: Mapping[str, str] = field(default_factory=dict)
    """Of inputs and outputs, by their names in the file."""

    @classmethod
    def read(cls, path: Path, new_names: Mapping[str, str]) -> _Source:
        model, _ = _read_renamed(path, new_names)
        initialized = {tensor.name for tensor in model.graph.initializer}
        inputs = [value for value in model.graph.input if value.name not in initialized]
        for value in (*inputs, *model.graph.output):
            _check_tensor(path, value)
        _check_inputs_are_given(path, inputs, model.graph)
        outputs = [value.name for value in model.graph.output]
        if twice := next((name for i, name in enumerate(outputs) if name in outputs[:i]), None):
            raise UnsupportedModelError(f"{path}: two outputs are called {twice!r}; export only one of them")
        for value in inputs:
            if value_type(value).dims is None:
                raise UnsupportedModelError(f"{path}: input {value.name!r} has no shape; export it with one")
        is_replaceable = model.ir_version >= _REPLACEABLE_SINCE
        optional = tuple(value.name for value in model.graph.input if is_replaceable and value.name in initialized)
        return cls(path, _types(inputs), _types(model.graph.output), optional, new_names)

    def skeleton(self) -> tuple[ModelProto, dict[int, Blob]]:
        """As `read_skeleton`, with the new names."""
        return _read_renamed(self.path, self.new_names)

    def notes(self) -> tuple[str, ...]:
        """What a client of the original could send that no client of the imported model can."""
        if not self.optional:
            return ()
        note = "optional inputs keep the values that the file has for them, and requests cannot replace these"
        return (f"{note}: {shortened(self.optional)}; to make one an input, remove its initializer",)


def _read_renamed(path: Path, new_names: Mapping[str, str]) -> tuple[ModelProto, dict[int, Blob]]:
    model, blobs = read_skeleton(path)
    rename_inputs_and_outputs(path, model.graph, new_names)
    return model, blobs


def _types(values: Iterable[ValueInfoProto]) -> dict[str, ValueType]:
    return {value.name: value_type(value) for value in values}


def _check_tensor(path: Path, value: ValueInfoProto) -> None:
    if value.type.WhichOneof("value") != "tensor_type":
        kind = (value.type.WhichOneof("value") or "untyped").removesuffix("_type")
        way_out = (
            "; converters of scikit-learn and LightGBM write a tensor with zipmap=False" if kind == "sequence" else ""
        )
        raise UnsupportedModelError(f"{path}: {value.name!r} is {kind}; inputs and outputs must be tensors{way_out}")
    if value.type.tensor_type.elem_type not in NUMPY_TYPES:
        kind = TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower()
        raise UnsupportedModelError(f"{path}: {value.name!r} is {kind}, which NumPy lacks; cast it in the model")


def _check_inputs_are_given(path: Path, inputs: Iterable[ValueInfoProto], graph: GraphProto) -> None:
    """PyTorch's exporter calls an inner value as it likes, also as a feature `cat` that the model concatenates."""
    made = {name for node in graph.node for name in node.output}
    for value in inputs:
        if value.name in made:
            raise ModelFormatError(
                f"{path}: {value.name!r} is an input and also the result of an operator, so ONNX Runtime refuses the "
                "model; export it with another name for this input"
            )


@dataclass(frozen=True)
class _Import:
    """One import into a draft."""

    source: _Source
    draft: Path
    version_dir: Path
    min_rows: int
    progress: Progress | None
    places: Mapping[str, TablePlace] = field(default_factory=dict)
    """Places of tables whose names are not those of their initializers."""
    context: tuple[str, ...] = ()
    """The inputs that are given once per context."""

    def run(self) -> ImportReport:
        """Fill the draft."""
        whole = to_canonical(self.source.path, *self.source.skeleton())
        self._check_places(whole.weights)
        bags_instead_of_loops(whole)
        cut_bags_by_bounds(whole)
        if not self.places:  # whose tables change by rows
            compute_tables(whole, self.min_rows)
        carved = carve(whole, self.min_rows, merge=True)
        folders = table_folders(carved, self.places)
        self._write_tables(carved, folders)
        findings, original = self._probe(carved, folders)
        if not self._is_faithful(carved, findings, original):
            carved = self._more_careful(whole, findings, original)
        if self.context:
            try_to_open([self.draft / _ORIGINAL_FILE], self.source.path.name)
            original = replace(original, network=open_network(self.draft / _ORIGINAL_FILE, optimised=True))
            if not self._rounds_alike(carved, findings, original):
                carved = self._more_careful(whole, findings, original)
        findings = self._joinable_if_proved(carved, findings)
        report = self._report(carved, findings)
        if self.context:
            folders = table_folders(carved, self.places)
            write = partial(self._write_ranking, findings)
            ranking = RankingImport(whole, folders, self.draft, original, findings, write)
            report = replace(report, spec=ranking.run(report.spec, self.context))
        for leftover in self.draft.glob(f"{_ORIGINAL_FILE}*"):
            leftover.unlink()
        return report

    def _check_places(self, weights: Mapping[str, Weight]) -> None:
        for name, place in self.places.items():
            if name in weights and weights[name].elem_type == TensorProto.BFLOAT16:
                raise UnsupportedModelError(f"table {place.name!r} is bfloat16; train tables in float32 or float16")

    def _joinable_if_proved(self, carved: CarvedModel, findings: Findings) -> Findings:
        """The findings; joinable only where it is proved that no sample influences another."""
        if not findings.joinable:
            return findings
        culprit = "the model could not be run on generated inputs"
        if len(findings.primes) == len(PRIME_SIZES):
            spec = self._spec(carved, findings)[0]
            path = self.draft / f"{_ORIGINAL_FILE}.observed"
            found = samples_are_independent(carved, spec, Replay(self.draft, spec), findings.primes, path)
            if found.is_proved:
                return findings
            culprit = f"{found.culprit} may mix them"
        note = (
            f"the samples of a batch could not be shown to be independent ({culprit}); requests are served one by one"
        )
        return replace(findings, joinable=False, notes=(*findings.notes, note))

    def _rounds_alike(self, carved: CarvedModel, findings: Findings, original: Prober) -> bool:
        """Whether look-ups that pool, and so add in another order, keep the promise for ranked candidates.

        The whole network answers those requests that the divided one would answer differently.
        """
        if findings.recipe is None or not any(lookup.pooling in ("sum", "mean") for lookup in carved.lookups):
            return True
        spec = self._spec(carved, findings)[0]
        trials = RankingTrials(original, Replay(self.draft, spec, as_served=True), spec, findings.recipe)
        return trials.largest_input(TOLERANCE / 2) == math.inf  # strict, for the careful way costs little

    def _more_careful(self, whole: CanonicalModel, findings: Findings, original: Prober) -> CarvedModel:
        """The same without changes that rely on inferred shapes, and so on declared ones; if necessary, all dense."""
        carved = carve(whole, self.min_rows, merge=False)
        if self._is_faithful(carved, findings, original):
            return carved
        carved = keep_whole(whole, self.min_rows)
        if not self._is_faithful(carved, findings, original):
            raise UnsupportedModelError(f"{self.source.path}: the imported model answers differently")
        shutil.rmtree(self.draft / TABLES_FOLDER)
        return carved

    def _report(self, carved: CarvedModel, findings: Findings) -> ImportReport:
        spec, notes = self._spec(carved, findings)
        dense = tuple(DenseInitializer(name, reason) for name, reason in sorted(carved.stays_dense.items()))
        return ImportReport(self.version_dir, spec, dense, (*self.source.notes(), *findings.notes, *notes))

    def _spec(self, carved: CarvedModel, findings: Findings) -> tuple[ModelSpec, tuple[str, ...]]:
        return model_spec(
            self.source.path.name, self.source.inputs, self.source.outputs, carved, findings, places=self.places
        )

    def _write_tables(self, carved: CarvedModel, folders: dict[str, str]) -> None:
        tables = [table for table in carved.tables if table.name not in self.places]  # those exist already
        check_space(self.draft.parent, sum(table.vector_bytes for table in tables), "the tables need")
        for table in tables:
            self._write_table(table, self._table_file(folders[table.name]))

    def _table_file(self, folder: str) -> Path:
        return self.draft / TABLES_FOLDER / folder / VECTOR_FILE

    def _write_table(self, table: Weight, path: Path) -> None:
        path.parent.mkdir(parents=True)
        with open_for_writing(path) as file:
            for chunk in table.vector_chunks():
                file.write(chunk)
                if self.progress:
                    self.progress(len(chunk))

    def _write_ranking(self, findings: Findings, carved: CarvedModel) -> None:
        self._write_networks(carved, batched=findings.batched, dense_file=RANKING_FILE, keys_file=RANKING_KEYS_FILE)

    def _write_networks(
        self, carved: CarvedModel, *, batched: bool, dense_file: str = DENSE_FILE, keys_file: str = KEYS_FILE
    ) -> None:
        (self.draft / keys_file).unlink(missing_ok=True)
        self._write_network(dense_file, carved.dense, carved.dense_weights, batched=batched)
        if carved.keys:
            self._write_network(keys_file, carved.keys, carved.keys_weights, batched=batched)

    def _write_network(self, name: str, network: ModelProto, weights: list[Weight], *, batched: bool) -> None:
        written = ModelProto()
        written.CopyFrom(network)
        if may_meet_empty_lists(written.graph, self.source.inputs.values(), batched=batched):
            guard_empty_lists(written)
        written.graph.initializer.extend(weight.tensor() for weight in weights)
        save_network(written, self.draft / name)

    def _probe(self, carved: CarvedModel, folders: dict[str, str]) -> tuple[Findings, Prober]:
        """Run the original; its tables are mapped from where they were written, not loaded."""
        model, blobs = self.source.skeleton()
        for i, tensor in enumerate(model.graph.initializer):
            weight = weight_of(self.source.path, tensor, blobs.get(i))
            if tensor.name in folders:
                refer_to(tensor, self._bytes_of(weight, folders[tensor.name]), weight.num_bytes)
            else:
                tensor.CopyFrom(weight.tensor())
        model = inliner.inline_local_functions(model) if model.functions else model
        guard_empty_lists(model)
        path = self.draft / _ORIGINAL_FILE
        save_network(model, path)
        try:
            network = open_network(path)
        except Exception as error:
            # ONNX Runtime raises its own types, which share no base but this.
            reason = _unknown_operators(model) or " ".join(str(error).replace(str(path), "it").split())
            raise ModelFormatError(f"{self.source.path}: ONNX Runtime cannot load this model: {reason}") from error
        prober = Prober(network, self.source.inputs, self._rows(carved))
        return prober.find(trusts_symbols=bool(self.context)), prober

    def _bytes_of(self, table: Weight, folder: str) -> str:
        """The file, in the draft, that holds the values of a table as the original has them."""
        if table.elem_type != TensorProto.BFLOAT16:
            return f"{TABLES_FOLDER}/{folder}/{VECTOR_FILE}"
        location = f"{_ORIGINAL_FILE}.{folder}"
        with (self.draft / location).open("wb") as file:
            file.writelines(table.chunks())
        return location

    def _rows(self, carved: CarvedModel) -> dict[str, int]:
        num_rows = {table.name: table.dims[0] for table in carved.tables}
        rows: dict[str, int] = {}
        for lookup in carved.lookups:
            rows[lookup.keys] = min(num_rows[lookup.table], rows.get(lookup.keys, num_rows[lookup.table]))
        return rows

    def _is_faithful(self, carved: CarvedModel, findings: Findings, original: Prober) -> bool:
        """Write the networks, and compare the version with the original."""
        self._write_networks(carved, batched=findings.batched)
        if not findings.feeds:
            return True
        try:
            replay = Replay(self.draft, self._spec(carved, findings)[0])
            in_half = _computes_in_half(carved)
            return all(_same(replay.run(arrays), original, arrays, in_half=in_half) for arrays in findings.feeds)
        except Exception as error:  # noqa: BLE001  ONNX Runtime's errors share no other base; all mean "no"
            logger.debug("the imported model does not run: %s", error)
            return False


def _unknown_operators(model: ModelProto) -> str:
    """Which operators are not those of ONNX or ONNX Runtime, and the way out; empty if all are."""
    found = {
        f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        for node in all_nodes(model.graph)
        if (node.domain or "ai.onnx") not in _DOMAINS or (not node.domain and not defs.has(node.op_type))
    }
    if not found:
        return ""
    return (
        f"it has no operator {shortened(sorted(found))}. Converters pass on what ONNX lacks, such as TensorFlow's "
        "hashes of strings. Export the network behind that operator, and let clients send what the operator gives"
    )


def _computes_in_half(carved: CarvedModel) -> bool:
    """Whether the network rounds to half precision on the way to its outputs. Tables of halves alone do not."""
    casts = (node for node in all_nodes(carved.dense.graph) if node.op_type == "Cast")
    return any(weight.elem_type == TensorProto.FLOAT16 for weight in carved.dense_weights) or any(
        attribute(node, "to", 0) == TensorProto.FLOAT16 for node in casts
    )


def _same(found: list[NDArray[Any]], original: Prober, arrays: NamedArrays, *, in_half: bool) -> bool:
    """Whether these are the original's answers. An output that is random in each run may be anything."""
    expected, again = original.run(arrays), original.run(arrays)
    if expected is None or again is None:
        return False
    alike = partial(close, tolerance=_TOLERANCE, in_half=in_half)
    return all(alike(f, e) or not alike(a, e) for f, e, a in zip(found, expected, again, strict=True))
