"""Proves that no sample of a batch influences another one, operator by operator.

kinds.py says what a value may be to the samples. The rules (rules.py) say what each operator makes of its
operands; operators without a rule, and those that read along the samples, give a value that may depend on several
samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from onnx import GraphProto, NodeProto

from inference_session.importers.onnx.samples.kinds import (
    CONSTANT,
    Axis,
    Free,
    Kind,
    Observations,
    PerIteration,
    PerPlace,
    PerSample,
)
from inference_session.importers.onnx.samples.loops import follow_iterations, follow_per_iteration
from inference_session.importers.onnx.samples.places import follow_places
from inference_session.importers.onnx.samples.rules import rule_of
from inference_session.importers.onnx.samples.step import Step
from inference_session.onnx_graphs import bodies, is_random, reads


class SampleAxis:
    """Follows the samples through one graph."""

    def __init__(self, graph: GraphProto, observed: Observations, kinds: Mapping[str, Kind]) -> None:
        """`kinds`: of the graph's inputs. All other values from outside are constant."""
        self._graph = graph
        self._observed = observed
        self.kinds: dict[str, Kind] = dict(kinds)
        self.culprit: NodeProto | None = None
        """The first node that may look along the samples."""
        self.placing: NodeProto | None = None
        """The first node that reads the places of samples in the batch."""
        for node in graph.node:
            self._follow(node)

    def kind(self, name: str) -> Kind:
        """The kind of a value; None also where its samples cannot be found, or their places in the batch matter."""
        kind = self.kinds.get(name, CONSTANT)
        is_lost = isinstance(kind, PerSample) and self.axis(name) is None
        return None if is_lost or isinstance(kind, PerPlace) else kind

    def axis(self, name: str) -> Axis | None:
        """Where the samples of a value are; None where it holds none, or they cannot be found."""
        kind = self.kinds.get(name, CONSTANT)
        return self._observed.axis(kind, name) if isinstance(kind, PerSample) else None

    def is_batch(self, name: str) -> bool:
        """Whether a value has a row for each sample."""
        found = self.axis(name)
        return found is not None and found.axis == 0 and found.is_whole

    def _follow(self, node: NodeProto) -> None:
        step = Step(node, self._observed, [self.kinds.get(name, CONSTANT) for name in node.input])
        around = [self.kinds.get(name, CONSTANT) for name in reads(node)]
        is_per_iteration = any(isinstance(kind, PerIteration) for kind in around)
        is_free = all(isinstance(kind, Free) and kind.is_constant for kind in around)
        if is_free and not is_per_iteration and not is_random(node):
            found: Sequence[Kind] = [CONSTANT] * len(node.output)
        elif None in around:
            found = [None] * len(node.output)
        else:
            try:
                found = self._results(step)
            except (ValueError, IndexError, TypeError, ZeroDivisionError):  # a node that violates ONNX's specification
                found = [None] * len(node.output)
        for name, kind in zip(node.output, found, strict=False):
            self.kinds[name] = kind
        if self.culprit is None and None in found and None not in around:
            self.culprit = node
        if self.placing is None and any(isinstance(kind, PerPlace) for kind in found):
            self.placing = node

    def _results(self, step: Step) -> Sequence[Kind]:
        if bodies(step.node):
            return follow_iterations(step, self.kinds, lambda *of_body: SampleAxis(*of_body).kinds)
        if (rule := rule_of(step.node)) is None:
            return [None] * len(step.node.output)
        return follow_per_iteration(step, partial(follow_places, rule=rule))
