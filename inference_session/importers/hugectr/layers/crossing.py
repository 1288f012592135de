"""Layers that reduce or combine features: sums, products of matrices, factorization machines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from inference_session.importers.hugectr.graph import Layer
from inference_session.importers.hugectr.layers.base import (
    Emitter,
    LayerBuilder,
    Tensor,
    check_size,
    only,
    require_rank,
)


def reduction(op: str) -> Emitter:
    """Sum or mean over one dimension, which stays with size 1."""

    def emit(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
        x = only(layer, bottoms)
        axis = layer.whole("axis", low=0, default=1)
        if axis == 0:
            layer.refuse("axis 0 reduces over the samples of a batch; an answer would depend on other samples")
        if axis > len(x.dims):
            layer.fail(f"found {axis}; the last axis of {x} is {len(x.dims)}", "axis")
        dims = (*x.dims[: axis - 1], 1, *x.dims[axis:])
        return [Tensor(_reduce(build, op, x.name, axis), dims, x.rows)]

    return emit


def _reduce(build: LayerBuilder, op: str, source: str, axis: int) -> str:
    # The axis of ReduceSum became an input in opset 13, that of ReduceMean in opset 18.
    if op == "ReduceSum":
        return build.node(op, source, build.indices(axis), keepdims=1)
    return build.node(op, source, axes=[axis], keepdims=1)


def matrix_multiply(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
    """Products of matrices, one per row of the first dimension: [n, k, l] @ [n, l, m] = [n, k, m], or one per head."""
    if len(bottoms) != 2:
        layer.fail(f"needs two tensors, found {len(bottoms)}", "bottom")
    a, b = bottoms
    if len(a.dims) == 1:
        layer.refuse("a product over the samples of a batch makes an answer depend on other samples")
    *heads, height, depth = a.dims
    if a.rows != b.rows or b.dims[:-1] != (*heads, depth):
        layer.fail(f"{a} and {b} cannot be multiplied", "bottom")
    return [Tensor(build.node("MatMul", a.name, b.name), (*heads, height, b.dims[-1]), a.rows)]


def fm_order2(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
    """Second order of a factorization machine: half of (square of the slots' sum - sum of their squares)."""
    x = only(layer, bottoms, rank=2)
    width = layer.whole("out_dim")
    if x.dims[0] % width:
        layer.fail(f"the tensor's width {x.dims[0]} is not a multiple of {width}", "out_dim")
    slots = build.reshape(x.name, x.dims[0] // width, width)
    axis = build.indices(1)
    total = build.node("ReduceSum", slots, axis, keepdims=0)
    square_of_sum = build.node("Mul", total, total)
    sum_of_squares = build.node("ReduceSum", build.node("Mul", slots, slots), axis, keepdims=0)
    twice = build.node("Sub", square_of_sum, sum_of_squares)
    return [Tensor(build.node("Mul", twice, build.scalar(0.5)), (width,), x.rows)]


def interaction(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
    """DLRM: the dense vector, the products of all pairs among it and the slots' vectors, and one zero.

    Pairs (i, j), i < j, in the order of j, then i; vector 0 is the dense one. A second top, which only training in
    HugeCTR reads, repeats the first.
    """
    if len(bottoms) != 2:
        layer.fail(f"needs two tensors, found {len(bottoms)}", "bottom")
    if len(layer.tops) not in (1, 2):
        layer.fail(f"produces one tensor, or two where HugeCTR trains, found {len(layer.tops)} names", "top")
    dense, slots = bottoms
    require_rank(layer, dense, 2)
    require_rank(layer, slots, 3)
    width = dense.dims[0]
    if slots.dims[1] != width or slots.rows != dense.rows:
        layer.fail(f"{dense} and {slots} have vectors of different sizes", "bottom")
    count = slots.dims[0] + 1
    vectors = build.node("Concat", build.reshape(dense.name, 1, width), slots.name, axis=1)
    turned = build.node("Transpose", vectors, perm=[0, 2, 1])
    products = check_size(layer, Tensor(build.node("MatMul", vectors, turned), (count, count), dense.rows))
    later, earlier = np.tril_indices(count, -1)
    pairs = build.constant((earlier * count + later).astype(np.int64))
    picked = build.node("Gather", build.reshape(products.name, count * count), pairs, axis=1)
    padded = build.node("Pad", build.node("Concat", dense.name, picked, axis=1), build.indices(0, 0, 0, 1))
    return [Tensor(padded, (width + len(later) + 1,), dense.rows)] * len(layer.tops)
