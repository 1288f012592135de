"""Converts the state of a model and its optimizers to flat names and tensors, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hotrow.training.hash_embeddings.table import HashTable, without_rows
from hotrow.training.onnx_export.dense_network import unwrapped
from hotrow.training.ranks import Ranks
from inference_session.errors import ConfigurationError, UnsupportedModelError

Others: TypeAlias = "dict[str, Any]"
"""Numbers and texts by name: what JSON holds."""

_KIND = "kind"
_NONE: Any = object()
_PLAIN = (bool, int, float, str, type(None))


class TrainingState:
    """Names are those of the model without what distributes it, so that any number of ranks finds them again.

    model.<parameter or buffer>, optimizer.<n>.state.<parameter>.<name>, fused.state.<parameter>.<name>;
    rows of hash embeddings, of each rank: rows.<module>.<rank>.<name>
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """ConfigurationError: an optimizer is none, or trains parameters that are not the model's."""
        self._model = unwrapped(model)
        modules = self._model.named_modules()
        self._hashed = {f"rows.{path}": module for path, module in modules if isinstance(module, HashTable)}
        self._keyed: dict[str, Any] = {}
        self._plain: dict[str, torch.optim.Optimizer] = {}
        for number, optimizer in enumerate(optimizers):
            name = f"optimizer.{number}"
            (self._keyed if _is_keyed(optimizer) else self._plain)[name] = optimizer
        known = self._names()
        for name, optimizer in self._plain.items():
            _check_parameters(name, optimizer, known)
        fused = getattr(model, "fused_optimizer", None)
        if fused is not None and not any(_holds(optimizer, fused) for optimizer in self._keyed.values()):
            self._keyed["fused"] = fused

    def collect(self) -> tuple[dict[str, Any], Others]:
        """The tensors, which are the live ones, and all else.

        Raises:
            UnsupportedModelError: the state holds something that is neither a tensor, a number nor a text.
        """
        tensors: dict[str, Any] = {}
        others: Others = {}
        for name, value in self._items():
            if isinstance(value, Tensor) or _is_sharded(value):
                tensors[name] = value
            elif isinstance(value, _PLAIN) or _is_plain_list(value):
                others[name] = value
            else:
                raise UnsupportedModelError(f"{name}: a {type(value).__name__} cannot be saved in a checkpoint")
        return tensors, others

    def hashed_rows(self, ranks: Ranks) -> dict[str, Any]:
        """The rows of hash embeddings that this rank holds: live tensors, under names that no other rank has."""
        return {
            f"{prefix}.{ranks.rank}.{name}": tensor
            for prefix, table in self._hashed.items()
            for name, tensor in table.tensors().items()
        }

    def load_hashed(self, ranks: Ranks, saved: Mapping[str, Any], read: Callable[[dict[str, Any]], None]) -> None:
        """Replace the rows of hash embeddings by those that belong to this rank, a saving rank's part at a time.

        Args:
            ranks: that load; any number may have saved.
            saved: what the checkpoint holds, with sizes and types.
            read: fills tensors, given by name.

        Raises:
            ConfigurationError: an embedding does not fit.
        """
        for prefix, table in self._hashed.items():
            parts = _parts(prefix, saved)
            table.clear()
            common = math.gcd(ranks.size, len(parts))  # a key's owners there and here are equal by this modulus
            for part in (part for rank, part in parts.items() if (rank - ranks.rank) % common == 0):
                tensors = {name: torch.empty(saved[name].size, dtype=saved[name].properties.dtype) for name in part}
                read(tensors)
                table.load_part({part[name]: tensor for name, tensor in tensors.items()})

    def targets(self, saved: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Tensors to read the saved ones into: the live ones, or new ones for an optimizer that has none yet.

        Raises:
            ConfigurationError: the checkpoint lacks a tensor of the model, or has it with another shape.
        """
        for prefix, optimizer in self._keyed.items():
            _start(prefix, optimizer, saved)
        tensors, _ = self.collect()
        for prefix, optimizer in self._plain.items():
            tensors.update(self._made(prefix, optimizer, saved))
        for name, value in tensors.items():
            if name not in saved:
                raise ConfigurationError(f"{place}: has no {name!r}; it belongs to another model or optimizer")
            size = getattr(saved[name], "size", None)
            if size is not None and tuple(size) != tuple(value.size()):
                raise ConfigurationError(
                    f"{place}: {name!r} has shape {list(size)} in the checkpoint, but {list(value.size())} in the model"
                )
        return tensors

    def check_fits(self, saved: Mapping[str, Any], others: Others, targets: Iterable[str], place: str) -> None:
        """Refuse a checkpoint of other optimizers, or with tensors for which no rank has a place.

        Args:
            saved: what it holds of tensors, with sizes and types, and
            others: of all else.
            targets: names that `targets` returned, on any rank.
            place: for messages.

        Raises:
            ConfigurationError: names what does not fit.
        """
        for prefix, optimizer in self._plain.items():
            kind = type(optimizer).__name__
            if others.get(f"{prefix}.{_KIND}", kind) != kind:
                raise ConfigurationError(
                    f"{place}: {prefix} was {others[f'{prefix}.{_KIND}']}, but is {kind} now; restore with the same"
                )
        # TorchRec's optimizers name their states differently where tables are sharded differently.
        begins = ("model.", "rows.") if self._keyed else ("model.", "rows.", "optimizer.")
        known, hashed = set(targets), tuple(f"{prefix}." for prefix in self._hashed)
        for name in saved:
            if name not in known and name.startswith(begins) and not name.startswith(hashed):
                raise ConfigurationError(
                    f"{place}: holds {name!r}, which this model and its optimizers lack; it belongs to others"
                )
        for prefix, table in self._hashed.items():
            _check_hashed(prefix, table, saved, place)

    def apply(self, tensors: Mapping[str, Any], others: Others) -> None:
        """Adopt the values that were read into `targets`."""
        model = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
        with without_rows(self._model):
            self._model.load_state_dict(model)
        for prefix, optimizer in self._plain.items():
            self._apply_plain(prefix, optimizer, tensors, others)
        for prefix, optimizer in self._keyed.items():
            state = optimizer.state_dict()  # its tensors have been read into
            _replace_others(state, prefix, others)
            optimizer.load_state_dict(state)
            _set_groups(prefix, optimizer, _keyed_names(optimizer), others)

    def _items(self) -> Iterator[tuple[str, Any]]:
        with without_rows(self._model):
            state = self._model.state_dict()
        for name, value in state.items():
            yield f"model.{name}", value
        for prefix, optimizer in self._keyed.items():
            yield from _flat(f"{prefix}.state", optimizer.state_dict()["state"])
            yield from _groups(prefix, optimizer, _keyed_names(optimizer))
        for prefix, optimizer in self._plain.items():
            names = self._names()
            for parameter, state in optimizer.state.items():
                yield from _flat(f"{prefix}.state.{names[parameter]}", state)
            yield from _groups(prefix, optimizer, names)
            yield f"{prefix}.{_KIND}", type(optimizer).__name__

    def _names(self) -> dict[Any, str]:
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after an evaluation, its parameters may be whole ones, which no optimizer has
        return {parameter: name for name, parameter in self._model.named_parameters()}

    def _made(self, prefix: str, optimizer: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors for the state of parameters for which a new optimizer has no state yet."""
        made: dict[str, Any] = {}
        names = self._names()
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if optimizer.state.get(parameter):
                continue
            begin = f"{prefix}.state.{names[parameter]}."
            for name, entry in saved.items():
                if name.startswith(begin):
                    made[name] = _empty(entry, parameter)
        return made

    def _apply_plain(self, prefix: str, optimizer: Any, tensors: Mapping[str, Any], others: Others) -> None:
        for parameter, name in self._names().items():
            begin = f"{prefix}.state.{name}."
            state = {
                key.removeprefix(begin): value
                for source in (tensors, others)
                for key, value in source.items()
                if key.startswith(begin)
            }
            if state:
                optimizer.state[parameter] = state
        _set_groups(prefix, optimizer, self._names(), others)


def _parts(prefix: str, saved: Mapping[str, Any]) -> dict[int, dict[str, str]]:
    """The tensors that each rank saved of a hash embedding: their short names by their names in the checkpoint."""
    parts: dict[int, dict[str, str]] = {}
    for full_name in saved:
        rank, _, name = full_name.removeprefix(f"{prefix}.").partition(".")
        if full_name.startswith(f"{prefix}.") and rank.isdecimal():
            parts.setdefault(int(rank), {})[full_name] = name
    return parts


def _check_hashed(prefix: str, table: HashTable, saved: Mapping[str, Any], place: str) -> None:
    """Refuse a hash embedding that does not fit, before anything changes."""
    parts = _parts(prefix, saved)
    if not parts:
        raise ConfigurationError(f"{place}: holds no {prefix!r}; it is of another model")
    wanted = sorted(table.optimizer.states())
    for part in parts.values():
        found = {short: saved[name] for name, short in part.items()}
        states = sorted(name.removeprefix("optimizer.") for name in found if name.startswith("optimizer."))
        if states != wanted:
            raise ConfigurationError(
                f"{place}: {prefix} has the optimizer states {states}, but {type(table.optimizer).__name__} has "
                f"{wanted}; restore with the optimizer that it was saved with"
            )
        dim = found["initial"].size[1] if "initial" in found else table.embedding_dim
        if dim != table.embedding_dim:
            raise ConfigurationError(
                f"{place}: {prefix} has {dim} elements in a vector, expected {table.embedding_dim}"
            )


def _check_parameters(name: str, optimizer: Any, known: Mapping[Any, str]) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"{name} is a {type(optimizer).__name__}; give optimizers of torch or TorchRec")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in known:
                raise ConfigurationError(
                    f"{name} trains a parameter of shape {list(parameter.shape)} that is not one of the model's"
                )


def _is_keyed(optimizer: Any) -> bool:
    """Whether it is one of TorchRec's, whose state goes by names of parameters."""
    return isinstance(getattr(optimizer, "params", None), Mapping)


def _keyed_names(optimizer: Any) -> dict[Any, str]:
    return {parameter: name for name, parameter in optimizer.params.items()}


def _holds(optimizer: Any, other: Any) -> bool:
    """Whether one optimizer is the other, or combines all that it does."""
    parts = {id(part) for _, part in getattr(optimizer, "optimizers", [])} | {id(optimizer)}
    inner = [part for _, part in getattr(other, "optimizers", [])]
    return (
        id(other) in parts
        or set(other.params) <= set(optimizer.params)
        or (bool(inner) and all(id(part) in parts for part in inner))
    )


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "local_shards") and hasattr(value, "size")


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, _PLAIN) for item in value)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flat(f"{prefix}.{key}", part)
    else:
        yield prefix, value


def _groups(prefix: str, optimizer: Any, names: Mapping[Any, str]) -> Iterator[tuple[str, Any]]:
    """Learning rates and other settings that schedules change; by parameter, because ranks differ in their groups."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in group.items():
                if key != "params" and (isinstance(value, _PLAIN) or _is_plain_list(value)):
                    yield f"{prefix}.group.{names[parameter]}.{key}", value


def _set_groups(prefix: str, optimizer: Any, names: Mapping[Any, str], others: Others) -> None:
    for group in optimizer.param_groups:
        for key in [key for key in group if key != "params"]:
            found = [others.get(f"{prefix}.group.{names[parameter]}.{key}", _NONE) for parameter in group["params"]]
            value = next((value for value in found if value is not _NONE), _NONE)
            if value is not _NONE:
                group[key] = tuple(value) if isinstance(group[key], tuple) else value


def _start(prefix: str, optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Let optimizers that have not stepped yet create their state, if the checkpoint has values for it."""
    begin = f"{prefix}.state."
    for part in [inner for _, inner in getattr(optimizer, "optimizers", [])] or [optimizer]:
        names = [f"{begin}{name}." for name in part.params]
        if not part.state and any(key.startswith(tuple(names)) for key in saved) and hasattr(part, "init_state"):
            part.init_state()


def _replace_others(state: dict[str, Any], prefix: str, others: Others) -> None:
    def replace(node: dict[str, Any], path: str) -> None:
        for key, value in node.items():
            if isinstance(value, dict):
                replace(value, f"{path}.{key}")
            elif f"{path}.{key}" in others:
                node[key] = others[f"{path}.{key}"]

    replace(state["state"], f"{prefix}.state")


def _empty(entry: Any, parameter: Tensor) -> Any:
    properties = entry.properties
    if tuple(entry.size) == tuple(parameter.shape) and parameter.dtype == properties.dtype:
        return torch.empty_like(parameter, requires_grad=False)
    return torch.empty(entry.size, dtype=properties.dtype, device=parameter.device if entry.size else "cpu")
