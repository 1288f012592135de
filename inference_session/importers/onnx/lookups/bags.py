"""Moves the pooling of bags that a Loop cuts out of one list of keys into the look-up.

PyTorch's legacy exporter writes EmbeddingBag with offsets this way, and loops/bounded_bags.py what the newer one
writes: iteration i slices the vectors from `begins[i]` up to `ends[i]`, and the Loop stacks their sums or means. A Loop
that does anything else stays unchanged, and so do maxima, for which ONNX Runtime returns a value even for an empty bag.
"""

from __future__ import annotations

from typing import NamedTuple

from onnx import GraphProto, NodeProto, TensorProto

from inference_session.importers.onnx.evaluation import fixed_value
from inference_session.importers.onnx.lookups.graph_lookups import EditedModel, GraphLookup, skip_identities
from inference_session.importers.onnx.lookups.vector_values import values_of_vectors
from inference_session.model_spec import Pooling
from inference_session.onnx_graphs import (
    NO_END,
    NodeBuilder,
    attribute,
    bodies,
    integers_attribute,
    producers,
    reads,
    replace_node,
    use_counts,
)

_POOLINGS: dict[str, Pooling] = {"ReduceSum": "sum", "ReduceMean": "mean"}


class _Cut(NamedTuple):
    """What a Loop does to the vectors of one look-up."""

    pooling: Pooling
    is_zero_if_empty: bool
    begins: str
    """A list of the main graph: where the bag of each iteration begins."""
    ends: str


def pool_bags(edited: EditedModel, lookups: list[GraphLookup]) -> None:
    """Change the graph and the look-ups whose vectors only such a Loop reads."""
    for lookup in lookups:
        if lookup.keys_dims is not None and len(lookup.keys_dims) == len(lookup.row_shape) == 1:
            _pool(edited, lookup, {other.vectors for other in lookups})
    skip_identities(edited.graph)


def _pool(edited: EditedModel, lookup: GraphLookup, vectors: set[str]) -> None:
    loop = _only_loop(edited.graph, lookup.vectors)
    cut = _cut(edited, loop, lookup) if loop is not None else None
    if loop is None or cut is None:
        return
    if values_of_vectors(edited.graph, vectors).intersection((loop.input[0], cut.begins, cut.ends)):
        return
    builder = edited.builder(lookup.vectors)
    begins, ends = (edited.names.fresh(f"{lookup.vectors}_{part}") for part in ("begins", "ends"))
    for offsets, name in zip(_for_iterations(edited, builder, loop, cut), (begins, ends), strict=True):
        builder.add("Cast", [offsets], name, to=TensorProto.INT64)
    builder.add("Identity", [lookup.vectors], loop.output[0])
    lookup.pooling, lookup.was_zero_if_empty = cut.pooling, cut.is_zero_if_empty
    lookup.bags, lookup.keys_dims = (begins, ends), (None, None)
    replace_node(edited.graph, loop, builder.nodes)


def _for_iterations(edited: EditedModel, builder: NodeBuilder, loop: NodeProto, cut: _Cut) -> tuple[str, str]:
    """Where the bags begin and end, without those after the last iteration."""
    if _are_of_one_list(edited, loop, cut):
        return cut.begins, cut.ends
    count, zero = builder.add("Reshape", [loop.input[0], builder.integers([1])]), builder.integers([0])
    return (
        builder.add("Slice", [cut.begins, zero, count, zero]),
        builder.add("Slice", [cut.ends, zero, count, zero]),
    )


def _are_of_one_list(edited: EditedModel, loop: NodeProto, cut: _Cut) -> bool:
    """Whether each bag ends where the next one begins, and has an iteration, as loops/bounded_bags.py writes it."""
    made_by = producers(edited.graph)
    count, begins, ends = (made_by.get(name) for name in (loop.input[0], cut.begins, cut.ends))
    if count is None or count.op_type != "Size" or count.input[0] != cut.begins:
        return False
    if begins is None or ends is None or not begins.op_type == ends.op_type == "Slice":
        return False
    limits = [[_constant(edited, edited.graph, name) for name in node.input[1:]] for node in (begins, ends)]
    return begins.input[0] == ends.input[0] and limits == [[[0], [-1], [0]], [[1], [NO_END], [0]]]


def _only_loop(graph: GraphProto, vectors: str) -> NodeProto | None:
    """The Loop, without values carried from iteration to iteration, that alone reads a value, once."""
    readers = [node for node in graph.node if vectors in reads(node)]
    if len(readers) != 1 or use_counts(graph)[vectors] != 1:
        return None
    (node,) = readers
    is_plain = node.op_type == "Loop" and not node.domain and len(node.input) == 2 and len(node.output) == 1
    return node if is_plain and node.input[0] and vectors not in node.input else None


def _cut(edited: EditedModel, loop: NodeProto, lookup: GraphLookup) -> _Cut | None:
    (body,) = bodies(loop)
    found = _reduction(edited, body)
    if found is None or not _runs_to_the_end(edited, loop, body):
        return None
    reduce, pooling, is_divided = found
    if attribute(reduce, "keepdims", 1) or _axes(edited, body, reduce) not in ([0], [-2]):
        return None
    cutter = _slice_behind(edited, body, reduce.input[0], lookup)
    if cutter is None:
        return None
    begins, ends = (_offsets_behind(edited, body, name) for name in cutter.input[1:3])
    return _Cut(pooling, is_divided, begins, ends) if begins and ends else None


def _reduction(edited: EditedModel, body: GraphProto) -> tuple[NodeProto, Pooling, bool] | None:
    """The node that reduces the rows of a bag, how they are pooled, and whether that is a sum divided by their number,
    or by 1 if it is 0.
    """
    made_by = producers(body)
    node = made_by.get(body.output[1].name)
    if node is None or node.op_type != "Div":
        return None if node is None or node.op_type not in _POOLINGS else (node, _POOLINGS[node.op_type], False)
    total, divisor = (made_by.get(name) for name in node.input)
    if total is None or total.op_type != "ReduceSum" or divisor is None or divisor.op_type != "Max":
        return None
    numbers = [name for name in divisor.input if not _is_one(edited, body, name)]
    counted = _counted(edited, body, numbers[0]) if len(numbers) == 1 == len(divisor.input) - 1 else None
    return (total, "mean", True) if counted == total.input[0] else None


def _is_one(edited: EditedModel, body: GraphProto, name: str) -> bool:
    value = fixed_value(edited.model, body, name)
    return value is not None and value.size == 1 and value.ndim <= 1 and bool((value == 1).all())


def _counted(edited: EditedModel, body: GraphProto, number: str) -> str | None:
    """The value whose first size a number is."""
    made_by = producers(body)
    cast = made_by.get(number)
    size = made_by.get(cast.input[0]) if cast is not None and cast.op_type == "Cast" else None
    if size is None or size.op_type != "Gather" or _constant(edited, body, size.input[1]) != [0]:
        return None
    shape = made_by.get(size.input[0])
    return str(shape.input[0]) if shape is not None and shape.op_type == "Shape" and not shape.attribute else None


def _runs_to_the_end(edited: EditedModel, loop: NodeProto, body: GraphProto) -> bool:
    """Whether the number of iterations is the trip count: no condition ends the Loop earlier."""
    made_by, condition = producers(body), body.output[0].name
    while condition in made_by and made_by[condition].op_type in ("Identity", "Cast"):
        condition = made_by[condition].input[0]
    goes_on = condition == body.input[1].name or _constant(edited, body, condition) == [1]
    return goes_on and (not loop.input[1] or _constant(edited, edited.graph, loop.input[1]) == [1])


def _slice_behind(edited: EditedModel, body: GraphProto, value: str, lookup: GraphLookup) -> NodeProto | None:
    """The Slice of the vectors, along the keys and without gaps, that a value of the body is."""
    made_by = producers(body)
    node = made_by.get(value)
    while node is not None and (node.op_type == "Identity" or _keeps_shape(edited, body, node, lookup)):
        node = made_by.get(node.input[0])
    if node is None or node.op_type != "Slice" or node.input[0] != lookup.vectors or len(node.input) < 3:
        return None
    axes, steps = ([*node.input[3:5], "", ""])[:2]
    along_keys = not axes or _constant(edited, body, axes) in ([0], [-2])
    return node if along_keys and (not steps or _constant(edited, body, steps) == [1]) else None


def _keeps_shape(edited: EditedModel, body: GraphProto, node: NodeProto, lookup: GraphLookup) -> bool:
    """Whether it is the Reshape by which the hoister restates the shape of a row."""
    return node.op_type == "Reshape" and _constant(edited, body, node.input[1]) == [0, *lookup.row_shape]


def _offsets_behind(edited: EditedModel, body: GraphProto, value: str) -> str | None:
    """The list of the main graph whose element at the number of the iteration this is."""
    made_by = producers(body)
    node = made_by.get(value)
    while node is not None and node.op_type in ("Identity", "Unsqueeze", "Reshape", "Cast"):
        node = made_by.get(node.input[0])
    if node is None or node.op_type != "Gather" or attribute(node, "axis", 0) or node.input[1] != body.input[0].name:
        return None
    offsets = node.input[0]
    return offsets if offsets not in made_by and edited.types.rank(offsets) == 1 else None


def _axes(edited: EditedModel, body: GraphProto, node: NodeProto) -> list[int] | None:
    given = integers_attribute(node, "axes")
    return _constant(edited, body, node.input[1]) if given is None and len(node.input) > 1 else given


def _constant(edited: EditedModel, scope: GraphProto, name: str) -> list[int] | None:
    """The elements of a value that is the same for every request and iteration; None for others."""
    value = fixed_value(edited.model, scope, name)
    return None if value is None else [int(element) for element in value.ravel()]
