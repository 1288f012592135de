"""The native layout: how a version directory describes its model (`session.json`), as frozen objects.

<version>/
  session.json         this module
  dense.onnx           the dense network; its inputs are model inputs and looked-up vectors
  keys.onnx            computes keys from the model's inputs; only where the graph derived them
  ranking.onnx         the dense network for requests that rank candidates: the context's inputs have a row per context;
                       only where context inputs were named. Its keys are computed by ranking_keys.onnx
  tables/<folder>/     `key` (int64, absent where keys are row numbers), `emb_vector`, `index`
  MANIFEST.json        sizes and checksums (manifest.py)
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from inference_session.errors import ModelFormatError, TableNotFoundError

FORMAT = 1
SESSION_FILE = "session.json"
DENSE_FILE = "dense.onnx"
KEYS_FILE = "keys.onnx"
RANKING_FILE = "ranking.onnx"
RANKING_KEYS_FILE = "ranking_keys.onnx"
NETWORK_FILES = (DENSE_FILE, KEYS_FILE, RANKING_FILE, RANKING_KEYS_FILE)
"""The networks that a version may have."""
TABLES_FOLDER = "tables"
KEY_FILE = "key"
VECTOR_FILE = "emb_vector"
INDEX_FILE = "index"
"""The files of a table; the first two are named as HugeCTR names them."""
PREDICTIONS = "OUTPUT0"
CANDIDATES = "CANDIDATES"
"""The input, int32 [contexts], that says how many candidates each context of a request has."""
ROW_CONTEXT = "hotrow_row_context"
"""The input of ranking.onnx, int64 [rows], that says the context of each candidate."""
BLOCK_CONTEXT = "hotrow_block_context"
"""The same, int64 [blocks], of each block: candidates come in blocks of one length, each of one context."""

Pooling = Literal["none", "sum", "mean", "max"]
VectorType = Literal["float32", "float16", "int8"]
SCALE_AND_BIAS_BYTES = 8
"""Behind the elements of an int8 row: a float32 each."""
_ELEMENT_BYTES: Mapping[VectorType, int] = {"float32": 4, "float16": 2, "int8": 1}
_USUAL_TYPES = frozenset(
    ("bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "object", "uint8", "uint32", "uint64")
)
"""Of inputs and outputs. NumPy is loaded for others only: it takes as long as the rest of `hotrow serve`."""
KeyKind = Literal["row_number", "stored"]


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of the model, as a client sees it."""

    name: str
    dtype: str
    """NumPy's name: `int64`, `float32`, `bool`, `object` for strings …"""
    shape: tuple[int, ...]
    """-1 for a dimension of any size. The first dimension counts samples where the model is `batched`."""
    context: bool = False
    """An input that is given once per context, and not for every candidate."""


@dataclass(frozen=True)
class TableSpec:
    """One embedding table."""

    name: str
    """The name in the original model, any characters."""
    folder: str
    """Folder below `tables/`; also the table's name in stores and topics."""
    num_rows: int
    embedding_dim: int
    """Number of elements of one vector (the product of `row_shape`)."""
    dtype: VectorType = "float32"
    """How vectors are stored; a lookup always answers float32."""
    keys: KeyKind = "stored"
    """`row_number`: the key is the row, negative keys count from the end as in ONNX. `stored`: a `key` file says."""
    row_shape: tuple[int, ...] | None = None
    """Shape of one row in the original model where it is not `(embedding_dim,)`, else None."""
    default_vector: float | tuple[float, ...] = 0.0
    """Answer for an unknown key: one number for all elements, or one number each."""

    @property
    def row_bytes(self) -> int:
        """Size of one stored vector; an int8 row ends with its float32 scale and bias."""
        return bytes_per_row(self.embedding_dim, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Size of the vectors and, where they are stored, of the keys."""
        return self.num_rows * (self.row_bytes + 8 * (self.keys == "stored"))


def bytes_per_row(embedding_dim: int, dtype: VectorType) -> int:
    """Size of one row of `emb_vector`."""
    return embedding_dim * _ELEMENT_BYTES[dtype] + SCALE_AND_BIAS_BYTES * (dtype == "int8")


@dataclass(frozen=True)
class LookupSpec:
    """One read of a table on behalf of the dense network.

    Unpooled, keys of shape S become vectors of shape S + row_shape. Pooled, the last axis of the keys is the bag:
    keys of shape S + (L,) become S + (embedding_dim,). An empty bag is a zero vector.
    Lookups of one `dense_input` are side by side in it, in the order of the list: each contributes
    (keys per sample x embedding_dim) columns of a matrix [samples, columns].
    """

    table: str
    """Folder of the table."""
    keys: str
    """A model input, or an output of keys.onnx. int64 or int32."""
    dense_input: str
    """The input of dense.onnx that takes the vectors, float32."""
    pooling: Pooling = "none"
    weights: str | None = None
    """Per-key factors of a pooled lookup: a model input or an output of keys.onnx, float32, shaped as the keys."""
    bags: tuple[str, str] | None = None
    """Where pooled keys are one list: outputs of keys.onnx, int64 [bags], that say where in it each bag begins and
    ends, counted as by ONNX's Slice. The vectors are [bags, embedding_dim]."""
    columns: tuple[int, int] | None = None
    """Where `keys` is a matrix [samples, n]: the columns that are read, from the first up to, not including, the
    second. Joined look-ups of model inputs only."""
    joined: bool = False
    """True where several lookups (or one with several keys per sample) fill one matrix [samples, columns]."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The values that the lookup needs."""
        return (self.keys, *([self.weights] if self.weights else []), *(self.bags or ()))


@dataclass(frozen=True)
class RankingSpec:
    """How the model answers requests that give their context once for many candidates."""

    lookups: tuple[LookupSpec, ...]
    """As ModelSpec.lookups, for ranking.onnx. Keys of the context have a row per context."""
    may_pad: bool = True
    """No answer depends on the other samples of its batch: rows that only fill up a block do no harm."""
    multiply_adds_fraction: float = 0.0
    """The fraction of a candidate's multiply-adds that are done once per context instead."""
    lookups_fraction: float = 0.0
    """The same of the rows that are looked up."""
    bytes_fraction: float = 0.0
    """The same of the bytes of a request."""
    tiled: tuple[str, ...] = ()
    """What keeps the rest from it: the work on the context that the network still repeats for every candidate."""
    undivided: str = ""
    """Why dense.onnx answers such requests, with the context repeated for every candidate; empty: ranking.onnx does."""
    largest_input: float | None = None
    """dense.onnx also answers requests with larger numbers in inputs of floats, of either sign; None: no such limit.
    With them ranking.onnx could round otherwise than the original by more than 1e-6."""

    def described(self) -> list[str]:
        """Lines for people."""
        if self.undivided:
            return [
                f"of one candidate's cost, paid once per context: {self.bytes_fraction:.0%} of the bytes sent",
                f"the network is not divided: {self.undivided}",
            ]
        saved = (
            f"of one candidate's cost, computed once per context: {self.multiply_adds_fraction:.0%} of the "
            f"multiply-adds, {self.lookups_fraction:.0%} of the look-ups, {self.bytes_fraction:.0%} of the bytes sent"
        )
        lines = [saved, *(f"for every candidate: {reason}" for reason in self.tiled)]
        if self.largest_input is not None:
            lines.append(
                f"requests with a float beyond ±{self.largest_input:g} are computed as if the context were repeated: "
                "answers would round differently otherwise"
            )
        if not self.may_pad:
            lines.append("requests are not joined into batches: an answer may depend on the other samples of its batch")
        return lines


@dataclass(frozen=True)
class ModelSpec:
    """What a model is. Written by the importers, read on open; never changed."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    """The original model's outputs, in its order."""
    tables: tuple[TableSpec, ...]
    lookups: tuple[LookupSpec, ...]
    labels: tuple[str, ...] = ()
    """One name per column of the predictions."""
    label_outputs: tuple[str, ...] = ()
    """The outputs, [samples] or [samples, k], that side by side make up the predictions; empty: none qualify."""
    batched: bool = True
    """The first dimension of every input and output counts samples, and may take any size."""
    equal_sizes: tuple[tuple[tuple[str, int], ...], ...] = ()
    """Groups of dimensions, each an input and an axis of it, that have one size in a request."""
    joinable: bool = True
    """No answer depends on the other samples of its batch, so that requests may be computed together."""
    layout: Literal["tensors", "hugectr", "hps"] = "tensors"
    """How a request carries its keys: `tensors` (by input), `hugectr` (DES/CATCOLUMN/ROWINDEX), `hps`."""
    layout_options: Mapping[str, Any] = field(default_factory=dict)
    """What the layout needs to know beyond the tensors, as the importer wrote it."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Defaults for the model's settings (docs/reference/settings.md); config.pbtxt overrides them."""
    source: str = ""
    """Where the model came from, for people."""
    ranking: RankingSpec | None = None
    """Where some of the inputs are the context's."""

    @property
    def context(self) -> tuple[str, ...]:
        """The inputs that are given once per context."""
        return tuple(tensor.name for tensor in self.inputs if tensor.context)

    @property
    def is_divided(self) -> bool:
        """Whether ranking.onnx answers requests that give their context once for many candidates."""
        return self.ranking is not None and not self.ranking.undivided

    @property
    def has_own_inputs(self) -> bool:
        """Whether a request carries the model's own inputs, by name."""
        return self.layout == "tensors"

    @property
    def takes_hugectr_requests(self) -> bool:
        """Whether a request is HugeCTR's: DES, CATCOLUMN and ROWINDEX."""
        return self.layout == "hugectr"

    @property
    def answers_vectors(self) -> bool:
        """Whether a request is HPS's, and the answer the vectors themselves: there is no dense network."""
        return self.layout == "hps"

    @property
    def joins_requests(self) -> bool:
        """Whether several requests can be computed at once: those of HPS as well, although they have no samples."""
        return self.joinable and (self.batched or self.answers_vectors)

    def table(self, name: str) -> TableSpec:
        """The table of that original name, else of that folder; TableNotFoundError where neither exists."""
        by_folder = {table.folder: table for table in self.tables}
        by_name = {table.name: table for table in self.tables}
        if table := by_name.get(name) or by_folder.get(name):
            return table
        known = ", ".join(repr(table.name) for table in self.tables) or "none"
        raise TableNotFoundError(f"the model has no table {name!r}; its tables: {known}")

    def table_in(self, folder: str) -> TableSpec:
        """The table of that folder, which may be another table's name; TableNotFoundError where none has it."""
        for table in self.tables:
            if table.folder == folder:
                return table
        known = ", ".join(repr(table.folder) for table in self.tables) or "none"
        raise TableNotFoundError(f"the model has no table in folder {folder!r}; its table folders: {known}")

    def write(self, directory: Path) -> None:
        """Write session.json into a version directory that is being staged."""
        document = {"format": FORMAT, **asdict(self)}
        text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
        (directory / SESSION_FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> ModelSpec:
        """Read and check session.json; ModelFormatError names the file and the field at fault."""
        path = directory / SESSION_FILE
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ModelFormatError(f"{path}: no such file; {_expected(directory)}") from error
        except (OSError, ValueError, RecursionError) as error:
            raise ModelFormatError(f"{path}: not readable as JSON: {error}") from error
        try:
            return _parse(document)
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise ModelFormatError(f"{path}: {error}") from error


def _expected(directory: Path) -> str:
    """What a folder without session.json should have been."""
    versions = sorted(int(path.name) for path in directory.glob("[0-9]*") if path.name.isdecimal())
    if versions:
        newest = directory / str(versions[-1])
        return f"{directory} is the folder of a model; give one of its version directories, such as {newest}"
    return "a version directory, such as model_repository/ctr/1, has one"


def _parse(document: object) -> ModelSpec:
    if not isinstance(document, dict):
        raise ValueError(f"expected an object, found {type(document).__name__}")
    if document.pop("format", None) != FORMAT:
        raise ValueError(f"field 'format' must be {FORMAT}; this version of hotrow reads no other format")
    document["inputs"] = tuple(_record(TensorSpec, item, "inputs") for item in _list(document, "inputs"))
    document["outputs"] = tuple(_record(TensorSpec, item, "outputs") for item in _list(document, "outputs"))
    document["tables"] = tuple(_record(TableSpec, item, "tables") for item in _list(document, "tables"))
    document["lookups"] = tuple(_record(LookupSpec, item, "lookups") for item in _list(document, "lookups"))
    document["equal_sizes"] = tuple(_dimensions(group) for group in _list(document, "equal_sizes"))
    if document.get("ranking") is not None:
        document["ranking"] = _ranking(document["ranking"])
    for name in ("labels", "label_outputs"):
        document[name] = tuple(str(item) for item in _list(document, name))
    spec = _record(ModelSpec, document, "")
    _check(spec)
    return spec


def _ranking(value: object) -> RankingSpec:
    if not isinstance(value, dict):
        raise ValueError(f"field 'ranking': expected an object, found {value!r}")
    lookups = tuple(_record(LookupSpec, item, "ranking.lookups") for item in _list(value, "lookups"))
    return _record(RankingSpec, {**value, "lookups": lookups}, "ranking")


def _dimensions(group: Any) -> tuple[tuple[str, int], ...]:
    is_list = isinstance(group, list) and len(group) > 1
    if not is_list or not all(isinstance(pair, list) and len(pair) == 2 for pair in group):
        raise ValueError(f"field 'equal_sizes': expected a list of [input, axis] pairs, found {group!r}")
    return tuple((name, axis) for name, axis in group)


Record = TypeVar("Record")


def _record(kind: type[Record], value: object, where: str) -> Record:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, found {value!r}")
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(value) - known)
    if unknown:
        raise ValueError(f"{where}: unknown field {unknown[0]!r}; known: {', '.join(sorted(known))}")
    frozen = {name: tuple(item) if isinstance(item, list) else item for name, item in value.items()}
    return kind(**frozen)


def _list(document: Mapping[str, Any], name: str) -> list[Any]:
    value = document.get(name, [])
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"field {name!r}: expected a list, found {value!r}")
    return list(value)


_OPERATORS_SETTINGS = frozenset({"record_keys", "state_dir", "canary_requests"})
"""Settings of a session that name paths at which it writes or reads: only the operator may choose them."""


def _check(spec: ModelSpec) -> None:
    _check_tensors(spec.inputs)
    _check_tensors(spec.outputs)
    if spec.batched and spec.has_own_inputs and any(tensor.shape[:1] != (-1,) for tensor in spec.inputs):
        raise ValueError("field 'batched' is true, but the first dimension of an input is not -1")
    if not isinstance(spec.settings, Mapping):
        raise ValueError(f"field 'settings': expected an object, found {spec.settings!r}")
    if refused := sorted(_OPERATORS_SETTINGS & spec.settings.keys()):
        raise ValueError(
            f"field 'settings': {refused[0]!r} names a path on the server, which a version cannot choose; set it in"
            " config.pbtxt, or pass it to InferenceSession.open"
        )
    axes = {tensor.name: range(len(tensor.shape)) for tensor in spec.inputs}
    for name, axis in itertools.chain(*spec.equal_sizes):
        if not isinstance(name, str) or type(axis) is not int or axis not in axes.get(name, ()):
            raise ValueError(f"field 'equal_sizes': no input {name!r} has an axis {axis!r}")
    folders: set[str] = set()
    for table in spec.tables:
        _check_table(table)
        if table.folder in folders:
            raise ValueError(f"two tables have the folder {table.folder!r}")
        folders.add(table.folder)
    for lookups in (spec.lookups, spec.ranking.lookups if spec.ranking else ()):
        for lookup in lookups:
            _check_lookup(lookup, spec, folders)
        _check_shared(lookups)
    _check_ranking(spec)


def _check_ranking(spec: ModelSpec) -> None:
    if not all(isinstance(tensor.context, bool) for tensor in spec.inputs):
        raise ValueError("an input's field 'context' must be true or false")
    names = {tensor.name for tensor in spec.inputs}
    if (spec.ranking is None) != (not spec.context) or len(spec.context) == len(names) > 0:
        raise ValueError("field 'ranking' is for models where some inputs, but not all, belong to the context")
    if spec.ranking is None:
        return
    fractions = spec.ranking.multiply_adds_fraction, spec.ranking.lookups_fraction, spec.ranking.bytes_fraction
    if not all(isinstance(fraction, (int, float)) for fraction in fractions) or type(spec.ranking.may_pad) is not bool:
        raise ValueError(
            f"field 'ranking': fractions must be numbers and may_pad must be true or false, found {spec.ranking!r}"
        )
    if not isinstance(spec.ranking.tiled, tuple) or not all(isinstance(line, str) for line in spec.ranking.tiled):
        raise ValueError(f"field 'ranking': tiled must be a list of strings, found {spec.ranking.tiled!r}")
    if not isinstance(spec.ranking.undivided, str):
        raise ValueError(f"field 'ranking': undivided must be a string, found {spec.ranking.undivided!r}")
    largest = spec.ranking.largest_input
    if largest is not None and (type(largest) not in (int, float) or not largest > 0):
        raise ValueError(f"field 'ranking': largest_input must be a number above 0, found {largest!r}")
    # Keys that a network computes may be of either: the session compares their number of rows in each batch.
    given = [lookup for lookup in spec.ranking.lookups if lookup.keys in names]
    contexts = {(lookup.dense_input, lookup.keys in spec.context) for lookup in given}
    if len(contexts) > len({name for name, _ in contexts}):
        raise ValueError("field 'ranking': lookups of the context and of candidates fill one input of the network")
    if not spec.batched or not spec.has_own_inputs or CANDIDATES in names:
        raise ValueError(
            f"field 'ranking': the model must be batched, have the layout 'tensors', and have no input {CANDIDATES!r}"
        )


def _check_tensors(tensors: tuple[TensorSpec, ...]) -> None:
    names: set[str] = set()
    for tensor in tensors:
        if not isinstance(tensor.name, str) or not isinstance(tensor.dtype, str):
            raise ValueError(f"tensor {tensor.name!r}: name and dtype must be strings")
        if not _is_type_name(tensor.dtype):
            raise ValueError(f"tensor {tensor.name!r}: dtype {tensor.dtype!r} is not a NumPy dtype")
        if not all(type(d) is int and d >= -1 for d in tensor.shape):
            raise ValueError(f"tensor {tensor.name!r}: shape {tensor.shape} may hold only sizes and -1")
        if tensor.name in names:
            raise ValueError(f"two inputs or two outputs have the name {tensor.name!r}")
        names.add(tensor.name)


def _is_type_name(text: str) -> bool:
    """Whether NumPy has a type of that name. NumPy may take other texts for a list of types, and evaluate them."""
    if text in _USUAL_TYPES:
        return True
    if not text.isidentifier():
        return False
    import numpy as np

    try:
        np.dtype(text)
    except (TypeError, ValueError):
        return False
    return True


def _check_lookup(lookup: LookupSpec, spec: ModelSpec, folders: set[str]) -> None:
    where = f"lookup of {lookup.table!r}"
    if lookup.table not in folders:
        raise ValueError(f"a lookup reads table {lookup.table!r}, which is not among the tables")
    if not all(isinstance(name, str) for name in (lookup.keys, lookup.dense_input, lookup.weights or "")):
        raise ValueError(f"{where}: keys, dense_input and weights must be strings")
    if lookup.pooling not in get_args(Pooling):
        raise ValueError(f"{where}: pooling {lookup.pooling!r} is not one of {get_args(Pooling)}")
    if lookup.weights is not None and lookup.pooling not in ("sum", "mean"):
        raise ValueError(f"{where}: weights {lookup.weights!r} need pooling 'sum' or 'mean', found {lookup.pooling!r}")
    if lookup.bags is not None and (lookup.pooling == "none" or lookup.joined or not _is_pair(lookup.bags)):
        raise ValueError(f"{where}: bags {lookup.bags!r} must be two names, and need pooling and an input of its own")
    if lookup.columns is not None:
        _check_columns(lookup, spec)


def _check_shared(lookups: tuple[LookupSpec, ...]) -> None:
    """Refuse lookups that would write to one place: memory would be made for one of them."""
    for first, second in itertools.pairwise(sorted(lookups, key=lambda lookup: lookup.dense_input)):
        if first.dense_input == second.dense_input and not (first.joined and second.joined):
            raise ValueError(f"several lookups fill {first.dense_input!r}: all of them must be joined")


def _is_pair(names: object) -> bool:
    return isinstance(names, tuple) and len(names) == 2 and all(isinstance(name, str) for name in names)


def _check_columns(lookup: LookupSpec, spec: ModelSpec) -> None:
    begin, end = lookup.columns or (0, 0)
    tensor = next((tensor for tensor in spec.inputs if tensor.name == lookup.keys), None)
    if not lookup.joined or tensor is None or len(tensor.shape) != 2 or not 0 <= begin < end <= tensor.shape[1]:
        raise ValueError(
            f"lookup of {lookup.table!r}: columns {lookup.columns} of {lookup.keys!r} are not a valid range"
        )
    if tensor.dtype not in ("int64", "int32"):
        raise ValueError(
            f"lookup of {lookup.table!r}: columns of {lookup.keys!r} are {tensor.dtype}, not int64 or int32"
        )


_LARGEST_FLOAT = 3.4028234663852886e38
"""The largest number of float32."""


def _check_table(table: TableSpec) -> None:
    where = f"table {table.name!r}"
    if not isinstance(table.folder, str) or not is_folder_name(table.folder):
        raise ValueError(f"{where}: folder {table.folder!r} may contain only letters, digits, '_' and '-'")
    if type(table.num_rows) is not int or table.num_rows < 0:
        raise ValueError(f"{where}: num_rows must be a whole number, found {table.num_rows!r}")
    if type(table.embedding_dim) is not int or table.embedding_dim < 1:
        raise ValueError(f"{where}: embedding_dim must be at least 1, found {table.embedding_dim!r}")
    if table.dtype not in get_args(VectorType):
        raise ValueError(f"{where}: dtype {table.dtype!r} is not one of {get_args(VectorType)}")
    if table.keys not in get_args(KeyKind):
        raise ValueError(f"{where}: keys {table.keys!r} is not one of {get_args(KeyKind)}")
    if table.row_shape is not None and math.prod(table.row_shape) != table.embedding_dim:
        raise ValueError(f"{where}: row_shape {table.row_shape} does not match embedding_dim {table.embedding_dim}")
    default = table.default_vector if isinstance(table.default_vector, tuple) else (table.default_vector,)
    if not all(isinstance(element, (int, float)) and abs(element) <= _LARGEST_FLOAT for element in default):
        raise ValueError(
            f"{where}: default_vector {table.default_vector!r} has an element that is not a finite float32"
        )
    if isinstance(table.default_vector, tuple) and len(table.default_vector) != table.embedding_dim:
        raise ValueError(f"{where}: default_vector has {len(table.default_vector)} elements, not {table.embedding_dim}")


_FOLDER_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


def is_folder_name(name: str) -> bool:
    """Whether a table's folder may have this name."""
    return bool(name) and set(name) <= _FOLDER_CHARACTERS


def folder_names(names: list[str]) -> list[str]:
    """Folder names for tables: foreign characters become `_`, a clash gets `_2`, `_3` … (in the order given)."""
    folders: list[str] = []
    for name in names:
        stem = "".join(c if c in _FOLDER_CHARACTERS else "_" for c in name) or "_"
        stem = stem[:120]
        folder, count = stem, 1
        while folder in folders:
            count += 1
            folder = f"{stem}_{count}"
        folders.append(folder)
    return folders
