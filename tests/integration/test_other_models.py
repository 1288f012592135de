"""A model of ours beside models of others, which use all that Triton has for models."""

from __future__ import annotations

import queue
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc

from tests.testing.programs import run_program
from tests.testing.served import Serve, Served
from tests.testing.served_requests import DENSE, IDS, ask
from tests.testing.servers import PATIENCE_S, wait_until
from tests.testing.triton_models import ctr_answer, write_ctr

pytestmark = pytest.mark.triton

TWICE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for _ in range(2):
                ids = pb_utils.Tensor.from_dlpack("ids", request.inputs()[0].to_dlpack())
                sender.send(pb_utils.InferenceResponse([ids]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TWICE_CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "ids" data_type: TYPE_INT64 dims: [ 3 ] } ]
output [ { name: "ids" data_type: TYPE_INT64 dims: [ 3 ] } ]
model_transaction_policy { decoupled: true }
"""
ITSELF = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(8)
        config.add_input({"name": "ids", "data_type": "TYPE_INT64", "dims": [3]})
        config.add_output({"name": "ids", "data_type": "TYPE_INT64", "dims": [3]})
        return config

    def execute(self, requests):
        tensors = [pb_utils.Tensor.from_dlpack("ids", request.inputs()[0].to_dlpack()) for request in requests]
        return [pb_utils.InferenceResponse([ids]) for ids in tensors]
"""
SCHEDULED = """
version_policy { all { } }
instance_group [ { count: 1 kind: KIND_CPU rate_limiter { resources [ { name: "turn" count: 1 } ] } } ]
dynamic_batching {
  priority_levels: 2
  default_priority_level: 2
  default_queue_policy { timeout_action: REJECT allow_timeout_override: true max_queue_size: 100 }
}
"""
WARMED = """
model_warmup [ {
  name: "one"
  batch_size: 1
  inputs { key: "ids" value { data_type: TYPE_INT64 dims: [ 3 ] input_data_file: "ids" } }
  inputs { key: "dense" value { data_type: TYPE_FP32 dims: [ 2 ] zero_data: true } }
} ]
parameters { key: "unknown_keys" value { string_value: "reject" } }
"""
NAMED = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "ids" data_type: TYPE_INT64 dims: [ 3 ] } ]
output [ { name: "same" data_type: TYPE_INT64 dims: [ 3 ] } ]
ensemble_scheduling { step [ {
  model_name: "partial" model_version: -1
  input_map { key: "ids" value: "ids" }
  output_map { key: "ids" value: "answer" }
}, {
  model_name: "without" model_version: -1
  input_map { key: "ids" value: "answer" }
  output_map { key: "ids" value: "same" }
} ] }
"""
ENSEMBLE_CONFIG = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "ids" data_type: TYPE_INT64 dims: [ 3 ] }, { name: "dense" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "score" data_type: TYPE_FP32 dims: [ 1 ] } ]
ensemble_scheduling { step [ {
  model_name: "ctr" model_version: -1
  input_map [ { key: "ids" value: "ids" }, { key: "dense" value: "dense" } ]
  output_map [ { key: "click" value: "score" } ]
} ] }
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """`ctr`, which keeps answers, `scored`, which asks it, and `twice`, which answers with two responses."""
    folder = tmp_path / "repository"
    write_ctr(folder / "ctr" / "1")
    with (folder / "ctr" / "config.pbtxt").open("a", encoding="utf-8") as config:
        config.write("response_cache { enable: true }\n")
    for name, text in {"twice": TWICE_CONFIG, "scored": ENSEMBLE_CONFIG}.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(text, encoding="utf-8")
    (folder / "twice" / "1" / "model.py").write_text(TWICE, encoding="utf-8")
    return folder


@pytest.fixture
def served(serve: Serve, repository: Path) -> Served:
    """A server of them, with a response cache."""
    return serve(repository, "--", "--cache-config=local,size=1048576")


def streamed(client: Any, model: str) -> list[Any]:
    """The responses that have outputs to a request in a stream."""
    responses: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: responses.put(error or result))
    ids = tritonclient.grpc.InferInput("ids", list(IDS.shape), "INT64")
    ids.set_data_from_numpy(IDS)
    client.async_stream_infer(model, [ids], enable_empty_final_response=True)
    found = [responses.get(timeout=PATIENCE_S)]
    while not found[-1].get_response().parameters["triton_final_response"].bool_param:
        found.append(responses.get(timeout=PATIENCE_S))
    client.stop_stream()
    return found[:-1]


def test_each_kind_of_model_answers_and_is_healthy(served: Served) -> None:
    """An ensemble of one of ours, and a decoupled model, of which only its readiness can be asked without a stream."""
    with served.grpc_client() as client:
        scores = ask(client, "scored", {"ids": IDS, "dense": DENSE}).as_numpy("score")
        np.testing.assert_array_equal(scores, ctr_answer(IDS, DENSE)[:, :1])
        assert [result.as_numpy("ids").tolist() for result in streamed(client, "twice")] == [IDS.tolist()] * 2

    for model in ("ctr", "scored", "twice"):
        assert f"{model}: version 1 answers" in health(served, model)


def health(served: Served, model: str) -> str:
    """What the command prints."""
    command = [sys.executable, "-m", "hotrow", "health", "--model", model, "--url", served.grpc]
    return run_program(*command, "--timeout", str(PATIENCE_S))


def test_answers_come_from_tritons_response_cache(served: Served) -> None:
    """A cached answer has the outputs that its first request named, as the manual says; Triton may change that."""
    with served.grpc_client() as client:
        for _ in range(2):
            answer = ask(client, "ctr", {"ids": IDS, "dense": DENSE}, ["like"])
            np.testing.assert_array_equal(answer.as_numpy("like"), ctr_answer(IDS, DENSE)[:, 1:])
        assert ask(client, "ctr", {"ids": IDS, "dense": DENSE}).as_numpy("click") is None
        statistics = client.get_inference_statistics("ctr", as_json=True)["model_stats"][0]["inference_stats"]
    assert statistics["cache_hit"]["count"] == "2"


def test_models_without_a_complete_config_are_served(serve: Serve, repository: Path) -> None:
    """As most models of onnxruntime are: Triton asks their backends, also those of models that an ensemble names."""
    for name in ("without", "partial"):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.py").write_text(ITSELF, encoding="utf-8")
    (repository / "partial" / "config.pbtxt").write_text('backend: "python"', encoding="utf-8")
    (repository / "without" / "1.tmp").mkdir()
    (repository / "named" / "1").mkdir(parents=True)
    (repository / "named" / "config.pbtxt").write_text(NAMED, encoding="utf-8")
    served = serve(repository, "--model", "ctr", "--model", "without", "--model", "named")

    with served.grpc_client() as client:
        for model, output in {"without": "ids", "partial": "ids", "named": "same"}.items():
            np.testing.assert_array_equal(ask(client, model, {"ids": IDS}).as_numpy(output), IDS)
        answer = ask(client, "ctr", {"ids": IDS, "dense": DENSE}, ["click"])
        np.testing.assert_array_equal(answer.as_numpy("click"), ctr_answer(IDS, DENSE)[:, :1])
    wait_until(
        lambda: "config.pbtxt of 'partial', 'without' lacks inputs or outputs" in "".join(served.errors), "the log"
    )


def test_tritons_schedulers_do_their_work(serve: Serve, tmp_path: Path) -> None:
    """Priorities, turns of a rate limiter, and several versions that requests name."""
    for version in (1, 2):
        write_ctr(tmp_path / "ctr" / str(version), scale=version)
    configure(tmp_path / "ctr", SCHEDULED)
    served = serve(tmp_path, "--", "--rate-limit=execution_count", "--rate-limit-resource=turn:1")

    assert served.announced == "ctr (versions 1, 2)"
    with served.grpc_client() as client:
        for version, priority in ((1, 1), (2, 2), (1, 2)):
            options = {"model_version": str(version), "priority": priority, "timeout": 1_000_000 * PATIENCE_S}
            answer = ask(client, "ctr", {"ids": IDS, "dense": DENSE}, **options).as_numpy("OUTPUT0")
            np.testing.assert_array_equal(answer, ctr_answer(IDS, DENSE, scale=version))


def configure(model: Path, text: str) -> None:
    """Give a model these settings of Triton's, in place of those that it has."""
    config = (model / "config.pbtxt").read_text(encoding="utf-8")
    kept = [line for line in config.splitlines() if not line.startswith(("instance_group", "dynamic_batching"))]
    (model / "config.pbtxt").write_text("\n".join([*kept, text]), encoding="utf-8")


def test_a_warm_up_is_answered_and_warned_of(serve: Serve, tmp_path: Path) -> None:
    """Its samples are requests like any other. One that fails may end Triton 24.10, so the log advises against them."""
    write_ctr(tmp_path / "warmed" / "1")
    configure(tmp_path / "warmed", WARMED)
    (tmp_path / "warmed" / "warmup").mkdir()
    (tmp_path / "warmed" / "warmup" / "ids").write_bytes(np.array([1, 2, 3], np.int64).tobytes())
    served = serve(tmp_path)

    with served.grpc_client() as client:
        (statistics,) = client.get_inference_statistics("warmed", as_json=True)["model_stats"]
        assert statistics["execution_count"] == "1"
    wait_until(lambda: "model 'warmed' has model_warmup: where a sample fails" in "".join(served.errors), "the log")
