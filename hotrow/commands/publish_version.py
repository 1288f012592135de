"""`hotrow publish-version`: a version directory from anywhere into a model repository."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotrow.commands.import_model import model_name
from hotrow.progress import byte_progress
from inference_session.model_spec import ModelSpec
from inference_session.platform.available_memory import available_bytes
from inference_session.platform.staging import MAX_VERSION
from inference_session.version_directory import manifest
from triton_backend.repository.model_config import (
    MAX_BATCH_SIZE,
    STANDALONE_CODE,
    configured_cache_bytes,
    write_model_config,
)

if TYPE_CHECKING:
    from inference_session.version_directory.publishing import PublishReport


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--name", required=True, callback=model_name, help="The model that it becomes a version of.")
@click.option(
    "--repository",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Model repository; made if there is none.",
)
@click.option(
    "--version", type=click.IntRange(1, MAX_VERSION), help="Version number.  [default: one above the highest]"
)
@click.option(
    "--max-batch-size",
    type=click.IntRange(1, MAX_BATCH_SIZE),
    help="Most samples in one request; written to the config.pbtxt of a new model.  [default: 1024; 16384 where it has "
    "context inputs]",
)
def command(folder: Path, name: str, repository: Path, version: int | None, max_batch_size: int | None) -> None:
    """Publish FOLDER, a version directory, as <repository>/<name>/<version>.

    It is verified, byte by byte, and appears whole or not at all. Files that another version of the model has too are
    shared with it by hard links. Servers do not serve it until they are told to: `hotrow load`.

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

    total_bytes = sum(entry.num_bytes for entry in manifest.read_manifest(folder))
    with byte_progress(f"Publishing {folder.name}", total_bytes) as progress:
        report = publish_version(folder, repository, name, version=version, progress=progress, complete=configure)
    click.echo(f"Published {folder} as {report.version_dir}")
    click.echo(f"Disk: {report.copied_bytes} bytes more; {report.shared_bytes} bytes shared with other versions")
    _report_memory(report)


def _report_memory(report: PublishReport) -> None:
    """What a swap will take on a machine like this one, as long as both versions are loaded."""
    from inference_session.sizing.memory import bytes_in, memory_items

    cache_bytes = configured_cache_bytes(report.spec, report.version_dir)
    private = bytes_in(memory_items(report.spec, report.version_dir, cache_bytes=cache_bytes), "process")
    available = available_bytes()
    click.echo(
        f"Memory to load it beside the version that serves: {private} bytes of its own, {report.copied_bytes} bytes of "
        f"files that no other version has; available here: {available} bytes"
    )
    if private > available:
        click.echo("hotrow: this machine has too little memory left to load it", err=True)
