"""Alerts and dashboard, tried on a real Prometheus that scrapes a real server."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import yaml
from tritonclient.utils import InferenceServerException

from tests.testing.command_line import hotrow
from tests.testing.model_settings import add_settings
from tests.testing.prometheus import Prometheus, panels
from tests.testing.served import Serve, Served, is_ready
from tests.testing.servers import RedisServer, wait_until
from tests.testing.triton_models import write_ctr

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus/rules.yml"
STREAM_METRICS = "hotrow_update_"
"""What only a model with an update stream has begins so."""

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """Skip where Debian's package `prometheus` is not installed."""
    if not (shutil.which("prometheus") and shutil.which("promtool")):
        pytest.skip("no prometheus and promtool on this machine: apt-get install prometheus")


def test_every_alert_fires_by_its_fault_and_none_without() -> None:
    """Promtool runs the rules on the faults; the configuration is valid, too, and every alert is tested."""
    folder = RULES.parent
    subprocess.run(["promtool", "check", "config", folder / "prometheus.yml"], check=True, capture_output=True)
    subprocess.run(["promtool", "test", "rules", folder / "rules_test.yml"], check=True, capture_output=True)
    tested = yaml.safe_load((folder / "rules_test.yml").read_text(encoding="utf-8"))["tests"]
    for test in tested:
        assert {case["alertname"] for case in test["alert_rule_test"]} == alerts().keys()


class MonitoredServer:
    """A server whose model reads Redis over RocksDB, under load, and what a Prometheus that scrapes it knows."""

    def __init__(self, served: Served, redis: RedisServer, prometheus: Prometheus) -> None:
        self.served = served
        self.redis = redis
        self.has_data = prometheus.has_data
        self._stopping = threading.Event()
        self._load = threading.Thread(target=self._ask, daemon=True)
        self._load.start()

    def close(self) -> None:
        """Stop the requests."""
        self._stopping.set()
        self._load.join()

    def _ask(self) -> None:
        """In turn: good requests, requests with unknown keys, and requests larger than the model allows."""
        requested = 0
        with self.served.grpc_client() as client:
            while not self._stopping.wait(0.02):
                requested += 1
                ids = np.full((4 if requested % 7 else 5, 3), requested % 5 if requested % 2 else 10**6)
                inputs = [("ids", ids, "INT64"), ("dense", np.zeros((len(ids), 2), np.float32), "FP32")]
                tensors = []
                for name, array, datatype in inputs:
                    tensors.append(grpc_client.InferInput(name, list(array.shape), datatype))
                    tensors[-1].set_data_from_numpy(array)
                try:
                    client.infer("ctr", tensors)
                except InferenceServerException:
                    continue


@pytest.fixture
def monitored(serve: Serve, tmp_path: Path) -> Iterator[MonitoredServer]:
    """A server under load, and a Prometheus."""
    repository = tmp_path / "repository"
    version_dir = repository / "ctr" / "1"
    write_ctr(version_dir)
    database = f"rocksdb://{tmp_path}/db"
    with RedisServer() as redis:
        for url in (redis.url, database):
            hotrow("push", version_dir, "--to", url)
        stores = {"volatile_store": redis.url, "persistent_store": database}
        add_settings(repository / "ctr" / "config.pbtxt", {**stores, "max_keys_per_request": 12})
        served = serve(repository)
        with (
            Prometheus(served.metrics, tmp_path) as prometheus,
            closing(MonitoredServer(served, redis, prometheus)) as monitored,
        ):
            yield monitored


def alerts() -> dict[str, str]:
    """The condition of every alert, by name."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def test_every_panel_shows_data_and_real_faults_raise_alerts(monitored: MonitoredServer) -> None:
    """While requests run, each query has an answer; each fault then makes the condition of its alert true."""
    for panel in panels():
        for query, _ in panel.queries:
            if STREAM_METRICS not in query:
                wait_until(lambda query=query: monitored.has_data(query), f"data in panel {panel.title!r}")  # type: ignore[misc]
    conditions = alerts()
    for name, cause in faults(monitored).items():
        if cause is not None:
            wait_until(lambda name=name: not monitored.has_data(conditions[name]), f"alert {name} to be silent")  # type: ignore[misc]
            cause()
        wait_until(lambda name=name: monitored.has_data(conditions[name]), f"alert {name}")  # type: ignore[misc]


def faults(monitored: MonitoredServer) -> dict[str, Any]:
    """The fault for each alert, in order of execution; None: the requests make it fire all along."""
    return {
        "HotrowDefaultVectors": None,
        "HotrowRequestsFail": None,
        "HotrowTierDown": monitored.redis.stop,
        "HotrowBackendRestarted": lambda: kill_stub(monitored.served),
        "HotrowModelNotServed": lambda: unload(monitored.served),
        "HotrowServerDown": monitored.served.stop,
    }


def kill_stub(served: Served) -> None:
    """Kill the backend process."""
    served.stub("ctr").kill()


def unload(served: Served) -> None:
    """Unload the model, as soon as the server lets us."""
    with served.grpc_client() as client:
        wait_until(lambda: is_ready(client, "ctr"), "the model to serve again")
        client.unload_model("ctr")
