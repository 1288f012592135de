"""Which batches are laid out alike, so that a GPU may repeat its work for the last one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inference_session.execution.lookups import ModelLookups
from inference_session.kernels.records import VectorCode
from inference_session.requests.batch import CheckedRequest, JoinedBatch
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


def test_vectors_in_float16_take_half_the_bytes(tmp_path: Path) -> None:
    """Of the inputs that the network takes so: offsets, strides and type; the others stay as they are."""
    graph = (
        "g (int64[n, 2] a, int64[n] b) => (float[n, 2, 4] x, float[n, 4] y) { x = Gather(emb, a) y = Gather(emb, b) }"
    )
    spec = import_model(tmp_path, model_of(graph, {"emb": table()})).spec
    narrow = spec.lookups[0].dense_input
    inputs = {"a": np.zeros((5, 2), np.int64), "b": np.zeros(5, np.int64)}
    batch = JoinedBatch.of([CheckedRequest(inputs, [], 5, shapes=())])
    found = []
    for names in ((), (narrow,)):
        lookups = ModelLookups(spec, by_column=False, keys_follow_inputs=True, narrow_inputs=names)
        found.append((lookups.vector_inputs, lookups.geometry(batch)))
    (vector_inputs, wide), (narrow_inputs, half) = found
    assert [each.dtype for each in vector_inputs] == [np.float32, np.float32]
    assert [each.dtype for each in narrow_inputs] == [np.float16, np.float32]
    assert half.shapes == wide.shapes
    assert half.segments["output_stride"].tolist() == [wide.segments["output_stride"][0] // 2, 16]
    assert half.segments["output_code"].tolist() == [VectorCode.FLOAT16, VectorCode.FLOAT32]
    assert not wide.segments["output_code"].any()
