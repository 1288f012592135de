"""The layers of attention over sequences, which HugeCTR's BST has.

Masks and scores have one element for each pair of positions: [samples, heads, from, to]. Of releases before 23.08 masks
have one `from` for all, and before 23.09 a MultiHeadAttention makes the scores, and another one reads their softmax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from inference_session.importers.hugectr.graph import Layer
from inference_session.importers.hugectr.layers.base import LayerBuilder, Tensor, check_size, only, require_rank

_MASKED = 10000.0
"""What HugeCTR takes off the scores of masked positions."""


def sequence_mask(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
    """1 where both positions are within the lengths that two tensors give, else 0; or one position and one length."""
    names = ("max_sequence_len_from", "max_sequence_len_to") if len(bottoms) == 2 else ("max_sequence_len",)
    lengths = bottoms if len(bottoms) == 2 else [only(layer, bottoms)]
    for tensor in lengths:
        if tensor.dims != (1,) or tensor.rows != 1:
            layer.fail(f"needs lengths [samples, 1], found {tensor}", "bottom")
    sizes = [layer.whole(name) for name in names]
    dims = (1, sizes[0] if len(sizes) == 2 else 1, sizes[-1])
    check_size(layer, Tensor("", dims))
    *first, last = (_within(build, tensor, size) for tensor, size in zip(lengths, sizes, strict=True))
    mask = build.reshape(last, 1, 1, sizes[-1])
    for name in first:
        mask = build.node("Mul", build.reshape(name, 1, sizes[0], 1), mask)
    return [Tensor(mask, dims)]


def _within(build: LayerBuilder, lengths: Tensor, size: int) -> str:
    """[samples, size]: 1 where a position is within the length, which is cut to a whole number."""
    ends = build.constant(np.arange(1, size + 1, dtype=np.float32))
    return build.node("Cast", build.node("GreaterOrEqual", lengths.name, ends), to=1)


def softmax(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
    """Softmax over the last dimension; with a mask, of the tensor times `factor`."""
    factor = layer.number("factor", default=1.0)
    if len(bottoms) != 2:
        x = only(layer, bottoms)
        if factor != 1.0:
            layer.refuse("a softmax with a factor and without a mask is not supported")
        return [Tensor(build.node("Softmax", x.name, axis=-1), x.dims, x.rows)]
    x, mask = bottoms
    require_rank(layer, x, 4)
    _check_mask(layer, mask, x)
    scaled = x.name if factor == 1.0 else build.node("Mul", x.name, build.scalar(factor))
    return [Tensor(_masked_softmax(build, scaled, mask), x.dims, x.rows)]


def multi_head_attention(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
    """softmax(query @ key.T / sqrt(width)) @ value for each head, given query, key and value, and a mask.

    With two tops, the scores before the softmax, and the values by head; given these two, their product.
    """
    if len(bottoms) == 2:
        if layer.parameters.get("transpose_b"):
            layer.refuse("transpose_b of two tensors is not supported; query, key and value of three dimensions are")
        return [_attended(build, layer, *bottoms)]
    if len(bottoms) not in (3, 4):
        layer.fail(f"needs query, key and value, and a mask, or scores and values, found {len(bottoms)}", "bottom")
    query, key, value = bottoms[:3]
    heads = _num_heads(layer, query, key, value)
    scores, values = _scores(build, layer, query, key, heads), _by_head(build, value, heads)
    if len(bottoms) == 3 and len(layer.tops) == 2:
        return [scores, values]
    if len(bottoms) == 3:
        softened = build.node("Softmax", scores.name, axis=-1)
    else:
        _check_mask(layer, bottoms[3], scores)
        softened = _masked_softmax(build, scores.name, bottoms[3])
    return [_attended(build, layer, Tensor(softened, scores.dims), values)]


def _num_heads(layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> int:
    for tensor in (query, key, value):
        require_rank(layer, tensor, 3)
    is_one_row = query.rows == key.rows == value.rows == 1
    if not (is_one_row and key.dims == value.dims and query.dims[1] == key.dims[1]):
        layer.fail(f"{query}, {key} and {value} do not match as query, key and value", "bottom")
    heads = layer.whole("num_attention_heads", default=1)
    if query.dims[1] % heads:
        layer.fail(f"the width of {query} is not a multiple of {heads}", "num_attention_heads")
    return heads


def _scores(build: LayerBuilder, layer: Layer, query: Tensor, key: Tensor, heads: int) -> Tensor:
    """[samples, heads, from, to]"""
    width = query.dims[1] // heads
    dims = (heads, query.dims[0], key.dims[0])
    check_size(layer, Tensor("", dims))
    turned = build.node("Transpose", _by_head(build, key, heads).name, perm=[0, 1, 3, 2])
    product = build.node("MatMul", _by_head(build, query, heads).name, turned)
    return Tensor(build.node("Mul", product, build.scalar(1.0 / math.sqrt(width))), dims)


def _by_head(build: LayerBuilder, x: Tensor, heads: int) -> Tensor:
    """[samples, positions, heads * width] to [samples, heads, positions, width]."""
    positions, width = x.dims[0], x.dims[1] // heads
    name = build.node("Transpose", build.reshape(x.name, positions, heads, width), perm=[0, 2, 1, 3])
    return Tensor(name, (heads, positions, width))


def _attended(build: LayerBuilder, layer: Layer, scores: Tensor, values: Tensor) -> Tensor:
    """[samples, from, heads * width], the sums of values that the scores weigh."""
    for tensor in (scores, values):
        require_rank(layer, tensor, 4)
    (heads, num_from, num_to), width = scores.dims, values.dims[2]
    if values.dims[:2] != (heads, num_to) or not scores.rows == values.rows == 1:
        layer.fail(f"{scores} and {values} do not match as scores and values", "bottom")
    turned = build.node("Transpose", build.node("MatMul", scores.name, values.name), perm=[0, 2, 1, 3])
    return Tensor(build.reshape(turned, num_from, heads * width), (num_from, heads * width))


def _check_mask(layer: Layer, mask: Tensor, scores: Tensor) -> None:
    _, num_from, num_to = scores.dims
    if mask.rows != 1 or mask.dims not in ((1, num_from, num_to), (1, 1, num_to)):
        layer.fail(f"{mask} does not have the shape of a mask of {scores}", "bottom")


def _masked_softmax(build: LayerBuilder, scores: str, mask: Tensor) -> str:
    """Softmax where masked positions count nothing; where all of a row are masked, as if none were.

    HugeCTR takes 10,000 off masked scores. Here the highest mask of a row counts as 1, which changes no softmax, but
    leaves a wholly masked row its digits. HugeCTR also adds 1e-6 to the sum of powers, which changes 1e-6 of a value.
    """
    highest = build.node("ReduceMax", mask.name, axes=[-1], keepdims=1)
    lowered = build.node("Mul", build.node("Sub", mask.name, highest), build.scalar(_MASKED))
    return build.node("Softmax", build.node("Add", scores, lowered), axis=-1)
