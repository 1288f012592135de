"""The loop of `Model.fit`, and the lines that it prints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hotrow.training.checks import check, is_whole, whole
from hotrow.training.hugectr.arguments.callbacks import TrainingCallback
from hotrow.training.hugectr.arguments.enums import MetricsType
from hotrow.training.hugectr.arguments.parameters import Solver
from hotrow.training.hugectr.readers.batches import DataReader
from hotrow.training.hugectr.trainer.schedule import LearningRateScheduler
from inference_session.importers.hugectr.data_source import DataSourceParams


class Trainable(Protocol):
    """The part of a `Model` that the loop uses, the low-level API; `Model` itself imports the loop."""

    def train(self) -> bool: ...
    def eval(self) -> bool: ...
    def start_data_reading(self) -> None: ...
    def get_data_reader_train(self) -> DataReader: ...
    def get_data_reader_eval(self) -> DataReader: ...
    def get_learning_rate_scheduler(self) -> LearningRateScheduler: ...
    def set_learning_rate(self, lr: float) -> None: ...
    def get_current_loss(self) -> float: ...
    def get_eval_metrics(self) -> list[tuple[str, float]]: ...
    def export_predictions(self, output_prediction_file_name: str, output_label_file_name: str) -> None: ...
    def save_params_to_files(
        self,
        prefix: str,
        iter: int,  # noqa: A002  HugeCTR's name
        data_source_params: DataSourceParams | None,
    ) -> None: ...


@dataclass
class Fitting:
    """One call of `fit`."""

    model: Trainable
    solver: Solver
    say: Callable[[str], None]
    display: int
    eval_interval: int
    snapshot: int
    snapshot_prefix: str
    data_source: DataSourceParams | None
    predictions_prefix: str = ""
    """Begins the names of the files that get what is evaluated; empty: none."""
    callbacks: Sequence[TrainingCallback] = ()
    agree: Callable[[bool], bool] = bool
    """Whether something holds for any process of the job."""
    is_saved_later: bool = False
    """See `Model.is_saved_later`."""

    def __post_init__(self) -> None:
        for name in ("display", "eval_interval", "snapshot"):
            check(is_whole(getattr(self, name)), f"Model.fit: {name}", getattr(self, name), "whole numbers")
        self._began = self._displayed = time.perf_counter()
        self.iteration = 0
        """Steps so far."""

    def iterations(self, count: int) -> None:
        """Train this many steps of data that repeats."""
        whole("Model.fit, as repeat_dataset is True: max_iter", count)
        self._announce(f"Use non-epoch mode with number of iterations: {count}")
        for callback in self.callbacks:
            callback.on_training_start()
        self.model.start_data_reading()
        is_complete = not any(self._step(f"{count} iterations") for _ in range(count))
        for callback in self.callbacks:
            callback.on_training_end(self.iteration - 1)
        if is_complete:
            self.say(f"Finish {count} iterations with batchsize: {self.solver.batchsize} in {self._elapsed():.2f}s.")
            self._tell_what_is_unsaved()

    def epochs(self, count: int, sources: Sequence[str], eval_source: str) -> None:
        """Train this many epochs, each of all sources."""
        whole("Model.fit, as repeat_dataset is False: num_epochs", count)
        self._announce(f"Use epoch mode with number of epochs: {count}")
        self.say(f"Training source file: {', '.join(sources)}")
        self.say(f"Evaluation source file: {eval_source}")
        self.model.get_data_reader_eval().set_source(eval_source)
        for epoch in range(count):
            self.say(f"-----------------------------------Epoch {epoch}-----------------------------------")
            if any(self._one_source(source, f"{count} epochs") for source in sources):
                return
        self.say(
            f"Finish {count} epochs {self.iteration} global iterations with batchsize {self.solver.batchsize} "
            f"in {self._elapsed():.2f}s."
        )
        self._tell_what_is_unsaved()

    def _tell_what_is_unsaved(self) -> None:
        """Many scripts of HugeCTR train for fewer iterations than `snapshot`, and so would leave nothing to serve."""
        if 0 < self.iteration <= self.snapshot and not self.is_saved_later:
            self.say(
                f"No snapshot was due in {self.iteration} iterations (snapshot={self.snapshot}): "
                f"model.save_params_to_files({self.snapshot_prefix!r}, {self.iteration}) saves the weights."
            )

    def _one_source(self, source: str, of: str) -> bool:
        """Train on all data of a source; whether the target of AUC is reached."""
        self.model.get_data_reader_train().set_source(source)
        while not (ended := self._step(of)):
            pass
        return ended == "hit"

    def _step(self, of: str) -> str:
        """One iteration; "end" if no data was left, "hit" if the target of AUC is reached."""
        lr = self.model.get_learning_rate_scheduler().get_next()
        self.model.set_learning_rate(lr)
        if not self.model.train():
            return "end"
        number, self.iteration = self.iteration, self.iteration + 1
        if _is_due(number, self.display):
            self._show(number, lr)
        if _is_due(number, self.eval_interval) and self._evaluate(number, of):
            return "hit"
        if _is_due(number, self.snapshot):
            self.model.save_params_to_files(self.snapshot_prefix, number, self.data_source)
        return ""

    def _show(self, number: int, lr: float) -> None:
        loss = self.model.get_current_loss()
        if math.isnan(loss):
            raise RuntimeError(f"Train Runtime error: Loss cannot converge; it is not a number at iteration {number}")
        now = time.perf_counter()
        seconds, self._displayed = now - self._displayed, now
        self.say(f"Iter: {number} Time({self.display} iters): {seconds:.6f}s Loss: {loss:.6f} lr:{lr:.6f}")

    def _evaluate(self, number: int, of: str) -> bool:
        """Whether AUC is above its target, or a callback ends the training."""
        for callback in self.callbacks:
            callback.on_eval_start(number)
        began = time.perf_counter()
        self._evaluate_batches(number)
        seconds = time.perf_counter() - began
        metrics = self.model.get_eval_metrics()
        ends = [callback.on_eval_end(number, dict(metrics)) for callback in self.callbacks]
        is_ended = bool(ends) and self.agree(any(ends))
        target = self.solver.metrics_spec.get(MetricsType.AUC, 1.0)
        is_hit = False
        for name, value in metrics:
            self.say(f"Evaluation, {name}: {value:.6f}")
            is_hit = is_hit or (name == MetricsType.AUC.value and value > target)
        self.say(f"Eval Time for {self.solver.max_eval_batches} iters: {seconds:.6f}s")
        if is_hit:
            size, elapsed = self.solver.batchsize, self._elapsed()
            self.say(
                f"Hit target accuracy AUC {target:.6f} at {number} / {of} with batchsize {size} in {elapsed:.2f}s. "
                f"Average speed {number * size / elapsed:.6f} records/s."
            )
        return is_hit or is_ended

    def _evaluate_batches(self, number: int) -> None:
        prefix = self.predictions_prefix
        files = (f"{prefix}_prediction_{number}", f"{prefix}_label_{number}") if prefix else ()
        for file in files:
            Path(file).unlink(missing_ok=True)  # of an earlier run; predictions are appended
        evaluate_batches(self.model, self.solver.max_eval_batches, *files)

    def _announce(self, mode: str) -> None:
        solver = self.solver
        self.say("Model Fit".center(114, "="))
        self.say(mode)
        self.say(f"Training batchsize: {solver.batchsize}, evaluation batchsize: {solver.batchsize_eval}")
        self.say(f"Evaluation interval: {self.eval_interval}, snapshot interval: {self.snapshot}")
        self.say(f"Use mixed precision: {solver.use_mixed_precision}, scaler: {solver.scaler:.6f}")
        self.say(f"lr: {solver.lr:.6f}, warmup_steps: {solver.warmup_steps}, end_lr: {solver.end_lr:.6f}")
        self.say(
            f"decay_start: {solver.decay_start}, decay_steps: {solver.decay_steps}, "
            f"decay_power: {solver.decay_power:.6f}"
        )

    def _elapsed(self) -> float:
        return time.perf_counter() - self._began


def evaluate_batches(model: Trainable, most: int, prediction_file: str = "", label_file: str = "") -> None:
    """Evaluate as many batches as there are, at most this many, and append them to the files if these are named."""
    for number in range(most):
        if not model.eval():
            model.get_data_reader_eval().set_source()
            # An evaluation before this one may have taken the last batch.
            if number > 0 or not model.eval():
                break
        if prediction_file:
            model.export_predictions(prediction_file, label_file)


def _is_due(number: int, interval: int) -> bool:
    return interval > 0 and number > 0 and number % interval == 0
