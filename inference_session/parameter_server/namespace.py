"""Where the rows of one model version live in a store that several models and versions share: by tag.

hps_et.<model>@<version>.<table>    kept apart by version, so that loading a version changes no other's rows
hps_et.<model>.<table>              HPS's own: one set of rows for all versions, shared with HPS
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from inference_session.version_directory.names import model_and_version

_TAG = re.compile(r"hps_et\.(?P<model>.+?)(?:@(?P<version>[^.@]+))?\.(?P<table>[^.]+)", re.DOTALL)


@dataclass(frozen=True)
class Namespace:
    """The tags of one model's tables."""

    model: str
    version: str | None = None
    """None: shared by all versions."""

    @classmethod
    def of(cls, version_dir: Path, *, shared: bool) -> Namespace:
        """That of <repository>/<model>/<version>; `shared`: by all versions."""
        model, version = model_and_version(version_dir)
        return cls(model, None if shared else version)

    def tag(self, table: str) -> str:
        """Tag of a table (its folder name)."""
        version = "" if self.version is None else f"@{self.version}"
        return f"hps_et.{self.model}{version}.{table}"

    def version_of(self, tag: str) -> str | None:
        """The version that the tag's rows are of; None if they are another model's, or all versions'."""
        parts = split_tag(tag)
        return parts[0].version if parts is not None and parts[0].model == self.model else None

    def __str__(self) -> str:
        return f"model {self.model!r}, " + ("all versions" if self.version is None else f"version {self.version}")


class StoredTable(NamedTuple):
    """A table found in a store."""

    tag: str
    num_rows: int
    embedding_dim: int | None
    """None where the store tells no width, having no rows."""


def split_tag(tag: str) -> tuple[Namespace, str] | None:
    """The namespace and the table that a tag stands for; None if it is no tag."""
    match = _TAG.fullmatch(tag)
    return None if match is None else (Namespace(match["model"], match["version"]), match["table"])
