"""`dense_precision` `bfloat16` on a real server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc

from inference_session.dense_engine.openvino import unusable_bfloat16
from tests.testing.model_settings import add_settings
from tests.testing.onnx_evaluation import run_network
from tests.testing.onnx_models import import_model, model_of, table
from tests.testing.served import Serve
from tests.testing.served_requests import ask
from triton_backend.repository.config_writer import write_model_config

pytestmark = pytest.mark.triton


def test_bfloat16(tmp_path: Path, serve: Serve) -> None:
    """A served model answers within the documented bound; without the instructions the load fails and says so."""
    rng = np.random.default_rng(0)
    layers = {"w0": rng.standard_normal((32, 64), np.float32) / 5, "w1": rng.standard_normal((64, 1), np.float32) / 6}
    graph = (
        "g (int64[n, 8] ids) => (float[n, 1] click)"
        " { e = Gather(emb, ids) f = Flatten(e) a = MatMul(f, w0) b = Relu(a) y = MatMul(b, w1) click = Sigmoid(y) }"
    )
    report = import_model(tmp_path, model_of(graph, {"emb": table(), **layers}))
    add_settings(write_model_config(report.version_dir, report.spec, "m"), {"dense_precision": "bfloat16"})
    if unusable_bfloat16() is not None:
        with pytest.raises(AssertionError, match="dense_precision cannot be 'bfloat16'"):
            serve(tmp_path / "repository")
        return

    with serve(tmp_path / "repository").grpc_client() as client:
        for num_samples in (1, 64, 33, 64):
            inputs = {"ids": rng.integers(0, 1000, (num_samples, 8))}
            found = ask(client, "m", inputs).as_numpy("click")
            wanted = run_network(tmp_path / "model.onnx", inputs)["click"]
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-2)
        with pytest.raises(tritonclient.utils.InferenceServerException, match="ids"):
            ask(client, "m", {"ids": np.zeros((2, 9), np.int64)})
