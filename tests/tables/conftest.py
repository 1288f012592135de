"""Fixtures of the tests of tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_session.tables.table_file import TableFile
from tests.testing.tables_of_all_kinds import write_files


@pytest.fixture(scope="module")
def folder_of_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `files` are."""
    return tmp_path_factory.mktemp("tables")


@pytest.fixture(scope="module")
def files(folder_of_files: Path) -> list[TableFile]:
    """Tables of every kind."""
    return write_files(folder_of_files)
