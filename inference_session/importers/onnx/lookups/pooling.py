"""Moves sum, mean and maximum over the keys' last axis from the graph into the look-up, where results stay the same."""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from inference_session.importers.onnx.lookups.graph_lookups import EditedModel, GraphLookup, skip_identities
from inference_session.importers.onnx.lookups.vector_values import values_of_vectors
from inference_session.importers.onnx.types import Dims
from inference_session.model_spec import Pooling
from inference_session.onnx_graphs import attribute, axes_of, make_node, producers, replace_node, use_counts

_POOLINGS: dict[str, Pooling] = {"ReduceSum": "sum", "ReduceMean": "mean", "ReduceMax": "max"}
_AXES_INPUT_OPSET = 13


def pool_lookups(edited: EditedModel, lookups: list[GraphLookup]) -> None:
    """Change the graph and the look-ups; those whose pooling is not exactly ours are not changed."""
    for lookup in lookups:
        dims = lookup.keys_dims
        if lookup.pooling == "none" and dims and len(dims) > 1 and dims[-1] != 0 and len(lookup.row_shape) <= 1:
            _pool(edited, lookup, {each.vectors for each in lookups})
    skip_identities(edited.graph)


def _pool(edited: EditedModel, lookup: GraphLookup, vectors: set[str]) -> None:
    """`vectors`: those of all look-ups, of which no factor may be computed: factors come before the look-ups."""
    reader = _only_reader(edited, lookup.vectors)
    if reader is None:
        return
    weights = None
    if reader.op_type == "Mul":
        product, reader = reader, _only_reader(edited, reader.output[0])
        if reader is None or reader.op_type != "ReduceSum" or not _reduces_bags(edited, reader, lookup):
            return
        weights = _key_weights(edited, lookup, product, vectors)
        if weights is None:
            return
    if reader.op_type not in _POOLINGS or not _reduces_bags(edited, reader, lookup):
        return
    lookup.pooling, lookup.weights = _POOLINGS[reader.op_type], weights
    replace_node(edited.graph, reader, [_reshaped(edited, lookup, reader)])


def _only_reader(edited: EditedModel, value: str) -> NodeProto | None:
    """The node of the main graph that reads a value, if it is the only reader."""
    if use_counts(edited.graph)[value] != 1:
        return None
    return next((node for node in edited.graph.node if value in node.input and not node.domain), None)


def _reduces_bags(edited: EditedModel, reader: NodeProto, lookup: GraphLookup) -> bool:
    if lookup.keys_dims is None or reader.op_type not in _POOLINGS:
        return False
    axes = axes_of(edited.graph, reader)
    rank = len(lookup.keys_dims) + len(lookup.row_shape)
    return axes is not None and [axis % rank for axis in axes] == [len(lookup.keys_dims) - 1]


def _reshaped(edited: EditedModel, lookup: GraphLookup, reader: NodeProto) -> NodeProto:
    """The nodes that give the pooled vectors the shape that the reduction gave them."""
    output, leading = reader.output[0], len(lookup.keys_dims or ()) - 1
    kept = [1] if attribute(reader, "keepdims", 1) else []
    if not kept and lookup.row_shape:
        return make_node("Identity", [lookup.vectors], output)
    # 0: as in the input.
    shape = edited.builder(output).integers([0] * leading + kept + list(lookup.row_shape))
    return make_node("Reshape", [lookup.vectors, shape], output)


def _key_weights(edited: EditedModel, lookup: GraphLookup, product: NodeProto, vectors: set[str]) -> str | None:
    """A value shaped as the keys that holds each key's factor; None where the factors are not one per key."""
    factor = next((name for name in product.input if name != lookup.vectors), None)
    if factor is None or factor in values_of_vectors(edited.graph, {*edited.tables, *vectors}):
        return None
    dims = edited.types.dims(factor)
    if edited.types.elem_type(factor) != TensorProto.FLOAT or dims is None or len(lookup.row_shape) != 1:
        return None
    if not dims or dims[-1] != 1 or not _fits(dims[:-1], lookup.keys_dims or ()):
        return None
    flat, is_whole = _without_last_axis(edited, factor), dims[:-1] == lookup.keys_dims
    if is_whole:
        return flat
    builder = edited.builder(flat)
    whole = builder.add("Expand", [flat, builder.add("Shape", [lookup.keys])])
    replace_node(edited.graph, product, [*builder.nodes, product])
    return whole


def _fits(dims: Dims, keys_dims: Dims) -> bool:
    """Whether a shape broadcasts to that of the keys, as far as sizes are known."""
    if len(dims) > len(keys_dims):
        return False
    aligned = zip(reversed(dims), reversed(keys_dims), strict=False)
    return all(dim == 1 or (dim is not None and dim == key_dim) for dim, key_dim in aligned)


def _without_last_axis(edited: EditedModel, factor: str) -> str:
    node = producers(edited.graph).get(factor)
    if node is not None and node.op_type == "Unsqueeze" and _unsqueezes_last(edited, node):
        return str(node.input[0])
    builder = edited.builder(factor)
    if edited.opset < _AXES_INPUT_OPSET:
        flat = builder.add("Squeeze", [factor], axes=[-1])
    else:
        flat = builder.add("Squeeze", [factor, builder.integers([-1])])
    if node is None:
        edited.graph.node.insert(0, builder.nodes[0])
    else:
        replace_node(edited.graph, node, [node, *builder.nodes])
    return flat


def _unsqueezes_last(edited: EditedModel, node: NodeProto) -> bool:
    axes = axes_of(edited.graph, node)
    rank = edited.types.rank(node.output[0])
    return axes in ([-1], [None if rank is None else rank - 1])
