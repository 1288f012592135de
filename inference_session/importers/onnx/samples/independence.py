"""Whether the samples of a batch may be computed together: the imported networks, followed operator by operator.

Without a proof, samples are not joined. The proof (axis.py) goes first over the network that computes keys, then
over the look-ups, then over the dense network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper

from inference_session.importers.onnx.carve import CarvedModel
from inference_session.importers.onnx.evaluation import open_network, save_network
from inference_session.importers.onnx.probe import PRIME_SIZES
from inference_session.importers.onnx.replay import Replay
from inference_session.importers.onnx.samples.axis import SampleAxis
from inference_session.importers.onnx.samples.kinds import CONSTANT, Free, Kind, Observations, PerSample
from inference_session.importers.onnx.samples.loops import first_iterations, result_of
from inference_session.importers.onnx.weights import Weight
from inference_session.model_spec import LookupSpec, ModelSpec, NamedArrays
from inference_session.onnx_graphs import Names, make_node

_SAMPLES = PerSample(1)
_BFLOAT16 = "tensor(bfloat16)"


@dataclass(frozen=True)
class Independence:
    """What has been found of a version."""

    is_proved: bool
    culprit: str = ""
    """The first operator that may look along the samples, for people."""


def samples_are_independent(
    carved: CarvedModel, spec: ModelSpec, replay: Replay, feeds: tuple[NamedArrays, ...], path: Path
) -> Independence:
    """Whether each answer follows from its own sample.

    Args:
        carved: the networks, before guards are added.
        replay: the same version, opened.
        feeds: inputs that the model accepts, of PRIME_SIZES samples each.
        path: a temporary file to write.
    """
    kinds: dict[str, Kind] = {tensor.name: _SAMPLES for tensor in spec.inputs}
    culprit = None
    if carved.keys is not None:
        observed = _observe(carved.keys, carved.keys_weights, feeds, path)
        followed = SampleAxis(carved.keys.graph, observed, kinds)
        kinds.update({value.name: followed.kinds.get(value.name, CONSTANT) for value in carved.keys.graph.output})
        culprit = followed.culprit or followed.placing
    fed = tuple(replay.feeds(arrays) for arrays in feeds)
    seen = Observations.of_runs(PRIME_SIZES, fed, {})
    vectors: dict[str, list[Kind]] = {}
    for lookup in spec.lookups:
        vectors.setdefault(lookup.dense_input, []).append(_looked_up(lookup, kinds, seen))
    kinds.update({name: found[0] if len(set(map(repr, found))) == 1 else None for name, found in vectors.items()})
    observed = _observe(carved.dense, carved.dense_weights, fed, path)
    followed = SampleAxis(carved.dense.graph, observed, kinds)
    is_proved = all(followed.is_batch(tensor.name) for tensor in spec.outputs)
    return Independence(is_proved, _described(culprit or followed.culprit or followed.placing))


def _looked_up(lookup: LookupSpec, kinds: Mapping[str, Kind], seen: Observations) -> Kind:
    """The result of a look-up of these keys; a pooled one reduces their last axis."""
    around = [kinds.get(name, CONSTANT) for name in lookup.reads]
    keys = around[0]
    if lookup.bags is not None:
        return _SAMPLES if _are_even_bags(lookup, kinds, seen) else None
    if not isinstance(keys, PerSample):
        return CONSTANT if all(isinstance(kind, Free) and kind.is_constant for kind in around) else None
    axis, shapes = seen.axis(keys, lookup.keys), seen.shapes(lookup.keys)
    if axis is None or shapes is None or any(kind != keys for kind in around):
        return None
    is_pooled_over = lookup.pooling != "none" and axis.axis == len(shapes[0]) - 1
    is_misplaced = lookup.joined and not (axis.axis == 0 and axis.is_whole)
    return None if is_pooled_over or is_misplaced else keys


def _are_even_bags(lookup: LookupSpec, kinds: Mapping[str, Kind], seen: Observations) -> bool:
    """Whether a list of keys, the same number for each sample, is pooled by samples."""
    keys, axis = kinds.get(lookup.keys), None
    if isinstance(keys, PerSample):
        axis = seen.axis(keys, lookup.keys)
    if axis is None or axis.axis != 0 or axis.outer != 1 or lookup.bags is None:
        return False
    if not all(isinstance(kinds.get(name, CONSTANT), Free | PerSample) for name in lookup.bags):
        return False
    for run, num_samples in zip(seen.values, seen.num_samples, strict=True):
        begins, ends = (run[name] for name in lookup.bags)
        expected = np.arange(num_samples) * axis.inner
        if not np.array_equal(begins, expected) or not np.array_equal(ends, expected + axis.inner):
            return False
    return True


def _observe(network: ModelProto, weights: list[Weight], feeds: tuple[NamedArrays, ...], path: Path) -> Observations:
    """Run a network, and keep all that its main graph computes."""
    model = ModelProto()
    model.CopyFrom(network)
    model.graph.initializer.extend(weight.tensor() for weight in weights)
    given = {value.name for value in model.graph.output}
    names = [name for node in model.graph.node for name in node.output if name and name not in given]
    model.graph.output.extend(ValueInfoProto(name=name) for name in names)
    save_network(model, path)
    session, original = open_network(path), dict[str, str]()
    if lacking := [value.name for value in session.get_outputs() if value.type == _BFLOAT16]:
        original = _widen(model, lacking)
        save_network(model, path)
        session = open_network(path)
    wanted = {value.name for value in session.get_inputs()}
    outputs = [value.name for value in session.get_outputs()]
    found = [original.get(name, name) for name in outputs]
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in network.graph.initializer}
    runs = []
    for arrays in feeds:
        inputs = {name: arrays[name] for name in wanted}
        runs.append({**constants, **inputs, **dict(zip(found, session.run(outputs, inputs), strict=True))})
    dims = {weight.name: weight.dims for weight in weights}
    within = {
        result_of(node): Observations.of_runs(PRIME_SIZES, tuple(begun), dims)
        for node in network.graph.node
        if (begun := first_iterations(model, node, runs, path)) is not None
    }
    return replace(Observations.of_runs(PRIME_SIZES, tuple(runs), dims), bodies=within)


def _widen(model: ModelProto, names: list[str]) -> dict[str, str]:
    """Let float32 copies of values be outputs in their place: NumPy lacks bfloat16. Returns the values by their copies'
    names.
    """
    free, graph = Names.unused_in(model.graph), model.graph
    copies = {name: free.fresh(f"{name}_float32") for name in names}
    graph.node.extend(make_node("Cast", [name], copy, to=TensorProto.FLOAT) for name, copy in copies.items())
    outputs = [value for value in graph.output if value.name not in copies]
    outputs += [ValueInfoProto(name=copy) for copy in copies.values()]
    del graph.output[:]
    graph.output.extend(outputs)
    return {copy: name for name, copy in copies.items()}


def _described(node: NodeProto | None) -> str:
    return "" if node is None else f"{node.op_type} {node.name or node.output[0]!r}"
