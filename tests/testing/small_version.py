"""The small model as a version with a unique name."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tests.testing import small_model


class SmallVersion(NamedTuple):
    """The small model in a version directory."""

    directory: Path
    tables: small_model.Arrays

    @property
    def model(self) -> str:
        """Its name."""
        return self.directory.parent.name

    def topic(self, table: str, prefix: str = "hps_et") -> str:
        """The topic of a table."""
        return f"{prefix}.{self.model}.{table}"
