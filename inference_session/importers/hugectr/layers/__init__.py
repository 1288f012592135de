"""The dense layers of HugeCTR that serving needs, each as ONNX nodes; `emitter(layer)` finds the one to use."""

from __future__ import annotations

from inference_session.importers.hugectr.graph import Layer
from inference_session.importers.hugectr.layers import attention, crossing, elementwise, reshaping, trained
from inference_session.importers.hugectr.layers.base import Emitter, LayerBuilder, Tensor, check_size

__all__ = ["Emitter", "LayerBuilder", "Tensor", "check_size", "emitter", "reason_against", "supported_layers"]

_EMITTERS: dict[str, Emitter] = {
    "Add": elementwise.chain("Add"),
    "BatchNorm": trained.batch_norm,
    "Cast": elementwise.unchanged,
    "Concat": reshaping.concat,
    "DotProduct": elementwise.chain("Mul"),
    "Dropout": elementwise.dropout,
    "ELU": elementwise.elu,
    "ElementwiseMultiply": elementwise.chain("Mul"),
    "FmOrder2": crossing.fm_order2,
    "FusedInnerProduct": trained.fused_inner_product,
    "FusedReshapeConcat": reshaping.fused_reshape_concat,
    "FusedReshapeConcatGeneral": reshaping.fused_reshape_concat_general,
    "InnerProduct": trained.inner_product,
    "Interaction": crossing.interaction,
    "LayerNorm": trained.layer_norm,
    "MLP": trained.mlp,
    "MatrixMultiply": crossing.matrix_multiply,
    "MultiCross": trained.multi_cross,
    "MultiHeadAttention": attention.multi_head_attention,
    "PReLU_Dice": elementwise.prelu_dice,
    "ReLU": elementwise.activation("Relu"),
    "ReduceMean": crossing.reduction("ReduceMean"),
    "ReduceSum": crossing.reduction("ReduceSum"),
    "Reshape": reshaping.reshape,
    "Scale": reshaping.scale,
    "SequenceMask": attention.sequence_mask,
    "Sigmoid": elementwise.activation("Sigmoid"),
    "Slice": reshaping.slices,
    "Softmax": attention.softmax,
    "Sub": elementwise.subtract,
    "WeightMultiply": trained.weight_multiply,
}

_REASONS = {
    "GRU": (
        "it treats the rows of a whole batch as time steps, which mixes samples, and its weights are packed by cuDNN"
    ),
    "Gather": "it selects rows of the whole batch by number, so an answer would depend on other samples",
}


def supported_layers() -> tuple[str, ...]:
    """The types of dense layers that can be served, in addition to the losses."""
    return tuple(_EMITTERS)


def reason_against(kind: str) -> str:
    """Why a type of dense layer cannot be served; empty where it can."""
    return "" if kind in _EMITTERS else _REASONS.get(kind, f"supported: {', '.join(_EMITTERS)}")


def emitter(layer: Layer) -> Emitter:
    """The emitter of a layer; UnsupportedModelError names the layer that has none."""
    if reason := reason_against(layer.type):
        layer.refuse(f"layers of type {layer.type!r} are not supported: {reason}")
    return _EMITTERS[layer.type]
