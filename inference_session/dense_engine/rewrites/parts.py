"""Reads a network, and makes networks of its parts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx
from google.protobuf.message import DecodeError
from onnx import GraphProto, ModelProto, ValueInfoProto
from onnx.checker import ValidationError

from inference_session.dense_engine.network_file import NetworkFile
from inference_session.errors import ModelFormatError
from inference_session.onnx_graphs import needed_nodes, reads


def read_network(network: NetworkFile) -> ModelProto:
    """A network, with weights that are in other files; ModelFormatError where it is missing or damaged."""
    try:
        return onnx.load(network.path) if network.made is None else onnx.load_model_from_string(network.made)
    except (DecodeError, OSError, ValidationError, ValueError) as error:
        raise ModelFormatError(f"{network.path}: cannot be read: {error}") from error


def part_of(
    model: ModelProto, inputs: Sequence[ValueInfoProto], outputs: Sequence[ValueInfoProto], given: Collection[str]
) -> ModelProto:
    """The network that computes these outputs from given values; it keeps only those of `inputs` that it reads."""
    part = ModelProto()
    part.CopyFrom(model)
    targets = [value.name for value in outputs]
    nodes = needed_nodes(model.graph.node, targets, given)
    read = set(targets).union(*map(reads, nodes))
    graph = part.graph
    for repeated in (graph.node, graph.input, graph.output, graph.initializer, graph.value_info):
        del repeated[:]
    graph.node.extend(nodes)
    graph.input.extend(value for value in inputs if value.name in read)
    graph.output.extend(outputs)
    graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in read)
    return part


def most_arrays(graph: GraphProto) -> int:
    """The most inputs, or outputs, that a node of the graph has; bodies of nodes are not looked into."""
    return max((max(len(node.input), len(node.output)) for node in graph.node), default=0)
