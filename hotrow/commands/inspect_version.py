"""`hotrow inspect`: what a version directory or a store holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from hotrow.dense_network import describe_dense_network
from hotrow.options.types import FOLDER, FOLDER_OR_URL
from hotrow.output.formatting import as_cell
from hotrow.output.progress import verify_checksums
from hotrow.output.streams import output_console, print_json
from inference_session.errors import ConfigurationError
from inference_session.model_spec import INDEX_FILE, TABLES_FOLDER, VECTOR_FILE, ModelSpec, RankingSpec, TensorSpec
from inference_session.parameter_server.namespace import StoredTable, split_tag
from inference_session.platform.mapped_large_pages import large_page_fraction
from inference_session.urls.store_url import OPTIONS as URL_OPTIONS
from inference_session.urls.store_url import StoreUrl
from inference_session.version_directory import manifest
from inference_session.version_directory.session_file import read_spec


def _target(ctx: click.Context, parameter: click.Parameter, value: str) -> Path | StoreUrl:
    """A directory that exists, or a store's URL."""
    scheme, _, _ = value.partition(":")
    if scheme.endswith("hdfs"):
        return FOLDER.convert(value, parameter, ctx)  # says how to copy it
    if "://" in value or scheme in URL_OPTIONS:  # an error must not repeat a mistyped URL
        return StoreUrl.parse(value)
    return FOLDER.convert(value, parameter, ctx)


@click.command()
@click.argument("target", type=FOLDER_OR_URL, metavar="VERSION_DIR|STORE_URL", callback=_target)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.option("--verify", is_flag=True, help="Read every file and compare its checksum with the manifest.")
def command(target: Path | StoreUrl, as_json: bool, verify: bool) -> None:
    """Show the inputs, tasks and tables of a version directory, or the tables in a store.

    Sizes are always checked against the manifest. With --verify every byte is read. A damaged or missing file is
    named, and the exit code is 1. `large pages` is how much of a table's file the kernel maps in large pages, which
    makes look-ups faster.

    \b
    Examples:
      hotrow inspect model_repository/ctr/1 --verify
      hotrow inspect redis://127.0.0.1:6379/0
    """
    if isinstance(target, Path):
        _inspect_version(target, as_json=as_json, verify=verify)
    elif verify:
        raise ConfigurationError("a store has no checksums to verify; `hotrow push --verify` compares it with files")
    else:
        _inspect_store(target, as_json=as_json)


def _inspect_store(url: StoreUrl, *, as_json: bool) -> None:
    from inference_session.parameter_server.create import list_tables  # imports Numba

    tables = list_tables(url)
    if as_json:
        print_json({"store": str(url), "tables": [_stored_table(table) for table in tables]})
        return
    shown = _table("Tables", ["table"], ["rows", "dim"])
    for table in tables:
        shown.add_row(as_cell(table.tag), str(table.num_rows), str(table.embedding_dim or "?"))
    output_console().print(shown)


def _stored_table(table: StoredTable) -> dict[str, Any]:
    parts = split_tag(table.tag)
    model, version, name = (None, None, None) if parts is None else (parts[0].model, parts[0].version, parts[1])
    facts = {"tag": table.tag, "rows": table.num_rows, "embedding_dim": table.embedding_dim}
    return {**facts, "model": model, "version": version, "table": name}


def _inspect_version(version_dir: Path, *, as_json: bool, verify: bool) -> None:
    spec = read_spec(version_dir)
    if verify:
        verify_checksums(version_dir)
        _check_indexes(version_dir, spec)
    else:
        manifest.verify(version_dir, checksums=False)
    description = _describe(spec, version_dir)
    if as_json:
        print_json(description)
    else:
        _show(description)
        _show_ranking(spec)
        click.echo(f"{'Checksums' if verify else 'Sizes'} of all files match {manifest.MANIFEST_FILE}.")


def _check_indexes(version_dir: Path, spec: ModelSpec) -> None:
    """Compare index files with their keys; the manifest does not list them, as a missing one is rebuilt."""
    # Imported here because Numba comes with them, which takes a second.
    from inference_session.tables.table_file import TableFile

    for table in spec.tables:
        folder = version_dir / TABLES_FOLDER / table.folder
        if (folder / INDEX_FILE).exists():
            TableFile.open(folder, table, must_have_index=True, verify_index=True)


def _describe(spec: ModelSpec, version_dir: Path) -> dict[str, Any]:
    return {
        "version_dir": str(version_dir),
        "source": spec.source,
        "inputs": [_tensor(tensor) for tensor in spec.inputs],
        "outputs": [_tensor(tensor) for tensor in spec.outputs],
        "tasks": list(spec.labels),
        "dense_network": describe_dense_network(spec, version_dir),
        "joinable": spec.joins_requests,
        "context": list(spec.context),
        "ranking": _ranking(spec.ranking),
        "tables": [
            {
                "name": table.name,
                "folder": table.folder,
                "rows": table.num_rows,
                "embedding_dim": table.embedding_dim,
                "dtype": table.dtype,
                "keys": table.keys,
                "bytes": table.num_bytes,
                "large_pages_fraction": large_page_fraction(version_dir / TABLES_FOLDER / table.folder / VECTOR_FILE),
            }
            for table in spec.tables
        ],
        "lookups": [{"table": lookup.table, "keys": lookup.keys, "pooling": lookup.pooling} for lookup in spec.lookups],
        "total_table_bytes": sum(table.num_bytes for table in spec.tables),
    }


def _show_ranking(spec: ModelSpec) -> None:
    if spec.ranking is not None:
        click.echo(f"Context: {as_cell(', '.join(spec.context))}")
        for line in spec.ranking.described():
            click.echo(f"  {line}")


def _tensor(tensor: TensorSpec) -> dict[str, Any]:
    return {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape)}


def _ranking(ranking: RankingSpec | None) -> dict[str, Any] | None:
    """Which of a candidate's costs are paid once per context."""
    if ranking is None:
        return None
    return {name: value for name, value in asdict(ranking).items() if name not in {"lookups", "may_pad"}}


def _network(facts: dict[str, Any] | None) -> str:
    if facts is None:
        return "none"
    text = f"{facts['engine']}, {facts['precision']}"
    if "matrix_products" in facts:
        text += f" for {facts['matrix_products']} of {facts['all_matrix_products']} matrix products"
    return text


def _show(description: dict[str, Any]) -> None:
    console = output_console()
    for title in ("inputs", "outputs"):
        table = _table(title.capitalize(), ["name"], ["type", "shape"])
        for tensor in description[title]:
            table.add_row(as_cell(tensor["name"]), tensor["dtype"], escape(str(tensor["shape"])))
        console.print(table)
    tables = _table("Tables", ["name", "folder"], ["rows", "dim", "type", "bytes", "large pages"])
    for row in description["tables"]:
        numbers = (str(row["rows"]), str(row["embedding_dim"]), row["dtype"], str(row["bytes"]))
        fraction = row["large_pages_fraction"]
        tables.add_row(as_cell(row["name"]), row["folder"], *numbers, "-" if fraction is None else f"{fraction:.0%}")
    console.print(tables)
    console.print(f"Dense network: {_network(description['dense_network'])}")
    console.print(f"Predictions: {as_cell(', '.join(description['tasks'])) or 'none'}")
    console.print(f"Requests: {'joined into batches' if description['joinable'] else 'computed one by one'}")
    console.print(f"Bytes of all tables: {description['total_table_bytes']}")


def _table(title: str, names: Sequence[str], facts: Sequence[str]) -> Table:
    """An empty table. Long names take several lines, so that nothing is cut off."""
    table = Table(title=title, title_justify="left")
    for heading in names:
        table.add_column(heading, overflow="fold")
    for heading in facts:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
