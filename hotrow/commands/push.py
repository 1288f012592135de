"""`hotrow push`: the rows of a version directory into a store."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotrow.options.types import FOLDER, FOLDER_OR_URL
from hotrow.output.progress import row_progress, verify_checksums
from inference_session.parameter_server.namespace import Namespace
from inference_session.urls.store_url import StoreUrl
from inference_session.version_directory.session_file import read_spec

if TYPE_CHECKING:
    from inference_session.parameter_server.table_push import TablePush

_TIMEOUT_MS = 30_000


def _version_dir(ctx: click.Context, parameter: click.Parameter, value: str) -> Path:
    if "://" in value:  # errors must not repeat it: it may contain a password
        raise click.BadParameter("expected a directory, found a URL; give the store with --to")
    return FOLDER.convert(value, parameter, ctx)


@click.command()
@click.argument("version_dir", type=FOLDER_OR_URL, callback=_version_dir)
@click.option(
    "--to",
    "store_url",
    required=True,
    metavar="STORE_URL",
    help="redis://, redis+cluster://, redis+sentinel://, rocksdb:///…",
)
@click.option("--verify", is_flag=True, help="Read all rows back and compare them.")
@click.option(
    "--verify-sample",
    type=click.IntRange(min=1),
    metavar="N",
    help=("Read N random rows of each table back and compare them."),
)
@click.option(
    "--namespace",
    type=click.Choice(["version", "shared"]),
    default="version",
    show_default=True,
    help="`shared`: the namespace of HPS, the same for all versions.",
)
def command(version_dir: Path, store_url: str, verify: bool, verify_sample: int | None, namespace: str) -> None:
    """Fill a store with the rows of a version directory, REPOSITORY/MODEL/VERSION.

    All files are compared with the version's checksums first; if one is damaged, nothing is written. To resume an
    interrupted push, run the command again. Pushing again does no harm.

    \b
    Example:
      hotrow push model_repository/ctr/1 --to redis://127.0.0.1:6379/0 --verify
    """
    # These import Numba, which takes seconds.
    from inference_session.parameter_server.base import ERASED_SUFFIX
    from inference_session.parameter_server.create import create_store
    from inference_session.parameter_server.table_push import TablePush

    spec = read_spec(version_dir)
    verify_checksums(version_dir)
    bound_to = Namespace.of(version_dir, shared=namespace == "shared")
    dims = {table.folder: table.embedding_dim for table in spec.tables}
    dims |= {table.folder + ERASED_SUFFIX: 1 for table in spec.tables}
    with create_store(StoreUrl.parse(store_url), bound_to, dims, writable=True, timeout_ms=_TIMEOUT_MS) as store:
        drops_others = bound_to.version is not None
        pushes = [TablePush(version_dir, table, store, drops_others=drops_others) for table in spec.tables]
        _push(pushes)
        if verify or verify_sample is not None:
            _verify(pushes, None if verify else verify_sample)


def _push(pushes: list[TablePush]) -> None:
    begin = time.perf_counter()
    num_written = 0
    for push in pushes:
        with row_progress(f"Pushing {push.spec.folder}", push.spec.num_rows) as progress:
            report = push.run(progress)
        num_written += report.num_rows - report.num_resumed
        resumed = f" ({report.num_resumed} of them pushed by an earlier run)" if report.num_resumed else ""
        click.echo(f"{report.table}: {report.num_rows} rows{resumed}")
    seconds = time.perf_counter() - begin
    click.echo(f"{num_written} rows pushed in {seconds:.1f} s, {num_written / max(seconds, 1e-9):.0f} rows/s")


def _verify(pushes: list[TablePush], num_samples: int | None) -> None:
    num_rows = 0
    for push in pushes:
        with row_progress(f"Verifying {push.spec.folder}", num_samples or push.spec.num_rows) as progress:
            num_rows += push.verify(num_samples, progress)
    click.echo(f"{num_rows} rows read back, all equal to the files")
