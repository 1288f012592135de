"""Layers that move, repeat or select elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

from inference_session.importers.hugectr.graph import Layer
from inference_session.importers.hugectr.layers.base import LayerBuilder, Tensor, only, require_rank


def reshape(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same elements as [rows, leading_dim] or [rows, time_step, leading_dim]; or the `selected` slots in a row."""
    x = only(layer, bottoms)
    if layer.has("selected"):
        return [_select(build, layer, x)]
    dims = _shape(layer) if layer.has("shape") else _dims(layer, x)
    rows, rest = divmod(x.num_elements, math.prod(dims))
    if rest or not rows:
        layer.refuse(
            f"{x} does not divide into rows of {list(dims)} within one sample; samples would be mixed. The elements of "
            f"rows must divide the {x.num_elements} of a sample"
        )
    return [Tensor(build.reshape(x.name, *dims), dims, rows)]


def _dims(layer: Layer, x: Tensor) -> tuple[int, ...]:
    if layer.parameters.get("leading_dim") == 0:
        hint = "HugeCTR's graph_to_json leaves the shape of a Reshape out; add it to the layer"
        layer.fail(f'found 0; {hint}, for example "shape": [-1, 26, 128]', "leading_dim")
    leading_dim = layer.whole("leading_dim", default=math.prod(x.dims))
    time_step = layer.whole("time_step", low=0, default=0)
    return (time_step, leading_dim) if time_step else (leading_dim,)


def _shape(layer: Layer) -> tuple[int, ...]:
    """The parameter of later releases, in which -1 stands for the rows."""
    rows, *dims = layer.wholes("shape", low=-1) or (0,)
    if rows != -1 or len(dims) not in (1, 2) or min(dims) < 1:
        layer.refuse("allowed for 'shape': [-1, leading_dim] and [-1, time_step, leading_dim]")
    return tuple(dims)


def _select(build: LayerBuilder, layer: Layer, x: Tensor) -> Tensor:
    require_rank(layer, x, 3)
    slots, width = x.dims
    selected = layer.wholes("selected") or tuple(range(slots))
    if max(selected) >= slots:
        layer.fail(f"slot {max(selected)} is beyond the {slots} slots of {x}", "selected")
    picked = build.node("Gather", x.name, build.indices(*selected), axis=1)
    dims = (len(selected) * width,)
    return Tensor(build.reshape(picked, *dims), dims, x.rows)


def slices(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
    """One tensor per range [start, end) of the last dimension; ranges may overlap."""
    x = only(layer, bottoms)
    ranges = layer.ranges("ranges")
    if len(ranges) != len(layer.tops):
        layer.fail(f"{len(ranges)} ranges for {len(layer.tops)} tops; give one range per top", "ranges")
    return [_slice(build, layer, x, span) for span in ranges]


def _slice(build: LayerBuilder, layer: Layer, x: Tensor, span: tuple[int, ...]) -> Tensor:
    width = x.dims[-1]
    if len(span) != 2 or not span[0] < span[1] <= width:
        layer.fail(f"range {list(span)}; expected two numbers, start < end <= {width}", "ranges")
    axis = len(x.dims)
    name = build.node("Slice", x.name, build.indices(span[0]), build.indices(span[1]), build.indices(axis))
    return Tensor(name, (*x.dims[:-1], span[1] - span[0]), x.rows)


def concat(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
    """Tensors side by side: along the last dimension, or along `axis` where they have three."""
    if not bottoms:
        layer.fail("needs at least one tensor, found none", "bottom")
    first = bottoms[0]
    last = len(first.dims)
    axis = layer.whole("axis", default=last) if last > 1 and layer.parameters.get("axis") != -1 else last
    if axis > last:
        layer.fail(f"found {axis}; the last axis of the tensors is {last}", "axis")
    for tensor in bottoms[1:]:
        fits = len(tensor.dims) == last and tensor.rows == first.rows
        if not fits or any(
            a != b for i, (a, b) in enumerate(zip(tensor.dims, first.dims, strict=True), 1) if i != axis
        ):
            layer.fail(f"{first} and {tensor} do not match along dimension {axis}", "bottom")
    dims = list(first.dims)
    dims[axis - 1] = sum(tensor.dims[axis - 1] for tensor in bottoms)
    name = build.node("Concat", *(tensor.name for tensor in bottoms), axis=axis)
    return [Tensor(name, tuple(dims), first.rows)]


def scale(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
    """Repeat every element `factor` times in place (axis 0), or every row `factor` times (axis 1)."""
    x = only(layer, bottoms, rank=2)
    width = x.dims[0]
    axis = layer.whole("scale_param", "axis", low=0)
    factor = layer.whole("scale_param", "factor")
    if axis > 1:
        layer.fail(f"found {axis}; allowed: 0, 1", "scale_param", "axis")
    if axis == 0:
        repeated = build.node("Tile", build.reshape(x.name, width, 1), build.indices(1, 1, factor))
        return [Tensor(build.reshape(repeated, width * factor), (width * factor,), x.rows)]
    repeated = build.node("Tile", build.reshape(x.name, 1, width), build.indices(1, factor, 1))
    return [Tensor(build.reshape(repeated, width), (width,), x.rows * factor)]


def fused_reshape_concat(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
    """The vectors of several embeddings side by side; the last slot (the item) apart from the history."""
    joined = _join_slots(build, layer, bottoms)
    slots, width = joined.dims
    if slots < 2 or len(layer.tops) != 2:
        layer.fail(f"needs at least two slots and two tops, found {slots} slots, {len(layer.tops)} tops")
    history, item = build.nodes_of("Split", (joined.name, build.indices(slots - 1, 1)), 2, axis=1)
    return [
        Tensor(build.reshape(history, width), (width,), joined.rows * (slots - 1)),
        Tensor(build.reshape(item, width), (width,), joined.rows),
    ]


def fused_reshape_concat_general(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
    """The vectors of several embeddings side by side, one row per slot."""
    joined = _join_slots(build, layer, bottoms)
    slots, width = joined.dims
    return [Tensor(build.reshape(joined.name, width), (width,), joined.rows * slots)]


def _join_slots(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Tensor:
    if not bottoms:
        layer.fail("needs at least one tensor, found none", "bottom")
    first = bottoms[0]
    for tensor in bottoms:
        require_rank(layer, tensor, 3)
        if (tensor.rows, tensor.dims[0]) != (first.rows, first.dims[0]):
            layer.fail(f"needs tensors with the same number of slots, found {first} and {tensor}", "bottom")
    dims = (first.dims[0], sum(tensor.dims[1] for tensor in bottoms))
    name = build.node("Concat", *(tensor.name for tensor in bottoms), axis=2)
    return Tensor(name, dims, first.rows)
