"""HugeCTR's Python API of releases before 3.1: a loop over a `Session`, whose model is a JSON configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotrow.training.hugectr.arguments.parameters import Solver
from hotrow.training.hugectr.graph.json_config import learning_rates, read_configuration
from hotrow.training.hugectr.model import Model
from hotrow.training.hugectr.snapshots.training_cache import Oversubscriber
from hotrow.training.hugectr.trainer.fitting import evaluate_batches
from hotrow.training.hugectr.trainer.schedule import LearningRateScheduler
from inference_session.errors import UnsupportedModelError

_OF_PREVIEW = frozenset({"display", "eval_interval", "max_iter", "num_epochs", "snapshot", "snapshot_prefix"})
"""Arguments of solvers for the Model of release 3.0, whose layers a script adds."""


@dataclass
class SessionSolver(Solver):
    """A solver, and the files that the weights are read from, if any."""

    model_file: str = field(default="", kw_only=True)
    embedding_files: Sequence[str] = field(default=(), kw_only=True)


def solver_parser_helper(**arguments: Any) -> SessionSolver:
    """The solver of a session.

    Raises:
        ConfigurationError: a value is not allowed.
        UnsupportedModelError: the solver is for the Model of release 3.0.
    """
    if found := sorted(_OF_PREVIEW & arguments.keys()):
        raise UnsupportedModelError(
            f"solver_parser_helper: {found} are not supported: they are for the Model of release 3.0. Use those of "
            "release 3.1, CreateSolver, DataReaderParams and Model, and give them to Model.fit"
        )
    return SessionSolver(**arguments)


def get_learning_rate_scheduler(configure_file: str) -> LearningRateScheduler:
    """The schedule of a configuration's optimizer; errors as `read_configuration`."""
    rates = learning_rates(read_configuration(Path(configure_file)).file)
    return LearningRateScheduler(rates.pop("lr", Solver.lr), **rates)


class Session(Model):
    """The layers, data and optimizer of a configuration, compiled; the solver is given."""

    def __init__(
        self,
        solver: SessionSolver,
        config_file: str,
        use_model_oversubscriber: bool = False,
        temp_embedding_dir: str = "",
    ) -> None:
        """The last two change no result. Errors are those of `read_configuration`, `Model.compile` and the loads."""
        configuration = read_configuration(Path(config_file))
        super().__init__(solver, configuration.reader, configuration.optimizer)
        self.add_document(configuration.file, dense=True)
        self.compile()
        if solver.model_file:
            self.load_dense_weights(solver.model_file)
        if solver.embedding_files:
            self.load_sparse_weights(solver.embedding_files)

    def evaluation(self, prediction_file: str = "", label_file: str = "") -> list[tuple[str, float]]:
        """Metrics over `max_eval_batches` batches, whose predictions and labels are appended to files if requested."""
        evaluate_batches(self, self._solver.max_eval_batches, prediction_file, label_file)
        return self.get_eval_metrics()

    def download_params_to_files(self, prefix: str, iter: int) -> None:  # noqa: A002  HugeCTR's name
        """As `save_params_to_files`."""
        self.save_params_to_files(prefix, iter)

    def get_model_oversubscriber(self) -> Oversubscriber:
        """What keysets are given to; they have no effect."""
        return Oversubscriber()

    def check_overflow(self) -> None:
        """Nothing: tables grow."""

    def copy_weights_for_evaluation(self) -> None:
        """Nothing: evaluation reads the weights that train."""
