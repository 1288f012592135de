"""Converts the layers that a script adds to its model to HugeCTR's graph JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from hotrow.training.hugectr.arguments.enums import (
    Activation_t,
    Embedding_t,
    FcPosition_t,
    Initializer_t,
    Layer_t,
    Optimizer_t,
    Regularizer_t,
    Update_t,
)
from hotrow.training.hugectr.arguments.parameters import (
    DataReaderSparseParam,
    DenseLayer,
    Input,
    OptParamsPy,
    SparseEmbedding,
)
from inference_session.errors import ConfigurationError

Document = dict[str, Any]


class _Field(NamedTuple):
    """An argument of DenseLayer, and where the graph JSON has it."""

    argument: str
    path: tuple[str, ...]
    kind: type[Enum] | None = None
    aliases: tuple[str, ...] = ()
    """Other names of the last part of the path."""


def _plain_fields(*names: str, within: tuple[str, ...] = ()) -> tuple[_Field, ...]:
    """Arguments that the graph JSON has under the same names."""
    return tuple(_Field(name, (*within, name)) for name in names)


def _initializers(*names: str, within: tuple[str, ...] = ()) -> tuple[_Field, ...]:
    return tuple(_Field(f"{name}_init_type", (*within, f"{name}_init"), Initializer_t) for name in names)


_BN, _FC, _LN, _MC, _MLP = ("bn_param",), ("fc_param",), ("ln_param",), ("mc_param",), ("mlp_param",)
_FULLY_CONNECTED = (*_plain_fields("num_output", within=_FC), *_initializers("weight", "bias", within=_FC))
_AXIS = _plain_fields("axis")

_FIELDS: Mapping[str, tuple[_Field, ...]] = {
    "BatchNorm": (*_plain_fields("factor", "eps", within=_BN), *_initializers("gamma", "beta", within=_BN)),
    "Dropout": (_Field("dropout_rate", ("rate",)),),
    "ELU": (_Field("elu_alpha", ("elu_param", "alpha")),),
    "FmOrder2": _plain_fields("out_dim"),
    "FusedInnerProduct": (
        _Field("pos_type", ("position",), FcPosition_t),
        _Field("act_type", ("activation",), Activation_t),
        *_FULLY_CONNECTED,
    ),
    "InnerProduct": _FULLY_CONNECTED,
    "LayerNorm": (*_plain_fields("eps", within=_LN), *_initializers("gamma", "beta", within=_LN)),
    "MLP": (
        *_plain_fields("num_outputs", within=_MLP),
        _Field("act_type", (*_MLP, "activation"), Activation_t),
        _Field("activations", (*_MLP, "activations"), Activation_t),
        *_plain_fields("use_bias", "biases", within=_MLP),
        *_initializers("weight", "bias", within=_MLP),
    ),
    "MultiCross": (
        *_plain_fields("num_layers", "projection_dim", within=_MC),
        *_initializers("weight", "bias", within=_MC),
    ),
    "MultiHeadAttention": _plain_fields("num_attention_heads", "transpose_b"),
    "PReLU_Dice": (
        _Field("elu_alpha", ("prelu_dice_param", "alpha"), aliases=("elu_alpha",)),
        _Field("eps", ("prelu_dice_param", "eps"), aliases=("epsilon",)),
    ),
    "ReduceMean": _AXIS,
    "ReduceSum": _AXIS,
    "Scale": _plain_fields("axis", "factor", within=("scale_param",)),
    "SequenceMask": _plain_fields("max_sequence_len", "max_sequence_len_from", "max_sequence_len_to"),
    "Slice": _plain_fields("ranges"),
    "WeightMultiply": (*_plain_fields("weight_dims"), *_initializers("weight")),
}

_FORMER_NAMES = {"Multiply": "WeightMultiply"}
"""Types of layers in configurations of releases before 3.0, and their later names."""
_REGULARIZER = (_Field("regularizer_type", ("regularizer",), Regularizer_t), _Field("lambda_", ("lambda",)))
_HPARAMS: Mapping[Optimizer_t, tuple[str, Sequence[str]]] = {
    Optimizer_t.Adam: ("adam_hparam", ("beta1", "beta2", "epsilon")),
    Optimizer_t.AdaGrad: ("adagrad_hparam", ("initial_accu_value", "epsilon")),
    Optimizer_t.MomentumSGD: ("momentum_sgd_hparam", ("momentum_factor",)),
    Optimizer_t.Nesterov: ("nesterov_hparam", ("momentum_factor",)),
    Optimizer_t.SGD: ("sgd_hparam", ("atomic_update",)),
    Optimizer_t.Ftrl: ("ftrl_hparam", ("beta", "lambda1", "lambda2")),
}
"""By optimizer, the section of its parameters, and their names there and in OptParamsPy."""


def data_document(layer: Input) -> Document:
    """The data layer."""
    single = len(layer.label_names) == 1
    return {
        "type": "Data",
        "label": {
            "top": layer.label_names[0] if single else layer.label_names,
            "label_dim": layer.label_dims[0] if single else layer.label_dims,
        },
        "dense": {"top": layer.dense_name, "dense_dim": layer.dense_dim},
        "sparse": [_sparse_document(item) for item in layer.data_reader_sparse_param_array],
    }


def _sparse_document(item: DataReaderSparseParam) -> Document:
    """A sparse input as the model reads it; where each key is a slot, it says so, for who trains again."""
    counts = [1] * item.nnz_per_slot[0] if item.keys_are_slots else item.nnz_per_slot
    return {
        "top": item.top_name,
        "type": "DistributedSlot",
        "nnz_per_slot": counts,
        "is_fixed_length": item.is_fixed_length,
        "slot_num": len(counts),
        **({"keys_are_slots": True} if item.keys_are_slots else {}),
    }


def embedding_document(layer: SparseEmbedding, params: OptParamsPy, num_gpus: int) -> Document:
    """An embedding layer, trained by the optimizer given."""
    rows = (layer.workspace_size_per_gpu_in_mb << 20) // (4 * layer.embedding_vec_size) * num_gpus
    hparam: Document = {
        "workspace_size_per_gpu_in_mb": layer.workspace_size_per_gpu_in_mb,
        "max_vocabulary_size_global": rows,
        "embedding_vec_size": layer.embedding_vec_size,
        "combiner": layer.combiner,
    }
    if layer.slot_size_array:
        hparam["slot_size_array"] = list(layer.slot_size_array)
    if layer.table:
        hparam["table"] = layer.table
    name, fields = _HPARAMS[params.optimizer_type]
    return {
        "type": layer.embedding_type.value,
        "bottom": layer.bottom_name,
        "top": layer.sparse_embedding_name,
        "sparse_embedding_hparam": hparam,
        "optimizer": {
            "type": params.optimizer_type.value,
            "update_type": params.update_type.value,
            name: {field: getattr(params, field) for field in fields},
        },
    }


def dense_document(layer: DenseLayer, *, joins_slots: bool) -> Document:
    """A dense layer or a loss.

    With `joins_slots`, Concat joins along dimension 1 unless told otherwise, as in releases 4.0 and later. In 3.4 it
    joins along the last one. The argument `axis` does not say which is meant: its default is 1.
    """
    document: Document = {
        "type": layer.layer_type.value,
        "bottom": layer.bottom_names[0] if len(layer.bottom_names) == 1 else layer.bottom_names,
        "top": layer.top_names[0] if len(layer.top_names) == 1 else layer.top_names,
    }
    for field in _AXIS if joins_slots and layer.layer_type is Layer_t.Concat else _fields_of(layer):
        value = getattr(layer, field.argument)
        if value is Initializer_t.Default or value is None:
            continue
        owner = document
        for part in field.path[:-1]:
            owner = owner.setdefault(part, {})
        owner[field.path[-1]] = _plain(value)
    return document


def _fields_of(layer: DenseLayer) -> Sequence[_Field]:
    kind: Any = layer
    name = layer.layer_type.value
    if name == "Reshape":
        if kind.selected:
            return (_Field("selected_slots", ("selected",)),)
        return _plain_fields("shape") if len(kind.shape) else _plain_fields("leading_dim", "time_step")
    if name == "Softmax":
        return _plain_fields("factor") if len(kind.bottom_names) == 2 else ()
    if name == "Concat":
        return _AXIS if kind.axis != 1 else ()
    fields = _FIELDS.get(name, ())
    if name.endswith("Loss"):
        fields = _REGULARIZER if kind.use_regularizer else ()
        if kind.target_weight_vec and name == "MultiCrossEntropyLoss":
            fields = (*fields, _Field("target_weight_vec", ("target_weight",)))
    return fields


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def read_data(document: Mapping[str, Any]) -> Input:
    """The data layer of a graph JSON, or of a configuration of releases before 3.1.

    Raises:
        ConfigurationError: a field is missing.
    """
    label, dense = _part(document, "label"), _part(document, "dense")
    return Input(
        label_dims=_get(label, "label_dim"),
        label_names=_get(label, "top"),
        dense_dim=_get(dense, "dense_dim"),
        dense_name=_get(dense, "top"),
        data_reader_sparse_param_array=[_read_sparse(item) for item in document.get("sparse", [])],
    )


def _read_sparse(item: Any) -> DataReaderSparseParam:
    if not isinstance(item, Mapping):
        raise ConfigurationError(f"field 'sparse' holds {item!r}; an object for each sparse input is required")
    nnz = item.get("nnz_per_slot")
    if nnz is None:
        nnz = item.get("max_nnz") or _get(item, "max_feature_num_per_sample")
    slots, is_fixed_length = _get(item, "slot_num"), bool(item.get("is_fixed_length", False))
    if item.get("keys_are_slots") is True:
        read = DataReaderSparseParam(_get(item, "top"), slots, is_fixed_length, 1)
        read.keys_are_slots = True
        return read
    return DataReaderSparseParam(_get(item, "top"), nnz, is_fixed_length, slots)


def read_embedding(document: Mapping[str, Any]) -> SparseEmbedding:
    """An embedding layer, with its own optimizer if it has one; ConfigurationError as `read_data`."""
    hparam = _part(document, "sparse_embedding_hparam")
    optimizer = document.get("optimizer")
    combiner = _get(hparam, "combiner")
    return SparseEmbedding(
        _member(Embedding_t, _get(document, "type")),
        hparam.get("workspace_size_per_gpu_in_mb", 0),
        _get(hparam, "embedding_vec_size"),
        {0: "sum", 1: "mean"}.get(combiner, combiner),
        _get(document, "top"),
        _get(document, "bottom"),
        hparam.get("slot_size_array", ()),
        None if optimizer is None else read_optimizer(optimizer),
        table=hparam.get("table", ""),
    )


def read_optimizer(document: Any) -> OptParamsPy:
    """An optimizer; ConfigurationError as `read_data`."""
    if not isinstance(document, Mapping):
        raise ConfigurationError(f"field 'optimizer' is {document!r}; an object is required")
    kind = _member(Optimizer_t, _get(document, "type"))
    name, fields = _HPARAMS[kind]
    given = _part(document, name) if name in document else {}
    arguments = {field: given[field] for field in fields if field in given}
    update = _member(Update_t, document.get("update_type", "Local"))
    return OptParamsPy(kind, update, **arguments)


def read_dense(document: Mapping[str, Any]) -> DenseLayer:
    """A dense layer or a loss.

    Raises:
        ConfigurationError: a field is missing.
        UnsupportedModelError: the layer cannot be served.
    """
    name = _get(document, "type")
    kind = _member(Layer_t, _FORMER_NAMES.get(name, name))
    layer: Any = DenseLayer(kind, _get(document, "bottom"), _get(document, "top"))
    layer.selected, layer.shape = "selected" in document, document.get("shape", ())
    layer.use_regularizer = "regularizer" in document
    layer.target_weight_vec = document.get("target_weight", ())
    layer.axis = document.get("axis", 1)
    for field in _fields_of(layer):
        owner: Any = document
        for part in field.path[:-1]:
            owner = owner.get(part, {})
        for name in (field.path[-1], *field.aliases):
            if name in owner:
                value = owner[name]
                setattr(layer, field.argument, _given(field.kind, value))
    return layer


def _given(kind: type[Enum] | None, value: Any) -> Any:
    """An argument of DenseLayer, or a list with one for each layer of an MLP."""
    if kind is None:
        return value
    return [_member(kind, each) for each in value] if isinstance(value, list) else _member(kind, value)


def _part(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = _get(document, name)
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"layer {document.get('type')!r}: field {name!r}: an object is required")
    return value


def _get(document: Mapping[str, Any], name: str) -> Any:
    if name not in document:
        kind = document.get("type") or document.get("top") or sorted(document)
        raise ConfigurationError(f"layer {kind!r}: field {name!r} is missing")
    return document[name]


def _member(kind: type[Any], value: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(repr(item.value) for item in kind)
        raise ConfigurationError(f"{value!r} is no {kind.__name__}; allowed: {allowed}") from None
