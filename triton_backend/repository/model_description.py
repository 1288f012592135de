"""How an imported model is served: its description for Triton, which follows from its spec."""

from __future__ import annotations

from inference_session.errors import UnsupportedModelError
from inference_session.model_spec import CANDIDATES, PREDICTIONS, ModelSpec, TensorSpec
from triton_backend.repository.model_config import ModelConfig, TensorConfig

DATA_TYPES = {
    "bool": "TYPE_BOOL", "uint8": "TYPE_UINT8", "uint16": "TYPE_UINT16", "uint32": "TYPE_UINT32",
    "uint64": "TYPE_UINT64", "int8": "TYPE_INT8", "int16": "TYPE_INT16", "int32": "TYPE_INT32", "int64": "TYPE_INT64",
    "float16": "TYPE_FP16", "float32": "TYPE_FP32", "float64": "TYPE_FP64", "object": "TYPE_STRING",
}  # fmt: skip
_MAX_SAMPLES = 1024
SCALAR_DIMS = (1,)
"""The dims of a scalar: Triton does not have scalars."""


def most_samples(spec: ModelSpec) -> int:
    """Default limit of samples in a request and a batch: requests that rank candidates are larger."""
    return 16 * _MAX_SAMPLES if spec.context else _MAX_SAMPLES


def describe(spec: ModelSpec, name: str, *, max_batch_size: int = _MAX_SAMPLES, backend: str = "hotrow") -> ModelConfig:
    """How a model is to be served: its own tensors, and the predictions.

    Some models get `max_batch_size` 0 and full dims, and are joined by us: those that are not batched; those with
    inputs of the context, whose first dimension is not that of the others; those with a tensor that has no dimension
    but samples (Triton's `reshape` to rank 0, its other way to serve those, lets an empty request kill the server); and
    those whose inputs all have an open size in addition to the number of samples (Triton never answers a request of 0
    samples, unless it refuses it for an input of fixed size that lacks its bytes).

    Raises:
        UnsupportedModelError: Triton does not support a tensor's type or rank.
    """
    outputs = all_outputs(spec)
    if not spec.has_own_inputs:
        return _describe_packed(spec, name, max_batch_size=max_batch_size, backend=backend)
    by_samples = (
        spec.batched
        and not spec.context
        and all(len(tensor.shape) > 1 for tensor in (*spec.inputs, *outputs))
        and any(-1 not in tensor.shape[1:] and tensor.dtype != "object" for tensor in spec.inputs)
    )
    return ModelConfig(
        name=name,
        backend=backend,
        max_batch_size=max_batch_size if by_samples else 0,
        inputs=tuple(
            _described(tensor, by_samples, optional=bool(spec.context) and tensor.name == CANDIDATES)
            for tensor in all_inputs(spec)
        ),
        outputs=tuple(_described(tensor, by_samples) for tensor in outputs),
        default_model_filename="",
    )


def all_inputs(spec: ModelSpec) -> list[TensorSpec]:
    """What requests may give: the model's inputs, and which context each sample belongs to."""
    return [*spec.inputs, *([TensorSpec(CANDIDATES, "int32", (-1,))] if spec.context else [])]


def all_outputs(spec: ModelSpec) -> list[TensorSpec]:
    """What requests may ask for: the model's outputs, and the predictions of all tasks."""
    if not spec.label_outputs or PREDICTIONS in [tensor.name for tensor in spec.outputs]:
        return list(spec.outputs)
    return [*spec.outputs, TensorSpec(PREDICTIONS, "float32", (-1, len(spec.labels)))]


def _describe_packed(spec: ModelSpec, name: str, *, max_batch_size: int, backend: str) -> ModelConfig:
    """HugeCTR's and HPS's requests: all samples of one are packed in tensors [1, n], which Triton joins unchanged."""
    return ModelConfig(
        name=name,
        backend=backend,
        max_batch_size=max_batch_size,
        inputs=tuple(TensorConfig(tensor.name, DATA_TYPES[tensor.dtype], (-1,)) for tensor in spec.inputs),
        outputs=(TensorConfig(PREDICTIONS, "TYPE_FP32", (-1,)),),
        default_model_filename="",
    )


def _described(tensor: TensorSpec, by_samples: bool, *, optional: bool = False) -> TensorConfig:
    dims = tensor.shape[1:] if by_samples else tensor.shape or SCALAR_DIMS
    if tensor.dtype not in DATA_TYPES:
        raise UnsupportedModelError(
            f"tensor {tensor.name!r} has type {tensor.dtype}; Triton serves: {', '.join(DATA_TYPES)}"
        )
    if 0 in dims:
        raise UnsupportedModelError(
            f"tensor {tensor.name!r} has shape {list(tensor.shape)}; Triton does not allow empty dimensions"
        )
    return TensorConfig(tensor.name, DATA_TYPES[tensor.dtype], dims, optional=optional)
