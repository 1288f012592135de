"""Writes a Loop over bags of one list of keys, of any sizes, as a Loop that slices and reduces the rows of each bag.

The newer exporter of PyTorch writes EmbeddingBag with offsets as a Loop that appends a row for each bag to a sequence.
`symbolic_loop.py` runs it on symbols for several bounds of bags. It is replaced only if every iteration reduces the
rows between its own bounds and no others. Look-ups can do what the new Loop does (lookups/bags.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from inference_session.importers.onnx.canonical import CanonicalModel
from inference_session.importers.onnx.loops.bag_loops import looked_up, replace_loop, result_of
from inference_session.importers.onnx.loops.symbolic_loop import Bag, NotABagError, SymbolicLoop
from inference_session.importers.onnx.shapes import Shape, Shapes
from inference_session.importers.onnx.types import value_type
from inference_session.importers.onnx.weights import Weight
from inference_session.onnx_graphs import NO_END, NodeBuilder, bodies, needed_nodes, reads

_LISTS = ((0, 2, 3), (0, 0, 4, 4), (1, 2), (0, 3), (0, 1, 1, 6, 6))
"""Offsets of bags, or lengths. Some bags are empty, also the first and the last. The sums are the numbers of keys."""
_INNER_SIZE = 2
_NUMBERS = (-1, 0, 1, 2, NO_END)
"""What the exporter's Loop computes with. Others may be limits that no list above reaches, such as of rows in a bag."""
_KEY_TYPES = (TensorProto.INT32, TensorProto.INT64)


class _Run(NamedTuple):
    """What a Loop does with one list of offsets."""

    shapes: Shapes
    bags: list[Bag]


def cut_bags_by_bounds(canonical: CanonicalModel) -> None:
    """Change a model."""
    graph = canonical.model.graph
    for loop in [node for node in graph.node if node.op_type == "Loop" and not node.domain and bodies(node)]:
        output = result_of(graph, loop)
        if output is not None and output not in loop.output:
            _replace(canonical, loop, output)


def _replace(canonical: CanonicalModel, loop: NodeProto, output: str) -> None:
    piece = _up_to(canonical.model, loop)
    for name in _lists(piece.graph):
        with contextlib.suppress(NotABagError):
            runs = [_run(piece, canonical.weights, loop, name, np.array(values)) for values in _LISTS]
            builder = NodeBuilder(canonical.model.graph, canonical.names, "bags")
            _write(canonical, builder, loop, runs, output)
            replace_loop(canonical.model.graph, builder.nodes, output)
            return


def _up_to(model: ModelProto, loop: NodeProto) -> ModelProto:
    """The part of a model that computes what a Loop reads."""
    piece = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    nodes = needed_nodes(model.graph.node, reads(loop))
    read = reads(loop).union(*map(reads, nodes))
    piece.graph.node.extend(nodes)
    piece.graph.input.extend(value for value in model.graph.input if value.name in read)
    piece.graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in read)
    return piece


def _lists(graph: GraphProto) -> Iterator[str]:
    """The inputs that may be offsets."""
    for value in graph.input:
        if value.type.tensor_type.elem_type in _KEY_TYPES and len(value_type(value).dims or ()) == 1:
            yield value.name


def _run(
    piece: ModelProto, weights: Mapping[str, Weight], loop: NodeProto, name: str, values: NDArray[np.int64]
) -> _Run:
    dims = {value.name: value_type(value).dims or () for value in piece.graph.input}
    sizes = {dims[name][0]: len(values)}
    others = [of_input[0] for of_input in dims.values() if of_input and of_input[0] not in {*sizes}]
    if len({*others}) > 1 or (None in others and len(others) > 1):  # which of them counts keys could not be told
        raise NotABagError
    given = {each: _sized(of_input, sizes, int(values.sum())) for each, of_input in dims.items()}
    elem_type = next(value.type.tensor_type.elem_type for value in piece.graph.input if value.name == name)
    known = {name: values.astype(helper.tensor_dtype_to_np_dtype(elem_type))}
    shapes = Shapes(piece, weights, given, known)
    return _Run(shapes, SymbolicLoop(piece, shapes, weights).bags(loop, is_stacked=False))


def _sized(dims: Sequence[int | str | None], sizes: Mapping[int | str | None, int], num_keys: int) -> Shape:
    """The shape of an input: what is as long as the offsets, or has an element for each key."""
    in_front = [dim if isinstance(dim, int) else sizes.get(dim, num_keys) for dim in dims[:1]]
    return (*in_front, *(dim if isinstance(dim, int) else _INNER_SIZE for dim in dims[1:]))


def _write(canonical: CanonicalModel, builder: NodeBuilder, loop: NodeProto, runs: Sequence[_Run], output: str) -> None:
    bags = [bag for run in runs for bag in run.bags]
    patterns = {bag.rows_of_all() for bag in bags if bag.positions}
    if len(patterns) != 1 or any(bag.reduction == "ReduceMean" and not bag.positions for bag in bags):  # that is NaN
        raise NotABagError
    (pattern,) = patterns
    table, keys, factor = looked_up(canonical.model.graph, [run.shapes for run in runs], pattern)
    is_plain = factor is None and pattern.padding is None and pattern.reduction in ("ReduceSum", "ReduceMean")
    if not is_plain or table not in canonical.weights or canonical.weights[table].elem_type != TensorProto.FLOAT:
        raise NotABagError
    found = _bounds(loop, runs)
    _check_numbers(canonical, loop, runs[0], {found, pattern.rows, table})
    bounds = builder.add("Cast", [found], to=TensorProto.INT64)
    begins, ends = (
        builder.add("Slice", [bounds, *map(builder.integers, ([begin], [end], [0]))])
        for begin, end in ((0, -1), (1, NO_END))
    )
    vectors = builder.add("Gather", [table, keys], axis=0)
    body = _body(canonical, vectors, (begins, ends), pattern.reduction)
    always = builder.constant(np.array(True))
    builder.add("Loop", [builder.add("Size", [begins]), always], output, body=body)


def _check_numbers(canonical: CanonicalModel, loop: NodeProto, run: _Run, kept: set[str]) -> None:
    """Raise NotABagError if a Loop depends on an unexpected constant, other than by these values."""
    read = reads(loop) - kept
    read = read.union(*map(reads, needed_nodes(canonical.model.graph.node, read)))
    fixed = {tensor.name for tensor in canonical.model.graph.initializer} | canonical.weights.keys()
    for name in read & fixed - kept:
        value = run.shapes.known.get(name)
        if value is None or not np.isin(value, _NUMBERS).all():
            raise NotABagError


def _bounds(loop: NodeProto, runs: Sequence[_Run]) -> str:
    """The list in which bag i begins at element i, and ends at the next."""
    for name in sorted(reads(loop)):
        if all(_are_between(run.shapes.known.get(name), run.bags) for run in runs):
            return name
    raise NotABagError


def _are_between(bounds: NDArray[np.int64] | None, bags: Sequence[Bag]) -> bool:
    if bounds is None or bounds.ndim != 1 or bounds.dtype.kind != "i" or len(bounds) != len(bags) + 1:
        return False
    expected = [tuple(range(*bounds[i : i + 2].tolist())) for i in range(len(bags))]
    return [bag.positions for bag in bags] == expected


def _body(canonical: CanonicalModel, vectors: str, bounds: tuple[str, str], reduction: str) -> GraphProto:
    """One bag: the sum of its rows, or their mean. Both are zeros for a bag of no rows."""
    builder = NodeBuilder(canonical.model.graph, canonical.names, "bag")
    i, goes_on = canonical.names.fresh("bag_number"), canonical.names.fresh("bag_goes_on")
    axis, one = builder.integers([0]), builder.integers([1])
    begin, end = (builder.add("Reshape", [builder.add("Gather", [each, i], axis=0), one]) for each in bounds)
    rows = builder.add("Slice", [vectors, begin, end, axis])
    row = builder.add("ReduceSum", [rows, axis], keepdims=0)
    if reduction == "ReduceMean":
        num_rows = builder.add("Gather", [builder.add("Shape", [rows]), axis], axis=0)
        number = builder.add("Cast", [num_rows], to=TensorProto.FLOAT)
        row = builder.add("Div", [row, builder.add("Max", [number, builder.constant(np.ones(1, np.float32))])])
    again = builder.add("Identity", [goes_on])
    given = [_value(i, TensorProto.INT64, []), _value(goes_on, TensorProto.BOOL, [])]
    results = [_value(again, TensorProto.BOOL, []), _value(row, TensorProto.FLOAT, None)]
    return helper.make_graph(builder.nodes, "bag", given, results)


def _value(name: str, elem_type: int, dims: list[int] | None) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, elem_type, dims)
