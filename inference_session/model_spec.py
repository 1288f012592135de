"""What a model is, as frozen objects, and the names of the files in a version directory.

<version>/
  session.json         a ModelSpec (version_directory/session_file.py)
  dense.onnx           the dense network; its inputs are model inputs and looked-up vectors
  keys.onnx            computes keys from the model's inputs; only where the graph derived them
  ranking.onnx         the dense network for requests that rank candidates: the context's inputs have a row per context;
                       only where context inputs were named. Its keys are computed by ranking_keys.onnx
  tables/<folder>/     `key` (int64, absent where keys are row numbers), `emb_vector`, `index`
  MANIFEST.json        sizes and checksums (version_directory/manifest.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from inference_session.errors import TableNotFoundError

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
KeyKind = Literal["row_number", "stored"]
NamedArrays: TypeAlias = "Mapping[str, NDArray[Any]]"
"""Arrays by the names of the inputs or outputs that they are, of a model or of one of its networks."""


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
    settings: Mapping[str, str | float | bool] = field(default_factory=dict)
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

    @property
    def looked_up_tables(self) -> list[int]:
        """For each look-up, the number of its table."""
        numbers = {table.folder: number for number, table in enumerate(self.tables)}
        return [numbers[lookup.table] for lookup in self.lookups]

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


def label_names(num_columns: Mapping[str, int]) -> dict[str, list[str]]:
    """Names for the columns of outputs: a single column has its output's name, others get `_0`, `_1` …

    Where an output or another column has such a name, they get `__0`, `__1` …
    """
    labels = {name: [name] for name, number in num_columns.items() if number == 1}
    taken = set(labels)
    for name, number in num_columns.items():
        if number != 1:
            stem = f"{name}_"
            while not taken.isdisjoint(columns := [f"{stem}{i}" for i in range(number)]):
                stem += "_"
            labels[name] = columns
            taken.update(columns)
    return {name: labels[name] for name in num_columns}
