"""The networks for requests that give their context once for many candidates, and the test of their answers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from inference_session.errors import UnsupportedModelError
from inference_session.importers.onnx.canonical import CanonicalModel
from inference_session.importers.onnx.carve import CarvedModel, carve_tables
from inference_session.importers.onnx.context import ContextSplit, Cut, may_jump, split_context
from inference_session.importers.onnx.probe import Findings, Prober, Recipe
from inference_session.importers.onnx.ranking.times import NUM_CANDIDATES, Times, measure
from inference_session.importers.onnx.ranking.trials import TOLERANCE, RankingTrials
from inference_session.importers.onnx.replay import Replay
from inference_session.importers.onnx.spec import lookup_spec
from inference_session.importers.onnx.tables import StaysDenseError
from inference_session.importers.report import shortened
from inference_session.model_spec import CANDIDATES, RANKING_FILE, RANKING_KEYS_FILE, ModelSpec, RankingSpec, TensorSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankingImport:
    """Divides one model.

    Args:
        folders: of the tables, by the names of their initializers.
        write: writes the two networks into the draft.
    """

    whole: CanonicalModel
    folders: dict[str, str]
    draft: Path
    original: Prober
    """As ONNX Runtime runs the model with its default settings."""
    findings: Findings
    write: Callable[[CarvedModel], None]

    def run(self, spec: ModelSpec, context: Sequence[str]) -> ModelSpec:
        """Write the networks; returns the description with what was found.

        Where every way of dividing the model is correct but slower, nothing is written: the whole network answers.

        Raises:
            ConfigurationError: a context input is unknown, or no input is left for the candidates.
            UnsupportedModelError: the model cannot be divided.
        """
        recipe = self._recipe(spec)
        slower: dict[Cut, Times] = {}
        cuts = [Cut.NONE] if may_jump(self.whole.model.graph, context) else list(Cut)
        for cut, split, merge in self._divisions(cuts, context):
            if cut in slower:
                continue
            try:
                carved = carve_tables(split.whole, list(self.folders), {}, merge=merge)
            except StaysDenseError as error:
                logger.debug("%s: table %s %s", cut.value, error.table, error.reason)
                continue
            self.write(carved)
            divided = self._tried(self._spec(spec, context, carved, split), recipe)
            if divided is None:
                logger.debug("split %s, the model answers differently", cut.value)
                continue
            times = self._measure(spec, divided)
            if times is None or not times.are_worse:
                return divided
            logger.debug("split %s, the model takes %s s", cut.value, times)
            slower[cut] = times
        return self._undivided(spec, context, split.costs.input_bytes, min(slower.values(), default=None))

    def _recipe(self, spec: ModelSpec) -> Recipe:
        """How to generate requests; UnsupportedModelError where the model cannot be divided and verified."""
        if CANDIDATES in {tensor.name for tensor in spec.inputs}:
            raise UnsupportedModelError(f"--context: the model already has an input {CANDIDATES!r}")
        if not spec.batched:
            found = shortened([f"{tensor.name!r} {list(tensor.shape)}" for tensor in (*spec.inputs, *spec.outputs)])
            raise UnsupportedModelError(
                "--context: the first dimension of some input or output of the model is not the number of samples: "
                f"{found}. Export it with a row of each for every candidate; requests still give the context once"
            )
        if self.findings.recipe is None:
            raise UnsupportedModelError(
                "--context: the original could not be run on generated inputs, so the result cannot be verified"
            )
        return self.findings.recipe

    def _divisions(self, cuts: Sequence[Cut], context: Sequence[str]) -> Iterator[tuple[Cut, ContextSplit, bool]]:
        """The ways to divide the model, the fastest first: how far, the result, and whether to merge look-ups."""
        for cut in cuts:
            split = split_context(self.whole, context, cut)
            yield from ((cut, split, merge) for merge in (True, False))

    def _spec(self, spec: ModelSpec, context: Sequence[str], carved: CarvedModel, split: ContextSplit) -> ModelSpec:
        ranking = RankingSpec(
            lookups=tuple(lookup_spec(lookup, self.folders[lookup.table]) for lookup in carved.lookups),
            may_pad=split.proven,
            multiply_adds_fraction=split.costs.multiply_adds,
            lookups_fraction=split.costs.lookups,
            bytes_fraction=split.costs.input_bytes,
            tiled=split.tiled,
        )
        return replace(spec, inputs=_inputs(spec, context), ranking=ranking, joinable=spec.joinable and split.proven)

    def _tried(self, divided: ModelSpec, recipe: Recipe) -> ModelSpec | None:
        """The description with the largest numbers that the divided network answers for as the original; None: none."""
        if divided.ranking is None:
            return None
        spec = replace(divided, lookups=divided.ranking.lookups)
        files = {"dense_file": RANKING_FILE, "keys_file": RANKING_KEYS_FILE}
        try:
            replay = Replay(self.draft, spec, **files, as_served=True)
            largest = RankingTrials(self.original, replay, divided, recipe).largest_input(TOLERANCE)
        except Exception as error:  # noqa: BLE001  ONNX Runtime's errors share no other base; all mean "no"
            logger.debug("the split model does not run: %s", error)
            return None
        if largest is None:
            return None
        limit = None if math.isinf(largest) else largest
        return replace(divided, ranking=replace(divided.ranking, largest_input=limit))

    def _measure(self, spec: ModelSpec, divided: ModelSpec) -> Times | None:
        if divided.ranking is None or self.findings.recipe is None:
            return None
        return measure(self.draft, replace(spec, inputs=divided.inputs), divided.ranking, self.findings.recipe)

    def _undivided(
        self, spec: ModelSpec, context: Sequence[str], bytes_fraction: float, slower: Times | None
    ) -> ModelSpec:
        """The description where the whole network answers, with the context repeated for every candidate.

        Args:
            slower: of the fastest division that answers as the original does; None: there is none.
        """
        for name in (RANKING_FILE, RANKING_KEYS_FILE):
            for path in self.draft.glob(f"{name}*"):
                path.unlink()
        reason = "every way of dividing it that was tried answers differently"
        if slower is not None:
            reason = (
                f"it takes {slower.divided * 1e3:.2f} ms divided and {slower.whole * 1e3:.2f} ms whole for "
                f"{NUM_CANDIDATES} candidates of one context"
            )
        undivided = f"{reason}, so the context is repeated for every candidate"
        ranking = RankingSpec(lookups=(), bytes_fraction=bytes_fraction, undivided=undivided)
        return replace(spec, inputs=_inputs(spec, context), ranking=ranking)


def _inputs(spec: ModelSpec, context: Sequence[str]) -> tuple[TensorSpec, ...]:
    """The inputs, each with whether it is of the context."""
    return tuple(replace(tensor, context=tensor.name in context) for tensor in spec.inputs)
