"""How the arguments of a model's forward arrive in served requests.

A model in training takes whatever Python object holds a batch; a served one takes named arrays. `ServedInputs` takes
the example apart into these arrays, and puts them together again, for the trace of the network.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hotrow.training.checks import check, is_whole, whole
from inference_session.errors import ConfigurationError, InvalidRequestError
from inference_session.model_spec import NamedArrays

Rebuild: TypeAlias = "Callable[[Mapping[str, Any]], Any]"
"""Makes an argument from the served inputs, by name: a Tensor, or a jagged tensor."""


@dataclass(frozen=True)
class Padded:
    """Lists of ids arrive as a matrix [batch, N or less]; each list is padded at its end with `pad`."""

    max_len: int
    pad: int = -1


@dataclass(frozen=True)
class Lengths:
    """Lists of ids arrive concatenated [ids], together with `<feature>_lengths` [batch]."""


Form: TypeAlias = "Padded | Lengths"


def padded(max_len: int, pad: int = -1) -> Padded:
    """Serve lists of ids as a matrix int64 [batch, max_len or less]; each list is padded at its end with `pad`.

    Weights of ids arrive as `<feature>_weights`, float32 of the same shape.

    Raises:
        ConfigurationError: max_len is not a whole number above 0, or pad is not a whole number.
    """
    check(is_whole(pad), "padded: pad", pad, "whole numbers")
    return Padded(whole("padded: max_len", max_len), int(pad))


def lengths() -> Lengths:
    """Serve lists of ids as values int64 [ids], together with `<feature>_lengths`, int64 [batch]."""
    return Lengths()


def width_of(feature: str) -> str:
    """The input that holds the lengths of a feature's lists."""
    return f"{feature}_lengths"


def weights_of(feature: str) -> str:
    """The input that holds the weights of a feature's ids."""
    return f"{feature}_weights"


@dataclass(frozen=True)
class DenseInput:
    """An input that is a tensor in training, too."""

    name: str
    tensor: Tensor

    def arrays(self) -> NamedArrays:
        """The input of the example as a client would send it."""
        return {self.name: self.tensor.detach().cpu().numpy()}


@dataclass(frozen=True)
class JaggedInput:
    """A feature: a list of ids for each sample."""

    name: str
    form: Form
    values: Tensor
    lengths: Tensor
    weights: Tensor | None

    def arrays(self) -> NamedArrays:
        """As of `DenseInput`; by several arrays."""
        values = self.values.detach().cpu().numpy().astype(np.int64)
        counts = self.lengths.detach().cpu().numpy().astype(np.int64)
        weights: dict[str, NDArray[Any]] = {}
        if self.weights is not None:
            weights[weights_of(self.name)] = self.weights.detach().cpu().numpy().astype(np.float32)
        if isinstance(self.form, Lengths):
            return {self.name: values, width_of(self.name): counts, **weights}
        padded_weights = {name: padded_matrix(array, counts, 0) for name, array in weights.items()}
        return {self.name: padded_matrix(values, counts, self.form.pad), **padded_weights}


@dataclass
class _FoundInputs:
    """The findings from the example so far."""

    forms: Form | Mapping[str, Form] | None
    inputs: dict[str, DenseInput | JaggedInput] = field(default_factory=dict)

    def add_lists(self, name: str, lists: Any) -> None:
        """Add one of TorchRec's jagged tensors."""
        form = _form(name, self.forms)
        self.add(JaggedInput(name, form, lists.values(), lists.lengths(), lists.weights_or_none()))

    def add(self, item: DenseInput | JaggedInput) -> None:
        if item.name in self.inputs:
            raise ConfigurationError(
                f"the example holds two inputs that would be served as {item.name!r}; give them different names"
            )
        self.inputs[item.name] = item


class ServedInputs:
    """The arguments of `forward`, and the arrays that they become when the model is served."""

    def __init__(self, model: nn.Module, example: Any, forms: Form | Mapping[str, Form] | None) -> None:
        """Take the example apart.

        Args:
            model: whose `forward` takes the example.
            example: its argument, or a tuple of several; a dict where its keys are names of parameters.
            forms: how jagged features arrive, all of them or each by name.

        Raises:
            ConfigurationError: the example does not fit `forward` or the forms.
        """
        found = _FoundInputs(forms)
        self.original, self._rebuild = _arguments(model, example, found)
        """The positional and the named arguments as they were given."""
        self.inputs = found.inputs
        jagged = [item for item in found.inputs.values() if isinstance(item, JaggedInput)]
        _check_names([item.name for item in jagged], forms)
        self.num_samples = _num_samples(found.inputs)
        for item in jagged:
            _check_jagged(item, self.num_samples)
        self._check_array_names()

    def arguments(self, served: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and the named arguments of `forward`, made from the served inputs by name."""
        return self._rebuild(served)

    def arrays(self) -> NamedArrays:
        """The example as a client would send it."""
        return {name: array for item in self.inputs.values() for name, array in item.arrays().items()}

    def is_given(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of the example's own."""
        return any(isinstance(item, DenseInput) and _is_same(item.tensor, tensor) for item in self.inputs.values())

    def _check_array_names(self) -> None:
        names: set[str] = set()
        for item in self.inputs.values():
            for name in item.arrays():
                if name in names:
                    raise ConfigurationError(
                        f"two served inputs would be called {name!r}: one of feature {item.name!r}, one of another "
                        "input; rename one"
                    )
                names.add(name)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are one, or one a detached view of the other."""
    return one.shape == other.shape and one.dtype == other.dtype and one.data_ptr() == other.data_ptr()


# The arguments of forward


def _arguments(model: nn.Module, example: Any, found: _FoundInputs) -> tuple[tuple[Any, dict[str, Any]], Rebuild]:
    parameters = inspect.signature(model.forward).parameters
    names = [
        name for name, item in parameters.items() if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)
    ]
    if _is_named(example, parameters, names):
        parts = {name: _take_apart(value, name, found) for name, value in example.items()}
        return ((), dict(example)), lambda served: ((), {name: part(served) for name, part in parts.items()})
    values = example if isinstance(example, tuple) and not hasattr(example, "_fields") else (example,)
    try:
        inspect.signature(model.forward).bind(*values)
    except TypeError as error:
        raise ConfigurationError(
            f"the example, of {len(values)} arguments, does not match "
            f"forward{inspect.signature(model.forward)}: {error}"
        ) from error
    surplus = [f"input_{number}" for number in range(len(names), len(values))]
    together = [_take_apart(value, name, found) for value, name in zip(values, [*names, *surplus], strict=False)]
    return (values, {}), lambda served: (tuple(part(served) for part in together), {})


def _is_named(example: Any, parameters: Mapping[str, inspect.Parameter], positional: list[str]) -> bool:
    """Whether the example is a dict of named arguments, rather than one argument that is a dict."""
    if not isinstance(example, Mapping) or not example or not set(example) <= set(parameters):
        return False
    required = [name for name in positional if parameters[name].default is inspect.Parameter.empty]
    return set(required) <= set(example)


def _take_apart(value: Any, name: str, found: _FoundInputs) -> Rebuild:
    """Note the tensors in a value; returns a function that rebuilds the value from served tensors."""
    if isinstance(value, Tensor):
        found.add(DenseInput(name, value))
        return lambda served: served[name]
    if (jagged := sys.modules.get("torchrec.sparse.jagged_tensor")) is not None:
        if isinstance(value, jagged.KeyedJaggedTensor):
            return _take_features(value, found)
        if isinstance(value, jagged.JaggedTensor):
            found.add_lists(name, value)
            return lambda served: served[name]
    parts = {key: _take_apart(part, part_name, found) for key, part_name, part in _parts(value, name)}
    if not parts:
        return lambda served: value
    return lambda served: _put_together(value, {key: part(served) for key, part in parts.items()})


def _take_features(features: Any, found: _FoundInputs) -> Rebuild:
    from hotrow.training.onnx_export.served_features import ServedFeatures

    if features.variable_stride_per_key():
        raise ConfigurationError(
            "the example's KeyedJaggedTensor has a different batch size for each key; use the same for all"
        )
    names = list(features.keys())
    for name in names:
        found.add_lists(name, features[name])
    return lambda served: ServedFeatures({name: served[name] for name in names})


def _parts(value: Any, name: str) -> Iterator[tuple[Any, str, Any]]:
    """The parts of a container: for each its key, the name that it is served under, and the part."""
    if isinstance(value, Mapping):
        yield from ((key, str(key), part) for key, part in value.items())
    elif hasattr(value, "_fields"):
        yield from ((key, key, getattr(value, key)) for key in value._fields)
    elif isinstance(value, (list, tuple)):
        yield from ((index, f"{name}_{index}", part) for index, part in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((item.name, item.name, getattr(value, item.name)) for item in dataclasses.fields(value))


def _put_together(value: Any, parts: dict[Any, Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: parts.get(key, part) for key, part in value.items()}
    if hasattr(value, "_fields"):
        return value._replace(**parts)
    if isinstance(value, (list, tuple)):
        return type(value)(parts[index] for index in range(len(value)))
    made = copy.copy(value)
    for key, part in parts.items():
        object.__setattr__(made, key, part)
    return made


# Checks of the example


def _form(name: str, forms: Form | Mapping[str, Form] | None) -> Form:
    form = forms.get(name) if isinstance(forms, Mapping) else forms
    if isinstance(form, (Padded, Lengths)):
        return form
    raise ConfigurationError(
        f"feature {name!r} is a list of ids for each sample; set `inputs` to the form in which requests send it: "
        f"training.padded(max_len=...), training.lengths(), or a dict of these by feature; found {form!r}"
    )


def _check_names(known: Sequence[str], forms: Form | Mapping[str, Form] | None) -> None:
    if not isinstance(forms, (Padded, Lengths, Mapping, type(None))):
        raise ConfigurationError(
            f"inputs is {forms!r}; give training.padded(max_len=...), training.lengths(), or a dict of these by feature"
        )
    if isinstance(forms, (Padded, Lengths)) and not known:
        raise ConfigurationError(
            f"inputs is {forms!r}, which is for a KeyedJaggedTensor, and the example has none; leave it out: requests "
            "have tensors as the example has them"
        )
    unknown = sorted(set(forms) - set(known)) if isinstance(forms, Mapping) else []
    if unknown:
        has = ", ".join(map(repr, known)) or "none"
        raise ConfigurationError(
            f"inputs names {unknown[0]!r}, which is not a jagged feature of the example; features: {has}"
        )


def _num_samples(inputs: Mapping[str, DenseInput | JaggedInput]) -> int:
    """The batch size of the example: that of its features, else the first dimension that most tensors share."""
    sizes = [len(item.lengths) for item in inputs.values() if isinstance(item, JaggedInput)]
    if not sizes:
        sizes = [item.tensor.shape[0] for item in inputs.values() if isinstance(item, DenseInput) and item.tensor.dim()]
    if not inputs:
        raise ConfigurationError("the example holds no tensor; give a batch of tensors, as forward takes it")
    if not sizes or max(sizes) == 0:
        raise ConfigurationError("the example holds no samples; give a batch of at least one")
    return max(set(sizes), key=sizes.count)


def _check_jagged(item: JaggedInput, num_samples: int) -> None:
    if len(item.lengths) != num_samples:
        raise ConfigurationError(
            f"feature {item.name!r} of the example has {len(item.lengths)} lists, the batch {num_samples} samples"
        )
    form = item.form
    if not isinstance(form, Padded):
        return
    longest = int(item.lengths.max()) if len(item.lengths) else 0
    if longest > form.max_len:
        raise ConfigurationError(
            f"feature {item.name!r} of the example has a list of {longest} ids, more than "
            f"padded(max_len={form.max_len}) allows; raise max_len"
        )
    if bool((item.values == form.pad).any()):
        raise ConfigurationError(
            f"feature {item.name!r} of the example has the id {form.pad}, which padded(pad={form.pad}) uses "
            "as padding; "
            "choose another pad"
        )


def padded_matrix(values: NDArray[Any], counts: NDArray[np.int64], pad: float) -> NDArray[Any]:
    """Concatenated lists as a matrix [lists, longest list], at least one wide."""
    width = max(1, int(counts.max(initial=0)))
    present = np.arange(width) < counts[:, None]
    if int(present.sum()) != len(values):
        raise InvalidRequestError(f"{len(values)} values do not match lists of {int(counts.sum())} in all")
    matrix = np.full(present.shape, pad, values.dtype)
    matrix[present] = values
    return matrix


def traced(array: NDArray[Any], copies: int, device: torch.device) -> Tensor:
    """An array [samples, …] as the trace takes it, its samples `copies` times: sizes of 1 would become constants."""
    return torch.from_numpy(np.concatenate([array] * copies)).to(device)
