"""What updates are worth: the last days of real events, replayed against a served model with and without updates.

    python benchmarks/freshness.py                       starts a broker; two minutes
    python benchmarks/freshness.py --to kafka://HOST:PORT

The example model has learned from the first 80 % of MovieLens-100k (downloaded by pip) in order of time. The other
ratings come here as they came then. For each hundred of them a Triton is asked what it predicts; then their outcome is
known, and a trainer moves the rows of these users and movies a little, the network being frozen, and publishes them.
The next hundred is asked for once the server's answers have become those of the trainer, which is checked. The same
ratings are asked for before any update as well. AUC is of all of them together.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime
import tritonclient.grpc
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from demo.client import MODEL, Client
from demo.metrics import auc_by_task
from demo.movielens import TASKS, Inputs, MovieLens, fetch, take
from inference_session.formats.native import DENSE_FILE, ModelSpec
from inference_session.update_stream import Publisher
from inference_session.update_stream.table_changes import open_tables
from tests.update_stream.broker import Broker
from triton_backend.server import ServerOptions, TritonServer

REPOSITORY = Path(__file__).resolve().parent.parent / "model_repository"
TRAINED = {"users_weight": ("user_id", 0.02), "movies_weight": ("movie_id", 0.005)}
"""By table, the input whose rows learn, and how fast."""
STEP = 1e-2
"""How far a vector's elements are moved to find the slope of the loss."""
DEADLINE_S = 60.0

Floats = NDArray[np.float32]


class Trainer:
    """Learns rows of a version's tables by Adagrad, its network being frozen.

    Slopes are differences: the network is run with every element of the vectors moved either way. A real trainer has a
    framework for that; this one needs nothing but the version that is served.
    """

    def __init__(self, version_dir: Path) -> None:
        self._lookups = ModelSpec.read(version_dir).lookups
        self._network = onnxruntime.InferenceSession(version_dir / DENSE_FILE, providers=["CPUExecutionProvider"])
        self.rows = {table.spec.folder: np.array(table.file.vectors, np.float32) for table in open_tables(version_dir)}
        self._sums = {folder: np.full_like(rows, 1e-4) for folder, rows in self.rows.items()}

    def predict(self, inputs: Inputs) -> Floats:
        """Probabilities float32 [samples, tasks] with the rows as they are now."""
        return self._run(self._feeds(inputs))

    def learn(self, inputs: Inputs, labels: Floats) -> dict[str, NDArray[np.int64]]:
        """Move the rows of these samples; returns the keys of those that have moved, by table."""
        feeds = self._feeds(inputs)
        slopes = {table: self._slopes(feeds, table, labels) for table in TRAINED}
        moved = {}
        for table, (name, rate) in TRAINED.items():
            keys, inverse = np.unique(inputs[name], return_inverse=True)
            total = np.zeros((len(keys), self.rows[table].shape[1]), np.float32)
            np.add.at(total, inverse.reshape(-1), slopes[table])
            self._sums[table][keys] += total**2
            self.rows[table][keys] -= rate * total / np.sqrt(self._sums[table][keys])
            moved[table] = keys
        return moved

    def _feeds(self, inputs: Inputs) -> Inputs:
        """The network's inputs: the model's own, and vectors in place of keys."""
        vectors = {lookup.dense_input: self.rows[lookup.table][inputs[lookup.keys]] for lookup in self._lookups}
        pooled = {lookup.dense_input for lookup in self._lookups if lookup.pooling == "sum"}
        vectors = {name: rows.sum(axis=1) if name in pooled else rows for name, rows in vectors.items()}
        return {one.name: {**inputs, **vectors}[one.name] for one in self._network.get_inputs()}

    def _run(self, feeds: Inputs) -> Floats:
        return np.concatenate(self._network.run(list(TASKS), feeds), axis=1)

    def _slopes(self, feeds: Inputs, table: str, labels: Floats) -> Floats:
        """Of the loss by the vectors of a table's trained input: float32 [samples, embedding_dim]."""
        lookup = next(one for one in self._lookups if one.keys == TRAINED[table][0])
        dim, num_samples = self.rows[table].shape[1], len(labels)
        many = {name: np.concatenate([column] * (2 * dim)) for name, column in feeds.items()}
        moves = np.repeat(np.concatenate([np.eye(dim), -np.eye(dim)]), num_samples, axis=0).astype(np.float32) * STEP
        many[lookup.dense_input] = many[lookup.dense_input] + moves.reshape(many[lookup.dense_input].shape)
        losses = _loss(self._run(many), np.concatenate([labels] * (2 * dim))).reshape(2, dim, num_samples)
        slopes: Floats = (losses[0] - losses[1]).T / (2 * STEP)
        return slopes


def _loss(predictions: Floats, labels: Floats) -> Floats:
    """Binary cross entropy, float32 [samples], mean over tasks."""
    sure = np.clip(predictions, 1e-6, 1 - 1e-6)
    loss: Floats = -(labels * np.log(sure) + (1 - labels) * np.log(1 - sure)).mean(axis=1)
    return loss


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", metavar="KAFKA_URL", help="brokers without earlier updates of this model")
    parser.add_argument("--ratings", type=int, default=100, help="ratings between two updates")
    parser.add_argument("--limit", type=int, help="replay only so many ratings")
    options = parser.parse_args()
    data = MovieLens.read(fetch())
    inputs, labels = data.samples()
    later = slice(data.num_train, None if options.limit is None else data.num_train + options.limit)
    inputs, labels = take(inputs, later), labels[later]
    days = (data.ratings.times[later][-1] - data.ratings.times[later][0]) / 86400
    print(f"{len(labels)} ratings of the {days:.1f} days after training, updated every {options.ratings}")
    with contextlib.ExitStack() as stack:
        url = options.to or stack.enter_context(Broker()).url
        repository = write_repository(Path(stack.enter_context(tempfile.TemporaryDirectory())), url)
        server_options = ServerOptions(repository, http_port=0, grpc_port=0, metrics_port=0)
        server = stack.enter_context(TritonServer.start(server_options))
        client = stack.enter_context(contextlib.closing(Client(tritonclient.grpc, server.endpoints["gRPC"])))
        without = client.predict(inputs)
        trainer = Trainer(repository / MODEL / "1")
        publisher = stack.enter_context(Publisher(url, MODEL))
        parts = [slice(begin, begin + options.ratings) for begin in range(0, len(labels), options.ratings)]
        steps = [replay(client, trainer, publisher, take(inputs, part), labels[part]) for part in parts]
    answers, delays_s = np.concatenate([answer for answer, _ in steps]), [delay_s for _, delay_s in steps]
    report(labels, without, answers, delays_s)


def write_repository(folder: Path, url: str) -> Path:
    """The example model with an update stream."""
    shutil.copytree(REPOSITORY / MODEL, folder / MODEL)
    with (folder / MODEL / "config.pbtxt").open("a") as config:
        config.write(f'parameters {{ key: "update_stream" value {{ string_value: "{url}" }} }}\n')
    return folder


def replay(
    client: Client, trainer: Trainer, publisher: Publisher, events: Inputs, outcome: Floats
) -> tuple[Floats, float]:
    """What the server answers before the outcome is known; seconds from publishing what was learned to serving it."""
    answer = client.predict(events)
    moved = trainer.learn(events, outcome)
    begin = time.monotonic()
    for table, keys in moved.items():
        publisher.publish(table, keys, trainer.rows[table][keys])
    publisher.flush()
    await_answers(client, events, trainer.predict(events))
    return answer, time.monotonic() - begin


def await_answers(client: Client, events: Inputs, expected: Floats) -> None:
    """Ask until the server answers as the trainer would."""
    end = time.monotonic() + DEADLINE_S
    while not np.allclose(client.predict(events), expected, atol=1e-5):
        if time.monotonic() > end:
            raise TimeoutError(f"the server does not answer with the rows published within {DEADLINE_S:g} s")
        time.sleep(0.005)


def report(labels: Floats, without: Floats, answers: Floats, delays_s: list[float]) -> None:
    """AUC by task, and the delays."""
    print(f"{'AUC':<10}{'without':>10}{'with':>10}{'gain':>10}")
    for task, before, after in zip(TASKS, auc_by_task(labels, without), auc_by_task(labels, answers), strict=True):
        print(f"{task:<10}{before:>10.4f}{after:>10.4f}{after - before:>+10.4f}")
    median, high = np.quantile(delays_s[1:] or delays_s, (0.5, 0.99)) * 1e3
    print(
        f"published to served, {len(delays_s)} times, the client's own questions included: median {median:.0f} ms,"
        f" p99 {high:.0f} ms; the first time, when topics had to be made, {delays_s[0]:.1f} s"
    )


if __name__ == "__main__":
    main()
