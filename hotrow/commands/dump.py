"""`hotrow dump`: the rows of a model as they are served, back into HugeCTR's sparse folders."""

from __future__ import annotations

from pathlib import Path

import click

from hotrow.options.types import FOLDER
from hotrow.output.progress import row_progress
from inference_session.errors import ConfigurationError
from inference_session.version_directory.session_file import read_spec

_READING_ONLY = {
    "cache_bytes": "0",
    "cache_missed_keys": "false",
    "touch_rows": "false",
    "keep_versions": "0",
    "refresh_interval_s": "0",
    "store_timeout_ms": "30000",
}
"""Settings of a session that does not change the stores."""


@click.command()
@click.argument("version_dir", type=FOLDER)
@click.option("--to", "target", required=True, metavar="DIR|URL", help="New folder, or hdfs://HOST:PORT/path.")
@click.option("--volatile-store", metavar="STORE_URL", help="[default: as in config.pbtxt]")
@click.option("--persistent-store", metavar="STORE_URL", help="[default: as in config.pbtxt]")
@click.option(
    "--namespace",
    type=click.Choice(["version", "shared"]),
    help=("Which rows of the stores to read.  [default: as in config.pbtxt]"),
)
def command(
    version_dir: Path, target: str, volatile_store: str | None, persistent_store: str | None, namespace: str | None
) -> None:
    """Write the rows of VERSION_DIR, REPOSITORY/MODEL/VERSION, as they are served: a folder per table with `key`
    and `emb_vector`, which HugeCTR loads and `hotrow import hugectr` imports.

    Rows come from the model's stores; rows that the stores lack come from its files. The model may be served at
    the same time. A RocksDB is read as of one moment. Redis has no such snapshot: rows written to it during the
    dump may or may not be included.

    \b
    Example:
      hotrow dump model_repository/ctr/1 --to hdfs://namenode:9870/dumps/ctr-1
    """
    from inference_session.rows.create import create_rows
    from inference_session.rows.dump import dump
    from inference_session.version_directory.version import VersionDirectory
    from triton_backend.repository.model_config import configured_session

    given = {"volatile_store": volatile_store, "persistent_store": persistent_store, "store_namespace": namespace}
    settings = {name: value for name, value in given.items() if value is not None}
    spec = read_spec(version_dir)
    config = configured_session(spec, version_dir, **settings, **_READING_ONLY)
    if config.update_stream is not None and not config.has_store:
        raise ConfigurationError(
            f"{version_dir}: the changes of its update stream are only in the memory of the process that serves it;"
            " open it in Python with `update_stream` and `catch_up_s`, which reads the stream again, and call"
            " InferenceSession.dump(), or serve it with a persistent_store"
        )
    num_rows = sum(table.num_rows for table in spec.tables)
    rows = create_rows(VersionDirectory(version_dir, spec), config)
    try:
        with row_progress(f"Dumping {version_dir}", num_rows) as progress:
            report = dump(rows, spec, target, progress)
    finally:
        rows.close()
    for folder, count in report.num_rows.items():
        click.echo(f"{folder}: {count} rows")
    click.echo(f"{sum(report.num_rows.values())} rows in {target}")
