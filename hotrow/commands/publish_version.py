"""`hotrow publish-version`: a version directory from anywhere into a model repository."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotrow.options.types import FOLDER
from hotrow.options.versions import name_option, repository_option, version_option
from hotrow.output.formatting import in_units
from hotrow.output.progress import byte_progress
from inference_session.model_spec import ModelSpec
from inference_session.platform.memory import available_bytes
from inference_session.version_directory import manifest
from inference_session.version_directory.session_file import read_spec
from triton_backend.repository.config_writer import STANDALONE_CODE, write_model_config
from triton_backend.repository.model_config import MAX_BATCH_SIZE, configured_cache_bytes

if TYPE_CHECKING:
    from inference_session.version_directory.publishing import PublishReport


@click.command()
@click.argument("folder", type=FOLDER)
@name_option
@repository_option
@version_option
@click.option(
    "--max-batch-size",
    type=click.IntRange(1, MAX_BATCH_SIZE),
    help="Largest number of samples in one request; written to the config.pbtxt of a new model.  "
    "[default: 1024; 16384 where it has context inputs]",
)
def command(folder: Path, name: str, repository: Path, version: int | None, max_batch_size: int | None) -> None:
    """Publish FOLDER, a version directory, as REPOSITORY/NAME/VERSION.

    Every byte is verified, and the version appears completely or not at all. Files that are identical in another
    version of the model are shared with it by hard links. Servers serve the version after `hotrow load`.

    \b
    Example:
      hotrow publish-version /training/out/ctr --name ctr --repository model_repository && hotrow load ctr
    """
    from inference_session.version_directory.publishing import (
        publish_version,  # imports ONNX Runtime, which takes seconds
    )

    def configure(version_dir: Path, spec: ModelSpec) -> None:
        code = version_dir / "model.py"
        standalone = code.exists() and code.read_text(encoding="utf-8") == STANDALONE_CODE
        write_model_config(version_dir, spec, name, max_batch_size=max_batch_size, standalone=standalone)

    read_spec(folder)  # its error says how to name a version directory
    total_bytes = sum(entry.num_bytes for entry in manifest.read_manifest(folder))
    with byte_progress(f"Publishing {folder.name}", total_bytes) as progress:
        report = publish_version(folder, repository, name, version=version, progress=progress, complete=configure)
    click.echo(f"Published {folder} as {report.version_dir}")
    click.echo(
        f"Disk: {in_units(report.copied_bytes)} more; {in_units(report.shared_bytes)} shared with other versions"
    )
    _report_memory(report)


def _report_memory(report: PublishReport) -> None:
    """The memory of a swap on a machine like this one, while both versions are loaded."""
    from inference_session.sizing.memory import bytes_in, memory_items

    cache_bytes = configured_cache_bytes(report.spec, report.version_dir)
    private = bytes_in(memory_items(report.spec, report.version_dir, cache_bytes=cache_bytes), "process")
    available = available_bytes()
    click.echo(
        f"Memory to load it beside the active version: {in_units(private)}, and {in_units(report.copied_bytes)} "
        f"of files that no other version has; available here: {in_units(available)}"
    )
    if private > available:
        click.echo("hotrow: this machine has too little free memory to load it", err=True)
