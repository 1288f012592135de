"""`hotrow inspect`: what a version directory holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from hotrow.progress import byte_progress
from inference_session.formats import manifest
from inference_session.formats.native import ModelSpec, TensorSpec


@click.command()
@click.argument("version_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.option("--verify", is_flag=True, help="Read every file and compare its checksum with the manifest.")
def command(version_dir: Path, as_json: bool, verify: bool) -> None:
    """Show the inputs, tasks and tables of a version directory.

    Sizes are always checked against the manifest. With --verify every byte is read; a damaged or missing file is named,
    and the exit code is 1.

    \b
    Example:
      hotrow inspect model_repository/ctr/1 --verify
    """
    spec = ModelSpec.read(version_dir)
    _check_files(version_dir, checksums=verify)
    description = _describe(spec, version_dir)
    if as_json:
        click.echo(json.dumps(description, indent=1, ensure_ascii=False))
    else:
        _show(description)
        click.echo(f"{'Checksums' if verify else 'Sizes'} of all files agree with {manifest.MANIFEST_FILE}.")


def _check_files(version_dir: Path, *, checksums: bool) -> None:
    if not checksums:
        manifest.verify(version_dir, checksums=False)
        return
    total_bytes = sum(entry.num_bytes for entry in manifest.read_manifest(version_dir))
    with byte_progress(f"Verifying {version_dir}", total_bytes) as progress:
        manifest.verify(version_dir, checksums=True, progress=progress)


def _describe(spec: ModelSpec, version_dir: Path) -> dict[str, Any]:
    return {
        "version_dir": str(version_dir),
        "source": spec.source,
        "inputs": [_tensor(tensor) for tensor in spec.inputs],
        "outputs": [_tensor(tensor) for tensor in spec.outputs],
        "tasks": list(spec.labels),
        "joinable": spec.batched and spec.joinable,
        "tables": [
            {
                "name": table.name,
                "folder": table.folder,
                "rows": table.num_rows,
                "embedding_dim": table.embedding_dim,
                "dtype": table.dtype,
                "keys": table.keys,
                "bytes": table.num_bytes,
            }
            for table in spec.tables
        ],
        "lookups": [{"table": lookup.table, "keys": lookup.keys, "pooling": lookup.pooling} for lookup in spec.lookups],
        "total_table_bytes": sum(table.num_bytes for table in spec.tables),
    }


def _tensor(tensor: TensorSpec) -> dict[str, Any]:
    return {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape)}


def _show(description: dict[str, Any]) -> None:
    console = Console()
    for title in ("inputs", "outputs"):
        table = Table("name", "type", "shape", title=title.capitalize(), title_justify="left")
        for tensor in description[title]:
            table.add_row(tensor["name"], tensor["dtype"], str(tensor["shape"]))
        console.print(table)
    tables = Table("name", "folder", title="Tables", title_justify="left")
    for heading in ("rows", "dim", "type", "bytes"):
        tables.add_column(heading, justify="right")
    for row in description["tables"]:
        numbers = (str(row["rows"]), str(row["embedding_dim"]), row["dtype"], str(row["bytes"]))
        tables.add_row(row["name"], row["folder"], *numbers)
    console.print(tables)
    console.print(f"Tasks: {', '.join(description['tasks']) or 'none'}", highlight=False)
    console.print(f"Bytes of all tables: {description['total_table_bytes']}", highlight=False)
