"""Which batches are laid out alike, so that a GPU may repeat its work for the last one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inference_session.execution.lookups import ModelLookups
from tests.testing.onnx_models import import_model, model_of, table


@pytest.mark.parametrize(("first", "follow"), [("n", True), ("a", False)])
def test_shapes_tell_all_only_where_samples_are_counted(first: str, follow: bool, tmp_path: Path) -> None:
    """Keys that a network computes follow the shapes of requests, unless these are no samples of one batch."""
    graph = f"g (int64[n] ids, float[{first}, 3] x) => (float[n, 4] z, float[{first}, 3] y)"
    graph += " { k = Mod(ids, rows) z = Gather(emb, k) y = Add(x, x) }"
    report = import_model(tmp_path, model_of(graph, {"emb": table(), "rows": np.array(1000)}))
    assert report.spec.batched == follow
    lookups = ModelLookups(report.spec, by_column=False, keys_follow_inputs=True)
    assert lookups.follow_shapes == follow
