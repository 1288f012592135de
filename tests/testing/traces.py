"""Traces of keys: a synthetic one similar to a recommender's, and a real one if it is available."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def generated_trace(num_keys: int = 400_000) -> NDArray[np.int64]:
    """Keys of which a few are popular for long, many occur once or twice, and some come back soon. int64 [num_keys].

    What is popular drifts: every key of the popular ones is another after a tenth of the trace.
    """
    random = np.random.default_rng(17)
    position = np.arange(num_keys)
    ranks = np.minimum(random.random(num_keys) ** -10, 1e15).astype(np.int64)  # as of Zipf 1.1, with any NumPy the same
    popular = (ranks - 1) % 100_000 + position * 10 // num_keys * 20
    tail = random.integers(1_000_000, 1_300_000, num_keys)
    keys = np.where(random.random(num_keys) < 0.6, popular, tail)
    again = random.random(num_keys) < 0.1
    keys[again] = keys[np.maximum(position - random.geometric(1 / 300, num_keys), 0)][again]
    return keys


def real_trace(real_data: Path) -> NDArray[np.int64]:
    """1.2 million keys of requests to a recommender, 258 k of them distinct."""
    return read_trace(real_data / "data" / "traces" / "scarab-recs.trace.xz")


def read_trace(path: Path) -> NDArray[np.int64]:
    """The keys of a trace: big-endian int64, compressed by xz."""
    return np.frombuffer(lzma.decompress(path.read_bytes()), ">i8").astype(np.int64)
