"""`hotrow publish`: rows into a Kafka update stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from hotrow.options.types import FOLDER
from hotrow.output.progress import row_progress
from inference_session.errors import ConfigurationError
from inference_session.model_spec import SESSION_FILE
from inference_session.urls.kafka_url import KafkaUrl
from inference_session.version_directory.session_file import read_spec

if TYPE_CHECKING:
    from inference_session.update_stream.publisher import Encoding, Publisher
    from inference_session.update_stream.table_changes import Changes, Table


@click.command()
@click.argument("source", metavar="VERSION_DIR|TABLE_FOLDER", type=FOLDER)
@click.option("--to", "url", required=True, metavar="KAFKA_URL", help="kafka://HOST:PORT[,HOST:PORT]")
@click.option("--model", required=True, help="The model's name in the repository that serves it.")
@click.option("--table", help="Publish only this table; required with a table folder.")
@click.option("--since", metavar="OLD_VERSION", type=FOLDER, help="Publish only what differs from this version.")
@click.option(
    "--encoding",
    type=click.Choice(["row", "batch"]),
    default="row",
    show_default=True,
    help="`row`: a message per row, which brokers can compact; `batch`: many rows per message, which is faster.",
)
def command(source: Path, url: str, model: str, table: str | None, since: Path | None, encoding: Encoding) -> None:
    """Publish rows to the servers that follow a model's update stream, and wait until the brokers have confirmed them.

    The source is a version directory, or with --table a folder with the files `key` and `emb_vector`. With --since,
    rows that are equal in both versions are left out, and rows that no longer exist are deleted. All files of a
    version directory are compared with its checksums first. Publishing again does no harm.

    \b
    Examples:
      hotrow publish trained/user --to kafka://127.0.0.1:9092 --model ctr --table user
      hotrow publish model_repository/ctr/2 --since model_repository/ctr/1 --to kafka://127.0.0.1:9092 --model ctr
    """
    from inference_session.update_stream.publisher import Publisher  # needs the Kafka client, which --help does not

    parsed = KafkaUrl.parse(url)
    sources = _sources(source, table, since)
    begin = time.perf_counter()
    num_rows = 0
    with Publisher(parsed, model, encoding=encoding) as publisher:
        for one in sources:
            counts = _publish(one, publisher)
            num_rows += sum(counts)
            click.echo(f"{one.table.spec.folder}: {counts[0]} rows published, {counts[1]} deleted")
    seconds = time.perf_counter() - begin
    click.echo(f"{num_rows} rows confirmed in {seconds:.1f} s, {num_rows / max(seconds, 1e-9):.0f} rows/s")


class _Source(NamedTuple):
    table: Table
    num_rows: int
    """Number of rows to compare."""
    changes: Callable[[], Iterator[Changes]]


def _sources(source: Path, table: str | None, since: Path | None) -> list[_Source]:
    from inference_session.update_stream.table_changes import open_folder, open_tables  # imports Numba

    if not (source / SESSION_FILE).exists():
        if table is None or since is not None:
            raise ConfigurationError(
                f"{source}: not a version directory, because it has no {SESSION_FILE}; a folder with a table's files"
                " needs --table, and cannot be compared by --since"
            )
        return [_whole(open_folder(source, table))]
    tables = open_tables(source)
    if table is not None:
        wanted = read_spec(source).table(table)
        tables = [one for one in tables if one.spec == wanted]
    if since is None:
        return [_whole(one) for one in tables]
    old = {one.spec.folder: one for one in open_tables(since)}
    return [_difference(one, old[one.spec.folder]) if one.spec.folder in old else _whole(one) for one in tables]


def _whole(table: Table) -> _Source:
    return _Source(table, table.spec.num_rows, table.all_rows)


def _difference(new: Table, old: Table) -> _Source:
    return _Source(new, new.spec.num_rows + old.spec.num_rows, lambda: new.changes_since(old))


def _publish(source: _Source, publisher: Publisher) -> tuple[int, int]:
    """Publish one table; returns the numbers of rows inserted and deleted."""
    inserted = deleted = 0
    folder = source.table.spec.folder
    with row_progress(f"Publishing {folder}", source.num_rows) as progress:
        for keys, vectors, num_done in source.changes():
            if vectors is None:
                publisher.delete(folder, keys)
                deleted += len(keys)
            else:
                publisher.publish(folder, keys, vectors)
                inserted += len(keys)
            progress(num_done)
        publisher.flush()
    return inserted, deleted
