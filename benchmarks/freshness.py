"""How much updates improve predictions: the last days of real events, replayed with and without updates.

    python benchmarks/freshness.py                       starts a broker; two minutes
    python benchmarks/freshness.py --to kafka://HOST:PORT
    python benchmarks/freshness.py --model FOLDER        a model and events of your own

The example model has learned from the first 80 % of MovieLens-100k (downloaded by pip) in order of time. The other
ratings come here as they came then. For each hundred of them a Triton is asked what it predicts; then their outcome is
known, and a trainer moves the rows of these users and movies a little, the network being frozen, and publishes them.
The next hundred is asked for once the server's answers have become those of the trainer, which is checked. The same
ratings are asked for before any update as well. AUC is of all of them together.

FOLDER has `model.onnx` and events from after its training, in order of time: `eval_inputs.npz` with all of its inputs,
`labels.npz` with what came of it, by the names of its outputs. The rows of its two largest tables learn.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import tritonclient.grpc
from numpy.typing import NDArray
from serving import add_settings, serve

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from demo.client import MODEL, Client
from demo.movielens import TASKS, Inputs, MovieLens, fetch, take
from hotrow.answer_quality.auc import auc_by_label
from inference_session.model_spec import DENSE_FILE, KEYS_FILE, LookupSpec
from inference_session.update_stream import Publisher
from inference_session.update_stream.table_changes import open_tables
from inference_session.version_directory.session_file import read_spec
from tests.testing.broker import Broker

REPOSITORY = Path(__file__).resolve().parent.parent / "model_repository"
TRAINED = {"users_weight": ("user_id", 0.02), "movies_weight": ("movie_id", 0.005)}
"""By table of the example, the input whose rows learn, and how fast."""
RATES = (0.01, 0.01)
"""How fast rows learn in the two largest tables of another model."""
STEP = 1e-2
"""Step of a vector's elements for the finite differences of the loss."""
DEADLINE_S = 60.0

Floats = NDArray[np.float32]


class Events(NamedTuple):
    """The events after a model was trained, in order of time."""

    repository: Path
    """The repository with the model's folder."""
    model: str
    tasks: Sequence[str]
    learning: Mapping[str, tuple[str, float]]
    """By table, the input whose rows learn, and how fast."""
    inputs: Inputs
    labels: Floats
    """[events, tasks]"""
    text: str
    """What they are."""


class Trainer:
    """Learns rows of a version's tables by Adagrad, with a frozen network.

    Gradients are finite differences: the network is run with every element of the vectors moved either way. A real
    trainer has a framework for that; this one needs only the version that is served.
    """

    def __init__(self, version_dir: Path, tasks: Sequence[str], learning: Mapping[str, tuple[str, float]]) -> None:
        self._lookups = read_spec(version_dir).lookups
        self._tasks, self._learning = list(tasks), learning
        self._network = _network(version_dir / DENSE_FILE)
        self._key_network = _network(version_dir / KEYS_FILE) if (version_dir / KEYS_FILE).exists() else None
        self.rows = {table.spec.folder: np.array(table.file.vectors, np.float32) for table in open_tables(version_dir)}
        self._sums = {folder: np.full_like(rows, 1e-4) for folder, rows in self.rows.items()}

    def predict(self, inputs: Inputs) -> Floats:
        """Probabilities float32 [samples, tasks] with the current rows."""
        known = self._with_derived(inputs)
        return self._run(known, self._vectors(known))

    def learn(self, inputs: Inputs, labels: Floats) -> dict[str, NDArray[np.int64]]:
        """Move the rows of these samples; returns the keys of those that have moved, by table."""
        known = self._with_derived(inputs)
        slopes = {table: self._slopes(known, name, labels) for table, (name, _) in self._learning.items()}
        moved = {}
        for table, (name, rate) in self._learning.items():
            keys, inverse = np.unique(inputs[name], return_inverse=True)
            total = np.zeros((len(keys), self.rows[table].shape[1]), np.float32)
            np.add.at(total, inverse.reshape(-1), slopes[table])
            self._sums[table][keys] += total**2
            self.rows[table][keys] -= rate * total / np.sqrt(self._sums[table][keys])
            moved[table] = keys.astype(np.int64, copy=False)
        return moved

    def _with_derived(self, inputs: Inputs) -> Inputs:
        """The inputs, and the keys and weights that the model derives from them."""
        if self._key_network is None:
            return inputs
        names = [one.name for one in self._key_network.get_outputs()]
        feeds = {one.name: inputs[one.name] for one in self._key_network.get_inputs()}
        return {**inputs, **dict(zip(names, self._key_network.run(names, feeds), strict=True))}

    def _vectors(self, inputs: Inputs) -> list[Floats]:
        """The vectors of each look-up."""
        return [_pooled(lookup, self.rows[lookup.table][inputs[lookup.keys]], inputs) for lookup in self._lookups]

    def _run(self, inputs: Inputs, vectors: Sequence[Floats]) -> Floats:
        """The network's answers for vectors instead of keys."""
        parts = defaultdict(list)
        for lookup, part in zip(self._lookups, vectors, strict=True):
            parts[lookup.dense_input].append(part.reshape(len(part), -1) if lookup.joined else part)
        columns = {**inputs, **{name: np.concatenate(found, axis=1) for name, found in parts.items()}}
        feeds = {one.name: columns[one.name] for one in self._network.get_inputs()}
        return np.concatenate([part.reshape(len(part), 1) for part in self._network.run(self._tasks, feeds)], axis=1)

    def _slopes(self, inputs: Inputs, name: str, labels: Floats) -> Floats:
        """Gradient of the loss by the vectors of an input's keys: float32 [samples, embedding_dim]."""
        position = next(i for i, one in enumerate(self._lookups) if one.keys == name)
        vectors = self._vectors(inputs)
        dim, num_samples = vectors[position].shape[-1], len(labels)
        moves = np.repeat(np.concatenate([np.eye(dim), -np.eye(dim)]), num_samples, axis=0).astype(np.float32) * STEP
        many = [np.concatenate([part] * (2 * dim)) for part in vectors]
        many[position] += moves.reshape(many[position].shape)
        many_inputs = {one: np.concatenate([column] * (2 * dim)) for one, column in inputs.items()}
        losses = _loss(self._run(many_inputs, many), np.concatenate([labels] * (2 * dim))).reshape(2, dim, num_samples)
        slopes: Floats = (losses[0] - losses[1]).T / (2 * STEP)
        return slopes


def _network(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def _pooled(lookup: LookupSpec, rows: Floats, inputs: Inputs) -> Floats:
    if lookup.weights is not None:
        weights: Floats = inputs[lookup.weights].astype(np.float32, copy=False)
        rows = rows * weights[..., None]
    pool: dict[str, Callable[[], Any]] = {
        "none": lambda: rows,
        "sum": lambda: rows.sum(axis=1),
        "mean": lambda: rows.mean(axis=1),
    }
    pooled: Floats = pool[lookup.pooling]()
    return pooled


def _loss(predictions: Floats, labels: Floats) -> Floats:
    """Binary cross entropy, float32 [samples], mean over tasks."""
    sure = np.clip(predictions, 1e-6, 1 - 1e-6)
    loss: Floats = -(labels * np.log(sure) + (1 - labels) * np.log(1 - sure)).mean(axis=1)
    return loss


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", metavar="KAFKA_URL", help="brokers without earlier updates of this model")
    parser.add_argument("--model", metavar="FOLDER", type=Path, help="another model than the example, with its events")
    parser.add_argument("--every", type=int, default=100, help="events between two updates")
    parser.add_argument("--limit", type=int, help="largest number of events to replay")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        repository = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        events = example(repository) if options.model is None else of_folder(options.model, repository)
        rows = slice(0, options.limit)
        events = events._replace(inputs=take(events.inputs, rows), labels=events.labels[rows])
        print(f"{len(events.labels)} {events.text}, updated every {options.every}")
        url = options.to or stack.enter_context(Broker()).url
        add_settings(repository / events.model / "config.pbtxt", {"update_stream": url})
        server = stack.enter_context(serve(repository))
        client = Client(tritonclient.grpc, server.endpoints["gRPC"], events.model)
        stack.callback(client.close)
        without = client.predict(events.inputs)
        trainer = Trainer(repository / events.model / "1", events.tasks, events.learning)
        publisher = stack.enter_context(Publisher(url, events.model))
        parts = [slice(begin, begin + options.every) for begin in range(0, len(events.labels), options.every)]
        steps = [replay(client, trainer, publisher, take(events.inputs, part), events.labels[part]) for part in parts]
    answers, delays_s = np.concatenate([answer for answer, _ in steps]), [delay_s for _, delay_s in steps]
    report(events, without, answers, delays_s)


def example(repository: Path) -> Events:
    """The example model, and the ratings after its training data."""
    data = MovieLens.read(fetch())
    inputs, labels = data.samples()
    later = slice(data.num_train, None)
    days = (data.ratings.times[later][-1] - data.ratings.times[later][0]) / 86400
    shutil.copytree(REPOSITORY / MODEL, repository / MODEL)
    text = f"ratings of the {days:.1f} days after training"
    return Events(repository, MODEL, TASKS, TRAINED, take(inputs, later), labels[later], text)


def of_folder(folder: Path, repository: Path) -> Events:
    """A model and events in files."""
    model = folder.resolve().name
    command = [sys.executable, "-m", "hotrow", "import", "onnx", str(folder / "model.onnx"), "--name", model]
    subprocess.run([*command, "--repository", str(repository)], check=True, stdout=subprocess.DEVNULL)
    spec = read_spec(repository / model / "1")
    largest = sorted(spec.tables, key=lambda table: -table.num_rows)[: len(RATES)]
    keys = {one.table: one.keys for one in reversed(spec.lookups) if one.pooling == "none"}
    learning = {table.folder: (keys[table.folder], rate) for table, rate in zip(largest, RATES, strict=True)}
    with np.load(folder / "eval_inputs.npz") as inputs, np.load(folder / "labels.npz") as labels:
        columns = [labels[task].reshape(-1, 1).astype(np.float32) for task in spec.labels]
        return Events(repository, model, spec.labels, learning, dict(inputs), np.concatenate(columns, axis=1), "events")


def replay(
    client: Client, trainer: Trainer, publisher: Publisher, events: Inputs, outcome: Floats
) -> tuple[Floats, float]:
    """The server's answers before the outcome is known; seconds from publishing learned rows to serving them."""
    answer = client.predict(events)
    moved = trainer.learn(events, outcome)
    begin = time.monotonic()
    for table, keys in moved.items():
        publisher.publish(table, keys, trainer.rows[table][keys])
    publisher.flush()
    await_answers(client, events, trainer.predict(events))
    return answer, time.monotonic() - begin


def await_answers(client: Client, events: Inputs, expected: Floats) -> None:
    """Send requests until the server's answers equal the trainer's."""
    end = time.monotonic() + DEADLINE_S
    while not np.allclose(client.predict(events), expected, atol=1e-5):
        if time.monotonic() > end:
            raise TimeoutError(f"the server does not answer with the rows published within {DEADLINE_S:g} s")
        time.sleep(0.005)


def report(events: Events, without: Floats, answers: Floats, delays_s: list[float]) -> None:
    """AUC by task, and the delays."""
    print(f"{'AUC':<10}{'without':>10}{'with':>10}{'gain':>10}")
    both = auc_by_label(events.labels, without), auc_by_label(events.labels, answers)
    for task, before, after in zip(events.tasks, *both, strict=True):
        print(f"{task:<10}{before:>10.4f}{after:>10.4f}{after - before:>+10.4f}")
    median, high = np.quantile(delays_s[1:] or delays_s, (0.5, 0.99)) * 1e3
    print(
        f"published to served, {len(delays_s)} times, the client's own questions included: median {median:.0f} ms,"
        f" p99 {high:.0f} ms; the first time, when topics had to be made, {delays_s[0]:.1f} s"
    )


if __name__ == "__main__":
    main()
