"""The content of session.json for an imported model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from onnx import TensorProto, helper

from inference_session.errors import UnsupportedModelError
from inference_session.importers.onnx.carve import CarvedModel
from inference_session.importers.onnx.lookups.graph_lookups import GraphLookup
from inference_session.importers.onnx.probe import Findings
from inference_session.importers.onnx.tables import VECTOR_TYPES
from inference_session.importers.onnx.types import Dims, ValueType
from inference_session.importers.onnx.weights import Weight
from inference_session.model_spec import (
    PREDICTIONS,
    LookupSpec,
    ModelSpec,
    TableSpec,
    TensorSpec,
    folder_names,
    label_names,
)
from inference_session.onnx_graphs import all_nodes

_PREDICTION_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)


class TablePlace(NamedTuple):
    """The place of a table that was written before the model was imported."""

    name: str
    folder: str


def table_folders(carved: CarvedModel, places: Mapping[str, TablePlace]) -> dict[str, str]:
    """The folder of each table, by the name of its initializer."""
    names = [table.name for table in carved.tables]
    found = dict(zip(names, folder_names(names), strict=True))
    return {name: places[name].folder if name in places else folder for name, folder in found.items()}


def model_spec(
    source: str,
    inputs: Mapping[str, ValueType],
    outputs: Mapping[str, ValueType],
    carved: CarvedModel,
    findings: Findings,
    *,
    places: Mapping[str, TablePlace],
) -> tuple[ModelSpec, tuple[str, ...]]:
    """The description of an imported model, and further notes for people."""
    folders = table_folders(carved, places)
    shapes = dict(zip(outputs, _output_shapes(outputs, findings), strict=True))
    labels = _labels(outputs, shapes, findings)
    spec = ModelSpec(
        inputs=tuple(TensorSpec(name, _dtype(kind), _sizes(kind.dims)) for name, kind in inputs.items()),
        outputs=tuple(TensorSpec(name, _dtype(kind), shapes[name]) for name, kind in outputs.items()),
        tables=tuple(_table_spec(table, folders[table.name], places) for table in carved.tables),
        lookups=tuple(lookup_spec(lookup, folders[lookup.table]) for lookup in carved.lookups),
        labels=tuple(label for columns in labels.values() for label in columns),
        label_outputs=tuple(labels),
        batched=findings.batched,
        joinable=findings.joinable,
        equal_sizes=findings.equal_sizes,
        source=source,
    )
    return spec, tuple(_notes(spec, carved))


def _dtype(kind: ValueType) -> str:
    if kind.elem_type == TensorProto.STRING:
        return "object"
    return str(helper.tensor_dtype_to_np_dtype(kind.elem_type))


def _sizes(dims: Dims | None) -> tuple[int, ...]:
    return tuple(dim if isinstance(dim, int) else -1 for dim in dims or ())


def _output_shapes(outputs: Mapping[str, ValueType], findings: Findings) -> list[tuple[int, ...]]:
    """As declared, except sizes that are declared fixed and are not, and what is not declared."""
    if findings.served_shapes is None:
        return [
            _unseen_shape(output, inferred)
            for output, inferred in zip(outputs.items(), findings.inferred_shapes, strict=True)
        ]
    declared = [_sizes(kind.dims) for kind in outputs.values()]
    shapes: list[tuple[int, ...]] = []
    for sizes, seen in zip(declared, findings.served_shapes, strict=True):
        if len(sizes) == len(seen):
            shapes.append(tuple(size if size == found else -1 for size, found in zip(sizes, seen, strict=True)))
        else:
            shapes.append(seen)
    return shapes


def _unseen_shape(output: tuple[str, ValueType], inferred: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an output of a model that could not be run."""
    name, kind = output
    if kind.dims is None and not inferred:
        raise UnsupportedModelError(
            f"output {name!r} has no shape, and the model cannot be run on generated inputs to find it; export it "
            "with one"
        )
    return inferred if kind.dims is None else _sizes(kind.dims)


def _labels(
    outputs: Mapping[str, ValueType], shapes: Mapping[str, tuple[int, ...]], findings: Findings
) -> dict[str, list[str]]:
    """The outputs that make up the predictions, with a name for each of their columns."""
    seen = dict(zip(outputs, findings.shapes or shapes.values(), strict=True))
    floats = [name for name, kind in outputs.items() if kind.elem_type in _PREDICTION_TYPES]
    num_columns = {name: _num_columns(seen[name]) for name in floats}
    names = [name for name in floats if num_columns[name] > 0]
    if not findings.batched:
        names = _of_equal_rows(names, outputs, findings)
    return label_names({name: num_columns[name] for name in names})


def _num_columns(shape: tuple[int, ...]) -> int:
    """Of an output of this shape, as predictions; 0 or less: it is none."""
    return 1 if len(shape) == 1 else shape[-1] if len(shape) == 2 else 0


def _of_equal_rows(names: list[str], outputs: Mapping[str, ValueType], findings: Findings) -> list[str]:
    """Those that have as many rows as the first one whose rows follow the inputs, as declared and in all runs.

    Where the rows of none do, the first one of all.
    """
    runs = dict(zip(outputs, findings.num_rows or [()] * len(outputs), strict=True))
    first = next((name for name in names if len({*runs[name]}) > 1), names[0] if names else "")
    declared = {name: (outputs[name].dims or (None,))[0] for name in names}
    return [name for name in names if declared[first] in (None, declared[name]) and runs[name] == runs[first]]


def _table_spec(table: Weight, folder: str, places: Mapping[str, TablePlace]) -> TableSpec:
    row_shape = table.dims[1:]
    return TableSpec(
        name=places[table.name].name if table.name in places else table.name,
        folder=folder,
        num_rows=table.dims[0],
        embedding_dim=table.row_elements,
        dtype=VECTOR_TYPES[table.elem_type],
        keys="row_number",
        row_shape=None if len(row_shape) == 1 else row_shape,
    )


def lookup_spec(lookup: GraphLookup, folder: str) -> LookupSpec:
    """One read of a table, as session.json says it."""
    return LookupSpec(
        table=folder,
        keys=lookup.keys,
        dense_input=lookup.matrix or lookup.vectors,
        pooling=lookup.pooling,
        weights=lookup.weights,
        bags=lookup.bags,
        columns=lookup.columns,
        joined=lookup.matrix is not None,
    )


def _notes(spec: ModelSpec, carved: CarvedModel) -> list[str]:
    notes: list[str] = []
    scaled = next((node for node in all_nodes(carved.dense.graph) if node.op_type == "DynamicQuantizeLinear"), None)
    if scaled:
        notes.append(
            f"DynamicQuantizeLinear {(scaled.name or scaled.output[0])!r} takes one scale for the whole batch, so that "
            "requests cannot be joined; import the model as it was before quantize_dynamic, and store tables by "
            "--tables int8"
        )
    if not spec.tables:
        notes.append(f"no table was taken out; everything is in the dense network{_largest_weight(carved)}")
    if not spec.labels:
        notes.append(f"there is no {PREDICTIONS}: no output is a float tensor of shape [batch] or [batch, k]")
    may_be_empty = (each for each in carved.lookups if each.keys_dims and not isinstance(each.keys_dims[-1], int))
    poolings = {lookup.pooling for lookup in may_be_empty if not lookup.was_zero_if_empty}
    return notes + [
        f"the {pooling} over an empty bag is zero here; ONNX Runtime gives NaN, -inf or an error"
        for pooling in sorted(poolings & {"mean", "max"})
    ]


def _largest_weight(carved: CarvedModel) -> str:
    """What a person who expected a table may have meant, unless the report names it already."""
    matrices = [weight for weight in carved.dense_weights if len(weight.dims) > 1]
    if carved.stays_dense or not matrices:
        return ""
    largest = max(matrices, key=lambda weight: weight.num_bytes)
    reader = next((node for node in all_nodes(carved.dense.graph) if largest.name in node.input), None)
    if reader is None:
        return ""
    return (
        f". The largest weight, {largest.name!r} ({' x '.join(map(str, largest.dims))}), is read by {reader.op_type} "
        f"{(reader.name or reader.output[0])!r}; rows of a table are read by Gather along axis 0"
    )
