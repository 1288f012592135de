"""DLRM on events of a shop, by HugeCTR's low-level API, from a JSON configuration.

python -m demo.hugectr_examples.dlrm_rees46 [--rees46 FILE] [--rows N] [--iterations N]
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click

from demo.hugectr_examples.from_movielens import read_movielens, write_rees46
from demo.hugectr_examples.original_formats import Rows, read_rees46
from demo.hugectr_examples.serving import ITERATIONS, Example, serve_and_score, write_data
from hotrow.training import hugectr
from hotrow.training.hugectr.graph.json_config import Configuration, read_configuration

CONFIGURATION = Path(__file__).with_suffix(".json")


def train(configuration: Configuration, num_iterations: int) -> hugectr.Model:
    """A custom loop over steps and evaluations."""
    model = hugectr.Model(configuration.solver, configuration.reader, configuration.optimizer)
    model.add_document(configuration.file, dense=True)
    model.compile()
    model.summary()
    model.start_data_reading()
    schedule, settings = model.get_learning_rate_scheduler(), configuration.settings
    for i in range(num_iterations):
        model.set_learning_rate(schedule.get_next())
        model.train(False)
        if i and i % settings["display"] == 0:
            print(f"Iter: {i} Loss: {model.get_current_loss():.6f}")
        if i and i % settings["eval_interval"] == 0:
            for _ in range(configuration.solver.max_eval_batches):
                model.eval(False)
            print(f"Iter: {i} {model.get_eval_metrics()}")
    return model


def read(rees46: Path | None, folder: Path, max_rows: int) -> Rows:
    """REES46's own file, or MovieLens written like it."""
    if rees46 is None:
        write_rees46(read_movielens(), folder / "events.csv")
    return read_rees46(rees46 or folder / "events.csv", max_rows)


@click.command(cls=Example)
@click.option("--rees46", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A CSV file of events.")
@click.option("--rows", type=click.IntRange(min=1), default=1_000_000, show_default=True, help="Rows to read at most.")
@ITERATIONS
def main(rees46: Path | None, rows: int, iterations: int) -> None:
    """Train DLRM, serve it on a real Triton, and score evaluation data; without --rees46 on MovieLens."""
    rees46 = rees46 and rees46.absolute()
    with tempfile.TemporaryDirectory(prefix="hotrow-dlrm-") as name:
        folder = Path(name)
        os.chdir(folder)  # the configuration's paths are relative to it
        write_data(read(rees46, folder, rows), folder)
        model = train(read_configuration(CONFIGURATION), iterations)
        serve_and_score(model, iterations, folder, "dlrm")
        os.chdir(CONFIGURATION.parent)


if __name__ == "__main__":
    main()
