"""`hotrow import onnx`, `hugectr`, `torch`, `dynamicemb`: other formats in, a version directory out."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path

import click

from hotrow.command_group import CommandGroup
from hotrow.options.types import FILE, FOLDER, FileOrUrl
from hotrow.options.versions import name_option, repository_option, version_option
from hotrow.output.progress import byte_progress
from inference_session.errors import ConfigurationError
from inference_session.model_spec import ModelSpec, VectorType
from triton_backend.repository.config_writer import write_model_config
from triton_backend.repository.model_config import MAX_BATCH_SIZE, suitable_instances
from triton_backend.repository.view import has_gpu


class Instances(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic from click 8.3 on
    """A number of instances, or `auto`."""

    name = "instances"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; `auto` is what suits this machine."""
        if value == "auto":
            return suitable_instances(has_gpu=has_gpu())
        if not str(value).isdecimal() or int(str(value)) < 1:
            self.fail(f"{value!r} is neither a whole number from 1 nor auto", param, ctx)
        return int(str(value))


class OnnxFile(FileOrUrl):
    """An ONNX file, or the URL of one."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The path or URL; a folder of TensorFlow is named."""
        if _is_saved_model(Path(str(value))):
            self.fail(
                f"{value} is a SavedModel of TensorFlow; convert it: pip install tf2onnx && "
                f"python -m tf2onnx.convert --saved-model {value} --opset 17 --output model.onnx",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


def _is_saved_model(path: Path) -> bool:
    with suppress(OSError):  # it cannot be looked into
        return (path / "saved_model.pb").is_file()
    return False


class NewName(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic from click 8.3 on
    """OLD=NEW: an input or output of a model file, and the name that it gets."""

    name = "new_name"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Both names."""
        old, _, new = str(value).rpartition("=")
        if not old or not new:
            self.fail(f"{value!r} is not OLD=NEW", param, ctx)
        return old, new


def _new_names(ctx: click.Context, param: click.Parameter, pairs: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """The new names, by the old ones."""
    names = dict(pairs)
    if len(names) < len(pairs):
        raise click.BadParameter("an input or output can be renamed once")
    return names


_tables = click.option(
    "--tables",
    type=click.Choice(["float32", "float16", "int8"]),
    default="float32",
    show_default=True,
    help="How to store tables that become smaller this way; int8 has a scale and an offset for each row.",
)


@click.group(cls=CommandGroup)
def command() -> None:
    """Import a trained model into a model repository that `hotrow serve` serves."""


@command.command(short_help="Import an ONNX model, as PyTorch, Keras and JAX export it.")
@click.argument("model", type=OnnxFile(), metavar="MODEL.onnx")
@name_option
@repository_option
@version_option
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
    help="An input that requests may give once for many candidates, such as the user's; may be repeated.",
)
@click.option(
    "--rename",
    type=NewName(),
    multiple=True,
    callback=_new_names,
    metavar="OLD=NEW",
    help="Another name for an input or output, as Identity:0=click; may be repeated. All other options, requests and "
    "answers use it.",
)
@_tables
@click.option(
    "--max-batch-size",
    type=click.IntRange(1, MAX_BATCH_SIZE),
    help="Largest number of samples in one request; written to config.pbtxt.  [default: 1024; 16384 with --context]",
)
@click.option(
    "--instances",
    type=Instances(),
    default="1",
    show_default=True,
    metavar="N|auto",
    help="Processes that serve the model; `auto`: as many as suit this machine. Written to a new config.pbtxt.",
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
    rename: dict[str, str],
    tables: VectorType,
    max_batch_size: int | None,
    instances: int,
    standalone: bool,
) -> None:
    """Import an ONNX model: its embedding tables become table files, the rest becomes a dense network.

    The imported model keeps its own inputs and outputs. A table is an initializer that the graph reads only by
    rows. What cannot be taken out safely stays in the network, and the report says why.

    With --context, requests may give some inputs once for all candidates that are to be ranked. The report says
    what is then looked up and computed once.

    With --tables int8, rows of 128 elements take 0.27 of the bytes and answers change a little. `hotrow quantize`
    does the same to an imported version, and reports by how much its answers change.

    \b
    Examples:
      hotrow import onnx model.onnx --name ctr --repository model_repository
      hotrow import onnx model.onnx --name ranker --repository model_repository --context user_id --context history
      hotrow import onnx hdfs://namenode:9870/models/model.onnx --name ctr --repository model_repository
    """
    from inference_session.importers.onnx import import_onnx
    from inference_session.importers.onnx.remote_model import local_model

    configure = partial(
        write_model_config, name=name, max_batch_size=max_batch_size, standalone=standalone, num_instances=instances
    )
    with byte_progress(f"Importing {model}") as progress, local_model(model, progress) as path:
        report = import_onnx(
            path,
            repository,
            name,
            version=version,
            min_rows=min_rows,
            context=context,
            rename=rename,
            tables=tables,
            progress=progress,
            complete=configure,
        )
    click.echo(str(report))


@command.command(short_help="Import models of HugeCTR or HPS.")
@click.argument("ps_json", type=FileOrUrl(), metavar="PS_JSON")
@click.option("--model", metavar="NAME", help="Import only this model of ps.json.  [default: all of them]")
@repository_option
@version_option
@click.option(
    "--keep-rows-of",
    type=FOLDER,
    metavar="VERSION_DIR",
    help="An earlier version of the model, whose rows are kept for keys that the new version lacks, as in HugeCTR's "
    "own update; needs --model if PS_JSON has several.  [default: keys that the new version lacks are unknown]",
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

    Sparse folders become tables without conversion, by hard links where the file system allows them. Clients keep
    their requests: DES, CATCOLUMN and ROWINDEX to OUTPUT0, or KEYS and NUMKEYS to OUTPUT0 for a model that
    consists only of tables. PS_JSON and the files that it names may be on HDFS, hdfs://HOST:PORT/path, where PORT
    is that of the NameNode's WebHDFS.

    \b
    Example:
      hotrow import hugectr ps.json --repository model_repository
    """
    from inference_session.importers.hugectr import import_hugectr
    from inference_session.importers.hugectr.ps_fields import PsModel

    def configure(version_dir: Path, spec: ModelSpec, item: PsModel) -> None:
        write_model_config(version_dir, spec, item.name, max_batch_size=item.max_batch_size)

    with byte_progress(f"Importing {ps_json}") as progress:
        reports = import_hugectr(
            ps_json,
            repository,
            model=model,
            version=version,
            keep_rows_of=keep_rows_of or (),
            tables=tables,
            progress=progress,
            complete=configure,
        )
    for report in reports:
        click.echo(str(report))


@command.command(name="torch", short_help="Import a program of torch.export.save.")
@click.argument("program", type=FILE, metavar="PROGRAM.pt2")
@click.option(
    "--checkpoint",
    metavar="DIR",
    help="Distributed checkpoint, a folder or hdfs:// URL, whose weights replace those in the program.",
)
@name_option
@repository_option
@version_option
def from_torch(program: Path, checkpoint: str | None, name: str, repository: Path, version: int | None) -> None:
    """Import a program written by torch.export.save; its tables may be in a torch distributed checkpoint. Needs
    hotrow[torch]. To import a live model, TorchRec tables included, use hotrow.training.export.

    \b
    Examples:
      hotrow import torch ctr.pt2 --name ctr --repository model_repository
      hotrow import torch ctr.pt2 --checkpoint hdfs://namenode/ckpt/ctr/10000 --name ctr --repository model_repository
    """
    try:
        from hotrow.training.onnx_export.program import import_program
    except ModuleNotFoundError as missing:
        raise ConfigurationError(
            f"import torch needs the package `{missing.name}`: pip install 'hotrow[torch]'"
        ) from missing

    with byte_progress(f"Importing {program}") as progress:
        report = import_program(
            program,
            repository,
            name,
            checkpoint=checkpoint,
            version=version,
            progress=progress,
            complete=partial(write_model_config, name=name),
        )
    click.echo(str(report))


@command.command(short_help="Import tables that DynamicEmb dumped.")
@click.argument("dump", type=FOLDER)
@name_option
@repository_option
@version_option
def dynamicemb(dump: Path, name: str, repository: Path, version: int | None) -> None:
    """Import the tables that DynamicEmb (recsys-examples) dumped, of all ranks; needs no CUDA.

    They become a model that consists only of tables, served as HPS serves them: KEYS and NUMKEYS to OUTPUT0.

    \b
    Example:
      hotrow import dynamicemb dump --name items --repository model_repository
    """
    from inference_session.importers.dynamicemb import import_dynamicemb

    configure = partial(write_model_config, name=name)
    with byte_progress(f"Importing {dump}") as progress:
        report = import_dynamicemb(dump, repository, name, version=version, progress=progress, complete=configure)
    click.echo(str(report))
