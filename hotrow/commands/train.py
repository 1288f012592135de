"""`hotrow train`: train a model from HugeCTR's JSON configuration."""

from __future__ import annotations

import signal
from pathlib import Path

import click

from hotrow.options.types import FILE
from inference_session.errors import ConfigurationError


@click.command()
@click.argument("config", type=FILE, metavar="CONFIG.json")
def command(config: Path) -> None:
    """Train a model from HugeCTR's JSON configuration: solver, optimizer and layers in one file.

    Paths count from the working directory. In the end the weights are written as `<snapshot_prefix>_dense_<N>.model`
    and so on, N being the iterations, and the graph as `<snapshot_prefix>_graph.json`: what `hotrow import hugectr`
    takes. Needs `pip install 'hotrow[torch]'`.

    \b
    Examples:
      hotrow train dcn.json
      torchrun --nproc-per-node 4 -m hotrow train dcn.json
    """
    # torchrun ends the other processes by it once one has failed. In a collective, none of them would notice.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    from hotrow.training.hugectr.graph.json_config import read_configuration, train

    if config.suffix == ".py":
        raise ConfigurationError(f"{config}: a script is run by `python -m hotrow.training.hugectr {config}`")
    train(read_configuration(config))
