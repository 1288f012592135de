"""`hotrow import onnx`, `hotrow import hugectr`: other formats in, a version directory out."""

from __future__ import annotations

from pathlib import Path

import click

from hotrow.progress import byte_progress
from inference_session.formats.native import ModelSpec, is_folder_name


def _model_name(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    if not is_folder_name(value.replace(".", "_")) or value.startswith("."):
        raise click.BadParameter(f"{value!r} may hold letters, digits, '_', '-' and '.' only")
    return value


@click.group()
def command() -> None:
    """Bring a trained model into a model repository that `hotrow serve` serves."""


@command.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="MODEL.onnx")
@click.option("--name", required=True, callback=_model_name, help="Name that clients will ask for.")
@click.option(
    "--repository",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Model repository; made if there is none.",
)
@click.option("--version", type=click.IntRange(min=1), help="Version number.  [default: one above the highest]")
@click.option(
    "--min-rows",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Initializers with fewer rows stay in the dense network.",
)
@click.option(
    "--max-batch-size",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="Most samples in one request; written to config.pbtxt.",
)
@click.option(
    "--standalone", is_flag=True, help="For a Triton without hotrow's backend folder: adds a one-line model.py."
)
def onnx(
    model: Path,
    name: str,
    repository: Path,
    version: int | None,
    min_rows: int,
    max_batch_size: int,
    standalone: bool,
) -> None:
    """Import an ONNX model: its embedding tables become table files, the rest a dense network.

    The imported model keeps its own inputs and outputs. Tables are initializers that the graph only ever reads by
    rows; what cannot be taken out safely stays in the network, and the report says why.

    \b
    Example:
      hotrow import onnx model.onnx --name ctr --repository model_repository
    """
    from inference_session.formats.onnx_model import import_onnx
    from triton_backend.model_config import write_model_config

    def configure(version_dir: Path, spec: ModelSpec) -> None:
        write_model_config(version_dir, spec, name, max_batch_size=max_batch_size, standalone=standalone)

    with byte_progress(f"Importing {model.name}") as progress:
        report = import_onnx(
            model, repository, name, version=version, min_rows=min_rows, progress=progress, complete=configure
        )
    click.echo(str(report))
