"""`hotrow size`: the memory that a model needs, and the cache that its keys deserve."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from hotrow.progress import key_progress
from hotrow.served_version import served_version
from hotrow.sizing_report import SizingReport, TableReport, show
from inference_session.errors import ConfigurationError, TraceFormatError
from inference_session.formats.native import ModelSpec, TableSpec
from inference_session.key_recorder import read_recording
from inference_session.sizing import (
    DEFAULT_TARGET,
    TRACE_FORMATS,
    KeySample,
    LruCurve,
    SamplingError,
    SimulatedCurve,
    TracePart,
    memory_items,
    read_trace,
)
from inference_session.sizing.hit_rate import num_simulated_keys
from triton_backend.model_config import configured_cache_bytes

_SAMPLED_KEYS = 1 << 24
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class _Bytes(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic from click 8.3 on
    """A whole number, or one of KiB, MiB, GiB, TiB."""

    name = "bytes"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(?:i?b)?|b)?", str(value).strip().lower())
        if match is None:
            self.fail(f"{value!r} is no number of bytes; examples: 1073741824, 512MiB, 1.5GiB", param, ctx)
        return int(Decimal(match[1]) * _UNITS[match[2] or ""])


@click.command()
@click.argument(
    "directory",
    metavar="MODEL_OR_VERSION_DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
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
    help="auto goes by the file's ending; raw int64 is little endian, int64-be big endian.",
)
@click.option("--cache-bytes", type=_Bytes(), help="Size of the cache.  [default: as the model's settings say]")
@click.option("--processes", type=click.IntRange(min=1), default=1, show_default=True, help="That serve the model.")
@click.option(
    "--devices",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="GPUs, each with a process, a cache and the network of its own; 0: on the CPU.",
)
@click.option(
    "--target",
    type=click.FloatRange(0, 1, min_open=True),
    default=DEFAULT_TARGET,
    show_default=True,
    help="Recommend the smallest cache with this part of the best hit rate possible.",
)
@click.option(
    "--sampled-keys",
    type=click.IntRange(min=1000),
    metavar="N",
    help=f"Keys of the traces that are kept; of longer ones a sample.  [default: {_SAMPLED_KEYS}]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.option(
    "--plot",
    "plots",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.png|FILE.html",
    help="Write the curves as a picture, or all as a page. May be repeated.",
)
def command(
    directory: Path,
    traces: tuple[str, ...],
    trace_format: str,
    cache_bytes: int | None,
    processes: int,
    devices: int,
    target: float,
    sampled_keys: int | None,
    as_json: bool,
    plots: tuple[Path, ...],
) -> None:
    """Tell how much memory a model needs, and from a trace of its keys, how large its cache should be.

    The hit rate of every cache size is computed from the trace, exactly for LRU and by simulation for hotrow's own
    cache; of very long traces from a sample, whose error is stated. The setting record_keys makes a served model
    record its keys.

    \b
    Examples:
      hotrow size model_repository/ctr
      hotrow size model_repository/ctr/1 --trace user=users.npy --trace item=items.txt.gz --plot curves.html
    """
    for plot in plots:
        if plot.suffix not in (".png", ".html"):
            raise click.BadParameter(f"{str(plot)!r} ends in neither .png nor .html", param_hint="'--plot'")
        if not plot.absolute().parent.is_dir():
            raise click.BadParameter(f"{str(plot)!r}: there is no such folder", param_hint="'--plot'")
    if plots and find_spec("matplotlib") is None:
        raise ConfigurationError('--plot needs matplotlib: pip install "hotrow[report]"')
    with served_version(directory) as version:
        spec = ModelSpec.read(version.directory)
        if cache_bytes is None:
            cache_bytes = configured_cache_bytes(spec, version.directory, on_device=devices > 0, **version.settings)
        copies = {"num_processes": max(processes, devices), "num_devices": devices}
        items = memory_items(spec, version.directory, cache_bytes=cache_bytes, **copies)
    parts = _trace_parts(spec, traces, trace_format)
    report = SizingReport(
        version_dir=version.named,
        spec=spec,
        cache_bytes=cache_bytes,
        items=items,
        target=target,
        tables=_table_reports(spec, parts, sampled_keys or _SAMPLED_KEYS) if traces else {},
    )
    for plot in plots:
        report.plot(plot)
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=1, ensure_ascii=False))
    else:
        show(report)


def _trace_parts(spec: ModelSpec, traces: Iterable[str], trace_format: str) -> Iterator[tuple[TableSpec, TracePart]]:
    """All keys of all traces, and whose they are."""
    for argument in traces:
        name, equals, path = argument.partition("=")
        table = name if equals and any(name in (table.name, table.folder) for table in spec.tables) else None
        file = Path(path if table else argument)
        parts = read_recording(file) if file.is_dir() else read_trace(file, trace_format)
        for part in parts:
            yield _table_of(spec, file, part.table or table), part


def _table_of(spec: ModelSpec, file: Path, table: str | None) -> TableSpec:
    if table is not None:
        return spec.table(table)
    if len(spec.tables) == 1:
        return spec.tables[0]
    known = ", ".join(repr(table.name) for table in spec.tables) or "none"
    raise ConfigurationError(f"--trace {file}: whose keys are these? Write --trace TABLE={file}; tables: {known}")


def _table_reports(
    spec: ModelSpec, parts: Iterator[tuple[TableSpec, TracePart]], sampled_keys: int
) -> dict[str, TableReport]:
    samples = {table.folder: KeySample(max(sampled_keys // len(spec.tables), 1000)) for table in spec.tables}
    num_unknown = dict.fromkeys(samples, 0)
    with key_progress("Reading keys") as progress:
        for table, part in parts:
            keys = _known_keys(table, part.keys)
            unknown = len(part.keys) - len(keys)
            num_unknown[table.folder] += unknown
            num_keys = len(part.keys) if part.num_keys is None else part.num_keys
            samples[table.folder].add_sampled(keys, num_keys - unknown, part.halvings)
            progress(len(part.keys))
    traced = {folder: sample for folder, sample in samples.items() if sample.num_keys > 0}
    if not traced:
        raise TraceFormatError("the traces hold no key that any of the tables has")
    with key_progress("Computing LRU", sum(len(sample.keys) for sample in traced.values())) as progress:
        curves = {folder: _lru(sample, progress) for folder, sample in traced.items()}
    total = sum(num_simulated_keys(sample, curves[folder].num_distinct) for folder, sample in traced.items())
    with key_progress("Simulating caches", total) as progress:
        return {
            folder: TableReport(
                spec=spec.table(folder),
                num_keys=sample.num_keys,
                num_unknown=num_unknown[folder],
                rate=sample.rate,
                lru=curves[folder],
                ours=SimulatedCurve.of_sample(sample, curves[folder].num_distinct, progress),
                error=SamplingError.of_sample(sample),
            )
            for folder, sample in traced.items()
        }


def _known_keys(table: TableSpec, keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Those that may be cached, as far as the table's description tells: a row number that is none has no row."""
    if table.keys == "stored":
        return keys
    return keys[(keys >= 0) & (keys < table.num_rows)]


def _lru(sample: KeySample, progress: Callable[[int], None]) -> LruCurve:
    curve = LruCurve.of_sample(sample)
    progress(len(sample.keys))
    return curve
