"""What a look-up in a cache has missed, made without one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inference_session.embedding_cache.missing_rows import MissingRows
from inference_session.kernels.records import SEGMENT, address_of


def missed_rows(dims: Sequence[int], keys: Sequence[NDArray[np.int64]]) -> MissingRows:
    """Keys int64 [n] of each table, all of them missing, in one segment for each table; vectors are to be filled in."""
    segments = np.zeros(len(dims), SEGMENT)
    segments["table"], segments["keys_address"] = np.arange(len(dims)), [address_of(asked) for asked in keys]
    segments["key_bytes"] = segments["row_stride"] = segments["key_stride"] = 8
    segments["num_rows"], segments["keys_per_row"] = [len(asked) for asked in keys], 1
    positions = np.concatenate([np.arange(len(asked)) for asked in keys])
    return MissingRows(np.array(dims, np.int64), segments, np.array([len(asked) for asked in keys]), positions)
