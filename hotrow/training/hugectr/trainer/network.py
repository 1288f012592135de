"""The dense network that trains: the ONNX graph that the importer builds, executed by torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional

from hotrow.training.hugectr.trainer.operators import OPERATORS, Function, scalar
from hotrow.training.hugectr.trainer.processes import Processes
from inference_session.errors import UnsupportedModelError
from inference_session.importers.hugectr.dense_weights import Statistics
from inference_session.importers.hugectr.graph import Graph, Layer
from inference_session.importers.hugectr.onnx_graph import DenseNetwork, translate
from inference_session.onnx_graphs import attributes

_ALONE = Processes(0, 1, torch.device("cpu"))
_TRUNCATION = 0.87962566103423978
"""The standard deviation of a normal distribution of 1 that is cut off at 2."""
_OWNERS = {
    "InnerProduct": "fc_param",
    "FusedInnerProduct": "fc_param",
    "MLP": "mlp_param",
    "MultiCross": "mc_param",
    "BatchNorm": "bn_param",
    "LayerNorm": "ln_param",
}
"""The parameters of a layer that name its initializers."""


class FirstWeights:
    """Draws the first weights, as HugeCTR's initializers do."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._num_inputs = 0
        """Rows of the last matrix; the bias of an MLP that follows it is drawn by them too."""

    def take(self, layer: Layer, what: str, *shape: int) -> NDArray[np.float32]:
        """The first values of a layer's weights, float32 [*shape]."""
        owner = _OWNERS.get(layer.type)
        parameters = layer.parameters.get(owner, {}) if owner else layer.parameters
        kind = parameters.get(f"{what}_init", "Default")
        if kind == "Default":
            kind = _default(layer, what)
        values = torch.empty(shape)
        fan_in, fan_out = (shape[0], shape[-1]) if what == "weight" else (0, shape[-1])
        if what == "weight":
            self._num_inputs = shape[0]
        elif layer.type == "MLP":
            fan_in = fan_out
        if layer.type == "MultiCross" and not _is_projected(layer):
            fan_out = shape[0]
        self._fill(layer, values, kind, fan_in, fan_out)
        return values.numpy()

    def _fill(self, layer: Layer, values: Tensor, kind: str, fan_in: int, fan_out: int) -> None:
        average = (fan_in + fan_out) / 2
        if kind in ("Zero", "One"):
            values.fill_(float(kind == "One"))
        elif kind == "Uniform":
            self._uniform(values, self._num_inputs**-0.5 if layer.type == "MLP" else 1.0 / (fan_in + fan_out))
        elif kind == "XavierUniform":
            self._uniform(values, (3.0 / average) ** 0.5)
        elif kind == "XavierNorm":
            self._normal(values, average**-0.5 / _TRUNCATION)
        elif kind == "Normal":
            self._normal(values, fan_out**-0.5)
        else:
            layer.refuse(f"the initializer {kind!r} is not supported; Uniform, XavierNorm, XavierUniform and Zero are")

    def _uniform(self, values: Tensor, limit: float) -> None:
        values.uniform_(-limit, limit, generator=self._random)

    def _normal(self, values: Tensor, deviation: float) -> None:
        nn.init.trunc_normal_(values, 0.0, deviation, -2 * deviation, 2 * deviation, generator=self._random)


def _default(layer: Layer, what: str) -> str:
    if layer.type == "MLP":
        return "Uniform"
    if layer.type in ("InnerProduct", "FusedInnerProduct"):
        return "XavierNorm" if what == "weight" else "Normal"
    if what == "weight":
        return "XavierNorm" if _is_projected(layer) else "XavierUniform"
    return "One" if what == "gamma" else "Zero"


def _is_projected(layer: Layer) -> bool:
    """Whether it is a MultiCross of DCN v2."""
    return layer.type == "MultiCross" and bool(layer.parameters["mc_param"].get("projection_dim"))


class FirstStatistics:
    """Running statistics before any batch."""

    def take(self, layer: Layer, width: int) -> Statistics:
        """Mean 0 and variance 1."""
        return Statistics(np.zeros(width, np.float32), np.ones(width, np.float32))


class TrainingNetwork(nn.Module):
    """Executes the graph node by node. Trained constants are its parameters, in the order of the dense file."""

    def __init__(self, graph: Graph, seed: int, processes: Processes | None = None) -> None:
        """UnsupportedModelError names a layer that cannot be trained; ModelFormatError a contradiction in the graph."""
        super().__init__()
        self._processes = processes or _ALONE
        self.is_batch_divided = False
        """Whether each process computes a part of the batch that trains, else the whole of it; may be set."""
        self.translated: DenseNetwork = translate(graph, FirstWeights(seed), FirstStatistics(), is_training=True)
        model = self.translated.model
        constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        for name in self.translated.parameters:
            self.register_parameter(name, nn.Parameter(torch.from_numpy(constants.pop(name).copy())))
        for name in (name for pair in self.translated.statistics for name in pair):
            self.register_buffer(name, torch.from_numpy(constants.pop(name).copy()))
        outputs = {label.name for label in self.translated.outputs}
        nodes = [node for node in model.graph.node if node.output[0] not in outputs]
        self._steps = [self._step(node, constants) for node in nodes]
        self._activations = {
            node.output[0]: _activation(node) for node in model.graph.node if node.output[0] in outputs
        }

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs of the losses: logits, float32 or less precise [samples, columns], by the label's name."""
        return self.logits(self.values(inputs))

    def logits(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs of the losses among all values: [samples, labels] each."""
        return {name: values[source] for name, (source, _) in self._activations.items()}

    def values(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """Everything that the graph computes, by its name there."""
        values: dict[str, Any] = dict(inputs)
        values.update(self._parameters)
        values.update(self._buffers)
        for function, sources, targets in self._steps:
            made = function(*(values[name] for name in sources))
            if len(targets) == 1:
                values[targets[0]] = made
            else:
                values.update(zip(targets, made, strict=True))
        return values

    @property
    def weights(self) -> list[nn.Parameter]:
        """The trained constants, in the order of the dense file."""
        return list(self.parameters())

    def predictions(self, logits: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The served outputs for logits: probabilities, float32."""
        return {name: self._activations[name][1](logit.float()) for name, logit in logits.items()}

    def statistics(self) -> list[tuple[Tensor, Tensor]]:
        """Running mean and variance, [width] each, of each BatchNorm layer."""
        return [(getattr(self, mean), getattr(self, variance)) for mean, variance in self.translated.statistics]

    def _step(self, node: onnx.NodeProto, constants: dict[str, Any]) -> tuple[Function, list[str], list[str]]:
        fixed = {i: constants[name] for i, name in enumerate(node.input) if name in constants}
        if node.op_type == "Dropout":
            return self._dropout(scalar(fixed[1])), [node.input[0]], list(node.output)
        if node.op_type == "BatchNormalization":
            return self._batch_norm(attributes(node)), list(node.input), list(node.output)
        if node.op_type not in OPERATORS:
            raise UnsupportedModelError(
                f"the operator {node.op_type!r} cannot be trained; report this as a bug of hotrow"
            )
        if node.op_type in _ELEMENTWISE:
            return _with_scalars(node, fixed), [n for n in node.input if n not in constants], list(node.output)
        function = OPERATORS[node.op_type](attributes(node), fixed)
        return function, [name for name in node.input if name not in constants], list(node.output)

    def _dropout(self, rate: float) -> Function:
        return lambda x: functional.dropout(x, rate, training=self.training)

    def _batch_norm(self, attributes: Mapping[str, Any]) -> Function:
        factor, eps = 1.0 - attributes.get("momentum", 0.0), attributes["epsilon"]

        def normalise(x: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
            if self.training and (self.is_batch_divided or len(x) == 1):  # torch refuses a batch of one sample
                processes = self._processes if self.is_batch_divided else _ALONE
                return _normalised_in_common(x, mean, variance, factor, eps, processes) * gamma + beta
            return functional.batch_norm(
                x, mean, variance, gamma, beta, training=self.training, momentum=factor, eps=eps
            )

        return normalise


_ELEMENTWISE = frozenset({"Add", "Div", "Mul", "Sub"})


def _with_scalars(node: onnx.NodeProto, fixed: Mapping[int, NDArray[Any]]) -> Function:
    """An operator whose constant inputs, if any, are single numbers."""
    function = OPERATORS[node.op_type]({}, {})
    if not fixed:
        return function
    ((position, array),) = fixed.items()
    number = scalar(array)
    return (lambda x: function(x, number)) if position == 1 else (lambda x: function(number, x))


def _activation(node: onnx.NodeProto) -> tuple[str, Function]:
    return node.input[0], OPERATORS[node.op_type](attributes(node), {})


def _normalised_in_common(
    x: Tensor, mean: Tensor, variance: Tensor, factor: float, eps: float, processes: Processes
) -> Tensor:
    """Batch normalisation of the samples of this process, [samples, width], by the mean and variance of those of all.

    Each process has as many samples. The running `mean` and `variance` move towards those of the batch by `factor`.
    """
    values, total = x.float(), len(x) * processes.count
    found = _Total.apply(values.sum(0), processes) / total
    centred = values - found
    spread = _Total.apply(centred.square().sum(0), processes) / total
    with torch.no_grad():
        mean.lerp_(found, factor)
        variance.lerp_(spread * (total / max(total - 1, 1)), factor)
    return (centred * (spread + eps).rsqrt()).to(x.dtype)


class _Total(torch.autograd.Function):
    """The sum over all processes."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, processes: Processes) -> Tensor:
        ctx.processes = processes
        return processes.add_up(part.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.processes.add_up(gradient.clone()), None
