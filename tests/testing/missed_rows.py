"""What a look-up in a cache has missed, made without one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inference_session.embedding_cache.missing_rows import MissingRows
from inference_session.kernels.records import key_segments


def missed_rows(dims: Sequence[int], keys: Sequence[NDArray[np.int64]]) -> MissingRows:
    """Keys int64 [n] of each table, all of them missing, in one segment for each table; vectors are to be filled in."""
    segments = key_segments(keys, [np.zeros((0, dim), np.float32) for dim in dims])
    positions = np.concatenate([np.arange(len(asked)) for asked in keys])
    return MissingRows(np.array(dims, np.int64), segments, np.array([len(asked) for asked in keys]), positions)
