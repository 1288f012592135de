"""Compares a divided network with the original on random requests, both as they are served.

A divided network adds in another order than the original, so that both are equally far from the exact answer. How far
depends on the request: a model may round a hundred times more for numbers a hundred times larger.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.importers.onnx.probe import Prober, Recipe
from inference_session.importers.onnx.replay import Replay
from inference_session.model_spec import BLOCK_CONTEXT, ROW_CONTEXT, ModelSpec, NamedArrays
from inference_session.requests.blocks import arrange

TOLERANCE = 4e-7
"""Relative to the largest number of an output, or to 1: less than half of what is promised, since other requests may
differ by more than those that are tried.
"""
LARGEST_INPUTS = (6.0, 10.0, 15.0, 25.0, 40.0, 60.0, 100.0, 300.0, 1000.0, 6000.0, 1e5, 1e8)
"""What requests are limited to, step by step. Numbers with a mean of 0 and a deviation of 1 are within the first."""
_COUNTS = ((5,), (2, 2, 2), (4, 1), (1, 1, 1), (3, 70, 1), (200, 100), (500,), (250, 250))
"""Candidates of each context."""
_OPEN_SIZES = (3, 2, 50)
_MORE = ((10,) * 50, (500,), (10,) * 50)
_NUM_LEAST, _NUM_MORE, _SECONDS = len(_COUNTS) * len(_OPEN_SIZES), 33, 10.0
"""How many further requests are tried if they take no more processor time: of some models one answer in 10,000 differs
by ten times as much as all others.
"""
_DEVIATIONS, _SHARE, _NARROW = 4, 0.5, 0.02
"""One of three requests has numbers around 0, the largest of them this many deviations away; one has numbers between 0
and this share of the largest; and one has them within this share below the largest.
"""


class TriedRequest(NamedTuple):
    """One random request."""

    arrays: NamedArrays
    counts: NDArray[np.int64]
    """Candidates of each context."""


@dataclass(frozen=True)
class RankingTrials:
    """The comparison of one divided network.

    Args:
        original: as ONNX Runtime runs the model with its default settings.
        replay: of the divided network.
        spec: of the model, divided.
    """

    original: Prober
    replay: Replay
    spec: ModelSpec
    recipe: Recipe

    def largest_input(self, tolerance: float) -> float | None:
        """How large numbers may be for the answers to stay within a tolerance; infinite where that does not matter.

        None: the answers differ by more for the smallest numbers as well.
        """
        has_floats = any(np.dtype(tensor.dtype).kind == "f" for tensor in self.spec.inputs)
        largest = None
        for limit in LARGEST_INPUTS:
            if not self._stays_within(tolerance, limit):
                return largest
            if not has_floats:
                return np.inf
            largest = limit
        return np.inf

    def _stays_within(self, tolerance: float, largest: float) -> bool:
        begin = time.process_time()
        more = ((_OPEN_SIZES[0], _MORE[i % len(_MORE)]) for i in range(_NUM_MORE))
        for seed, (inner, counts) in enumerate(chain(product(_OPEN_SIZES, _COUNTS), more)):
            if self.difference(self._request(seed, counts, inner, largest)) > tolerance:
                return False
            if seed >= _NUM_LEAST and time.process_time() - begin > _SECONDS:
                break
        return True

    def _request(self, seed: int, counts: Sequence[int], inner: int, largest: float) -> TriedRequest:
        """A random request whose numbers are at most so large; `inner` is what the model leaves open."""
        sizes = {tensor.name: len(counts) if tensor.context else sum(counts) for tensor in self.spec.inputs}
        arrays, random = {**self.recipe.arrays(100 + seed, sizes, inner)}, np.random.default_rng(seed)
        for name, array in arrays.items():
            if array.dtype.kind == "f":
                around = random.standard_normal(array.shape) / _DEVIATIONS
                parts = (around, array * _SHARE, 1 - array * _NARROW)[seed % 3]
                with np.errstate(over="ignore"):  # float16
                    arrays[name] = (np.clip(parts, -1, 1) * largest).astype(array.dtype)
        return TriedRequest(arrays, np.array(counts))

    def difference(self, request: TriedRequest) -> float:
        """The largest difference of an answer from the original's, of the largest of them or of 1.

        It is infinite where something else than rounding differs. Requests that the original refuses, and outputs that
        are random in each run, do not count.
        """
        arrays, counts = request
        rows = np.repeat(np.arange(len(counts)), counts)
        context = self.spec.context
        tiled = {name: array[rows] if name in context else array for name, array in arrays.items()}
        expected = self.original.run(tiled)
        if expected is None:
            return 0.0
        found = self._found(arrays, counts)
        differences = [relative_difference(*pair) for pair in zip(found, expected, strict=True)]
        if not any(differences):
            return 0.0
        again = self.original.run(tiled) or expected
        is_random = [relative_difference(*pair) > 0 for pair in zip(again, expected, strict=True)]
        return max((d for d, skipped in zip(differences, is_random, strict=True) if not skipped), default=0.0)

    def _found(self, arrays: NamedArrays, counts: NDArray[np.int64]) -> list[NDArray[Any]]:
        """The outputs of the divided network."""
        context = self.spec.context
        blocks = arrange(counts, may_pad=bool(self.spec.ranking and self.spec.ranking.may_pad))
        if blocks.candidates is not None:
            arrays = {name: array if name in context else array[blocks.candidates] for name, array in arrays.items()}
        found = self.replay.run({**arrays, ROW_CONTEXT: blocks.row_context, BLOCK_CONTEXT: blocks.block_context})
        return found if blocks.rows is None else [output[blocks.rows] for output in found]


def relative_difference(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """The largest difference of two outputs, as a part of the largest number, or of 1 if that is larger.

    It is infinite if shapes, types, integers, or the places of NaN and infinities differ.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return np.inf
    if np.array_equal(found, expected, equal_nan=expected.dtype.kind == "f"):
        return 0.0
    if expected.dtype.kind != "f" or not np.array_equal(np.isfinite(found), finite := np.isfinite(expected)):
        return np.inf
    if not np.array_equal(found[~finite], expected[~finite], equal_nan=True):
        return np.inf
    one, other = (array[finite].astype(np.float64) for array in (found, expected))
    return float(np.abs(one - other).max() / max(1.0, np.abs(other).max()))
