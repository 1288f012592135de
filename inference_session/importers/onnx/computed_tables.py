"""Tables that the graph computes from constants are computed at import, not for each request.

Such as a table with a row of zeros put in front, a scaled or transposed one, and one of int8 that is dequantized whole.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from inference_session.importers.onnx.canonical import CanonicalModel
from inference_session.importers.onnx.evaluation import open_network
from inference_session.importers.onnx.graph import (
    all_nodes,
    bodies,
    constants,
    is_random,
    needed_nodes,
    producers,
    reads,
    set_nodes,
)
from inference_session.importers.onnx.tables import VECTOR_TYPES, copies_of_tables, is_row_read
from inference_session.importers.onnx.weights import Weight, little_endian, tensor_bytes

_MIN_BYTES = 4096
_MAX_BYTES = 1 << 30
"""Of what a table is computed from, and of the table: several copies are held in memory."""


def compute_tables(whole: CanonicalModel, min_rows: int) -> None:
    """Make weights of values that are read by rows, have enough of them, and follow from constants alone.

    Changes the model. Larger tables stay as they are.
    """
    graph = whole.model.graph
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
    piece = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    piece.graph.name = "table"
    piece.graph.initializer.extend(tensors)
    piece.graph.node.extend(nodes)
    piece.graph.output.append(ValueInfoProto(name=name))
    try:
        values: NDArray[Any] = open_network(piece.SerializeToString()).run([name], {})[0]
    except Exception:  # noqa: BLE001  ONNX Runtime's errors share no other base; the original will say what is wrong
        return None
    return values


def _weight(name: str, values: NDArray[Any]) -> Weight | None:
    elem_type = helper.np_dtype_to_tensor_dtype(values.dtype)
    if elem_type not in VECTOR_TYPES or not values.ndim or tensor_bytes(elem_type, values.shape) > _MAX_BYTES:
        return None
    tensor = TensorProto(name=name, data_type=elem_type, dims=values.shape, raw_data=little_endian(values))
    return Weight(name, elem_type, values.shape, tensor)
