"""Whether a config.pbtxt describes a version: compared when it would be written, and when the version is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from inference_session.errors import ConfigurationError
from inference_session.model_spec import ModelSpec, TensorSpec
from triton_backend.repository.model_config import CONFIG_FILE, ModelConfig, TensorConfig
from triton_backend.repository.model_description import DATA_TYPES, SCALAR_DIMS, all_inputs, all_outputs


def check_config(config: Mapping[str, Any], spec: ModelSpec) -> None:
    """Refuse a version whose requests are other than what a config.pbtxt, given as Triton's JSON, lets clients send.

    Its inputs have to be the model's and its outputs, of which some may be absent, among the model's. Types have to be
    the same, and where requests are not packed, sizes too, unless one is open in either.

    Raises:
        ConfigurationError: names the first difference, or the model is decoupled or gets inputs from Triton.
    """
    if config.get("model_transaction_policy", {}).get("decoupled"):
        raise ConfigurationError(
            f"{CONFIG_FILE} has `decoupled: true`, but hotrow answers each request with one response; remove it"
        )
    packed = not spec.has_own_inputs
    if (added := _inputs_of_sequences(config)) and not packed:
        raise ConfigurationError(
            f"{CONFIG_FILE} lets Triton add the input {added[0]!r} to the requests of a sequence, but versions take "
            "inputs from clients only, and would refuse all of them; remove it from sequence_batching"
        )
    outer = (-1,) if config.get("max_batch_size") else ()
    for kind, tensors in (("input", all_inputs(spec)), ("output", () if packed else all_outputs(spec))):
        here = {tensor.name: _tensor_of_spec(tensor) for tensor in tensors}
        there = {tensor["name"]: _tensor_of_json(tensor, outer) for tensor in config.get(kind, ()) if here}
        needed = {tensor.name for tensor in spec.inputs} if kind == "input" else set()
        for name in {**there, **dict.fromkeys(needed)}:
            if not _suits(there.get(name), here.get(name), sizes=not packed):
                raise ConfigurationError(
                    f"{CONFIG_FILE} does not describe this version: {kind} is {there.get(name, 'absent')}, "
                    f"but {here.get(name, 'absent')} in the version"
                )


def may_be_empty(config: Mapping[str, Any], spec: ModelSpec) -> bool:
    """Whether Triton, which counts samples by a config.pbtxt, given as its JSON, takes requests that have none.

    It refuses these only for an input of fixed size, which lacks its bytes. It does not withstand them: see `describe`.
    """
    counted = config.get("max_batch_size") and spec.has_own_inputs
    return bool(counted) and not any(map(_has_fixed_size, config.get("input", ())))


def _has_fixed_size(tensor: Mapping[str, Any]) -> bool:
    dims = _dims(tensor)
    return bool(dims) and -1 not in dims and tensor["data_type"] != DATA_TYPES["object"]


def _inputs_of_sequences(config: Mapping[str, Any]) -> list[str]:
    """Inputs that Triton adds to requests itself."""
    batching = config.get("sequence_batching", {})
    controls = [control["name"] for control in batching.get("control_input", ())]
    return [*controls, *(state["input_name"] for state in batching.get("state", ()))]


def _tensor_of_spec(tensor: TensorSpec) -> TensorConfig:
    return TensorConfig(tensor.name, DATA_TYPES[tensor.dtype], tensor.shape or SCALAR_DIMS)


def _tensor_of_json(tensor: Mapping[str, Any], outer: tuple[int, ...]) -> TensorConfig:
    """With all sizes that the model gets, including the number of samples."""
    return TensorConfig(tensor["name"], tensor["data_type"], (*outer, *_dims(tensor)) or SCALAR_DIMS)


def _dims(tensor: Mapping[str, Any]) -> tuple[int, ...]:
    """Without the number of samples, after a reshape."""
    dims = tensor["reshape"].get("shape", ()) if "reshape" in tensor else tensor.get("dims", ())
    return tuple(map(int, dims))


def _suits(there: TensorConfig | None, here: TensorConfig | None, *, sizes: bool) -> bool:
    if there is None or here is None or there.data_type != here.data_type:
        return False
    same = len(there.dims) == len(here.dims) and all(
        one == other or -1 in {one, other} for one, other in zip(there.dims, here.dims, strict=True)
    )
    return same or not sizes


def check_fits(path: Path, wanted: ModelConfig, *, packed: bool) -> None:
    """Refuse an existing config.pbtxt that does not describe what is wanted; `packed`: HugeCTR's or HPS's requests."""
    present = ModelConfig.read(path)
    there, here = present, wanted
    if not packed and bool(present.max_batch_size) != bool(wanted.max_batch_size):
        there, here = _with_samples(present), _with_samples(wanted)
    differences = (
        *_differences("input", there.inputs, here.inputs),
        *_differences("output", there.outputs, here.outputs),
    )
    if present.backend != wanted.backend:
        hint = " (`hotrow import onnx --standalone` imports for 'python')" if present.backend == "python" else ""
        found = f"the backend is {present.backend!r}" if present.backend else "it names no backend"
        differences = (f"{found}, but the model needs {wanted.backend!r}{hint}", *differences)
    if differences:
        raise ConfigurationError(
            f"{path} does not describe this model: {differences[0]}. All versions of a model share one "
            f"{CONFIG_FILE}: import under another name or into another repository, or remove the file to have it "
            "written again"
        )


def _with_samples(config: ModelConfig) -> ModelConfig:
    """The same with full dims: if Triton counts samples for only one of two models, their tensors do not differ."""
    if not config.max_batch_size:
        return config
    inputs, outputs = (
        tuple(replace(tensor, dims=(-1, *tensor.dims)) for tensor in tensors)
        for tensors in (config.inputs, config.outputs)
    )
    return replace(config, inputs=inputs, outputs=outputs)


def _differences(kind: str, present: tuple[TensorConfig, ...], wanted: tuple[TensorConfig, ...]) -> list[str]:
    there = {tensor.name: tensor for tensor in present}
    here = {tensor.name: tensor for tensor in wanted}
    return [
        f"{kind} is {there.get(name, 'absent')}, but {here.get(name, 'absent')} in the model"
        for name in {**there, **here}
        if not _serves(there.get(name), here.get(name), narrowed=kind == "output")
    ]


def _serves(there: TensorConfig | None, here: TensorConfig | None, *, narrowed: bool) -> bool:
    """Whether a description holds for a tensor: sizes may be open in it, and `narrowed`, where they are in the model.

    Some exporters leave sizes of outputs open that others know. A narrower input size would reject valid requests.
    """
    if there is None or here is None or not _suits(there, here, sizes=True):
        return False
    return narrowed or all(size in (-1, own) for size, own in zip(there.dims, here.dims, strict=True))
