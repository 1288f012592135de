"""The arguments of hash embeddings: what is allowed, and errors that say so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotrow.training.checks import check, is_whole
from hotrow.training.hash_embeddings.optimizers import Adagrad, RowOptimizer
from hotrow.training.hash_embeddings.rows import INITIAL_ROWS
from inference_session.errors import ConfigurationError

_KEY_TYPES = {"int64": torch.int64, "uint32": torch.uint32}
MAX_UINT32 = 2**32 - 1
_OF_TORCH: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "num_embeddings": ((), "leave it out: a key gets a row when training first reads it"),
    "max_norm": ((None,), "rows change by their optimizer only; divide vectors by their norms in forward"),
    "norm_type": ((), "it belongs to max_norm, which is not supported; leave both out"),
    "scale_grad_by_freq": ((False,), "leave it out; gradients of a row are summed"),
    "sparse": ((True, False), ""),
    "dtype": ((None, torch.float32), "rows are float32; `.to(dtype)` of the module converts the vectors"),
    "_weight": ((None,), "give rows with their keys to `put`"),
    "_freeze": ((False,), "call requires_grad_(False)"),
}
"""Arguments of torch's embeddings: the values that change nothing here, and what to do in place of others."""


def initial_rows(initializer: Callable[[Tensor], Any], embedding_dim: int) -> Tensor:
    initial = torch.full((INITIAL_ROWS, embedding_dim), torch.nan, device="cpu")
    with torch.no_grad():
        initializer(initial)
    if not bool(initial.isfinite().all()):
        raise ConfigurationError(
            "initializer left elements that are no numbers; it has to fill the tensor that it gets, in place, as "
            "torch.nn.init.normal_ does"
        )
    return initial


def is_whole_type(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype not in (torch.bool, torch.uint64)


def check_of_torch(owner: str, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name not in _OF_TORCH:
            raise TypeError(f"{owner} has no argument {name!r}")
        allowed, instead = _OF_TORCH[name]
        if not any(value is item for item in allowed):
            raise ConfigurationError(f"{owner}: {name} of torch's embeddings is not supported: {instead}")


def padding_key(key: int | None, key_dtype: torch.dtype) -> int | None:
    low, high = (0, MAX_UINT32) if key_dtype is torch.uint32 else (-(2**63), 2**63 - 1)
    is_key = key is None or (is_whole(key) and low <= key <= high)
    check(is_key, "padding_idx", key, f"None, keys from {low} to {high}")
    return key


def one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    check(value in allowed, name, value, ", ".join(map(repr, allowed)))
    return value


def row_optimizer(optimizer: Any) -> RowOptimizer:
    if optimizer is None:
        return Adagrad()
    if isinstance(optimizer, int):
        raise ConfigurationError(
            f"optimizer is {optimizer}; no number of rows is given here: embedding_dim is the first argument"
        )
    if not isinstance(optimizer, RowOptimizer):
        raise ConfigurationError(
            f"optimizer is {optimizer!r}; give training.SGD(lr), training.Adagrad(lr) or training.Adam(lr): rows learn "
            "in backward, not by optimizers of torch"
        )
    return optimizer


def key_type(key_dtype: Any) -> torch.dtype:
    name = str(key_dtype).removeprefix("torch.")
    if not isinstance(key_dtype, (torch.dtype, str)):
        name = np.dtype(key_dtype).name
    check(name in _KEY_TYPES, "key_dtype", key_dtype, ", ".join(_KEY_TYPES))
    return _KEY_TYPES[name]
