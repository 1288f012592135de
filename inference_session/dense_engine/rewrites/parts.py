"""Reads a network, and makes networks of its parts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, ValueInfoProto
from onnx.checker import ValidationError

from inference_session.dense_engine.network_file import NetworkFile
from inference_session.errors import ModelFormatError


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
    nodes, read = needed_nodes(model.graph, outputs, given)
    graph = part.graph
    for repeated in (graph.node, graph.input, graph.output, graph.initializer, graph.value_info):
        del repeated[:]
    graph.node.extend(nodes)
    graph.input.extend(value for value in inputs if value.name in read)
    graph.output.extend(outputs)
    graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in read)
    return part


def needed_nodes(
    graph: GraphProto, outputs: Iterable[ValueInfoProto], given: Collection[str] = ()
) -> tuple[list[NodeProto], set[str]]:
    """The nodes that compute these outputs from given values, and all values that are read then, outputs included."""
    nodes, read = list[NodeProto](), {value.name for value in outputs}
    for node in reversed(graph.node):
        if read.intersection(node.output).difference(given):
            nodes.append(node)
            read |= names_read(node)
    return nodes[::-1], read


def names_read(node: NodeProto) -> set[str]:
    """The values that a node needs: its inputs, and those of its bodies, which are no others' names."""
    names = set(node.input) - {""}
    for item in node.attribute:
        for body in [item.g] if item.type == AttributeProto.GRAPH else item.graphs:
            names.update(*(names_read(inner) for inner in body.node), (value.name for value in body.output))
    return names


def most_arrays(graph: GraphProto) -> int:
    """The most inputs, or outputs, that a node of the graph has; bodies of nodes are not looked into."""
    return max((max(len(node.input), len(node.output)) for node in graph.node), default=0)
