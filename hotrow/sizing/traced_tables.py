"""Analyses key traces of a model's tables, for `hotrow size`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotrow.output.progress import key_progress
from hotrow.sizing.report import TableReport
from inference_session.errors import ConfigurationError, TraceFormatError
from inference_session.model_spec import ModelSpec, TableSpec
from inference_session.sizing.hit_rate import LruCurve, SamplingError, SimulatedCurve, num_simulated_keys
from inference_session.sizing.key_recorder import read_recording
from inference_session.sizing.key_sample import KeySample
from inference_session.sizing.trace_file import TracePart, read_trace

_LEAST_SAMPLED_KEYS = 1000


def read_traces(
    spec: ModelSpec, traces: Iterable[str], trace_format: str, *, sampled_keys: int
) -> dict[str, TableReport]:
    """Reports by folder, of the tables that have keys in the traces, each written as `FILE` or `TABLE=FILE`.

    Raises:
        ConfigurationError: the table of a trace's keys is unclear.
        TraceFormatError: a trace cannot be read, or holds no key of any table.
    """
    samples, num_unknown = _sample(spec, _parts(spec, traces, trace_format), sampled_keys)
    traced = {folder: sample for folder, sample in samples.items() if sample.num_keys > 0}
    if not traced:
        raise TraceFormatError("the traces contain no key of any table")
    with key_progress("Computing LRU", sum(len(sample.keys) for sample in traced.values())) as progress:
        curves = {folder: _lru(sample, progress) for folder, sample in traced.items()}
    total = sum(num_simulated_keys(sample, curves[folder].num_distinct) for folder, sample in traced.items())
    with key_progress("Simulating caches", total) as progress:
        return {
            folder: TableReport(
                spec=spec.table_in(folder),
                num_keys=sample.num_keys,
                num_unknown=num_unknown[folder],
                rate=sample.rate,
                lru=curves[folder],
                ours=SimulatedCurve.of_sample(sample, curves[folder].num_distinct, progress),
                error=SamplingError.of_sample(sample),
            )
            for folder, sample in traced.items()
        }


def _sample(
    spec: ModelSpec, parts: Iterable[tuple[TableSpec, TracePart]], sampled_keys: int
) -> tuple[dict[str, KeySample], dict[str, int]]:
    """By folder, a sample of the keys that the table has, and the number of keys that it lacks."""
    per_table = max(sampled_keys // len(spec.tables), _LEAST_SAMPLED_KEYS)
    samples = {table.folder: KeySample(per_table) for table in spec.tables}
    num_unknown = dict.fromkeys(samples, 0)
    with key_progress("Reading keys") as progress:
        for table, part in parts:
            keys = _known_keys(table, part.keys)
            unknown = len(part.keys) - len(keys)
            num_unknown[table.folder] += unknown
            num_keys = len(part.keys) if part.num_keys is None else part.num_keys
            samples[table.folder].add_sampled(keys, num_keys - unknown, part.halvings)
            progress(len(part.keys))
    return samples, num_unknown


def _parts(spec: ModelSpec, traces: Iterable[str], trace_format: str) -> Iterator[tuple[TableSpec, TracePart]]:
    """All keys of all traces, with their tables."""
    for argument in traces:
        name, equals, path = argument.partition("=")
        table = name if equals and any(name in (table.name, table.folder) for table in spec.tables) else None
        file = Path(path if table else argument)
        if equals and not table and not file.exists():
            raise ConfigurationError(f"--trace {argument}: the model has no table {name!r}; tables: {_names(spec)}")
        if file.is_dir():  # a recording, which names tables by their folders
            yield from ((spec.table_in(str(part.table)), part) for part in read_recording(file))
        else:
            for part in read_trace(file, trace_format):
                yield _table_of(spec, file, part.table or table), part


def _table_of(spec: ModelSpec, file: Path, table: str | None) -> TableSpec:
    if table is not None:
        return spec.table(table)
    if len(spec.tables) == 1:
        return spec.tables[0]
    raise ConfigurationError(
        f"--trace {file}: name the table whose keys these are: --trace TABLE={file}; tables: {_names(spec)}"
    )


def _names(spec: ModelSpec) -> str:
    return ", ".join(repr(table.name) for table in spec.tables) or "none"


def _known_keys(table: TableSpec, keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Keys that may be cached, by the table's description: an invalid row number has no row."""
    if table.keys == "stored":
        return keys
    return keys[(keys >= 0) & (keys < table.num_rows)]


def _lru(sample: KeySample, progress: Callable[[int], None]) -> LruCurve:
    curve = LruCurve.of_sample(sample)
    progress(len(sample.keys))
    return curve
