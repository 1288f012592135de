"""One form for the many forms that exporters write, so that the rest of the importer handles fewer patterns.

Afterwards the model holds no functions, every value has a unique name, all constants are initializers of the
main graph, and a Loop carries nothing that never changes (it captures it instead).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, inliner, numpy_helper

from inference_session.importers.onnx.evaluation import fixed_value
from inference_session.importers.onnx.model_file import Blob
from inference_session.importers.onnx.types import Types, value_type
from inference_session.importers.onnx.weights import Weight, weight_of
from inference_session.onnx_graphs import (
    NO_END,
    Names,
    all_graphs,
    all_nodes,
    attribute,
    axes_of,
    bodies,
    constants,
    integers,
    make_node,
    position,
    producers,
    rename_inner,
    replace_node,
    replace_reads,
    set_nodes,
    sort_nodes,
)

FLOAT_TYPES = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16})
_SMALL_BYTES = 4096
_UNUSUAL, _STEP = 3.1416e-3, 1e-5
"""A value that hardly occurs in models, and the distance of another."""


@dataclass(frozen=True)
class CanonicalModel:
    """A model in canonical form."""

    model: ModelProto
    """Without its large initializers."""
    weights: dict[str, Weight]
    """These, by name."""
    names: Names
    """Gives out names that neither uses."""

    def copied(self) -> ModelProto:
        """The model, to be changed."""
        copy = ModelProto()
        copy.CopyFrom(self.model)
        return copy


def to_canonical(path: Path, model: ModelProto, blobs: dict[int, Blob]) -> CanonicalModel:
    """Bring a model file, as it was read, into canonical form.

    Raises:
        ModelFormatError: external data are missing, too short or outside the model's folder.
    """
    weights = _split_weights(path, model.graph, blobs)
    if model.functions:
        model = inliner.inline_local_functions(model)
    graph = model.graph
    sort_nodes(graph)
    _drop_default_inputs(graph, weights)
    # IR 3 demands that initializers are inputs; later versions do not, and we write a later one.
    model.ir_version = max(model.ir_version, 4)
    for node in all_nodes(graph):
        node.domain = "" if node.domain == "ai.onnx" else node.domain
    names = Names.unused_in(graph, weights)
    for node in graph.node:
        for body in bodies(node):
            rename_inner(body, names)  # siblings may share names, and bodies get copied
    _lift_constants(graph, names)
    _separate_running_statistics(graph)
    for tensor in list(graph.initializer):
        if tensor.data_type in FLOAT_TYPES and len(tensor.dims) > 0:
            weights[tensor.name] = weight_of(path, tensor, None)
            graph.initializer.remove(tensor)
    _cast_instead_of_cast_like(model, weights)
    _capture_invariants(graph)
    _name_axis_zero(graph, weights)
    _skip_whole_slices(graph)
    _skip_flattened_lists(graph)
    _gather_instead_of_gather_nd(model, weights)
    _gather_instead_of_gather_elements(model, weights)
    _gather_instead_of_slice(model, weights)
    return CanonicalModel(model, weights, names)


def _split_weights(path: Path, graph: GraphProto, blobs: dict[int, Blob]) -> dict[str, Weight]:
    """Take the initializers that lie in files out of the graph; small ones are read into it."""
    weights: dict[str, Weight] = {}
    kept: list[TensorProto] = []
    for i, tensor in enumerate(graph.initializer):
        weight = weight_of(path, tensor, blobs.get(i))
        if isinstance(weight.values, TensorProto) or weight.num_bytes < _SMALL_BYTES:
            kept.append(weight.tensor())
        else:
            weights[tensor.name] = weight
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return weights


def _drop_default_inputs(graph: GraphProto, weights: dict[str, Weight]) -> None:
    """An initializer that is listed as an input is a default value; served models take the defaults."""
    initialized = {tensor.name for tensor in graph.initializer} | set(weights)
    kept = [value for value in graph.input if value.name not in initialized]
    del graph.input[:]
    graph.input.extend(kept)


def _lift_constants(graph: GraphProto, names: Names) -> None:
    # Bodies before the graphs that hold them: a graph's nodes are copied, with their bodies, when they are replaced.
    for scope in reversed(list(all_graphs(graph))):
        lifted: list[TensorProto] = [] if scope is graph else list(scope.initializer)
        nodes: list[NodeProto] = []
        for node in scope.node:
            tensor = _constant_value(node)
            if tensor is None:
                nodes.append(node)
            else:
                lifted.append(tensor)
        if scope is not graph:
            del scope.initializer[:]
        nodes += _relay_outputs(scope, lifted, names)
        set_nodes(scope, nodes)
        graph.initializer.extend(lifted)


def _relay_outputs(scope: GraphProto, lifted: list[TensorProto], names: Names) -> list[NodeProto]:
    """A graph's output must be made inside it: lifted constants that are outputs are passed on under their name."""
    outputs = {value.name for value in scope.output}
    relays: list[NodeProto] = []
    lifted_names: dict[str, str] = {}
    for tensor in lifted:
        if tensor.name in outputs:
            output, tensor.name = tensor.name, names.fresh(tensor.name)
            lifted_names[output] = tensor.name
            relays.append(make_node("Identity", [tensor.name], output))
    replace_reads(scope, lifted_names)
    return relays


def _constant_value(node: NodeProto) -> TensorProto | None:
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx") or len(node.attribute) != 1:
        return None
    value = helper.get_attribute_value(node.attribute[0])
    name, output = node.attribute[0].name, node.output[0]
    if name == "value":
        tensor = TensorProto()
        tensor.CopyFrom(value)
        tensor.name = output
        return tensor
    kinds = {"value_int": TensorProto.INT64, "value_float": TensorProto.FLOAT, "value_string": TensorProto.STRING}
    kind = kinds.get(name.removesuffix("s"))
    if kind is None:
        return None
    several = name.endswith("s")
    return helper.make_tensor(output, kind, [len(value)] if several else [], value if several else [value])


def _separate_running_statistics(graph: GraphProto) -> None:
    """Give running statistics of training that no node reads a value that no other constant has.

    ONNX Runtime overwrites the initializers that hold them, and lets initializers of one equal element share memory:
    a constant elsewhere would change from run to run. The normalised values do not depend on these statistics.
    """
    nodes, initializers = list(all_nodes(graph)), constants(graph)
    reads = Counter(name for node in nodes for name in node.input)
    reads.update(output.name for scope in all_graphs(graph) for output in scope.output)
    for node in nodes:
        is_training = node.op_type == "BatchNormalization" and attribute(node, "training_mode", 0)
        if not is_training or any(reads[name] for name in node.output[1:]):
            continue
        for number, name in enumerate(node.input[3:]):
            tensor = initializers.get(name)
            if tensor is not None and reads[name] == 1 and math.prod(tensor.dims) == 1:
                dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
                value = np.full(tuple(tensor.dims), _UNUSUAL + number * _STEP, dtype)
                tensor.CopyFrom(numpy_helper.from_array(value, name))


def _capture_invariants(graph: GraphProto) -> None:
    """Remove from each Loop the values that it carries but never changes; jax2onnx passes whole tables that way."""
    for node in graph.node:
        for body in bodies(node):
            if node.op_type == "Loop":
                _capture_invariants_of(graph, node, body)
            _capture_invariants(body)


def _capture_invariants_of(graph: GraphProto, loop: NodeProto, body: GraphProto) -> None:
    made_by = {node.output[0]: node.input[0] for node in body.node if node.op_type == "Identity"}
    for i in reversed(range(2, len(loop.input))):
        source = body.output[i - 1].name
        while source in made_by:
            source = made_by[source]
        given_out = any(value.name == source for j, value in enumerate(body.output) if j != i - 1)
        if source != body.input[i].name or given_out:
            continue
        outer, final = loop.input[i], loop.output[i - 2]
        replace_reads(body, {source: outer})
        del body.input[i], body.output[i - 1], loop.input[i], loop.output[i - 2]
        if final:
            graph.node.insert(position(graph, loop), make_node("Identity", [outer], final))


def _cast_instead_of_cast_like(model: ModelProto, weights: dict[str, Weight]) -> None:
    """Name the type that a CastLike takes from another value. PyTorch writes many where it does not optimize."""
    nodes = [node for node in all_nodes(model.graph) if node.op_type == "CastLike" and not node.domain]
    types = Types(model, weights) if nodes else None
    for node in nodes:
        elem_type = types.elem_type(node.input[1]) if types else 0
        if elem_type:
            del node.attribute[:], node.input[1:]
            node.op_type = "Cast"
            node.attribute.append(helper.make_attribute("to", elem_type))


def _name_axis_zero(graph: GraphProto, weights: dict[str, Weight]) -> None:
    """Write Gather on axis -rank of a weight as Gather on axis 0."""
    for node in all_nodes(graph):
        if node.op_type == "Gather" and node.input[0] in weights:
            axis = attribute(node, "axis", 0)
            if axis < 0 and axis + len(weights[node.input[0]].dims) == 0:
                del node.attribute[:]
                node.attribute.append(helper.make_attribute("axis", 0))


def _skip_whole_slices(graph: GraphProto) -> None:
    """Let a Slice of all elements be a copy: tf2onnx writes one for each `x[..., None]`."""
    known = constants(graph)
    for node in all_nodes(graph):
        if node.op_type != "Slice" or len(node.input) < 3:
            continue
        begins, ends = (integers(known.get(name)) for name in node.input[1:3])
        steps = integers(known.get(node.input[4])) if len(node.input) > 4 and node.input[4] else [1]
        if begins and ends and steps and not any(begins) and min(ends) >= NO_END and {*steps} == {1}:
            node.op_type = "Identity"
            del node.input[1:]


def _skip_flattened_lists(graph: GraphProto) -> None:
    """Let a Reshape of an input of one dimension to one be a copy: PyTorch writes one for each list of ids."""
    lists = {value.name for value in graph.input if len(value_type(value).dims or ()) == 1}
    known = constants(graph)
    for node in all_nodes(graph):
        if node.op_type == "Reshape" and node.input[0] in lists and integers(known.get(node.input[1])) == [-1]:
            node.op_type = "Identity"
            del node.input[1:], node.attribute[:]


def _gather_instead_of_gather_nd(model: ModelProto, weights: dict[str, Weight]) -> None:
    """GatherND by keys with a last axis of one, as `weight[keys]` is written, is Gather by the keys without it.

    So that the weight may also be computed, this is done for all values that keys pick from.
    """
    types: Types | None = None
    for scope in all_graphs(model.graph):
        made_by = producers(scope)
        for node in scope.node:
            if node.op_type != "GatherND" or attribute(node, "batch_dims", 0):
                continue
            keys = made_by.get(node.input[1])
            while keys is not None and keys.op_type == "Identity":
                keys = made_by.get(keys.input[0])
            if keys is None or keys.op_type != "Unsqueeze":
                continue
            types = types or Types(model, weights)
            if axes_of(model.graph, keys) in ([-1], [(types.rank(keys.output[0]) or 0) - 1]):
                del node.attribute[:]
                node.op_type, node.input[1] = "Gather", keys.input[0]


def _gather_instead_of_gather_elements(model: ModelProto, weights: dict[str, Weight]) -> None:
    """GatherElements of all elements of rows is Gather: `torch.gather(weight, 0, keys[:, None].expand(-1, dim))`."""
    types: Types | None = None
    for scope in all_graphs(model.graph):
        made_by = producers(scope)
        for node in scope.node:
            if node.op_type != "GatherElements" or node.input[0] not in weights or attribute(node, "axis", 0):
                continue
            expand = made_by.get(node.input[1])
            keys = made_by.get(expand.input[0]) if expand is not None and expand.op_type == "Expand" else None
            if keys is None or keys.op_type != "Unsqueeze" or axes_of(model.graph, keys) not in ([-1], [1]):
                continue
            types = types or Types(model, weights)
            dims = types.dims(keys.input[0])
            is_row = dims and None not in dims and len(dims) == 1
            if is_row and types.dims(node.input[1]) == (*dims, *weights[node.input[0]].dims[1:]):  # type: ignore[misc]
                del node.attribute[:]
                node.op_type, node.input[1] = "Gather", keys.input[0]


def _gather_instead_of_slice(model: ModelProto, weights: dict[str, Weight]) -> None:
    """Write each Slice of exactly one whole row of a weight as Gather, which differs only for keys out of range.

    jax2onnx writes `table[key]` in a scan as a Slice from the key to the key + 1.
    """
    for scope in all_graphs(model.graph):
        for node in list(scope.node):
            if node.op_type != "Slice" or node.input[0] not in weights or len(node.input) != 4:
                continue
            key = _row_key(model, scope, node, weights[node.input[0]].dims)
            if key is not None:
                replace_node(scope, node, [make_node("Gather", [node.input[0], key], node.output[0], axis=0)])


def _row_key(model: ModelProto, scope: GraphProto, node: NodeProto, dims: tuple[int, ...]) -> str | None:
    """The value, of one element, that names the row; None where the Slice does not take one whole row."""
    _, starts, ends, axes_name = node.input
    known = constants(model.graph)
    axes = integers(known.get(axes_name))
    made_by = producers(scope)
    end, start = made_by.get(ends), made_by.get(starts)
    if axes is None or end is None or end.op_type != "Add" or starts not in end.input:
        return None
    sizes = integers(known.get(next((name for name in end.input if name != starts), "")))
    if axes != list(range(len(axes))) or sizes is None or sizes != [1, *dims[1 : len(axes)]]:
        return None
    if len(axes) == 1:
        return str(starts)
    if start is None or start.op_type != "Concat" or attribute(start, "axis", 0) != 0 or len(start.input) != len(axes):
        return None
    others = start.input[1:]
    begins = [fixed_value(model, scope, name) for name in others]
    return str(start.input[0]) if all(begin is not None and not begin.any() for begin in begins) else None
