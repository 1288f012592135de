"""Rows of an earlier version that an import keeps for keys that the new files lack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference_session import InferenceSession
from inference_session.errors import ConfigurationError
from inference_session.importers.hugectr import import_hugectr
from inference_session.model_spec import VectorType
from tests.testing.hugectr_source import Source

MODEL = {
    "model": "items",
    "sparse_files": ["0_sparse.model", "1_sparse.model"],
    "embedding_vecsize_per_table": [1, 4],
    "embedding_table_names": ["wide", "deep"],
    "max_batch_size": 16,
}


def tables_alone(folder: Path, keys: list[int], value: float, **fields: Any) -> Source:
    """A model of HPS with two tables, whose rows have these keys and hold this value."""
    source = Source(folder)
    source.keys = [np.array(keys), np.array(keys)]
    source.vectors = [np.full((len(keys), dim), value, np.float32) for dim in (1, 4)]
    for table in range(2):
        source.write_table(table)
    source.settings["models"] = [{**MODEL, **fields}]
    return source


@pytest.mark.parametrize("earlier", ["float32", "float16", "int8"])
@pytest.mark.parametrize("later", ["float32", "int8"])
def test_rows_of_smaller_tables_are_kept(earlier: VectorType, later: VectorType, tmp_path: Path) -> None:
    """Each version may store them in another type; a row of equal elements is exact in all of them."""
    vectors = {"embedding_vecsize_per_table": [16, 16]}
    sources = [tables_alone(tmp_path / name, keys, 0, **vectors) for name, keys in [("old", [1, 2]), ("new", [2, 3])]]
    for number, source in enumerate(sources):
        source.vectors = [np.full((2, 16), 10.0 * (number + 1), np.float32)] * 2
        source.write_table(0)
        source.write_table(1)
    (old,) = import_hugectr(sources[0].ps_json(), tmp_path / "repository", tables=earlier)

    (new,) = import_hugectr(sources[1].ps_json(), tmp_path / "repository", keep_rows_of=old.version_dir, tables=later)

    with InferenceSession.open(new.version_dir, verify="full") as session:
        for table in session.tables:
            assert session.lookup(table, [1, 2, 3, 4])[:, 0].tolist() == [10, 20, 20, 0]


def test_tables_are_found_by_their_names(tmp_path: Path) -> None:
    """ps.json may list them in another order than it did before, or name more of them."""
    folders = ["1_sparse.model"] * 3
    dims = [4, 4, 4]
    fields: dict[str, Any] = {"sparse_files": folders[:2], "embedding_vecsize_per_table": dims[:2]}
    old = tables_alone(tmp_path / "old", [1], 10, **fields)
    new = tables_alone(tmp_path / "new", [2], 20, **fields, embedding_table_names=["deep", "added"])
    (earlier,) = import_hugectr(old.ps_json(), tmp_path / "repository")

    with pytest.raises(ConfigurationError, match=r"tables 'wide', 'deep', and the model has 'deep', 'added'; tables"):
        import_hugectr(new.ps_json(), tmp_path / "repository", keep_rows_of=earlier.version_dir)
    fields = {"sparse_files": folders, "embedding_vecsize_per_table": dims}
    new.model.update(fields, embedding_table_names=["added", "deep", "wide"])
    (report,) = import_hugectr(new.ps_json(), tmp_path / "repository", keep_rows_of=earlier.version_dir)

    with InferenceSession.open(report.version_dir) as session:
        assert [session.lookup(name, [1])[0, 0] for name in ("added", "deep", "wide")] == [0, 10, 10]


def test_a_table_of_another_width_is_refused(tmp_path: Path) -> None:
    """The error names the table and both widths."""
    (earlier,) = import_hugectr(tables_alone(tmp_path / "old", [1], 10).ps_json(), tmp_path / "repository")
    new = tables_alone(tmp_path / "new", [2], 20, embedding_table_names=["deep", "wide"])

    with pytest.raises(ConfigurationError, match=r"'deep' has vectors of 4 elements, and the model's has 1"):
        import_hugectr(new.ps_json(), tmp_path / "repository", keep_rows_of=earlier.version_dir)


def test_rows_are_kept_of_one_model_only(tmp_path: Path) -> None:
    """All models of ps.json would get the rows of one."""
    source = tables_alone(tmp_path / "old", [1], 10)
    (earlier,) = import_hugectr(source.ps_json(), tmp_path / "repository")
    source.settings["models"].append({**source.model, "model": "users"})

    with pytest.raises(ConfigurationError, match="has 2 models; name the one whose rows are to be kept"):
        import_hugectr(source.ps_json(), tmp_path / "repository", keep_rows_of=earlier.version_dir)
    import_hugectr(source.ps_json(), tmp_path / "repository", model="items", keep_rows_of=earlier.version_dir)
