"""session.json, which says what the model of a version directory is: written, read and checked."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from inference_session.errors import ModelFormatError
from inference_session.model_spec import (
    CANDIDATES,
    SESSION_FILE,
    LookupSpec,
    ModelSpec,
    TableSpec,
    TensorSpec,
    is_folder_name,
)
from inference_session.platform.json_records import LARGEST_INTEGER, MAX_JSON_BYTES, parse_json, read_record
from inference_session.platform.small_files import read_regular_file, why_unreadable

FORMAT = 1
_USUAL_TYPES = frozenset(
    ("bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "object", "uint8", "uint32", "uint64")
)
"""Of inputs and outputs. NumPy is loaded for others only: it takes as long as the rest of `hotrow serve`."""


def write_spec(spec: ModelSpec, directory: Path) -> None:
    """Write session.json into a draft."""
    document = {"format": FORMAT, **asdict(spec)}
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    (directory / SESSION_FILE).write_text(text + "\n", encoding="utf-8")


def read_spec(directory: Path) -> ModelSpec:
    """Read and check session.json; ModelFormatError names the file and the field at fault."""
    path = directory / SESSION_FILE
    try:
        document = parse_json(read_regular_file(path, max_bytes=MAX_JSON_BYTES))
    except FileNotFoundError as error:
        raise ModelFormatError(f"{path}: no such file; {_expected(directory)}") from error
    except NotADirectoryError as error:
        raise ModelFormatError(
            f"{directory}: a file, not a version directory; `hotrow import` makes one of a model's file"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"{path}: not readable as JSON: {why_unreadable(error)}") from error
    try:
        return _parse(document)
    except ValueError as error:
        raise ModelFormatError(f"{path}: {error}") from error


def _expected(directory: Path) -> str:
    """What a folder without session.json should have been."""
    for kind, pattern in (("the folder of a model", "[0-9]*"), ("a model repository", "*/[0-9]*")):
        numbered = [path for path in directory.glob(pattern) if path.name.isdecimal()]
        versions = [path for path in numbered if (path / SESSION_FILE).exists()]
        if versions:
            newest = max(versions, key=lambda path: int(path.name))
            return f"{directory} is {kind}; give one of its version directories, such as {newest}"
        if numbered:  # as those of HugeCTR's models that are served in place
            return f"{directory} is {kind}, none of whose versions has one; `hotrow import` writes versions that do"
    return "a version directory, such as model_repository/ctr/1, has one"


def _parse(document: object) -> ModelSpec:
    if not isinstance(document, dict):
        raise ValueError(f"expected an object, found {type(document).__name__}")
    found = document.pop("format", None)
    if type(found) is not int or found != FORMAT:
        raise ValueError(f"field 'format' must be {FORMAT}; this version of hotrow reads no other format")
    spec = read_record(ModelSpec, document)
    _check(spec)
    return spec


_OPERATORS_SETTINGS = frozenset({"record_keys", "state_dir", "canary_requests"})
"""Settings of a session that name paths at which it writes or reads: only the operator may choose them."""


def _check(spec: ModelSpec) -> None:
    _check_tensors(spec.inputs, "inputs")
    _check_tensors(spec.outputs, "outputs")
    if spec.batched and spec.has_own_inputs and any(tensor.shape[:1] != (-1,) for tensor in spec.inputs):
        raise ValueError("field 'batched' is true, but the first size in the 'shape' of an input is not -1")
    if refused := sorted(_OPERATORS_SETTINGS & spec.settings.keys()):
        raise ValueError(
            f"field 'settings': {refused[0]!r} names a path on the server, which a version cannot choose; set it in"
            " config.pbtxt, or pass it to InferenceSession.open"
        )
    _check_names(spec)
    _check_equal_sizes(spec)
    for number, table in enumerate(spec.tables):
        _check_table(table, f"tables[{number}]")
    folders = [table.folder for table in spec.tables]
    if repeated := _repeated(folders):
        raise ValueError(f"field 'tables': two tables have the folder {repeated!r}")
    for place, lookups in {
        "lookups": spec.lookups,
        "ranking.lookups": spec.ranking.lookups if spec.ranking else (),
    }.items():
        for number, lookup in enumerate(lookups):
            _check_lookup(lookup, spec, folders, f"{place}[{number}]")
        _check_shared(lookups, place)
    _check_ranking(spec)


def _check_equal_sizes(spec: ModelSpec) -> None:
    axes = {tensor.name: range(len(tensor.shape)) for tensor in spec.inputs}
    for group in spec.equal_sizes:
        if len(group) < 2:
            raise ValueError(f"field 'equal_sizes': a group needs two [input, axis] pairs, found {group!r}")
        for name, axis in group:
            if axis not in axes.get(name, ()):
                raise ValueError(f"field 'equal_sizes': no input {name!r} has an axis {axis!r}")


def _check_names(spec: ModelSpec) -> None:
    """Refuse label_outputs that are no outputs."""
    outputs = {tensor.name for tensor in spec.outputs}
    for name in spec.label_outputs:
        if name not in outputs:
            raise ValueError(f"field 'label_outputs': the model has no output {name!r}")


def _repeated(names: Sequence[str]) -> str | None:
    """The first name that comes twice."""
    return next((name for number, name in enumerate(names) if name in names[:number]), None)


def _check_ranking(spec: ModelSpec) -> None:
    names = {tensor.name for tensor in spec.inputs}
    if (spec.ranking is None) != (not spec.context) or len(spec.context) == len(names) > 0:
        raise ValueError(
            "field 'ranking' is for models where some inputs, but not all, belong to the context (field 'context')"
        )
    if spec.ranking is None:
        return
    largest = spec.ranking.largest_input
    if largest is not None and not largest > 0:
        raise ValueError(f"field 'ranking.largest_input' must be a number above 0, found {largest!r}")
    # Keys that a network computes may be of either: the session compares their number of rows in each batch.
    given = [lookup for lookup in spec.ranking.lookups if lookup.keys in names]
    contexts = {(lookup.dense_input, lookup.keys in spec.context) for lookup in given}
    if len(contexts) > len({name for name, _ in contexts}):
        raise ValueError("field 'ranking': lookups of the context and of candidates fill one input of the network")
    if not spec.batched or not spec.has_own_inputs or CANDIDATES in names:
        raise ValueError(
            f"field 'ranking': the model must be batched, have the layout 'tensors', and have no input {CANDIDATES!r}"
        )


def _check_tensors(tensors: tuple[TensorSpec, ...], place: str) -> None:
    for number, tensor in enumerate(tensors):
        if not _is_type_name(tensor.dtype):
            raise ValueError(f"field '{place}[{number}].dtype': {tensor.dtype!r} is not a NumPy dtype")
        if not all(size >= -1 for size in tensor.shape):
            raise ValueError(f"field '{place}[{number}].shape': {tensor.shape} may hold only sizes and -1")
        if math.prod(max(size, 1) for size in tensor.shape) > LARGEST_INTEGER:
            raise ValueError(f"field '{place}[{number}].shape': {tensor.shape} has more than 2^63 elements")
    if repeated := _repeated([tensor.name for tensor in tensors]):
        raise ValueError(f"field '{place}': two {place} have the name {repeated!r}")


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


def _check_lookup(lookup: LookupSpec, spec: ModelSpec, folders: Sequence[str], place: str) -> None:
    if lookup.table not in folders:
        raise ValueError(f"field '{place}.table': {lookup.table!r} is not the folder of a table")
    if lookup.weights is not None and lookup.pooling not in ("sum", "mean"):
        raise ValueError(
            f"field '{place}.weights': {lookup.weights!r} needs 'pooling' 'sum' or 'mean', found {lookup.pooling!r}"
        )
    if lookup.bags is not None and (lookup.pooling == "none" or lookup.joined):
        raise ValueError(f"field '{place}.bags': {lookup.bags!r} need 'pooling', and an input that is not 'joined'")
    if lookup.columns is not None:
        _check_columns(lookup, spec, place)


def _check_shared(lookups: tuple[LookupSpec, ...], place: str) -> None:
    """Refuse lookups that would write to one place: memory would be made for one of them."""
    for first, second in itertools.pairwise(sorted(lookups, key=lambda lookup: lookup.dense_input)):
        if first.dense_input == second.dense_input and not (first.joined and second.joined):
            raise ValueError(
                f"field '{place}': several lookups have the 'dense_input' {first.dense_input!r}: all of them must be"
                " 'joined'"
            )


def _check_columns(lookup: LookupSpec, spec: ModelSpec, place: str) -> None:
    begin, end = lookup.columns or (0, 0)
    tensor = next((tensor for tensor in spec.inputs if tensor.name == lookup.keys), None)
    if not lookup.joined or tensor is None or len(tensor.shape) != 2 or not 0 <= begin < end <= tensor.shape[1]:
        raise ValueError(
            f"field '{place}.columns': {lookup.columns} is not a range of columns of an input 'keys' ({lookup.keys!r})"
            " of a 'joined' lookup"
        )
    if tensor.dtype not in ("int64", "int32"):
        raise ValueError(f"field '{place}.columns': {lookup.keys!r} is {tensor.dtype}, not int64 or int32")


_LARGEST_FLOAT = 3.4028234663852886e38
"""The largest number of float32."""
_LARGEST_ROW_BYTES = 2**31 - 1


def _check_table(table: TableSpec, place: str) -> None:
    if not is_folder_name(table.folder):
        raise ValueError(f"field '{place}.folder': {table.folder!r} may contain only letters, digits, '_' and '-'")
    if table.num_rows < 0:
        raise ValueError(f"field '{place}.num_rows' must be at least 0, found {table.num_rows}")
    if table.embedding_dim < 1:
        raise ValueError(f"field '{place}.embedding_dim' must be at least 1, found {table.embedding_dim}")
    if table.num_bytes > LARGEST_INTEGER or table.row_bytes > _LARGEST_ROW_BYTES:
        raise ValueError(
            f"field '{place}.num_rows' and 'embedding_dim': {table.num_rows} rows of {table.row_bytes} bytes exceed"
            f" {LARGEST_INTEGER} bytes, or {_LARGEST_ROW_BYTES} bytes for a row"
        )
    if table.row_shape is not None and (
        min(table.row_shape, default=1) < 1 or math.prod(table.row_shape) != table.embedding_dim
    ):
        raise ValueError(
            f"field '{place}.row_shape': {table.row_shape} does not match 'embedding_dim' {table.embedding_dim}"
        )
    default = table.default_vector if isinstance(table.default_vector, tuple) else (table.default_vector,)
    if not all(abs(element) <= _LARGEST_FLOAT for element in default):
        raise ValueError(
            f"field '{place}.default_vector': {table.default_vector!r} has an element that is not a finite float32"
        )
    if isinstance(table.default_vector, tuple) and len(table.default_vector) != table.embedding_dim:
        raise ValueError(
            f"field '{place}.default_vector': {len(table.default_vector)} elements, not {table.embedding_dim}"
        )
