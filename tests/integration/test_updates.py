"""A real model on a real server whose rows change through a real broker, by the command line alone."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from inference_session.version_directory import manifest
from tests.testing import small_model
from tests.testing.broker import Broker
from tests.testing.command_line import hotrow
from tests.testing.model_settings import add_settings
from tests.testing.served import Serve, Served, metric
from tests.testing.servers import wait_until
from triton_backend.client.server import RemoteServer
from triton_backend.repository.config_writer import write_model_config

pytestmark = pytest.mark.triton


def answer(served: Served, inputs: small_model.Arrays) -> small_model.Arrays:
    import tritonclient.grpc as grpc_client

    client = served.grpc_client()
    tensors = []
    for name, array in inputs.items():
        kind = {"int64": "INT64", "int32": "INT32", "float32": "FP32"}[array.dtype.name]
        tensors.append(grpc_client.InferInput(name, list(array.shape), kind))
        tensors[-1].set_data_from_numpy(array)
    result = client.infer("small", tensors)
    client.close()
    return {tensor.name: result.as_numpy(tensor.name) for tensor in result.get_response().outputs}


def test_published_rows_are_served(serve: Serve, tmp_path: Path) -> None:
    """A diff of two versions changes the answers of the old one into the new one's, and metrics show it."""
    repository = tmp_path / "repository"
    version, newer = repository / "small" / "1", tmp_path / "newer"
    small_model.write(version)
    tables = small_model.write(newer, seed=1)
    inputs = small_model.random_inputs(40, np.random.default_rng(2), num_items=3)
    expected = small_model.expected(tables, inputs)
    begun_s = time.time()
    with Broker() as broker:
        add_settings(write_model_config(version, small_model.SPEC, "small"), {"update_stream": broker.url})
        manifest.verify(version, checksums=True)
        served = serve(repository)

        hotrow("publish", newer, "--since", version, "--to", broker.url, "--model", "small")
        broker.send("hps_et.small.user_weight", (b"odd", b"message"))

        def changed() -> bool:
            answers = answer(served, inputs)
            return all(np.allclose(answers[name], expected[name], atol=1e-2) for name in ("click", "stay", "wide"))

        wait_until(changed, "the new rows to be served")
        labels = '{model="small",version="1"}'
        wait_until(
            lambda: metric(served, 'hotrow_update_messages_rejected_total{model="small",reason="key_width"') == 1,
            "the refused message to be counted",
        )
        wait_until(lambda: metric(served, f"hotrow_update_lag_messages{labels}") == 0, "all messages to be applied")
        wait_until(lambda: metric(served, f"hotrow_update_rows_total{labels}") >= 50 + 40, "all rows to be counted")
        assert 0 < metric(served, f"hotrow_update_staleness_seconds{labels}") <= time.time() - begun_s


def test_announced_versions_are_served(serve: Serve, tmp_path: Path) -> None:
    """By `hotrow follow` next to a server; if a message is no number, or a load fails, the old version serves on."""
    repository, trained = tmp_path / "repository", tmp_path / "trained"
    version = repository / "small" / "1"
    small_model.write(version)
    write_model_config(version, small_model.SPEC, "small")
    for number in (2, 3, 4):
        small_model.write(trained / str(number), seed=number)
    (trained / "3" / "dense.onnx").write_bytes(b"damaged")
    with Broker() as broker:
        hotrow("announce", "small", "2", "--to", broker.url)
        served = serve(repository)
        options = ["--from", broker.url, "--source", str(trained), "--repository", str(repository)]
        command = [sys.executable, "-m", "hotrow", "follow", "small", *options, "--url", served.grpc]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as follower:
            assert follower.stdout is not None
            try:
                assert any("version 2 serves" in line for line in follower.stdout), "the version announced before"
                broker.send("hotrow_versions.small", (b"version", b"../../4"))
                hotrow("announce", "small", "3", "--to", broker.url)
                named = next(line for line in follower.stdout if "dense.onnx" in line)
                assert named.endswith("; trying again every 5 s\n"), "the damaged version is named"
                hotrow("announce", "small", "9", "--to", broker.url)
                missing = next(line for line in follower.stdout if "No such file" in line)
                assert missing == f"hotrow: {trained}/9: No such file or directory; trying again every 5 s\n"
                wait_until(lambda: served_versions(served) == [2], "version 2 alone to be ready")
                hotrow("announce", "small", "4", "--to", broker.url)
                assert any("version 4 serves" in line for line in follower.stdout)
                wait_until(lambda: served_versions(served) == [4], "version 4 alone to be ready")
            finally:
                follower.terminate()
        assert follower.returncode == 0


def served_versions(served: Served) -> list[int]:
    with RemoteServer(served.grpc) as server:
        return server.ready_versions("small")
