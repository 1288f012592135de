"""`hotrow size`: the memory that a model needs, and the cache size that suits its keys."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotrow.options.types import FOLDER, Number
from hotrow.output.streams import print_json
from inference_session.errors import ConfigurationError
from inference_session.sizing.trace_file import TRACE_FORMATS
from inference_session.version_directory.session_file import read_spec

if TYPE_CHECKING:
    from hotrow.sizing.report import SizingReport
    from inference_session.device.placement import Shard

_DEFAULT_TARGET = 0.95
_SAMPLED_KEYS = 1 << 24
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class _Bytes(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic from click 8.3 on
    """A number of bytes, KiB, MiB, GiB or TiB."""

    name = "bytes"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(?:i?b)?|b)?", str(value).strip().lower())
        if match is None:
            self.fail(f"{value!r} is not a number of bytes; examples: 1073741824, 512MiB, 1.5GiB", param, ctx)
        return int(Decimal(match[1]) * _UNITS[match[2] or ""])


@click.command()
@click.argument("directory", metavar="MODEL_OR_VERSION_DIR", type=FOLDER)
@click.option(
    "--trace",
    "traces",
    multiple=True,
    metavar="[TABLE=]FILE",
    help="Keys in the order of their use: .npy, raw int64, .txt, .csv with columns table and key, each also .gz, .xz, "
    ".bz2; or a recording's folder. May be repeated.",
)
@click.option(
    "--trace-format",
    type=click.Choice(TRACE_FORMATS),
    default="auto",
    show_default=True,
    help="`auto` uses the file's extension; raw int64 is little endian, int64-be big endian.",
)
@click.option("--cache-bytes", type=_Bytes(), help="Size of the cache.  [default: as the model's settings say]")
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    help="Number of processes that serve the model.  [default: the instances in its config.pbtxt]",
)
@click.option(
    "--devices",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Number of GPUs, each with its own network; 0 for the CPU.",
)
@click.option(
    "--shard",
    type=click.Choice(("auto", "rows", "none")),
    help="Which tables have their rows divided among the GPUs: the setting.  [default: the model's settings]",
)
@click.option(
    "--target",
    type=Number(0, 1, min_open=True),
    default=_DEFAULT_TARGET,
    show_default=True,
    help="Recommend the smallest cache that reaches this fraction of the best possible hit rate.",
)
@click.option(
    "--sampled-keys",
    type=click.IntRange(min=1000),
    metavar="N",
    help=f"Number of keys to keep of the traces; longer traces are sampled.  [default: {_SAMPLED_KEYS}]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.option(
    "--plot",
    "plots",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.png|FILE.html",
    help="Write the curves to a .png file, or the whole report to an .html file. May be repeated.",
)
def command(
    directory: Path,
    traces: tuple[str, ...],
    trace_format: str,
    cache_bytes: int | None,
    processes: int | None,
    devices: int,
    shard: Shard | None,
    target: float,
    sampled_keys: int | None,
    as_json: bool,
    plots: tuple[Path, ...],
) -> None:
    """Estimate how much memory a model needs and, from a trace of its keys, how large its cache should be.

    The hit rate of every cache size is computed from the trace, exactly for LRU and by simulation for hotrow's own
    cache. Very long traces are sampled, and the error is stated. The setting record_keys makes a served model
    record its keys.

    \b
    Examples:
      hotrow size model_repository/ctr
      hotrow size model_repository/ctr/1 --trace user=users.npy --trace item=items.txt.gz --plot curves.html
    """
    _check_plots(plots)
    # These imports take seconds, which --help and bad options should not.
    from hotrow.sizing.report import show
    from hotrow.sizing.traced_tables import read_traces

    report = replace(_report(directory, cache_bytes, processes, devices, shard), target=target)
    if traces:
        kept = sampled_keys or _SAMPLED_KEYS
        report = replace(report, tables=read_traces(report.spec, traces, trace_format, sampled_keys=kept))
    for plot in plots:
        from hotrow.sizing.plot import write_plot  # imports Matplotlib

        write_plot(report, plot)
    if as_json:
        print_json(report.as_json())
    else:
        show(report)


def _report(
    directory: Path, cache_bytes: int | None, processes: int | None, devices: int, shard: Shard | None
) -> SizingReport:
    """The memory that a version needs where it is deployed."""
    from hotrow.sizing.report import SizingReport
    from hotrow.sizing.served_version import served_version
    from inference_session.device.placement import places_of
    from inference_session.sizing.memory import memory_items
    from triton_backend.repository.model_config import configured_cache_bytes, configured_instances, configured_session

    with served_version(directory) as version:
        spec = read_spec(version.directory)
        if cache_bytes is None:
            cache_bytes = configured_cache_bytes(spec, version.directory, on_device=devices > 0, **version.settings)
        config = configured_session(spec, version.directory, **version.settings)
        num_processes = processes or configured_instances(version.named)
        rows_on_device = devices > 0 and not config.has_store
        can_shard = devices > 1 and rows_on_device
        if shard not in (None, "none") and not can_shard:
            raise ConfigurationError(f"--shard={shard} needs --devices 2 or more, and rows in table files")
        shard = (shard or config.shard) if can_shard else "none"
        items = memory_items(
            spec,
            version.directory,
            cache_bytes=cache_bytes,
            rows_on_device=rows_on_device,
            cache_on_device=devices > 0 and config.has_store,
            in_rocksdb=config.persistent_store is not None and config.persistent_store.scheme == "rocksdb",
            num_processes=num_processes if config.names_several_gpus else max(num_processes, devices),
            num_devices=devices,
            shard=shard,
        )
        places = places_of(spec.tables, cache_bytes, devices, shard) if rows_on_device else []
    named = {table.name: place for table, place in zip(spec.tables, places, strict=False)}
    return SizingReport(version.named, spec, cache_bytes, items, named)


def _check_plots(plots: Iterable[Path]) -> None:
    """Check before the work that the files can be written."""
    for plot in plots:
        if plot.suffix not in (".png", ".html"):
            raise click.BadParameter(f"{str(plot)!r} must end in .png or .html", param_hint="'--plot'")
        if not plot.absolute().parent.is_dir():
            raise click.BadParameter(f"{str(plot)!r}: the folder does not exist", param_hint="'--plot'")
        if find_spec("matplotlib") is None:
            raise ConfigurationError('--plot needs matplotlib: pip install "hotrow[report]"')
