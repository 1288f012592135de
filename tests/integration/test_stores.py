"""A model on a real server without its table files: its rows come from Redis and RocksDB."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from inference_session.importers.onnx import import_onnx
from inference_session.model_spec import TABLES_FOLDER
from tests.testing.command_line import hotrow
from tests.testing.example_models import ExampleModels
from tests.testing.model_settings import add_settings
from tests.testing.served import Serve, metric
from tests.testing.served_requests import DENSE, IDS, ask
from tests.testing.servers import RedisServer, wait_until
from tests.testing.triton_models import ctr_answer, write_ctr
from triton_backend.repository.config_writer import write_model_config

pytestmark = pytest.mark.triton

MODEL = "multi_task"


def test_a_model_is_served_from_stores_alone(models: ExampleModels, serve: Serve, tmp_path: Path) -> None:
    """512 requests get the expected answers from Redis over RocksDB, before, while and after Redis is away."""
    folder = models.multi_task
    inputs, expected = dict(np.load(folder / "requests.npz")), np.load(folder / "expected.npz")
    repository = tmp_path / "repository"
    report = import_onnx(folder / "model.onnx", repository, MODEL, min_rows=100)
    path = write_model_config(report.version_dir, report.spec, MODEL)
    database = f"rocksdb://{tmp_path}/db"
    with RedisServer() as server:
        for url in (server.url, database):
            hotrow("push", report.version_dir, "--to", url)
        shutil.move(report.version_dir / TABLES_FOLDER, tmp_path / "tables")
        stores = {"volatile_store": server.url, "persistent_store": database, "cache_fraction": "0.01"}
        add_settings(path, stores)
        served = serve(repository)
        client = served.grpc_client()
        tier = f'{{model="{MODEL}",tier="volatile",version="1"}}'

        def check() -> None:
            for name in expected.files:
                answer = ask(client, MODEL, inputs).as_numpy(name)
                np.testing.assert_allclose(answer, expected[name], rtol=0, atol=1e-6)

        check()
        wait_until(lambda: metric(served, f"hotrow_tier_up{tier}") == 1, "the metric to tell that all is well")
        server.stop()
        check()
        wait_until(lambda: metric(served, f"hotrow_tier_up{tier}") == 0, "the metric to tell of the outage")
        server.start()
        check()
        wait_until(lambda: metric(served, f"hotrow_tier_up{tier}") == 1, "the metric to tell of the recovery")
        check()
        for said in (
            "failed: ",
            "answers again",
        ):  # with the time, the model and the version, as the server's own lines
            line = re.compile(rf'W\d{{4}} [\d:.]+ \d+ \S+] "{MODEL} version 1: tier volatile of .* {said}')
            wait_until(lambda wanted=line: any(map(wanted.match, served.errors)), said)  # type: ignore[misc]
        client.close()


def test_files_in_a_load_call_are_served_with_the_rows_of_a_store(serve: Serve, tmp_path: Path) -> None:
    """Triton puts these files into a folder of another name, by which the store would have no rows."""
    version = tmp_path / "repository" / "ctr" / "1"
    write_ctr(version)
    with RedisServer() as server:
        hotrow("push", version, "--to", server.url)
        with serve(version.parent.parent).grpc_client() as client:
            config = client.get_model_config("ctr", as_json=True)["config"]
            client.unload_model("ctr")
            wait_until(lambda: not client.is_model_ready("ctr"), "the model to be unloaded")
            config["parameters"] = {"volatile_store": {"string_value": server.url}}
            files = {f"file:1/{path.name}": path.read_bytes() for path in version.iterdir() if path.is_file()}
            client.load_model("ctr", config=json.dumps(config), files=files)
            answer = ask(client, "ctr", {"ids": IDS, "dense": DENSE}).as_numpy("OUTPUT0")
        np.testing.assert_array_equal(answer, ctr_answer(IDS, DENSE))
