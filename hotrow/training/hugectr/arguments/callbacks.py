"""What a script may do while `Model.fit` trains."""

from __future__ import annotations

from collections.abc import Mapping


class TrainingCallback:
    """Subclasses are given to `CreateSolver(training_callbacks=[…])`; `Model.fit` calls them in repeat mode only."""

    def on_training_start(self) -> None:
        """Called before the first step."""

    def on_training_end(self, current_iter: int) -> None:
        """Called after the last step, with its number from 0."""

    def on_eval_start(self, current_iter: int) -> bool:
        """Called before an evaluation; what it returns has no effect."""
        return False

    def on_eval_end(self, current_iter: int, eval_results: Mapping[str, float]) -> bool:
        """Called with the metrics of an evaluation by name; True ends the training."""
        return False
