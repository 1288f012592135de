"""Makes a model whose context inputs have one row per context from one that repeats them for every candidate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from onnx import GraphProto, ModelProto, TensorProto, helper

from inference_session.errors import ConfigurationError, UnsupportedModelError
from inference_session.importers.onnx.canonical import CanonicalModel
from inference_session.importers.onnx.context.biases import carry_biases
from inference_session.importers.onnx.context.columns import cut_products
from inference_session.importers.onnx.context.concatenations import delay_concatenations, reduce_by_parts
from inference_session.importers.onnx.context.costs import Costs, saved_costs, tiled_readers, unproven_readers
from inference_session.importers.onnx.context.division import CONTEXT, ContextDivision
from inference_session.importers.onnx.context.elementwise import broadcast_elementwise, drop_expansions
from inference_session.importers.onnx.context.pairs import divide_pairs
from inference_session.importers.onnx.context.products import contract_sum, multiply_blocks
from inference_session.importers.onnx.context.siblings import multiply_siblings
from inference_session.importers.onnx.context.simplification import (
    answer_shape,
    fold_constants,
    share_equal_nodes,
    write_plainly,
)
from inference_session.importers.onnx.context.single_rows import compute_two_rows
from inference_session.importers.onnx.context.work import Work
from inference_session.importers.onnx.samples.axis import SampleAxis
from inference_session.importers.onnx.samples.kinds import Observations, PerSample
from inference_session.importers.onnx.shapes import Shapes, sized
from inference_session.importers.onnx.types import value_type
from inference_session.importers.onnx.weights import Weight
from inference_session.model_spec import BLOCK_CONTEXT, ROW_CONTEXT
from inference_session.onnx_graphs import drop_unused

_NUM_SAMPLES, _OPEN_SIZE = (101, 103), 13
"""Both prime, and what an open size is taken to be."""


class Cut(Enum):
    """How far a model is divided."""

    ALL = "with every rewrite"
    NO_SUMS = "without taking sums apart"
    NONE = "everything that meets a candidate is tiled"


@dataclass(frozen=True)
class ContextSplit:
    """The result of dividing a model."""

    whole: CanonicalModel
    """All tables in it, as before."""
    proven: bool
    """Whether no answer can depend on the other samples of its batch."""
    costs: Costs
    tiled: tuple[str, ...]
    """What the network does with the context for every candidate."""


def split_context(whole: CanonicalModel, context: Sequence[str], cut: Cut) -> ContextSplit:
    """Divide a model, which is not changed.

    Args:
        context: the inputs that are given once per context.

    Raises:
        ConfigurationError: a context input is unknown, or no input is left for the candidates.
        UnsupportedModelError: an input's first dimension does not count samples.
    """
    model, weights, names, copy = whole.model, whole.weights, whole.names, whole.copied()
    _check(model.graph, context)
    samples = infer_samples(copy, weights)
    proven = all(samples.is_batch(value.name) for value in copy.graph.output)
    division = ContextDivision(copy.graph, samples, names, context)
    division.divide()
    _declare(copy.graph, context, division)
    work = Work(copy, dict(weights), names, tuple(context))
    if cut is Cut.NONE:
        work.replace_each(compute_two_rows)
    else:
        _rewrite(work, sums=cut is Cut.ALL)
    drop_unused(work.graph)
    tiled = (*unproven_readers(model.graph, samples), *tiled_readers(work))
    return ContextSplit(CanonicalModel(copy, work.weights, names), proven, saved_costs(model, weights, work), tiled)


def infer_samples(model: ModelProto, weights: Mapping[str, Weight]) -> SampleAxis:
    """Where the samples of all values of a canonical model are, from sizes inferred for two numbers of samples."""
    runs = []
    for size in _NUM_SAMPLES:
        shapes = {value.name: sized(model.graph, value.name, size, _OPEN_SIZE) for value in model.graph.input}
        runs.append(Shapes(model, weights, shapes))
    dims = tuple({name: found for name in run.types if (found := run.dims(name)) is not None} for run in runs)
    observed = Observations(_NUM_SAMPLES, dims, tuple(run.known for run in runs))
    return SampleAxis(model.graph, observed, {value.name: PerSample(1) for value in model.graph.input})


def _check(graph: GraphProto, context: Sequence[str]) -> None:
    inputs = [value.name for value in graph.input]
    if not context:
        raise ConfigurationError("--context: no input was given")
    for name in context:
        if name not in inputs:
            known = ", ".join(map(repr, inputs))
            raise ConfigurationError(f"--context {name!r}: the model has no such input; its inputs: {known}")
    if set(inputs) <= set(context):
        raise ConfigurationError(
            "--context: all inputs of the model were given; at least one must be left for the candidates"
        )
    for value in graph.input:
        dims = value_type(value).dims
        if not dims or isinstance(dims[0], int):
            raise UnsupportedModelError(
                f"--context: the first dimension of input {value.name!r} does not count samples: its shape is "
                f"{list(dims or ())}"
            )


def _declare(graph: GraphProto, context: Sequence[str], division: ContextDivision) -> None:
    """Declare another number of rows for the context's inputs, and drop the declarations of its inner values."""
    for value in graph.input:
        if value.name in context:
            value.type.tensor_type.shape.dim[0].dim_param = CONTEXT
    for name, rows in ((ROW_CONTEXT, "rows"), (BLOCK_CONTEXT, "blocks")):
        graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, [rows]))
    kept = [value for value in graph.value_info if not division.is_contexts(value.name)]
    del graph.value_info[:]
    graph.value_info.extend(kept)


def _rewrite(work: Work, *, sums: bool) -> None:
    """Remove tiles, as many as can be: the rewrites, in the order in which they are applied.

    Args:
        sums: take sums of a context's and a candidate's value apart where their rounding allows it, and add fields in
            another order.
    """
    fold_constants(work)
    work.replace_each(answer_shape)
    work.replace_each(write_plainly)
    delay_concatenations(work)
    if sums:
        work.replace_each(reduce_by_parts)
    divide_pairs(work)
    delay_concatenations(work)
    drop_expansions(work)
    work.replace_each(contract_sum)
    carry_biases(work)
    cut_products(work, sums=sums)
    work.replace_each(multiply_blocks)
    work.replace_each(broadcast_elementwise)
    multiply_siblings(work)
    share_equal_nodes(work)
