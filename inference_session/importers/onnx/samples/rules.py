"""What each operator makes of operands that hold samples. Operators that have no rule may mix the samples."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from inference_session.importers.onnx.samples.kinds import CONSTANT, Axis, Free, Kind, PerSample, Places
from inference_session.importers.onnx.samples.step import Step, all_constant, is_constant, is_size, neither
from inference_session.onnx_graphs import BROADCASTING, NO_END, UNARY, text_attribute


def _elementwise(step: Step) -> list[Kind]:
    if step.sizes_of_samples:
        return [_counted_elementwise(step)] * len(step.node.output)
    shapes = step.observed.shapes(step.node.output[0])
    if not step.rest_is_constant or shapes is None:
        return [None] * len(step.node.output)
    positions = {(len(shapes[0]) - step.rank(i) + at.axis, at.outer) for i, at in step.per_sample if at.axis >= 0}
    if len(positions) != 1 or any(at.axis < 0 for _, at in step.per_sample):
        return [None] * len(step.node.output)
    return step.outputs(*positions.pop())


def _equal(step: Step) -> list[Kind]:
    """Sizes never equal negative numbers, with which PyTorch compares them to find those that it may infer."""
    for sizes, other in ((0, 1), (1, 0)):
        compared = step.fixed(other)
        if step.sizes_of_samples and is_size(step.kinds[sizes]) and compared and max(compared) < 0:
            found = [run.get(step.node.input[sizes]) for run in step.observed.values]
            counts = getattr(step.kinds[sizes], "counts", False)  # all else is constant, as -1 in `expand(-1, n)` is
            if all(values is not None and np.all((values >= 0) | ~np.asarray(counts)) for values in found):
                return [CONSTANT]
    return _elementwise(step)


def _quantized(step: Step) -> list[Kind]:
    """One constant scale for all elements, or one for each index of an axis; blocks may be of samples."""
    at = step.only()
    if at is None or step.attribute("block_size", 0):
        return neither(step)
    return _beside(step, at, 1) if step.rank(1) > 0 else step.outputs(at.axis, at.outer)


def _counted_elementwise(step: Step) -> Kind:
    shapes = step.observed.shapes(step.node.output[0])
    if shapes is None or len(set(shapes)) > 1:
        return Free(True)
    masks = [kind.counts for kind in step.kinds if isinstance(kind, Free)]
    if step.node.op_type == "Max" and all(map(is_size, step.kinds)) and _is_common_size(step, masks):
        return Free(np.logical_or.reduce([np.broadcast_to(mask, shapes[0]) for mask in masks]))
    counted = [position for position, mask in enumerate(masks) if np.any(mask)]
    keeps = _KEEPS_COUNTS.get(step.node.op_type, ())
    if any(mask is True for mask in masks) or len(counted) > 1 or not set(counted) <= set(keeps):
        return Free(True)
    return Free(np.logical_or.reduce([np.broadcast_to(mask, shapes[0]) for mask in masks]))


def _is_common_size(step: Step, masks: list[NDArray[np.bool_] | bool]) -> bool:
    """Whether operands that depend on the number of samples are the same multiple of it, and all others 1 there.

    tf2onnx writes such a Max for the sizes that two values are stretched to.
    """
    counted = np.logical_or.reduce(np.broadcast_arrays(*masks))
    for run in step.observed.values:
        values = [run[name] for name in (*step.node.input, *step.node.output) if run.get(name) is not None]
        if len(values) <= len(masks):
            return False
        for value, mask in zip(values, masks, strict=False):
            if not np.all(np.where(mask, value == values[-1], value <= 1) | ~counted):
                return False
    return True


_KEEPS_COUNTS = {"Identity": (0,), "Cast": (0,), "Mul": (0, 1), "Div": (0,), "Where": (1, 2)}
"""Operands of which a multiple of the number of samples becomes another one; all else must be constant."""


def _reshaped(step: Step) -> list[Kind]:
    """The same elements in the same order, in another shape."""
    kind, name = step.kinds[0], step.node.output[0]
    if isinstance(kind, PerSample):
        return [kind if step.observed.axis(kind, name) and all(map(is_size, step.kinds[1:])) else None]
    shapes = step.observed.shapes(name)
    if isinstance(kind, Free) and shapes and len(set(shapes)) == 1 and all_constant(step.kinds[1:]):
        return [kind if kind.counts is True else Free(np.broadcast_to(kind.counts, step.shape()).reshape(shapes[0]))]
    return neither(step)


def _shape(step: Step) -> list[Kind]:
    kind, shapes = step.kinds[0], step.observed.shapes(step.node.input[0])
    if isinstance(kind, Free):  # a list of sizes has as many of them for any number of samples
        return [Free(True) if kind.counts is True else CONSTANT]
    if not isinstance(kind, PerSample) or shapes is None:
        return [None]
    at = step.observed.axis(kind, step.node.input[0])
    if at is None:
        return [None]
    mask = np.arange(len(shapes[0])) == at.axis
    return [Free(mask[step.attribute("start", 0) : step.attribute("end", None)])]


def _transpose(step: Step) -> list[Kind]:
    at = step.only()
    perm = list(step.attribute("perm", range(step.rank())[::-1]))
    return step.outputs(perm.index(at.axis), at.outer) if at else neither(step)


def _reduction(step: Step) -> list[Kind]:
    at, axes = step.only(), step.axes()
    if step.node.op_type == "ReduceProd" and isinstance(sizes := step.kinds[0], Free) and step.rank() == 1:
        is_multiple = sizes.counts is not True and np.sum(sizes.counts) == 1
        return [
            Free(np.array([True]) if step.attribute("keepdims", 1) else np.array(True)) if is_multiple else Free(True)
        ]
    if at is None or axes is None:
        return neither(step)
    if not axes and step.attribute("noop_with_empty_axes", 0):
        return step.outputs(at.axis, at.outer)
    return _without(step, at, axes or list(range(step.rank())), keep=bool(step.attribute("keepdims", 1)))


def _without(step: Step, at: Axis, axes: list[int], *, keep: bool) -> list[Kind]:
    """Outputs that lack these dimensions, or have 1 there."""
    if at.axis in axes:
        return [None] * len(step.node.output)
    return step.outputs(at.axis if keep else at.axis - sum(axis < at.axis for axis in axes), at.outer)


def _arg(step: Step) -> list[Kind]:
    at = step.only()
    if at is None:
        return neither(step)
    return _without(step, at, [step.attribute("axis", 0) % step.rank()], keep=bool(step.attribute("keepdims", 1)))


def _beside(step: Step, at: Axis | None, default: int = 0) -> list[Kind]:
    """Samples that stay where they are, beside the axis that the node works along."""
    if at is None or at.axis == step.attribute("axis", default) % step.rank():
        return neither(step)
    return step.outputs(at.axis, at.outer)


def _along(default: int) -> Callable[[Step], list[Kind]]:
    """A node that works along one axis, this one unless another is named."""
    return lambda step: _beside(step, step.only(), default)


def _from_axis_on(default: int) -> Callable[[Step], list[Kind]]:
    """A node that computes along all axes from one on, this one unless another is named, and keeps the shape."""

    def rule(step: Step) -> list[Kind]:
        at = step.only()
        if at is None or at.axis >= step.attribute("axis", default) % step.rank():
            return neither(step)
        return step.outputs(at.axis, at.outer)

    return rule


def _skip_normalization(step: Step) -> list[Kind]:
    """ONNX Runtime's sum of two tensors and a bias, normalised along the last axis."""
    looks_there = any(at.axis == step.rank(i) - 1 for i, at in step.per_sample)
    return [None] * len(step.node.output) if looks_there else _elementwise(step)


def _cumulative(step: Step) -> list[Kind]:
    at, axis = step.only(), step.fixed(1)
    if at is None or not axis or at.axis == axis[0] % step.rank():
        return neither(step)
    return step.outputs(at.axis, at.outer)


def _gather(step: Step) -> list[Kind]:
    axis = step.attribute("axis", 0) % max(step.rank(), 1)
    if (at := step.only(1)) is not None:
        return step.outputs(axis + at.axis, at.outer)
    if (at := step.only(0)) is not None:
        moved = at.axis if at.axis < axis else at.axis - 1 + step.rank(1)
        return [None] if at.axis == axis else step.outputs(moved, at.outer)
    picked = step.fixed(1)
    if picked and isinstance(kind := step.kinds[0], Free) and kind.counts is not True and step.rank() == 1:
        return [Free(np.broadcast_to(kind.counts, step.shape())[np.array(picked)].reshape(step.shape(1)))]
    return neither(step)


def _gather_elements(step: Step) -> list[Kind]:
    if (at := step.only(1)) is not None and at.axis == step.attribute("axis", 0) % step.rank():  # of a constant
        return step.outputs(at.axis, at.outer)
    return _beside(step, step.common())


def _scatter_elements(step: Step) -> list[Kind]:
    """Elements of each sample, written into those of the same sample."""
    return _beside(step, step.common())


def _gather_nd(step: Step) -> list[Kind]:
    num_batch_dims = step.attribute("batch_dims", 0)
    if (at := step.only(1)) is not None and num_batch_dims == 0 and at.axis < step.rank(1) - 1:
        return step.outputs(at.axis, at.outer)
    if (at := step.only(0)) is not None and num_batch_dims == 0 and at.axis >= step.shape(1)[-1]:
        return step.outputs(step.rank(1) - 1 + at.axis - step.shape(1)[-1], at.outer)
    at = step.common()
    return step.outputs(at.axis, at.outer) if at and at.axis < num_batch_dims else neither(step)


def _matmul(step: Step) -> list[Kind]:
    shapes = step.observed.shapes(step.node.output[0])
    if step.sizes_of_samples or not step.rest_is_constant or shapes is None:
        return neither(step)
    is_vector = [step.rank(i) == 1 for i in (0, 1)]
    positions = set()
    for i, at in step.per_sample:
        from_end = step.rank(i) - 1 - _turned(step, i, at.axis)
        if at.axis < 0 or is_vector[i] or from_end == i:  # the axis that is summed over
            return [None]
        shift = is_vector[1 - i] and from_end > 0
        positions.add((len(shapes[0]) - 1 - from_end + int(shift), at.outer))
    return step.outputs(*positions.pop()) if len(positions) == 1 else [None]


def _turned(step: Step, position: int, axis: int) -> int:
    """Where an axis of a factor lies in the product. ONNX Runtime's FusedMatMul transposes its factors first."""
    rank, factor = step.rank(position), "AB"[position]
    if step.attribute(f"transBatch{factor}", 0) and axis < rank - 1:  # the first axis becomes the last but one
        axis = (axis - 1) % (rank - 1)
    is_swapped = step.attribute(f"trans{factor}", 0) and axis >= rank - 2
    return 2 * rank - 3 - axis if is_swapped else axis


def _gemm(step: Step) -> list[Kind]:
    if not step.rest_is_constant:
        return [None]
    positions = set()
    for i, at in step.per_sample:
        is_turned = bool(step.attribute("transA" if i == 0 else "transB", 0))
        rows_or_columns = (i == 0) == is_turned
        if at.axis < 0 or (i < 2 and at.axis != int(rows_or_columns)):
            return [None]
        if i == 2:
            positions.add((2 - step.rank(2) + at.axis, at.outer))
        else:
            positions.add((i, at.outer))
    return step.outputs(*positions.pop()) if len(positions) == 1 else [None]


def _einsum(step: Step) -> list[Kind]:
    equation = text_attribute(step.node, "equation")
    inputs, arrow, output = equation.partition("->")
    labels = inputs.split(",")
    if not arrow or "." in equation or not step.rest_is_constant or any(at.axis < 0 for _, at in step.per_sample):
        return [None]
    found = {(labels[i][at.axis], at.outer) for i, at in step.per_sample}
    label, outer = found.pop() if found else ("", 1)
    is_shared = not found and label in output and equation.count(label) == len(step.per_sample) + 1
    return step.outputs(output.index(label), outer) if is_shared else [None]


def _concat(step: Step) -> list[Kind]:
    if step.sizes_of_samples:
        return [_concatenated_sizes(step)]
    positions = {(at.axis, at.outer) for _, at in step.per_sample}
    axis = step.attribute("axis", 0) % step.rank()
    if len(positions) != 1 or len(step.per_sample) != len(step.kinds) or positions & {(axis, 1), (-1, 0)}:
        return [None]
    found, outer = positions.pop()
    return [None] if found == axis else step.outputs(found, outer)


def _concatenated_sizes(step: Step) -> Kind:
    masks = [kind.counts for kind in step.kinds if isinstance(kind, Free)]
    shapes = [step.observed.shapes(name) or () for name in step.node.input]
    if any(mask is True for mask in masks) or any(len(set(shape)) != 1 or len(shape[0]) != 1 for shape in shapes):
        return Free(True)
    return Free(np.concatenate([np.broadcast_to(mask, shape[0]) for mask, shape in zip(masks, shapes, strict=True)]))


def _slice(step: Step) -> list[Kind]:
    if step.sizes_of_samples:
        return [_sliced_sizes(step)]
    at, axes = step.only(), step.fixed(3)
    if at is None or axes is None or not step.node.input[1:] or not all_constant(step.kinds[1:]):
        return [None]
    axes = [axis % step.rank() for axis in axes or range(step.rank())]
    if at.axis in axes and not _takes_all(step, axes.index(at.axis)):
        return [None]
    return step.outputs(at.axis, at.outer)


def _takes_all(step: Step, position: int) -> bool:
    """Whether a Slice leaves an axis of any size unchanged."""
    begins, ends, steps = step.fixed(1), step.fixed(2), step.fixed(4)
    if not begins or not ends or steps is None or len(begins) <= position or len(ends) <= position:
        return False
    return begins[position] == 0 and ends[position] >= NO_END and (not steps or steps[position] == 1)


def _sliced_sizes(step: Step) -> Kind:
    """A part of a list of sizes."""
    shapes, kind = step.observed.shapes(step.node.input[0]), step.kinds[0]
    bounds = [step.fixed(i) for i in (1, 2, 4)]
    if shapes is None or len(shapes[0]) != 1 or len(set(shapes)) > 1 or not is_size(kind):
        return Free(True)
    begins, ends, strides = bounds
    if not begins or not ends or strides is None or (strides or [1])[0] != 1:
        return Free(True)
    return Free(np.broadcast_to(kind.counts, shapes[0])[begins[0] : ends[0]])  # type: ignore[union-attr]


def _expand(step: Step) -> list[Kind]:
    """Repeats along axes; if a size is the number of samples, that axis gets a block for each of them."""
    if isinstance(step.kinds[0], PerSample):
        if not is_size(step.kinds[1]):
            return [None]
        return _elementwise(Step(step.node, step.observed, [step.kinds[0], CONSTANT]))
    return _filled(step, step.kinds[1]) if is_constant(step.kinds[0]) else neither(step)


def _range(step: Step) -> list[Kind]:
    """From 0 to the number of samples: their places."""
    limits = [run.get(step.node.input[1]) for run in step.observed.values]
    ends_there = is_size(step.kinds[1]) and limits == list(step.observed.num_samples)
    is_counted = ends_there and step.fixed(0) == [0] and step.fixed(2) == [1]
    return [Places(exact=True)] if is_counted else neither(step)


def _filled(step: Step, sizes: Kind) -> list[Kind]:
    """The same block for each sample, where exactly one of the sizes depends on the number of samples."""
    if not isinstance(sizes, Free) or not isinstance(sizes.counts, np.ndarray) or np.sum(sizes.counts) != 1:
        return neither(step)
    shapes = step.observed.shapes(step.node.output[0])
    axis = int(np.argmax(sizes.counts)) + (len(shapes[0]) if shapes else 0) - len(sizes.counts)
    if _varies(step, axis):
        return neither(step)
    return step.outputs(axis)


def _varies(step: Step, axis: int) -> bool:
    """Whether what is repeated along an axis is more than one block."""
    shapes = step.observed.shapes(step.node.input[0])
    offset = len((step.observed.shapes(step.node.output[0]) or ((),))[0]) - (len(shapes[0]) if shapes else 0)
    return step.node.op_type == "Expand" and (shapes is None or (axis >= offset and shapes[0][axis - offset] != 1))


def _tile(step: Step) -> list[Kind]:
    if is_constant(step.kinds[0]):
        return _filled(step, step.kinds[1])
    at, repeats = step.only(), step.fixed(1)
    if at is None or not repeats or repeats[at.axis] != 1:
        return neither(step)
    return step.outputs(at.axis, at.outer)


def _pad(step: Step) -> list[Kind]:
    at, pads = step.only(), step.attribute("pads", None) or step.fixed(1)
    if at is None or not pads or len(step.node.input) > 3 or pads[at.axis] or pads[at.axis + step.rank()]:
        return neither(step)
    return step.outputs(at.axis, at.outer)


def _one_hot(step: Step) -> list[Kind]:
    at = step.only()
    if at is None:
        return neither(step)
    axis = step.attribute("axis", -1) % (step.rank() + 1)
    return step.outputs(at.axis + (axis <= at.axis), at.outer)


def _trilu(step: Step) -> list[Kind]:
    at = step.only()
    return step.outputs(at.axis, at.outer) if at and at.axis < step.rank() - 2 else neither(step)


def _batch_normalization(step: Step) -> list[Kind]:
    at = step.only()
    is_training = step.attribute("training_mode", 0) or len(list(filter(None, step.node.output))) > 1
    if at is None or is_training or at.axis == 1:
        return [None] * len(step.node.output)
    return step.outputs(at.axis, at.outer)


def _samples_in_front(step: Step) -> list[Kind]:
    """A node whose first axis is that of samples, which it keeps apart."""
    at = step.only()
    return step.outputs(0) if at and at.axis == 0 and at.is_whole else neither(step)


def _all_in_front(step: Step) -> list[Kind]:
    """A node whose operands have the axis of samples in front, or none."""
    positions = step.per_sample
    is_apart = positions and positions[0][0] == 0 and all(at.axis == 0 and at.is_whole for _, at in positions)
    return step.outputs(0) if is_apart and step.rest_is_constant else neither(step)


def _attention(step: Step) -> list[Kind]:
    """Queries, keys and values, and a mask whose axes are counted from the last one."""
    held = {position for position, _ in step.per_sample}
    is_mask_in_front = 3 not in held or step.rank(3) == 4
    return _all_in_front(step) if {0, 1, 2} <= held and is_mask_in_front else neither(step)


def _rotary_embedding(step: Step) -> list[Kind]:
    """Values, and the cosines and sines of each sample; with positions, these are one list for all samples."""
    has_positions = any(step.node.input[3:])
    is_list_of_samples = has_positions and any(position in (1, 2) for position, _ in step.per_sample)
    return neither(step) if is_list_of_samples else _all_in_front(step)


def _recurrent(step: Step) -> list[Kind]:
    """GRU, LSTM, RNN: the sequence, the lengths and the first states have their samples on different axes."""
    is_first = step.attribute("layout", 0) == 1
    wanted = {0: 0 if is_first else 1, 4: 0, 5: 0 if is_first else 1, 6: 0 if is_first else 1}
    positions = step.per_sample
    is_apart = all(at.is_whole and wanted.get(i) == at.axis for i, at in positions)
    if not is_apart or not step.rest_is_constant or not positions or positions[0][0] != 0:
        return [None] * len(step.node.output)
    axes = [0 if is_first else (1 if position else 2) for position in range(len(step.node.output))]
    return [
        step.observed.per_sample(name, axis) if name else CONSTANT
        for name, axis in zip(step.node.output, axes, strict=True)
    ]


def _reverse_sequence(step: Step) -> list[Kind]:
    """The first elements of each sample in turn, as many as its length says."""
    batch_axis, time_axis = step.attribute("batch_axis", 1), step.attribute("time_axis", 0)
    positions = dict(step.per_sample)
    is_apart = 0 in positions and positions[0].axis == batch_axis != time_axis
    if not is_apart or not all(at.is_whole for at in positions.values()) or len(positions) < len(step.kinds):
        return neither(step)
    return step.outputs(batch_axis)


def _dropout(step: Step) -> list[Kind]:
    """The rule outside training; a third operand may ask for training."""
    asks_for_training = len(step.kinds) > 2 and bool(step.node.input[2]) and step.fixed(2) not in ([0], [False])
    return neither(step) if asks_for_training else _elementwise(step)


def _normalized_axes(step: Step) -> list[Kind]:
    at = step.only()
    axes = [axis % step.rank() for axis in step.attribute("axes", [0, 2, 3])]
    return step.outputs(at.axis, at.outer) if at and at.axis not in axes else neither(step)


def _by_rows(step: Step) -> list[Kind]:
    """A node of ONNX-ML that computes each row of a matrix by itself; of a list it makes one row."""
    at = step.only()
    return step.outputs(0, at.outer) if at and at.axis == 0 and step.rank() > 1 else neither(step)


def _by_elements(step: Step) -> list[Kind]:
    """One vector for each element."""
    at = step.only()
    return step.outputs(at.axis, at.outer) if at else neither(step)


def _picked_features(step: Step) -> list[Kind]:
    """The features that a list of numbers names, which may be a class for each sample."""
    numbers = step.kinds[1]
    if step.only(1) is not None and isinstance(numbers, PerSample):
        return step.outputs(max(step.rank(), 2) - 1, numbers.before)
    at = step.only()
    return step.outputs(at.axis, at.outer) if at and at.axis < step.rank() - 1 else neither(step)


def _vectorized(step: Step) -> list[Kind]:
    """Matrices side by side."""
    positions = {(at.axis, at.outer) for _, at in step.per_sample}
    are_matrices = all(step.rank(i) > 1 for i in range(len(step.kinds)))
    if not are_matrices or len(step.per_sample) < len(step.kinds) or positions != {(0, 1)}:
        return neither(step)
    return step.outputs(0)


_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")

_SAMPLES_IN_FRONT = """
AveragePool Conv DepthToSpace GlobalAveragePool GlobalMaxPool GroupNormalization InstanceNormalization LRN MaxPool
SpaceToDepth
"""

_ROWS = """
Imputer LinearClassifier LinearRegressor Normalizer SVMClassifier SVMRegressor Scaler TreeEnsemble
TreeEnsembleClassifier TreeEnsembleRegressor
"""


def rule_of(node: NodeProto) -> Callable[[Step], list[Kind]] | None:
    """The rule for a node without bodies; None: nothing is known of it."""
    if not node.domain:
        return RULES.get(node.op_type, neither)
    return OTHER_RULES.get(node.domain, {}).get(node.op_type)


RULES: dict[str, Callable[[Step], list[Kind]]] = {
    **dict.fromkeys(UNARY | BROADCASTING, _elementwise),
    **dict.fromkeys((f"Reduce{name}" for name in _REDUCTIONS), _reduction),
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), _reshaped),
    # Before opset 13, they computed along all axes from one on; the stricter rule is valid for both.
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), _from_axis_on(1)),
    **dict.fromkeys(("ArgMax", "ArgMin"), _arg),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _quantized),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _recurrent),
    **dict.fromkeys(_SAMPLES_IN_FRONT.split(), _samples_in_front),
    "Attention": _attention,
    "BatchNormalization": _batch_normalization,
    "Concat": _concat,
    "ConstantOfShape": lambda step: _filled(step, step.kinds[0]),
    "CumSum": _cumulative,
    "Dropout": _dropout,
    "Einsum": _einsum,
    "Equal": _equal,
    "Expand": _expand,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "LayerNormalization": _from_axis_on(-1),
    "LpNormalization": _along(-1),
    "MatMul": _matmul,
    "MeanVarianceNormalization": _normalized_axes,
    "OneHot": _one_hot,
    "Pad": _pad,
    "RMSNormalization": _from_axis_on(-1),
    "Range": _range,
    "ReverseSequence": _reverse_sequence,
    "RotaryEmbedding": _rotary_embedding,
    "ScatterElements": _scatter_elements,
    "Shape": _shape,
    "Size": lambda _: [Free(True)],
    "Slice": _slice,
    "Split": _along(0),
    "Tile": _tile,
    "TopK": _along(-1),
    "Transpose": _transpose,
    "Trilu": _trilu,
}

OTHER_RULES: dict[str, dict[str, Callable[[Step], list[Kind]]]] = {
    "ai.onnx.ml": {
        **dict.fromkeys(("Binarizer", "CategoryMapper", "LabelEncoder"), _elementwise),
        **dict.fromkeys(_ROWS.split(), _by_rows),
        "ArrayFeatureExtractor": _picked_features,
        "FeatureVectorizer": _vectorized,
        "OneHotEncoder": _by_elements,
    },
    "com.microsoft": {
        **dict.fromkeys(("BiasGelu", "FastGelu", "Gelu", "MurmurHash3", "QuickGelu"), _elementwise),
        "FusedGemm": _gemm,
        "FusedMatMul": _matmul,
        "SkipLayerNormalization": _skip_normalization,
    },
}
"""The same for operators of other domains."""
