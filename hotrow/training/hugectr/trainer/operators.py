"""The ONNX operators that the HugeCTR importer's layers emit, as functions of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

Function = Callable[..., Any]
Attributes = Mapping[str, Any]
Constants = Mapping[int, NDArray[Any]]
"""The constant inputs of a node, by their positions."""
Operator = Callable[[Attributes, Constants], Function]
"""Makes the function of a node: of its other inputs, tensors, in their order."""


def _same(function: Function) -> Operator:
    """An operator without attributes and constant shapes."""
    return lambda _attributes, _constants: function


def _reshape(_attributes: Attributes, constants: Constants) -> Function:
    shape = tuple(constants[1].tolist())
    return lambda x: x.reshape(shape)


def _slice(_attributes: Attributes, constants: Constants) -> Function:
    begin, end, axis = (int(constants[i][0]) for i in (1, 2, 3))
    return lambda x: x.narrow(axis, begin, end - begin)


def _concat(attributes: Attributes, _constants: Constants) -> Function:
    axis = attributes["axis"]
    return lambda *tensors: torch.cat(tensors, dim=axis)


def with_constant(array: NDArray[Any], function: Callable[[Tensor, Tensor], Tensor]) -> Function:
    """A function of a tensor and a constant, an array of any shape, which is copied to each device once."""
    constant = torch.from_numpy(array.copy())
    moved: dict[torch.device, Tensor] = {}

    def apply(x: Tensor) -> Tensor:
        if x.device not in moved:
            moved[x.device] = constant.to(x.device)
        return function(x, moved[x.device])

    return apply


def _gather(attributes: Attributes, constants: Constants) -> Function:
    axis = attributes["axis"]
    return with_constant(constants[1], lambda x, places: x.index_select(axis, places))


def _greater_or_equal(_attributes: Attributes, constants: Constants) -> Function:
    return with_constant(constants[1], torch.ge)


def _layer_norm(attributes: Attributes, _constants: Constants) -> Function:
    eps = attributes["epsilon"]
    return lambda x, gamma, beta: functional.layer_norm(x, gamma.shape, gamma, beta, eps)


def _tile(_attributes: Attributes, constants: Constants) -> Function:
    repeats = tuple(constants[1].tolist())
    return lambda x: x.repeat(repeats)


def _split(attributes: Attributes, constants: Constants) -> Function:
    axis, sizes = attributes["axis"], constants[1].tolist()
    return lambda x: x.split(sizes, dim=axis)


def _pad(_attributes: Attributes, constants: Constants) -> Function:
    begins_and_ends = constants[1].tolist()
    half = len(begins_and_ends) // 2
    # torch counts from the last dimension.
    pads = [n for axis in reversed(range(half)) for n in (begins_and_ends[axis], begins_and_ends[half + axis])]
    return lambda x: functional.pad(x, pads)


def _transpose(attributes: Attributes, _constants: Constants) -> Function:
    order = attributes["perm"]
    return lambda x: x.permute(order)


def _reduce_sum(attributes: Attributes, constants: Constants) -> Function:
    axes, keeps = constants[1].tolist(), bool(attributes["keepdims"])
    return lambda x: x.sum(dim=axes, keepdim=keeps)


def _over_axes(function: Function) -> Operator:
    def make(attributes: Attributes, _constants: Constants) -> Function:
        axes, keeps = list(attributes["axes"]), bool(attributes["keepdims"])
        return lambda x: function(x, dim=axes, keepdim=keeps)

    return make


def _softmax(attributes: Attributes, _constants: Constants) -> Function:
    axis = attributes["axis"]
    return lambda x: torch.softmax(x, dim=axis)


def _elu(attributes: Attributes, _constants: Constants) -> Function:
    alpha = attributes["alpha"]
    return lambda x: functional.elu(x, alpha)


def _gemm(attributes: Attributes, _constants: Constants) -> Function:
    beta = attributes.get("beta", 1.0)
    return lambda x, weight, bias: torch.addmm(bias, x, weight, beta=beta)


def scalar(array: NDArray[Any]) -> float:
    """The one element of a constant."""
    return float(np.asarray(array).reshape(-1)[0])


OPERATORS: Mapping[str, Operator] = {
    "Add": _same(lambda *x: reduce(torch.add, x)),
    "Cast": _same(Tensor.float),  # of truth values; no other type is cast
    "Concat": _concat,
    "Div": _same(torch.div),
    "Elu": _elu,
    "Gather": _gather,
    "Gemm": _gemm,
    "GreaterOrEqual": _greater_or_equal,
    "Identity": _same(lambda x: x),
    "LayerNormalization": _layer_norm,
    "MatMul": _same(torch.matmul),
    "Mul": _same(torch.mul),
    "Pad": _pad,
    "ReduceMax": _over_axes(torch.amax),
    "ReduceMean": _over_axes(torch.mean),
    "ReduceSum": _reduce_sum,
    "Relu": _same(torch.relu),
    "Reshape": _reshape,
    "Sigmoid": _same(torch.sigmoid),
    "Slice": _slice,
    "Softmax": _softmax,
    "Split": _split,
    "Sqrt": _same(torch.sqrt),
    "Sub": _same(torch.sub),
    "Tile": _tile,
    "Transpose": _transpose,
}
"""Operators that compute the same in training and evaluation."""
