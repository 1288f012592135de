"""Tables that the graph computes from constants are computed at import, not for each request.

Such as a table with a row of zeros put in front, a scaled or transposed one, and one of int8 that is dequantized, as a
whole or after its rows are read.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

from inference_session.importers.onnx.canonical import CanonicalModel
from inference_session.importers.onnx.evaluation import run_piece
from inference_session.importers.onnx.tables import VECTOR_TYPES, copies_of_tables, is_row_read
from inference_session.importers.onnx.weights import Weight, little_endian, tensor_bytes
from inference_session.onnx_graphs import (
    all_nodes,
    bodies,
    constants,
    copied,
    is_random,
    needed_nodes,
    producers,
    reads,
    set_nodes,
    use_counts,
)

_QUANTIZED = (TensorProto.INT8, TensorProto.UINT8)
_MIN_BYTES = 4096
_MAX_BYTES = 1 << 30
"""Of what a table is computed from, and of the table: several copies are held in memory."""


def compute_tables(whole: CanonicalModel, min_rows: int) -> None:
    """Make weights of values that are read by rows, have enough of them, and follow from constants alone.

    Changes the model. Larger tables stay as they are.
    """
    graph = whole.model.graph
    for name in [each.name for each in whole.weights.values() if each.elem_type in _QUANTIZED]:
        _dequantize(whole, name, min_rows)
    made_by, outputs = producers(graph), [value.name for value in graph.output]
    vectors = {name for name, weight in whole.weights.items() if weight.elem_type in VECTOR_TYPES}
    others = {*outputs, *copies_of_tables(graph, vectors)}
    read = dict.fromkeys(node.input[0] for node in all_nodes(graph) if is_row_read(node))
    computed = False
    for name in [name for name in read if name in made_by and name not in others]:
        table = _computed(whole, name)
        if table is not None and table.dims[0] >= min_rows:
            whole.weights[name] = table
            made_by[name].output[:] = [whole.names.fresh(o) if o == name else o for o in made_by[name].output]
            computed = True
    if computed:
        set_nodes(graph, needed_nodes(graph.node, outputs))


def _dequantize(whole: CanonicalModel, name: str, min_rows: int) -> None:
    """Read the rows of a dequantized table instead of dequantizing rows, if all who read them do so in one way.

    ONNX Runtime's `quantize_dynamic` writes tables so, and calls them `…_quantized`.
    """
    graph = whole.model.graph
    row_reads = [node for node in graph.node if is_row_read(node) and node.input[0] == name]
    readers = {node.input[0]: node for node in graph.node if node.op_type == "DequantizeLinear" and not node.domain}
    counts = use_counts(graph)
    found = [readers.get(node.output[0]) for node in row_reads if counts[node.output[0]] == 1]
    nodes = [node for node in found if node is not None]
    if not nodes or len(nodes) != counts[name] or whole.weights[name].dims[0] < min_rows:
        return
    ways = {tuple(node.input[1:]) for node in nodes}
    table = _dequantized(whole, nodes[0], name) if len(ways) == 1 else None
    if table is not None:
        whole.weights[table.name] = table
        for row_read, node in zip(row_reads, nodes, strict=True):
            row_read.input[0], row_read.output[:] = table.name, node.output
        set_nodes(graph, [node for node in graph.node if node not in nodes])


def _dequantized(whole: CanonicalModel, node: NodeProto, name: str) -> Weight | None:
    """The whole table, if a node dequantizes all rows with one scale."""
    known = constants(whole.model.graph)
    parameters = [known.get(each) for each in node.input[1:] if each]
    tensors = [each for each in parameters if each is not None and not each.dims]
    weight = whole.weights[name]
    if len(tensors) != len(parameters) or not _MIN_BYTES <= 4 * weight.num_bytes <= _MAX_BYTES:
        return None
    table = whole.names.fresh(name.removesuffix("_quantized"))
    of_all_rows = copied(node)
    of_all_rows.input[0], of_all_rows.output[0] = name, table
    values = _evaluated(whole.model, [of_all_rows], [*tensors, weight.tensor()], table)
    return None if values is None else _weight(table, values)


def _computed(whole: CanonicalModel, name: str) -> Weight | None:
    nodes = needed_nodes(whole.model.graph.node, [name])
    given = set[str]().union(*(reads(node) for node in nodes)) - {output for node in nodes for output in node.output}
    known = constants(whole.model.graph)
    if not given <= known.keys() | whole.weights.keys() or any(not _is_fixed(node) for node in nodes):
        return None
    weights = [whole.weights[each] for each in given if each in whole.weights]
    total = sum(each.num_bytes for each in weights) + sum(known[each].ByteSize() for each in given & known.keys())
    if not _MIN_BYTES <= total <= _MAX_BYTES:
        return None
    tensors = [known[each] for each in given & known.keys()]
    values = _evaluated(whole.model, nodes, [*tensors, *(weight.tensor() for weight in weights)], name)
    return None if values is None else _weight(name, values)


def _is_fixed(node: NodeProto) -> bool:
    is_in_training = node.op_type == "Dropout" and len(node.input) > 2
    return not is_random(node) and not bodies(node) and not is_in_training


def _evaluated(
    model: ModelProto, nodes: Collection[NodeProto], tensors: Collection[TensorProto], name: str
) -> NDArray[Any] | None:
    """None where ONNX Runtime cannot compute the value, or NumPy lacks its type."""
    try:
        return run_piece(model, nodes, tensors, name)
    except Exception:  # noqa: BLE001  ONNX Runtime's errors share no other base; the original will say what is wrong
        return None


def _weight(name: str, values: NDArray[Any]) -> Weight | None:
    elem_type = helper.np_dtype_to_tensor_dtype(values.dtype)
    if elem_type not in VECTOR_TYPES or not values.ndim or tensor_bytes(elem_type, values.shape) > _MAX_BYTES:
        return None
    tensor = TensorProto(name=name, data_type=elem_type, dims=values.shape, raw_data=little_endian(values))
    return Weight(name, elem_type, values.shape, tensor)
