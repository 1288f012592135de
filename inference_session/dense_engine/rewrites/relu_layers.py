"""Layers with ReLU, one after the other, with fewer passes over their values; only rounding differs.

A layer computes y = relu(x W + b), and the next one multiplies y with V and adds c. On a GPU the bias is written
before the product is added to it, and ReLU reads and writes all values once more. As relu(u + b) = max(u, -b) + b,
the same numbers are

    z = max(x W, -b)
    y V + c = z V + (b V + c)       the bias of the next layer, a constant
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto

from inference_session.dense_engine.rewrites.products import Product, Products
from inference_session.onnx_graphs import opset_of

_LEAST_OPSET = 12
"""Of ONNX, whose Max takes float16 in ONNX Runtime, on a CPU as well."""
_LARGEST_BIAS = 8
"""float16 rounds numbers of this size by up to 1/256. Values that are small once a bias is added to them are as large
as the bias before: a larger one would make their rounding errors larger than a network's usual ones.
"""


def merge_relu_layers(model: ModelProto) -> int:
    """Rewrite a network's layers with ReLU that a product follows, in place; returns how many there were."""
    if opset_of(model) < _LEAST_OPSET:
        return 0
    products, dropped, num_merged = Products(model), list[NodeProto](), 0
    for node in model.graph.node:
        if node.op_type != "Relu" or node.domain:
            continue
        layer, following = products.product(node.input[0]), _product_after(node, products)
        bias = None if layer is None or following is None else _joined_bias(layer, following)
        if layer is None or layer.bias is None or following is None or bias is None:
            continue
        name, multiplied = node.output[0], layer.nodes[-1].output[0]
        node.op_type, node.input[:] = "Max", [multiplied, products.add_constant(f"{name}/least", -layer.bias)]
        dropped += _without_bias(layer)
        _set_bias(following, products.add_constant(f"{name}/next_bias", bias))
        num_merged += 1
    for node in dropped:
        model.graph.node.remove(node)
    return num_merged


def _product_after(relu: NodeProto, products: Products) -> Product | None:
    """The product with a bias that alone reads what a ReLU computes."""
    node = products.user(relu.output[0])
    if node is None:
        return None
    for last in (products.user(node.output[0]), node):  # an Add, or none
        product = products.product_of(last)
        if product is not None and product.value == relu.output[0]:
            return product
    return None


def _joined_bias(layer: Product, following: Product) -> NDArray[Any] | None:
    """The bias of `following` and what it makes of the one of `layer`; None: they have none, or too large ones."""
    if layer.bias is None or following.bias is None:
        return None
    if layer.bias.shape != layer.matrix.shape[1:] or following.bias.shape != following.matrix.shape[1:]:
        return None
    if not np.isfinite(layer.bias).all():
        return None
    exact = layer.bias.astype(np.float64) @ following.matrix.astype(np.float64) + following.bias
    largest = max(np.abs(layer.bias).max(initial=0), np.abs(exact).max(initial=0))
    return exact.astype(following.bias.dtype) if largest <= _LARGEST_BIAS else None


def _without_bias(layer: Product) -> list[NodeProto]:
    """Nodes that are no longer needed once a product has no bias."""
    *added, multiplied = layer.nodes
    if not added:
        del multiplied.input[2]
    return added


def _set_bias(product: Product, name: str) -> None:
    node, multiplied = product.nodes[0], product.nodes[-1]
    if node is multiplied:
        node.input[2] = name
    else:
        node.input[:] = [multiplied.output[0], name]
