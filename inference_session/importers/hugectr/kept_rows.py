"""Tables of earlier versions, whose rows a new version keeps for keys that it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from inference_session.errors import ConfigurationError
from inference_session.model_spec import TABLES_FOLDER, TableSpec, VectorType
from inference_session.version_directory.session_file import read_spec


class KeptTable(NamedTuple):
    """A table's folder in an earlier version, and how it stores vectors."""

    path: Path
    dtype: VectorType = "float32"


Kept = Sequence[Path] | Path
"""What an importer is given: a version directory; or sparse folders, one per table in the order of the tables, of
several versions the oldest first.
"""


def kept_tables(kept: Kept, names: Sequence[str], dims: Sequence[int]) -> list[list[KeptTable]]:
    """The earlier tables of each table of a model, the oldest first.

    The tables of a version directory are found by their names, as their order may have changed.

    Raises:
        ConfigurationError: they are not those of the model.
        ModelFormatError: that is no version directory.
    """
    if isinstance(kept, Path):
        return _of_version(kept, dict(zip(names, dims, strict=True)))
    if len(kept) % len(names):
        raise ConfigurationError(
            f"the model has {len(names)} tables, but {len(kept)} folders in keep_rows_of; give one per table"
        )
    return [[KeptTable(path) for path in kept[i :: len(names)]] for i in range(len(names))]


def _of_version(version_dir: Path, dims: dict[str, int]) -> list[list[KeptTable]]:
    earlier = {table.name: table for table in read_spec(version_dir).tables}
    if not dims.keys() <= earlier.keys() and not earlier.keys() <= dims.keys():
        raise ConfigurationError(
            f"{version_dir}, whose rows are to be kept, has the tables {_listed(earlier)}, and the model has "
            f"{_listed(dims)}; tables are found by their names"
        )
    return [[_kept(version_dir, earlier[name], dim)] if name in earlier else [] for name, dim in dims.items()]


def _kept(version_dir: Path, table: TableSpec, embedding_dim: int) -> KeptTable:
    if table.embedding_dim != embedding_dim:
        raise ConfigurationError(
            f"{version_dir}, whose rows are to be kept: table {table.name!r} has vectors of {table.embedding_dim} "
            f"elements, and the model's has {embedding_dim}"
        )
    return KeptTable(version_dir / TABLES_FOLDER / table.folder, table.dtype)


def _listed(names: dict[str, int] | dict[str, TableSpec]) -> str:
    return ", ".join(map(repr, names))
