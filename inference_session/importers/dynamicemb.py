"""Dumps of DynamicEmb (NVIDIA's recsys-examples): its hash tables become tables with stored keys.

A dump has for each table and rank `<table>_emb_keys.rank_R.world_size_W`, raw int64, and `<table>_emb_values…`, raw
float32, in a folder per collection; scores and optimizer values lie next to them and are not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from inference_session.errors import ModelFormatError
from inference_session.importers.report import ImportReport
from inference_session.kernels.records import FLOAT_BYTES, KEY_BYTES
from inference_session.model_spec import KEY_FILE, TABLES_FOLDER, VECTOR_FILE, ModelSpec, TableSpec, folder_names
from inference_session.platform.drafts import draft_version
from inference_session.platform.large_pages import open_for_writing
from inference_session.platform.progress import Progress
from inference_session.requests.hugectr_csr import tables_alone
from inference_session.tables.table_index import build_index
from inference_session.version_directory.publishing import finish_version

_FILE = re.compile(r"(?P<table>.+)_emb_(?P<kind>keys|values)\.rank_(?P<rank>\d+)\.world_size_(?P<size>\d+)")
_CHUNK_BYTES = 8 << 20


def import_dynamicemb(
    dump: Path,
    repository: Path,
    name: str,
    *,
    version: int | None = None,
    progress: Progress | None = None,
    complete: Callable[[Path, ModelSpec], object] | None = None,
) -> ImportReport:
    """Import a dump as `<repository>/<name>/<version>`, a model of tables alone: KEYS, NUMKEYS in, vectors out.

    Args:
        dump: the folder that was dumped into; collections may be in folders below it.
        version: None: one above the highest that exists.
        progress: called with the bytes of tables written.
        complete: called with the draft before it appears.

    Raises:
        ModelFormatError: a file is missing, or has an impossible size; names it.
        ConfigurationError: the version exists.
    """
    tables = _find(dump)
    with draft_version(repository, name, version) as (draft, version_dir):
        written = [table.write(draft, folder, progress) for table, folder in _placed(tables)]
        spec = tables_alone(written, source="DynamicEmb")
        finish_version(draft, spec, progress, complete)
    return ImportReport(version_dir, spec)


@dataclass(frozen=True)
class _Part:
    """The files that one rank dumped of a table."""

    keys: Path
    values: Path

    @property
    def num_rows(self) -> int:
        """The number of rows, by the size of the keys' file."""
        num_bytes = self.keys.stat().st_size
        if num_bytes % KEY_BYTES:
            raise ModelFormatError(f"{self.keys}: {num_bytes} bytes are not a whole number of int64 keys")
        return num_bytes // KEY_BYTES


@dataclass(frozen=True)
class _DumpedTable:
    """One table, of all ranks."""

    name: str
    parts: Sequence[_Part]

    @property
    def embedding_dim(self) -> int:
        """The embedding_dim, by the sizes of the files; ModelFormatError where ranks differ."""
        dims: dict[int, Path] = {}
        for part in self.parts:
            num_bytes, num_rows = part.values.stat().st_size, part.num_rows
            dim, rest = divmod(num_bytes, max(num_rows, 1) * FLOAT_BYTES)
            if rest or (num_rows == 0) != (num_bytes == 0):
                raise ModelFormatError(f"{part.values}: {num_bytes} bytes are not float32 vectors for {num_rows} keys")
            if num_rows:
                dims[dim] = part.values
        if not dims:
            raise ModelFormatError(
                f"{self.parts[0].values}: no rank has a row of {self.name!r}, so its embedding_dim is unknown"
            )
        if len(dims) > 1:
            raise ModelFormatError(
                f"{list(dims.values())[1]}: vectors of {self.name!r} have widths {sorted(dims)}; expected one width"
            )
        return next(iter(dims))

    def write(self, draft: Path, folder: str, progress: Progress | None) -> TableSpec:
        """Concatenate the ranks' files."""
        dim, target = self.embedding_dim, draft / TABLES_FOLDER / folder
        target.mkdir(parents=True)
        _join([part.keys for part in self.parts], target / KEY_FILE, progress)
        _join([part.values for part in self.parts], target / VECTOR_FILE, progress)
        num_rows = sum(part.num_rows for part in self.parts)
        build_index(target, np.memmap(target / KEY_FILE, "<i8", "r", shape=(num_rows,)))
        return TableSpec(self.name, folder, num_rows, dim)


def _find(dump: Path) -> list[_DumpedTable]:
    """All tables below a folder; ModelFormatError where ranks are missing."""
    found: dict[tuple[Path, str], dict[tuple[str, int], Path]] = {}
    sizes: dict[tuple[Path, str], set[int]] = {}
    for path in sorted(dump.rglob("*_emb_*")):
        if match := _FILE.fullmatch(path.name):
            place = path.parent, match["table"]
            found.setdefault(place, {})[match["kind"], int(match["rank"])] = path
            sizes.setdefault(place, set()).add(int(match["size"]))
    if not found:
        raise ModelFormatError(f"{dump}: holds no <table>_emb_keys.rank_R.world_size_W, as DynamicEmbDump writes them")
    tables = []
    for place, files in found.items():
        folder, name = place
        if len(sizes[place]) > 1:
            raise ModelFormatError(
                f"{folder}: found dumps of table {name!r} from jobs of {sorted(sizes[place])} ranks; keep one"
            )
        tables.append(_DumpedTable(name, [_part(folder, name, rank, files) for rank in range(sizes[place].pop())]))
    return tables


def _part(folder: Path, name: str, rank: int, files: dict[tuple[str, int], Path]) -> _Part:
    for kind in ("keys", "values"):
        if (kind, rank) not in files:
            raise ModelFormatError(f"{folder}: the {kind} of rank {rank} of table {name!r} are missing")
    return _Part(files["keys", rank], files["values", rank])


def _placed(tables: Sequence[_DumpedTable]) -> Iterable[tuple[_DumpedTable, str]]:
    return zip(tables, folder_names([table.name for table in tables]), strict=True)


def _join(paths: Sequence[Path], target: Path, progress: Progress | None) -> None:
    with open_for_writing(target, "xb") as file:
        for path in paths:
            with path.open("rb") as part:
                while chunk := part.read(_CHUNK_BYTES):
                    file.write(chunk)
            if progress:
                progress(path.stat().st_size)
