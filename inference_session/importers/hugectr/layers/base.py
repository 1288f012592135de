"""The means to build layers: tensors with known shapes, and a builder of ONNX nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from inference_session.importers.hugectr.dense_weights import Statistics
from inference_session.importers.hugectr.graph import MAX_ELEMENTS, Layer


@dataclass(frozen=True)
class Tensor:
    """A float32 tensor of the graph: [samples x rows, *dims].

    HugeCTR reshapes across its first dimension, so one sample may have several rows there; they are adjacent.
    """

    name: str
    dims: tuple[int, ...]
    rows: int = 1

    @property
    def num_elements(self) -> int:
        """Elements per sample."""
        return self.rows * math.prod(self.dims)

    def __str__(self) -> str:
        samples = "samples" if self.rows == 1 else f"samples*{self.rows}"
        return f"[{', '.join([samples, *map(str, self.dims)])}]"


class WeightSource(Protocol):
    """The source of the layers' weights: a file, or a trainer that initializes them."""

    def take(self, layer: Layer, what: str, *shape: int) -> npt.NDArray[np.float32]:
        """The next weights, float32 [*shape]."""


class StatisticsSource(Protocol):
    """The source of running statistics."""

    def take(self, layer: Layer, width: int) -> Statistics:
        """The statistics of the next BatchNorm layer."""


class LayerBuilder:
    """Collects nodes and constants of the ONNX graph, and hands out the weights in order."""

    def __init__(
        self, weights: WeightSource, statistics: StatisticsSource, reserved: set[str], *, is_training: bool = False
    ) -> None:
        """`is_training`: add what only training computes, such as dropout."""
        self.is_training = is_training
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.parameters: list[str] = []
        """Names of the trained constants, in the order of the dense file."""
        self.statistics: list[tuple[str, str]] = []
        """Names of the running means and variances, in the order of their file."""
        self.joinable = True
        """False once a layer lets samples of one batch see each other."""
        self._weights = weights
        self._statistics_source = statistics
        self._names = set(reserved)

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output; the output's name."""
        (name,) = self.nodes_of(op, inputs, 1, **attributes)
        return name

    def nodes_of(self, op: str, inputs: Sequence[str], num_outputs: int, **attributes: Any) -> list[str]:
        """Add a node; the names of its outputs."""
        names = [self._unique(op) for _ in range(num_outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), names, **attributes))
        return names

    def output(self, op: str, source: str, name: str, **attributes: Any) -> None:
        """Add the node that makes an output of the graph, under the output's own name."""
        self.nodes.append(helper.make_node(op, [source], [name], **attributes))

    def constant(self, array: npt.NDArray[Any]) -> str:
        """Add a constant; its name."""
        name = self._unique("constant")
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def parameter(self, layer: Layer, what: str, *shape: int) -> str:
        """Add a layer's next weights as a constant; its name."""
        self.parameters.append(self.constant(self._weights.take(layer, what, *shape)))
        return self.parameters[-1]

    def running_statistics(self, layer: Layer, width: int) -> tuple[str, str]:
        """Add a layer's running mean and variance as constants; their names."""
        found = self._statistics_source.take(layer, width)
        self.statistics.append((self.constant(found.mean), self.constant(found.variance)))
        return self.statistics[-1]

    def indices(self, *numbers: int) -> str:
        """Add a constant list of int64; its name."""
        return self.constant(np.array(numbers, np.int64))

    def scalar(self, value: float) -> str:
        """Add a float32 constant [1]; its name."""
        return self.constant(np.array([value], np.float32))

    def reshape(self, source: str, *shape: int) -> str:
        """Add a Reshape; the name of its output. The first dimension, of any size, is left out of `shape`."""
        return self.node("Reshape", source, self.indices(-1, *shape))

    def _unique(self, stem: str) -> str:
        name = f"{stem}_{len(self._names)}"
        while name in self._names:
            name += "_"
        self._names.add(name)
        return name


Emitter = Callable[[LayerBuilder, Layer, Sequence[Tensor]], Sequence[Tensor]]
"""Adds the nodes of one layer, given its bottoms; returns its tops."""


def only(layer: Layer, bottoms: Sequence[Tensor], *, rank: int | None = None) -> Tensor:
    """The single bottom of a layer; with `rank`, of that many dimensions (the first included)."""
    if len(bottoms) != 1:
        layer.fail(f"needs one tensor, found {len(bottoms)}", "bottom")
    if rank is not None:
        require_rank(layer, bottoms[0], rank)
    return bottoms[0]


def require_rank(layer: Layer, tensor: Tensor, rank: int) -> None:
    """Fail unless the tensor has that many dimensions."""
    if len(tensor.dims) + 1 != rank:
        layer.fail(f"needs a tensor of {rank} dimensions, found {tensor}", "bottom")


def alike(layer: Layer, bottoms: Sequence[Tensor]) -> Tensor:
    """The first of several bottoms, all of one shape."""
    for tensor in bottoms[1:]:
        if (tensor.rows, tensor.dims) != (bottoms[0].rows, bottoms[0].dims):
            layer.fail(f"needs tensors of one shape, found {bottoms[0]} and {tensor}", "bottom")
    return bottoms[0]


def check_size(layer: Layer, tensor: Tensor) -> Tensor:
    """The tensor, if one sample of it is of a sane size."""
    if tensor.num_elements > MAX_ELEMENTS:
        layer.fail(f"produces {tensor.num_elements} elements per sample; at most {MAX_ELEMENTS} are allowed")
    return tensor
