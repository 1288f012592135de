"""The place of a table's rows in a version that is exported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hotrow.training.tables import Table
from inference_session.model_spec import KEY_FILE, TABLES_FOLDER, VECTOR_FILE, TableSpec


@dataclass(frozen=True)
class RankRows:
    """The rows of a table with keys that one rank writes."""

    count: int
    first_row: int
    """The first row of its shard in the whole table."""
    unknown_vector: tuple[float, ...]
    """The answer to unknown keys of this shard."""


@dataclass(frozen=True)
class ExportedTable:
    """A table, and its files in the version directory."""

    table: Table
    num_rows: int
    """In the files; one, of zeros, while a table without rows is traced."""
    folder: str
    """Also its name in stores and topics."""
    parts: Sequence[RankRows] = ()
    """By rank, of a table with keys."""
    is_empty: bool = False
    """Whether the table has no rows: no operator of the traced network could read one."""

    @property
    def location(self) -> str:
        """The file of vectors, relative to the version directory."""
        return f"{TABLES_FOLDER}/{self.folder}/{VECTOR_FILE}"

    @property
    def key_location(self) -> str:
        """The file of keys, of a table with keys."""
        return f"{TABLES_FOLDER}/{self.folder}/{KEY_FILE}"

    @property
    def unknown_vectors(self) -> list[tuple[float, ...]]:
        """The answers to unknown ids: of a table with managed collisions the last row of each shard, in their order."""
        found = [part.unknown_vector for part in sorted(self.parts, key=lambda part: part.first_row)]
        return found if self.table.shards_of is not None else found[:1]

    def described(self, spec: TableSpec) -> TableSpec:
        """The served table, of which the network knows no keys."""
        num_rows = 0 if self.is_empty else spec.num_rows
        return replace(spec, keys="stored", default_vector=self.default_vector, num_rows=num_rows)

    @property
    def default_vector(self) -> tuple[float, ...]:
        """The vector for unknown ids; where each shard has its own answer, the network puts it in place."""
        if self.table.shards_of is not None:
            return (self.table.unknown_value,) * self.table.embedding_dim
        return self.unknown_vectors[0]
