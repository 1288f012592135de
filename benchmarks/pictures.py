"""Draws the pictures of the manual from real runs: `make docs-pictures`.

docs/images/top.svg        `hotrow top` of a Triton that serves the example model from Redis and RocksDB, under load,
                           while Redis is stopped and started again
docs/images/dashboard.png  the dashboard's panels of that run, a swap and an update stream included, as a real
                           Prometheus answers their queries, drawn by matplotlib
docs/images/sizing.png     `hotrow size --plot` of the same model, from the keys of MovieLens-100k (downloaded by pip)
"""

from __future__ import annotations

import io
import itertools
import math
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc
from matplotlib.figure import Figure
from rich.console import Console
from serving import add_settings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from demo.client import MODEL, Client
from demo.movielens import Inputs, MovieLens, fetch, take
from demo.report import REPOSITORY
from hotrow.metrics.page import MetricsPage
from hotrow.metrics.top_view import TopView
from inference_session.update_stream import Publisher
from inference_session.version_directory.session_file import read_spec
from tests.testing.broker import Broker
from tests.testing.command_line import hotrow
from tests.testing.prometheus import Panel, Prometheus, panels
from tests.testing.served import Served, start
from tests.testing.servers import RedisServer

IMAGES = Path(__file__).resolve().parent.parent / "docs/images"
WIDTH = 150
NUM_LOOKS = 14
STOPS_AT, STARTS_AT = 4, 8
"""The range of looks during which Redis does not answer."""
PER_REQUEST = 64
SECONDS_UNTIL_RATES, SECONDS_AFTER_SWAP = 2, 20
UNITS = {"reqps": "/s", "cps": "/s", "percentunit": "fraction", "bool": "0 or 1", "short": "number"}
"""Units by Grafana's names for them."""


def main() -> None:
    samples, _ = MovieLens.read(fetch()).samples()
    with tempfile.TemporaryDirectory() as name, RedisServer() as redis, Broker() as broker:
        folder = Path(name)
        draw_sizing(samples, folder)
        repository = write_repository(folder, redis, broker)
        with (
            closing(start(repository)) as served,
            Prometheus(served.metrics, folder) as prometheus,
            asking(served, samples),
            publishing(broker),
        ):
            begin = time.time()
            draw_top(served, redis)
            hotrow("publish-version", repository / MODEL / "1", "--name", MODEL, "--repository", repository)
            hotrow("load", MODEL, "--url", served.grpc)
            time.sleep(SECONDS_AFTER_SWAP)
            draw_dashboard(prometheus, begin + SECONDS_UNTIL_RATES, time.time())


def draw_sizing(samples: Inputs, folder: Path) -> None:
    """The hit rates of every cache size, for the users and movies that the requests of the data set name."""
    traces = {"users.weight": samples["user_id"], "movies.weight": samples["movie_id"]}
    arguments: list[object] = []
    for table, keys in traces.items():
        np.save(folder / f"{table}.npy", keys.ravel())
        arguments += ["--trace", f"{table}={folder / table}.npy"]
    hotrow("size", REPOSITORY / MODEL, *arguments, "--plot", IMAGES / "sizing.png")


def write_repository(folder: Path, redis: RedisServer, broker: Broker) -> Path:
    """The example model with updates, whose rows are in a Redis and a RocksDB, with a cache for a fifth of them."""
    model = folder / "repository" / MODEL
    shutil.copytree(REPOSITORY / MODEL, model)
    database = f"rocksdb://{folder}/rocksdb"
    for url in (redis.url, database):
        hotrow("push", model / "1", "--to", url)
    settings = {"volatile_store": redis.url, "persistent_store": database, "cache_fraction": "0.2"}
    settings["update_stream"] = broker.url
    add_settings(model / "config.pbtxt", settings)
    return model.parent


@contextmanager
def repeated(act: Callable[[], None], pause_s: float) -> Iterator[None]:
    """Another thread does this again and again, with a pause before each time."""
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(pause_s):
            act()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def asking(served: Served, samples: Inputs) -> Iterator[None]:
    """A client asks for the ratings of the data set in their order, with a pause after each request."""
    begins = itertools.cycle(range(0, len(samples["user_id"]) - PER_REQUEST, PER_REQUEST))
    with closing(Client(tritonclient.grpc, served.grpc)) as client:

        def ask() -> None:
            first = next(begins)
            client.predict(take(samples, slice(first, first + PER_REQUEST)))

        with repeated(ask, 0.005):
            yield


@contextmanager
def publishing(broker: Broker) -> Iterator[None]:
    """A publisher sends a hundred rows of random users each second."""
    rng = np.random.default_rng(0)
    table = read_spec(REPOSITORY / MODEL / "1").table("users.weight")
    with Publisher(broker.url, MODEL) as publisher:

        def publish() -> None:
            keys = rng.integers(0, table.num_rows, 100)
            publisher.publish(table.folder, keys, rng.normal(0, 0.1, (100, table.embedding_dim)))

        with repeated(publish, 1):
            yield


def draw_dashboard(prometheus: Prometheus, begin: float, end: float) -> None:
    """A plot for each panel that has data, in the dashboard's order."""
    data = [(panel, _lines(prometheus, panel, begin, end)) for panel in panels()]
    data = [(panel, lines) for panel, lines in data if lines]
    num_rows = math.ceil(len(data) / 4)
    figure = Figure(figsize=(16, 3 * num_rows), layout="constrained")
    figure.supxlabel("seconds")
    for number, (panel, lines) in enumerate(data, 1):
        axes = figure.add_subplot(num_rows, 4, number)
        for name, values in lines:
            axes.plot([float(at) - begin for at, _ in values], [float(value) for _, value in values], label=name)
        axes.set_title(f"{panel.title} ({UNITS.get(panel.unit, panel.unit)})", fontsize=10)
        axes.legend(fontsize=7)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.savefig(IMAGES / "dashboard.png", dpi=75)


def _lines(prometheus: Prometheus, panel: Panel, begin: float, end: float) -> list[tuple[str, Any]]:
    """The lines of a panel, each with its name and its points in time."""
    return [
        (re.sub(r"\{\{(\w+)\}\}", lambda label, series=series: series["metric"][label[1]], form), series["values"])
        for query, form in panel.queries
        for series in prometheus.series(query, begin, end)
    ]


def draw_top(served: Served, redis: RedisServer) -> None:
    """Look once a second, as the command does, and keep the last picture."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    view = TopView("http://localhost:8002/metrics")
    for look in range(NUM_LOOKS):
        if look == STOPS_AT:
            redis.stop()
        if look == STARTS_AT:
            redis.start()
        view.add(MetricsPage.fetch(served.metrics, timeout_s=5.0), [])
        time.sleep(1)
    console.print(view.render(WIDTH))
    picture = console.export_svg(title="hotrow top", unique_id="top")
    # Only the readers' own fonts: the page loads nothing from other hosts.
    (IMAGES / "top.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
