"""Passwords and keys of a served model: they work, and nothing that other users can read contains them."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from hotrow.command_line import cli
from tests.testing.command_line import hotrow
from tests.testing.model_settings import settings_text
from tests.testing.served import Serve
from tests.testing.servers import RedisServer, wait_until
from tests.testing.triton_models import NUM_ROWS, ctr_answer, write_ctr

PASSWORD, KEY = "Sesame-4711", "Keyhole-0815"

pytestmark = pytest.mark.triton


def test_secrets_are_nowhere_to_be_read(serve: Serve, tmp_path: Path) -> None:
    """Not in logs, metrics, errors or the list of processes, through an outage and a refused load; the model's
    configuration names the file that the password is in, and strangers do not get even that.
    """
    version_dir, password, key = tmp_path / "repository/ctr/1", tmp_path / "password", tmp_path / "key"
    write_ctr(version_dir)
    password.write_text(f"{PASSWORD}\n", encoding="utf-8")
    key.write_text(f"{KEY}\n", encoding="utf-8")
    with RedisServer("--requirepass", PASSWORD) as redis:
        url = f"redis://127.0.0.1:{redis.port}?password_file={password}"
        hotrow("push", version_dir, "--to", url)
        config = version_dir.parent / "config.pbtxt"
        sound = config.read_text(encoding="utf-8")
        config.write_text(sound + settings_text({"volatile_store": url}), encoding="utf-8")
        served = serve(tmp_path / "repository", "--restrict-apis", str(key), "--verbose")
        with served.grpc_client() as client:
            answer = client.infer("ctr", ctr_tensors(1)).as_numpy("OUTPUT0")
            np.testing.assert_allclose(answer, ctr_answer(*ctr_inputs(1)))
            redis.stop()
            for first in range(4, NUM_ROWS - 3, 3):  # rows that the cache lacks, so that the store is asked
                client.infer("ctr", ctr_tensors(first))
        wait_until(lambda: any(str(redis.port) in line for line in served.errors), "the outage in the log")
    config.write_text(sound + settings_text({"volatile_store": f"redis://:{PASSWORD}@127.0.0.1:x"}), encoding="utf-8")
    refused = CliRunner().invoke(cli, ["load", "ctr", "--url", served.grpc, "--key-file", str(key)])

    assert "malformed host or port" in str(refused.exception)
    with pytest.raises(urllib.error.HTTPError) as denied:
        urllib.request.urlopen(f"http://{served.http}/v2/models/ctr/config")
    denied.value.close()
    with urllib.request.urlopen(served.metrics) as page:  # noqa: S310  a page of ours
        texts = [page.read().decode(), str(refused.exception), refused.output, *served.errors]
    assert not [text for text in texts if PASSWORD in text or KEY in text]
    assert not [process for process in served.family() if PASSWORD in " ".join(process.cmdline())]


def ctr_inputs(first: int) -> tuple[np.ndarray, np.ndarray]:
    return np.array([[first, first + 1, first + 2]]), np.ones((1, 2), np.float32)


def ctr_tensors(first: int) -> list[object]:
    import tritonclient.grpc as grpc_client

    tensors = []
    for name, array, datatype in zip(("ids", "dense"), ctr_inputs(first), ("INT64", "FP32"), strict=True):
        tensors.append(grpc_client.InferInput(name, list(array.shape), datatype))
        tensors[-1].set_data_from_numpy(array)
    return tensors
