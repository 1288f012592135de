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
            f"{path}: a {type(module).__name__} is not supported; of managed collision modules, only "
            "MCHManagedCollisionModule (ZCH) is. MPZCH finds rows by a hash function of its own. Train with "
            "MCHManagedCollisionModule, or with hotrow.training.HashEmbedding"
        )


def known_ids(module: Any) -> KnownKeys:
    """The mapping of a module as `remap` applies it, including what it makes of the largest integer, its filler."""
    ids, rows = module._mch_sorted_raw_ids, module._mch_remapped_ids_mapping
    num_known = int(torch.searchsorted(ids[:-1], torch.full((1,), _LAST_ID, device=ids.device)).item())
    unknown_row = module._output_global_offset + module._zch_size - 1
    is_own_filler = int(shards_of(module, ids.new_full((1,), _LAST_ID))) == _shard(module)
    return KnownKeys(ids[: num_known + 1], rows[: num_known + 1], unknown_row, num_known + is_own_filler)


def num_shards(module: Any) -> int:
    """The number of shards, each of which is on one rank."""
    return int(module._buckets)


def _shard(module: Any) -> int:
    """The shard that this rank has."""
    starts = [start for start in module._init_output_segments_tensor.tolist() if start >= 0]
    return sorted(starts).index(module._output_global_offset)


def shards_of(module: Any, ids: Tensor) -> Tensor:
    """The shard of each id, int64 [n], as `preprocess` returned them: as TorchRec sends ids to ranks.

    Shards have equal ranges of ids, unsigned; ids beyond the last range are distributed by their remainder.
    """
    count = num_shards(module)
    if count == 1:
        return torch.zeros_like(ids)
    size = -(-module._input_hash_size // count)
    rest = torch.remainder(torch.remainder(ids, count) + torch.where(ids < 0, 2**64 % count, 0), count)
    if not size:
        return rest
    # By comparisons: in ONNX, a quotient of integers goes by way of floating point.
    bounds = [bound for number in range(1, count) if (bound := number * size) <= _LAST_ID]
    number = sum(((ids >= bound).to(torch.int64) for bound in bounds), torch.zeros_like(ids))
    in_ranges = (ids >= 0) & (ids <= min(size * count - 1, _LAST_ID))
    return torch.where(in_ranges, number, rest)


def preprocess(module: Any, ids: Tensor) -> Tensor:
    """Raw ids as the mapping holds them."""
    if module._input_hash_func is None:
        return ids
    return module._input_hash_func(ids, module._input_hash_size)
