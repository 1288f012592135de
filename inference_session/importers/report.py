"""The result of an import, for the person who ran it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inference_session.model_spec import ModelSpec, TableSpec

_MAX_NAMES = 12


@dataclass(frozen=True)
class DenseInitializer:
    """An initializer that is read by rows, but stays in the dense network."""

    name: str
    reason: str


@dataclass(frozen=True)
class ImportReport:
    """The result of an import."""

    version_dir: Path
    spec: ModelSpec
    stays_dense: tuple[DenseInitializer, ...] = ()
    notes: tuple[str, ...] = ()
    """What else to tell the person, a sentence each."""

    @property
    def tables(self) -> tuple[TableSpec, ...]:
        """The tables that were carved out."""
        return self.spec.tables

    def __str__(self) -> str:
        lines = [f"Imported {self.spec.source} as {self.version_dir}", f"Tables: {len(self.tables) or 'none'}"]
        lines += [f"  {self._table_line(table)}" for table in self.tables]
        if self.stays_dense:
            lines.append("Stays in the dense network:")
            lines += [f"  {item.name!r} {item.reason}" for item in self.stays_dense]
        if self.spec.ranking:
            lines.append(f"Context: {shortened(self.spec.context)}")
            lines += [f"  {line}" for line in self.spec.ranking.described()]
        if self.spec.labels:
            lines.append(f"Predictions: {shortened(self.spec.labels)}")
        lines += [f"Note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _table_line(self, table: TableSpec) -> str:
        reads = [lookup for lookup in self.spec.lookups if lookup.table == table.folder]
        ways = [
            f"{lookup.keys!r}{f', {lookup.pooling}' if lookup.pooling != 'none' else ''}"
            f"{', weighted' if lookup.weights else ''}"
            for lookup in reads
        ]
        return f"{table.name!r}: {table.num_rows} rows x {table.embedding_dim} {table.dtype}, read by {'; '.join(ways)}"


def shortened(names: Sequence[str]) -> str:
    """Names in a line that a person reads; of many, the first ones and the total number."""
    if len(names) <= _MAX_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: _MAX_NAMES - 1])} … ({len(names)} in all)"
