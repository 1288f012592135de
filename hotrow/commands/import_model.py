"""`hotrow import onnx`, `hugectr`, `torch`, `dynamicemb`: other formats in, a version directory out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hotrow.progress import byte_progress
from inference_session.errors import ConfigurationError
from inference_session.model_spec import TABLES_FOLDER, ModelSpec, VectorType, is_folder_name
from inference_session.platform.staging import MAX_VERSION
from triton_backend.repository.model_config import MAX_BATCH_SIZE


class FileOrUrl(click.Path):
    """A file of this machine that exists, or a URL as it is."""

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The path or URL."""
        return str(value) if "://" in str(value) else str(super().convert(value, param, ctx))


def model_name(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    if not is_folder_name(value.replace(".", "_")) or value.startswith("."):
        raise click.BadParameter(f"{value!r} may hold letters, digits, '_', '-' and '.' only, and not begin with '.'")
    return value


_repository = click.option(
    "--repository",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Model repository; made if there is none.",
)
_version = click.option(
    "--version", type=click.IntRange(1, MAX_VERSION), help="Version number.  [default: one above the highest]"
)
_tables = click.option(
    "--tables",
    type=click.Choice(["float32", "float16", "int8"]),
    default="float32",
    show_default=True,
    help="How tables are stored, each where that makes it smaller; int8 with a scale and an offset for each row.",
)


@click.group()
def command() -> None:
    """Bring a trained model into a model repository that `hotrow serve` serves."""


@command.command()
@click.argument("model", type=FileOrUrl(), metavar="MODEL.onnx")
@click.option("--name", required=True, callback=model_name, help="Name that clients will ask for.")
@_repository
@_version
@click.option(
    "--min-rows",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Initializers with fewer rows stay in the dense network.",
)
@click.option(
    "--context",
    multiple=True,
    metavar="INPUT",
    help="An input that requests may give once for many candidates, as a user's; may be repeated.",
)
@_tables
@click.option(
    "--max-batch-size",
    type=click.IntRange(1, MAX_BATCH_SIZE),
    help="Most samples in one request; written to config.pbtxt.  [default: 1024; 16384 with --context]",
)
@click.option(
    "--standalone", is_flag=True, help="For a Triton without hotrow's backend folder: adds a one-line model.py."
)
def onnx(
    model: str,
    name: str,
    repository: Path,
    version: int | None,
    min_rows: int,
    context: tuple[str, ...],
    tables: VectorType,
    max_batch_size: int | None,
    standalone: bool,
) -> None:
    """Import an ONNX model: its embedding tables become table files, the rest a dense network.

    The imported model keeps its own inputs and outputs. Tables are initializers that the graph only ever reads by
    rows; what cannot be taken out safely stays in the network, and the report says why.

    With --context, requests may give some inputs once for all candidates that are to be ranked; the report says what
    is then looked up and computed once.

    With --tables int8, rows of 128 elements take 0.27 of the bytes and answers change a little: `hotrow quantize` does
    the same to an imported version, and tells by how much.

    \b
    Examples:
      hotrow import onnx model.onnx --name ctr --repository model_repository
      hotrow import onnx model.onnx --name ranker --repository model_repository --context user_id --context history
      hotrow import onnx hdfs://namenode:9870/models/model.onnx --name ctr --repository model_repository
    """
    from inference_session.importers.onnx import import_onnx
    from inference_session.importers.onnx.remote_model import local_model
    from triton_backend.repository.model_config import write_model_config

    def configure(version_dir: Path, spec: ModelSpec) -> None:
        write_model_config(version_dir, spec, name, max_batch_size=max_batch_size, standalone=standalone)

    with byte_progress(f"Importing {model}") as progress, local_model(model, progress) as path:
        report = import_onnx(
            path,
            repository,
            name,
            version=version,
            min_rows=min_rows,
            context=context,
            tables=tables,
            progress=progress,
            complete=configure,
        )
    click.echo(str(report))


@command.command()
@click.argument("ps_json", type=FileOrUrl(), metavar="PS_JSON")
@click.option("--model", metavar="NAME", help="Import this model of ps.json only.  [default: all of them]")
@_repository
@_version
@click.option(
    "--keep-rows-of",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="VERSION_DIR",
    help="An earlier version of the model: its rows stay where the new one has no row of that key, as HugeCTR's "
    "own update does it.  [default: a key that the new version does not have is unknown]",
)
@_tables
def hugectr(
    ps_json: str,
    model: str | None,
    repository: Path,
    version: int | None,
    keep_rows_of: Path | None,
    tables: VectorType,
) -> None:
    """Import models of HugeCTR or HPS: graph JSON, dense weights and sparse folders, as ps.json names them.

    Sparse folders become tables as they are, by hard links where the file system allows. Clients keep their requests:
    DES, CATCOLUMN, ROWINDEX to OUTPUT0, or KEYS, NUMKEYS to OUTPUT0 for a model of tables alone. PS_JSON and the files
    that it names may be on HDFS, hdfs://HOST:PORT/path, where PORT is that of the NameNode's WebHDFS.

    \b
    Example:
      hotrow import hugectr ps.json --repository model_repository
    """
    from inference_session.importers.hugectr import import_hugectr
    from inference_session.importers.hugectr.ps_fields import PsModel
    from triton_backend.repository.model_config import write_model_config

    def configure(version_dir: Path, spec: ModelSpec, item: PsModel) -> None:
        write_model_config(version_dir, spec, item.name, max_batch_size=item.max_batch_size)

    with byte_progress(f"Importing {ps_json}") as progress:
        reports = import_hugectr(
            ps_json,
            repository,
            model=model,
            version=version,
            keep_rows_of=_table_folders(keep_rows_of) if keep_rows_of else (),
            tables=tables,
            progress=progress,
            complete=configure,
        )
    for report in reports:
        click.echo(str(report))


@command.command(name="torch")
@click.argument("program", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="PROGRAM.pt2")
@click.option(
    "--checkpoint",
    metavar="DIR",
    help="Distributed checkpoint, a folder or hdfs:// URL, whose weights are taken in place of the program's own.",
)
@click.option("--name", required=True, callback=model_name, help="Name that clients will ask for.")
@_repository
@_version
def from_torch(program: Path, checkpoint: str | None, name: str, repository: Path, version: int | None) -> None:
    """Import a program that torch.export.save wrote; tables may be in a torch distributed checkpoint. Needs
    hotrow[torch]. From a live model, hotrow.training.export does it, TorchRec's tables included.

    \b
    Examples:
      hotrow import torch ctr.pt2 --name ctr --repository model_repository
      hotrow import torch ctr.pt2 --checkpoint hdfs://namenode/ckpt/ctr/10000 --name ctr --repository model_repository
    """
    try:
        from hotrow.training.program import import_program
    except ModuleNotFoundError as missing:
        raise ConfigurationError(
            f"import torch needs the package `{missing.name}`: pip install 'hotrow[torch]'"
        ) from missing
    from triton_backend.repository.model_config import write_model_config

    def configure(version_dir: Path, spec: ModelSpec) -> None:
        write_model_config(version_dir, spec, name)

    with byte_progress(f"Importing {program}") as progress:
        report = import_program(
            program,
            repository,
            name,
            checkpoint=checkpoint,
            version=version,
            progress=progress,
            complete=configure,
        )
    click.echo(str(report))


@command.command()
@click.argument("dump", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--name", required=True, callback=model_name, help="Name that clients will ask for.")
@_repository
@_version
def dynamicemb(dump: Path, name: str, repository: Path, version: int | None) -> None:
    """Import the tables that DynamicEmb (recsys-examples) dumped, of all ranks; needs no CUDA.

    They become a model of tables alone, served as HPS serves them: KEYS, NUMKEYS to OUTPUT0.

    \b
    Example:
      hotrow import dynamicemb dump --name items --repository model_repository
    """
    from inference_session.importers.dynamicemb import import_dynamicemb
    from triton_backend.repository.model_config import write_model_config

    def configure(version_dir: Path, spec: ModelSpec) -> None:
        write_model_config(version_dir, spec, name)

    with byte_progress(f"Importing {dump}") as progress:
        report = import_dynamicemb(dump, repository, name, version=version, progress=progress, complete=configure)
    click.echo(str(report))


def _table_folders(version_dir: Path) -> list[Path]:
    return [version_dir / TABLES_FOLDER / table.folder for table in ModelSpec.read(version_dir).tables]
