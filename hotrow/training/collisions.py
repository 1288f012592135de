"""TorchRec's managed collisions (ZCH): raw ids of any size, mapped to the rows of a table as they come."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.training.tables import KnownKeys
from inference_session.errors import UnsupportedModelError

_LAST_ID = torch.iinfo(torch.int64).max


def check_supported(module: Any, path: str) -> None:
    """UnsupportedModelError for a module whose mapping is not known here; it is named by its path."""
    if not hasattr(module, "_mch_sorted_raw_ids"):
        raise UnsupportedModelError(
            f"{path}: a {type(module).__name__} is not supported; of managed collision modules, "
            "only MCHManagedCollisionModule is"
        )


def known_ids(module: Any) -> KnownKeys:
    """The mapping of a module as `remap` applies it, including what it makes of the largest integer, its filler."""
    ids, rows = module._mch_sorted_raw_ids, module._mch_remapped_ids_mapping
    num_known = int(torch.searchsorted(ids[:-1], torch.full((1,), _LAST_ID, device=ids.device)).item())
    unknown_row = module._output_global_offset + module._zch_size - 1
    return KnownKeys(ids[: num_known + 1], rows[: num_known + 1], unknown_row)


def preprocess(module: Any, ids: Tensor) -> Tensor:
    """Raw ids as the mapping holds them."""
    if module._input_hash_func is None:
        return ids
    hashed: Tensor = module._input_hash_func(ids, module._input_hash_size)
    return hashed
