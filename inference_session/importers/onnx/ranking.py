"""The networks for requests that give their context once for many candidates, and the test of their answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from inference_session.errors import UnsupportedModelError
from inference_session.importers.onnx.carve import CarvedModel, carve_tables
from inference_session.importers.onnx.context import ContextSplit, Cut, split_context
from inference_session.importers.onnx.graph import Names
from inference_session.importers.onnx.probe import Arrays, Findings, Prober, Recipe
from inference_session.importers.onnx.ranking_times import NUM_CANDIDATES, Times, measure
from inference_session.importers.onnx.replay import Replay
from inference_session.importers.onnx.spec import lookup_spec
from inference_session.importers.onnx.tables import StaysDenseError
from inference_session.importers.onnx.weights import Weight
from inference_session.model_spec import (
    BLOCK_CONTEXT,
    CANDIDATES,
    RANKING_FILE,
    RANKING_KEYS_FILE,
    ROW_CONTEXT,
    ModelSpec,
    RankingSpec,
)
from inference_session.requests.blocks import arrange

logger = logging.getLogger(__name__)

_TOLERANCE = 5e-7
"""Half of what is promised: other requests may differ by more than those that are tried."""
_PLAIN_TOLERANCE = 1e-5
_COUNTS = ((5,), (2, 2, 2), (4, 1), (1, 1, 1), (3, 70, 1), (200, 100))
"""Candidates of each context, in the requests that are tried."""
_LARGE = 4096.0


@dataclass(frozen=True)
class RankingImport:
    """Divides one model.

    Args:
        model: in canonical form, whole.
        folders: of the tables, by the names of their initializers.
        write: writes the two networks into the staging folder.
    """

    model: ModelProto
    weights: dict[str, Weight]
    names: Names
    folders: dict[str, str]
    staging: Path
    original: Prober
    findings: Findings
    write: Callable[[CarvedModel], None]

    def run(self, spec: ModelSpec, context: Sequence[str]) -> ModelSpec:
        """Write the networks; returns the description with what was found.

        Where every way of dividing the model is correct but slower, nothing is written: the whole network answers.

        Raises:
            ConfigurationError: a context input is unknown, or no input is left for the candidates.
            UnsupportedModelError: the model cannot be divided.
        """
        if CANDIDATES in {tensor.name for tensor in spec.inputs}:
            raise UnsupportedModelError(f"--context: the model already has an input {CANDIDATES!r}")
        if not spec.batched:
            raise UnsupportedModelError(
                "--context: the first dimension of some input or output of the model is not the number of samples"
            )
        if self.findings.recipe is None:
            raise UnsupportedModelError(
                "--context: the original could not be run on generated inputs, so the result cannot be verified"
            )
        slower: dict[Cut, Times] = {}
        for cut, merge in product(Cut, (True, False)):
            if cut in slower:
                continue
            split = split_context(self.model, self.weights, self.names, context, cut)
            try:
                carved = carve_tables(split.model, split.weights, self.names, list(self.folders), merge=merge)
            except StaysDenseError as error:
                logger.debug("%s: table %s %s", cut.value, error.table, error.reason)
                continue
            found = self._spec(spec, context, carved, split)
            self.write(carved)
            if not self._is_faithful(found, context, self.findings.recipe, cut):
                logger.debug("split %s, the model answers differently", cut.value)
                continue
            times = self._measure(spec, found)
            if times is None or not times.are_worse:
                return found
            logger.debug("split %s, the model takes %s s", cut.value, times)
            slower[cut] = times
        if slower:
            return self._undivided(found, spec, min(slower.values()))
        raise UnsupportedModelError("--context: the split model answers differently")

    def _spec(self, spec: ModelSpec, context: Sequence[str], carved: CarvedModel, split: ContextSplit) -> ModelSpec:
        ranking = RankingSpec(
            lookups=tuple(lookup_spec(lookup, self.folders[lookup.table]) for lookup in carved.lookups),
            may_pad=split.proven,
            multiply_adds_fraction=split.costs.multiply_adds,
            lookups_fraction=split.costs.lookups,
            bytes_fraction=split.costs.input_bytes,
            tiled=split.tiled,
        )
        inputs = tuple(replace(tensor, context=tensor.name in context) for tensor in spec.inputs)
        return replace(spec, inputs=inputs, ranking=ranking, joinable=spec.joinable and split.proven)

    def _measure(self, spec: ModelSpec, divided: ModelSpec) -> Times | None:
        if divided.ranking is None or self.findings.recipe is None:
            return None
        return measure(self.staging, replace(spec, inputs=divided.inputs), divided.ranking, self.findings.recipe)

    def _undivided(self, divided: ModelSpec, spec: ModelSpec, slower: Times) -> ModelSpec:
        """The description where the whole network answers, with the context repeated for every candidate."""
        for name in (RANKING_FILE, RANKING_KEYS_FILE):
            for path in self.staging.glob(f"{name}*"):
                path.unlink()
        reason = (
            f"it takes {slower.divided * 1e3:.2f} ms divided and {slower.whole * 1e3:.2f} ms whole for "
            f"{NUM_CANDIDATES} candidates of one context, so the context is repeated for every candidate"
        )
        fraction = divided.ranking.bytes_fraction if divided.ranking else 0.0
        ranking = RankingSpec(lookups=(), bytes_fraction=fraction, undivided=reason)
        return replace(divided, ranking=ranking, joinable=spec.joinable)

    def _is_faithful(self, spec: ModelSpec, context: Sequence[str], recipe: Recipe, cut: Cut) -> bool:
        """Compare random requests with the original on tiled inputs."""
        try:
            lookups = spec.ranking.lookups if spec.ranking else ()
            replay = Replay(
                self.staging, replace(spec, lookups=lookups), dense_file=RANKING_FILE, keys_file=RANKING_KEYS_FILE
            )
            tolerance = _PLAIN_TOLERANCE if cut is Cut.NONE else _TOLERANCE
            return all(
                self._answers_alike(replay, spec, arrays, counts, tolerance)
                for arrays, counts in _requests(recipe, context, large=cut is not Cut.NONE)
            )
        except Exception as error:  # noqa: BLE001  ONNX Runtime's errors share no other base; all mean "no"
            logger.debug("the split model does not run: %s", error)
            return False

    def _answers_alike(
        self, replay: Replay, spec: ModelSpec, arrays: Arrays, counts: NDArray[np.int64], tolerance: float
    ) -> bool:
        """Whether a request is answered as the original answers it tiled; requests that it refuses do not count."""
        rows = np.repeat(np.arange(len(counts)), counts)
        tiled = {
            tensor.name: arrays[tensor.name][rows] if tensor.context else arrays[tensor.name] for tensor in spec.inputs
        }
        expected, again = self.original.run(tiled), self.original.run(tiled)
        if expected is None or again is None:
            return True
        blocks = arrange(counts, may_pad=bool(spec.ranking and spec.ranking.may_pad))
        if blocks.candidates is not None:
            arrays = {
                tensor.name: arrays[tensor.name] if tensor.context else arrays[tensor.name][blocks.candidates]
                for tensor in spec.inputs
            }
        found = replay.run({**arrays, ROW_CONTEXT: blocks.row_context, BLOCK_CONTEXT: blocks.block_context})
        if blocks.rows is not None:
            found = [output[blocks.rows] for output in found]
        return all(
            _close(f, e, tolerance) or not _close(a, e, tolerance)
            for f, e, a in zip(found, expected, again, strict=True)
        )


def _requests(recipe: Recipe, context: Sequence[str], *, large: bool) -> Iterator[tuple[Arrays, NDArray[np.int64]]]:
    """Requests of several shapes, their numbers small, and large where they may be."""
    for seed, (counts, inner) in enumerate(product(_COUNTS, (3, 2))):
        sizes = {name: len(counts) if name in context else sum(counts) for name in recipe.inputs}
        arrays = recipe.arrays(100 + seed, sizes, inner)
        yield arrays, np.array(counts)
        numbers = [name for name, array in arrays.items() if array.dtype.kind == "f"]
        if large and numbers:
            yield (
                {**arrays, **{name: (arrays[name] + _LARGE).astype(arrays[name].dtype) for name in numbers}},
                np.array(counts),
            )


def _close(found: NDArray[Any], expected: NDArray[Any], tolerance: float) -> bool:
    """Whether two outputs are the same, numbers within a tolerance of the largest of them, or of one."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if expected.dtype.kind != "f":
        return bool(np.array_equal(found, expected))
    finite = np.abs(expected[np.isfinite(expected)]).astype(np.float64)
    tolerance = max(tolerance, 4 * float(np.finfo(expected.dtype).eps)) * max(1.0, finite.max(initial=0.0))
    return bool(np.allclose(found, expected, rtol=0, atol=tolerance, equal_nan=True))
