"""Dumps of DynamicEmb, written as it writes them, become tables with their keys."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inference_session import InferenceSession
from inference_session.errors import ModelFormatError
from inference_session.importers.dynamicemb import import_dynamicemb
from tests.testing.command_line import hotrow

RANDOM = np.random.default_rng(0)
EXTREMES = np.array([-(2**63), -1, 0, 2**63 - 1], np.int64)


def _dump(folder: Path, table: str, parts: list[np.ndarray], dim: int) -> dict[int, np.ndarray]:
    """Files of this many ranks; returns the rows by key."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[int, np.ndarray] = {}
    for rank, keys in enumerate(parts):
        vectors = RANDOM.random((len(keys), dim)).astype(np.float32)
        end = f"rank_{rank}.world_size_{len(parts)}"
        keys.astype("<i8").tofile(folder / f"{table}_emb_keys.{end}")
        vectors.tofile(folder / f"{table}_emb_values.{end}")
        vectors.tofile(folder / f"{table}_emb_opt_values.{end}")
        keys.tofile(folder / f"{table}_emb_scores.{end}")
        rows |= dict(zip(keys.tolist(), vectors, strict=True))
    return rows


def test_all_ranks_of_all_tables_are_imported(tmp_path: Path) -> None:
    """By the command; extremes among the keys, a rank without rows, tables in folders of their collections."""
    empty = np.empty(0, np.int64)
    expected = {
        "users": _dump(tmp_path / "dump" / "model.users", "users", [EXTREMES, np.arange(10, 50), empty], 4),
        "item ids": _dump(tmp_path / "dump" / "model.items", "item ids", [np.arange(100)], 8),
    }

    hotrow("import", "dynamicemb", tmp_path / "dump", "--name", "tables", "--repository", tmp_path / "repository")

    assert (tmp_path / "repository" / "tables" / "config.pbtxt").exists()
    with InferenceSession.open(tmp_path / "repository" / "tables" / "1", device="cpu") as session:
        for name, rows in expected.items():
            keys = np.array([*rows, 77_777], np.int64)
            found = session.lookup(name, keys)
            assert np.array_equal(found[:-1], np.stack(list(rows.values())))
            assert not found[-1].any()


def test_dumps_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    """A rank that is missing, files that do not fit, two dumps in one folder, none at all."""
    cases = []
    for number in range(5):
        folder = tmp_path / str(number)
        _dump(folder, "t", [np.arange(10), np.arange(10, 20)], 4)
        cases.append(folder)
    (cases[0] / "t_emb_values.rank_1.world_size_2").unlink()
    (cases[1] / "t_emb_values.rank_1.world_size_2").write_bytes(b"123")
    (cases[2] / "t_emb_keys.rank_0.world_size_2").write_bytes(b"123")
    _dump(cases[3], "t", [np.arange(10)], 4)
    for path in cases[4].iterdir():
        path.unlink()

    texts = (
        "values of rank 1 of table 't' are missing",
        "3 bytes are not float32 vectors for",
        "bytes are not a whole number of int64 keys",
        "from jobs of",
        "no <table>",
    )
    for folder, text in zip(cases, texts, strict=True):
        with pytest.raises(ModelFormatError, match=text):
            import_dynamicemb(folder, tmp_path / "repository", "m")
    assert not (tmp_path / "repository").exists()
