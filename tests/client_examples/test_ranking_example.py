"""The example that ranks candidates for one user runs unchanged against a real server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import onnx
import pytest

from inference_session.importers.onnx import import_onnx
from tests.testing import ROOT
from tests.testing.programs import run_program
from tests.testing.ranking import CONTEXT, small_ranker
from triton_backend.launcher.server import ServerOptions, TritonServer
from triton_backend.repository.config_writer import write_model_config


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model `ranker`, whose user and clicks are the context."""
    folder = tmp_path_factory.mktemp("ranking")
    onnx.save(small_ranker(), folder / "model.onnx")
    report = import_onnx(folder / "model.onnx", folder / "repository", "ranker", context=CONTEXT)
    write_model_config(report.version_dir, report.spec, "ranker")
    return folder / "repository"


@pytest.mark.triton
def test_items_are_ranked_for_each_user(tritonserver: None, repository: Path) -> None:
    """Of one user, and of three in one request, the best items come first."""
    options = ServerOptions(repository, ("ranker",), http_port=0, grpc_port=0, metrics_port=0)
    with TritonServer.start(options) as server:
        command = (sys.executable, ROOT / "client_examples" / "rank_candidates.py", "--url", server.endpoints["gRPC"])
        context = ("--model", "ranker", "--context", "user", "--context", "clicks")
        for num_users in ("1", "3"):
            lines = run_program(*command, *context, "--users", num_users).splitlines()
            assert [line.partition(":")[0] for line in lines] == [f"user {i}" for i in range(int(num_users))]
            for line in lines:
                scores = [float(score) for score in line.split()[4::3]]
                assert len(scores) == 5
                assert scores == sorted(scores, reverse=True)


def test_perf_analyzer_sends_one_context_with_many_candidates(repository: Path, tmp_path: Path) -> None:
    """An entry is a whole request."""
    path = tmp_path / "ranker.json"
    command = (sys.executable, ROOT / "client_examples" / "perf_analyzer_input.py", repository / "ranker")
    run_program(*command, "--output", path, "--entries", "3", "--candidates", "500")

    entries = json.loads(path.read_text(encoding="utf-8"))["data"]
    assert len(entries) == 3
    assert {name: entry["shape"] for name, entry in entries[0].items()} == {
        "user": [1],
        "clicks": [1, 8],
        "item": [500],
    }
