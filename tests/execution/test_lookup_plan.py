"""Which batches are laid out alike, so that a GPU may do again what it did for the last one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inference_session.execution.lookup_plan import LookupPlan
from inference_session.model_spec import ModelSpec
from inference_session.rows import MappedRows
from inference_session.tables.table_file import TableFile
from tests.testing.onnx_models import import_model, model_of, table


def plan_of(spec: ModelSpec, version_dir: Path) -> LookupPlan:
    tables = [TableFile.open(version_dir / "tables" / each.folder, each) for each in spec.tables]
    return LookupPlan(spec, MappedRows(tables, num_threads=1))


@pytest.mark.parametrize(("first", "follows"), [("n", True), ("a", False)])
def test_shapes_tell_all_only_where_samples_are_counted(first: str, follows: bool, tmp_path: Path) -> None:
    """Keys that a network computes follow the shapes of requests, unless these are no samples of one batch."""
    graph = f"g (int64[n] ids, float[{first}, 3] x) => (float[n, 4] z, float[{first}, 3] y)"
    graph += " { k = Mod(ids, rows) z = Gather(emb, k) y = Add(x, x) }"
    report = import_model(tmp_path, model_of(graph, {"emb": table(), "rows": np.array(1000)}))
    assert report.spec.batched == follows
    (lookup,) = report.spec.lookups
    plan = plan_of(report.spec, report.version_dir)
    assert plan.follows_shapes([lookup.keys]) == follows
    assert not plan.follows_shapes([])
