"""The dense network of a HugeCTR graph as an ONNX model.

Inputs: the dense features [samples, dense_dim] under their name in the graph (where dense_dim is not 0), and per
embedding layer its combined vectors [samples, slot_num, embedding_dim] under the name of its top. Outputs: one per
label, [samples, columns] under the label's name, as probabilities. All float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from inference_session.importers.hugectr.dense_weights import BatchStatistics, DenseWeights
from inference_session.importers.hugectr.graph import LOSS_LAYERS, Graph, Label, Layer
from inference_session.importers.hugectr.layers import LayerBuilder, Tensor, check_size, emitter
from inference_session.importers.hugectr.layers.base import StatisticsSource, WeightSource

_OPSET = 17
_IR_VERSION = 8
_ACTIVATIONS = {
    "BinaryCrossEntropyLoss": ("Sigmoid", {}),
    "MultiCrossEntropyLoss": ("Sigmoid", {}),
    "CrossEntropyLoss": ("Softmax", {"axis": -1}),
}


@dataclass(frozen=True)
class DenseNetwork:
    """The ONNX model, and what importers and trainers need to know of it."""

    model: onnx.ModelProto
    outputs: tuple[Label, ...]
    """Name and number of columns, in the order of the labels."""
    joinable: bool
    """False where samples of one batch see each other (PReLU_Dice)."""
    parameters: tuple[str, ...]
    """Initializers that are trained, in the order of the dense file."""
    statistics: tuple[tuple[str, str], ...]
    """Initializers that are running means and variances, in the order of their file."""
    tensors: Mapping[str, Tensor]
    """What layers take and make, by its name in the graph."""


def build_dense_network(graph: Graph, dense_file: Path, statistics_file: Path | None = None) -> DenseNetwork:
    """Translate the dense layers with their weights.

    ModelFormatError where graph and files do not fit each other or contradict themselves; UnsupportedModelError names
    a layer that cannot be served.
    """
    weights = DenseWeights(dense_file)
    statistics = BatchStatistics(statistics_file)
    network = translate(graph, weights, statistics)
    weights.finish()
    statistics.finish()
    return network


def translate(
    graph: Graph, weights: WeightSource, statistics: StatisticsSource, *, is_training: bool = False
) -> DenseNetwork:
    """Translate the dense layers, with weights from anywhere; with `is_training`, with what only training computes.

    Raises:
        as `build_dense_network`.
    """
    inputs = _inputs(graph)
    reserved = {tensor.name for tensor in inputs} | {label.name for label in graph.labels}
    build = LayerBuilder(weights, statistics, reserved, is_training=is_training)
    tensors = {tensor.name: tensor for tensor in inputs}
    predictions = _emit_layers(build, graph, tensors)
    outputs = _emit_outputs(build, graph, predictions)
    model = helper.make_model(
        helper.make_graph(
            build.nodes,
            "dense",
            [_value_info(tensor.name, *tensor.dims) for tensor in inputs],
            [_value_info(label.name, label.dim) for label in outputs],
            build.initializers,
        ),
        opset_imports=[helper.make_opsetid("", _OPSET)],
        ir_version=_IR_VERSION,
        producer_name="hotrow",
    )
    return DenseNetwork(model, outputs, build.joinable, tuple(build.parameters), tuple(build.statistics), tensors)


@dataclass(frozen=True)
class _Prediction:
    """The network's output for one label, before its last activation."""

    layer: Layer
    tensor: Tensor
    label: Label
    activation: str


def _inputs(graph: Graph) -> list[Tensor]:
    dense = [Tensor(graph.dense_name, (graph.dense_dim,))] if graph.dense_dim else []
    return dense + [Tensor(table.name, (table.slot_num, table.embedding_dim)) for table in graph.embeddings]


def _emit_layers(build: LayerBuilder, graph: Graph, tensors: dict[str, Tensor]) -> list[_Prediction]:
    losses: list[_Prediction] = []
    for layer in graph.layers:
        if layer.type in LOSS_LAYERS:
            losses.append(_loss(graph, layer, tensors))
            continue
        emit = emitter(layer)
        tops = emit(build, layer, [_tensor(layer, tensors, name) for name in layer.bottoms])
        if len(tops) != len(layer.tops):
            layer.fail(f"produces {len(tops)} tensors, found {len(layer.tops)} names", "top")
        tensors.update((name, check_size(layer, top)) for name, top in zip(layer.tops, tops, strict=True))
    return losses or [_last_tensor(graph, tensors)]


def _tensor(layer: Layer, tensors: dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        layer.fail(f"{name!r} is empty, because dense_dim is 0", "bottom")
    return tensors[name]


def _loss(graph: Graph, layer: Layer, tensors: dict[str, Tensor]) -> _Prediction:
    """Serving puts the loss's activation in its place."""
    labels = {label.name: label for label in graph.labels}
    if len(layer.bottoms) != 2 or layer.bottoms[0] in labels or layer.bottoms[1] not in labels:
        layer.fail(
            f"needs a tensor and a label ({', '.join(map(repr, labels))}), found {list(layer.bottoms)}", "bottom"
        )
    tensor = _tensor(layer, tensors, layer.bottoms[0])
    label = labels[layer.bottoms[1]]
    width = _width(layer, tensor)
    if width != label.dim and layer.type != "CrossEntropyLoss":
        layer.fail(f"{tensor} does not match label {label.name!r}, which has {label.dim} columns", "bottom")
    return _Prediction(layer, tensor, label, layer.type)


def _last_tensor(graph: Graph, tensors: dict[str, Tensor]) -> _Prediction:
    """Without a loss, the last layer's tensor is the prediction."""
    if not graph.layers or not graph.layers[-1].tops:
        graph.file.fail(("layers",), "no layer produces a prediction")
    layer = graph.layers[-1]
    tensor = tensors[layer.tops[-1]]
    _width(layer, tensor)
    return _Prediction(layer, tensor, graph.labels[0], "")


def _width(layer: Layer, tensor: Tensor) -> int:
    if len(tensor.dims) != 1 or tensor.rows != 1:
        layer.fail(
            f"a prediction is one row per sample, [samples, columns], found {tensor}; a Reshape layer before it, with "
            "a larger leading_dim, can join the rows of a sample",
            "bottom",
        )
    return tensor.dims[0]


def _emit_outputs(build: LayerBuilder, graph: Graph, predictions: Sequence[_Prediction]) -> tuple[Label, ...]:
    outputs: list[Label] = []
    for label in graph.labels:
        found = [prediction for prediction in predictions if prediction.label is label]
        if len(found) > 1:
            found[1].layer.fail(f"label {label.name!r} already has a loss", "bottom")
        for prediction in found:
            op, attributes = _ACTIVATIONS.get(prediction.activation, ("Identity", {}))
            build.output(op, prediction.tensor.name, label.name, **attributes)
            outputs.append(Label(label.name, prediction.tensor.dims[0]))
    return tuple(outputs)


def _value_info(name: str, *dims: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["samples", *dims])
