"""Fixtures of the tests of tables."""

from __future__ import annotations

import pytest

from inference_session.tables.table_file import TableFile
from tests.testing.tables_of_all_kinds import write_files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[TableFile]:
    """Tables of every kind."""
    return write_files(tmp_path_factory.mktemp("tables"))
