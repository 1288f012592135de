"""Trains on MovieLens in order of time while a real Triton serves the model, and compares three ways to serve.

python -m demo.online_learning [--seed N] [--plot FILE.png]

The first half of the ratings trains the model. The second half is replayed: the three models on the
server first predict each batch, then the trainer learns from it.

    frozen      the model as it was at half time
    reloaded    a new version after each seventh of the second half
    streamed    the same new versions, and every row as soon as it has been learned
"""

from __future__ import annotations

import copy
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
import torch
import tritonclient.grpc as grpc_client
from numpy.typing import NDArray
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from demo.broker import started_broker
from demo.client import Client
from demo.movielens import GENRES, NUM_MOVIES, NUM_USERS, OCCUPATIONS, Inputs, MovieLens, fetch, take
from demo.report import console
from hotrow import training
from hotrow.answer_quality.auc import auc
from inference_session.errors import HotrowError, UnavailableError
from triton_backend.launcher.command import ServerOptions
from triton_backend.launcher.server import TritonServer

WAYS = ("frozen", "reloaded", "streamed")
EMBEDDING_DIM = 16
BATCH_SIZE = 128
NUM_PARTS = 7
LEARNING_RATE, DENSE_LEARNING_RATE = 0.1, 0.01
PATIENCE_S = 60.0
TOLERANCE = 1e-5


class TwoTowers(nn.Module):
    """Predicts a user's opinion of a movie: a vector of each, their product, and a small network.

    Inputs are int64 [batch, 1], genres [batch, MAX_GENRES] filled up with 0; the answer is a probability [batch, 1].
    """

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(NUM_USERS + 1, EMBEDDING_DIM)
        self.jobs = nn.Embedding(len(OCCUPATIONS) + 1, EMBEDDING_DIM)
        self.movies = nn.Embedding(NUM_MOVIES + 1, EMBEDDING_DIM)
        self.genres = nn.EmbeddingBag(len(GENRES) + 1, EMBEDDING_DIM, mode="mean", padding_idx=0)
        nn.init.zeros_(self.users.weight)  # a user without training data is treated as an average one
        for table in (self.jobs, self.movies, self.genres):
            nn.init.normal_(table.weight, std=0.05)
        self.layers = nn.Sequential(nn.Linear(4 * EMBEDDING_DIM + 1, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user_id: Tensor, occupation: Tensor, movie_id: Tensor, genres: Tensor) -> Tensor:
        user, job = self.users(user_id).squeeze(1), self.jobs(occupation).squeeze(1)
        movie, genre = self.movies(movie_id).squeeze(1), self.genres(genres)
        match = ((user + job) * (movie + genre)).sum(1, keepdim=True)
        return torch.sigmoid(self.layers(torch.cat([user, job, movie, genre, match], dim=1)))

    def tables(self) -> list[Tensor]:
        """The weights of all tables."""
        return [self.users.weight, self.jobs.weight, self.movies.weight, self.genres.weight]


@dataclass(frozen=True)
class Samples:
    """Inputs and labels, in order of time."""

    inputs: Inputs
    liked: NDArray[np.float32]

    @classmethod
    def read(cls) -> Samples:
        """MovieLens-100k; UnavailableError if it is unavailable."""
        data = MovieLens.read(fetch())
        genres = data.genre_keys(range(NUM_MOVIES + 1))
        jobs = np.concatenate([data.occupation_key(user) for user in range(NUM_USERS + 1)])
        users, movies = data.ratings.users, data.ratings.movies
        inputs: Inputs = {
            "user_id": users[:, None],
            "occupation": jobs[users],
            "movie_id": movies[:, None],
            "genres": genres[movies],
        }
        return cls(inputs, (data.ratings.stars >= 4).astype(np.float32))

    def __len__(self) -> int:
        return len(self.liked)

    def batches(self, begin: int, end: int, what: str) -> Iterator[tuple[int, Inputs, NDArray[np.float32]]]:
        """The position, inputs and labels of each batch. `what` is done with them, by a progress bar."""
        for first in track(range(begin, end, BATCH_SIZE), what, console=console):
            rows = slice(first, min(first + BATCH_SIZE, end))
            yield first, take(self.inputs, rows), self.liked[rows]


class Trainer:
    """The model, and one step of learning."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = TwoTowers()
        groups = [
            {"params": self.model.tables(), "lr": LEARNING_RATE},
            {"params": list(self.model.layers.parameters()), "lr": DENSE_LEARNING_RATE},
        ]
        self.optimizer = torch.optim.Adagrad(groups)

    def learn(self, inputs: Inputs, liked: NDArray[np.float32]) -> None:
        """One step."""
        loss = nn.functional.binary_cross_entropy(self.model(*_tensors(inputs)).squeeze(1), torch.from_numpy(liked))
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()

    def export(self, repository: Path, name: str, example: Inputs) -> int:
        """Export the current model as the next version."""
        example_tensors = tuple(_tensors(take(example, slice(2))))
        return training.export(self.model, example=example_tensors, outputs=["liked"], repository=repository, name=name)


def _tensors(inputs: Inputs) -> list[Tensor]:
    return [torch.from_numpy(inputs[name]) for name in ("user_id", "occupation", "movie_id", "genres")]


@dataclass
class Outcome:
    """The predictions, and the delays of rows."""

    liked: list[NDArray[np.float32]] = field(default_factory=list)
    scores: dict[str, list[NDArray[np.float32]]] = field(default_factory=lambda: {way: [] for way in WAYS})
    delays_s: list[float] = field(default_factory=list)
    """Seconds from the end of a step until its rows were served."""

    def auc(self, way: str, num_batches: int | None = None) -> float:
        """Over the first batches, or all."""
        return auc(np.concatenate(self.liked[:num_batches]), np.concatenate(self.scores[way][:num_batches]))


class OnlineServer:
    """A Triton that serves the three models, and a client of it."""

    def __init__(self, repository: Path, server: TritonServer) -> None:
        self.repository = repository
        url = server.endpoints["gRPC"]
        self._control = grpc_client.InferenceServerClient(url)
        self._clients = {way: Client(grpc_client, url, way) for way in WAYS}

    def score(self, way: str, inputs: Inputs) -> NDArray[np.float32]:
        """Probabilities [batch]."""
        return self._clients[way].predict(inputs)[:, 0]

    def reload(self, way: str) -> None:
        """Serve the newest version."""
        self._control.load_model(way)

    def wait_for(self, inputs: Inputs, expected: NDArray[np.float32]) -> None:
        """Return when the streamed model answers as expected; UnavailableError where it does not in a minute."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if np.allclose(self.score("streamed", inputs), expected, atol=TOLERANCE):
                return
            time.sleep(0.005)
        raise UnavailableError(f"the streamed model has not answered with the trainer's rows in {PATIENCE_S:g} s")

    def close(self) -> None:
        """Close the connection."""
        for client in self._clients.values():
            client.close()
        self._control.close()


@contextmanager
def _serving(trainer: Trainer, example: Inputs, broker: str) -> Iterator[OnlineServer]:
    """Export the model under three names, and serve it."""
    with ExitStack() as stack:
        repository = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotrow-online-")))
        for way in WAYS:
            trainer.export(repository, way, example)
        config = repository / "streamed" / "config.pbtxt"
        parameter = f'parameters {{ key: "update_stream" value {{ string_value: "{broker}" }} }}\n'
        config.write_text(config.read_text() + parameter)
        options = ServerOptions(repository, WAYS, http_port=0, grpc_port=0, metrics_port=0)
        server = stack.enter_context(TritonServer.start(options))
        online = OnlineServer(repository, server)
        stack.callback(online.close)
        yield online


def replay(samples: Samples, trainer: Trainer, broker: str, *, limit: int | None = None) -> Outcome:
    """Learn the first half, then ask and learn each batch of the second."""
    half = len(samples) // 2
    end = len(samples) if limit is None else min(len(samples), half + limit)
    for _, inputs, liked in samples.batches(0, half, "learn the first half"):
        trainer.learn(inputs, liked)
    console.print("export three models, and start Triton")
    marks = [half + (end - half) * part // NUM_PARTS for part in range(1, NUM_PARTS)]
    outcome = Outcome()
    with (
        _serving(trainer, inputs, broker) as server,
        training.UpdatePublisher(trainer.model, broker, "streamed") as updates,
    ):
        dense = copy.deepcopy(trainer.model.layers)
        for position, inputs, liked in samples.batches(half, end, "ask and learn the rest"):
            if marks and position >= marks[0]:
                marks.pop(0)
                dense = _new_versions(server, trainer, inputs)
            outcome.liked.append(liked)
            for way in WAYS:
                outcome.scores[way].append(server.score(way, inputs))
            trainer.learn(inputs, liked)
            began = time.perf_counter()
            updates.step()
            server.wait_for(inputs, _served(trainer.model, dense, inputs))
            outcome.delays_s.append(time.perf_counter() - began)
    return outcome


def _new_versions(server: OnlineServer, trainer: Trainer, example: Inputs) -> nn.Module:
    """Serve the current model; returns the dense weights that are served from now on."""
    for way in WAYS[1:]:
        trainer.export(server.repository, way, example)
        server.reload(way)
    return copy.deepcopy(trainer.model.layers)


def _served(model: TwoTowers, dense: nn.Module, inputs: Inputs) -> NDArray[np.float32]:
    """The answers of a model with the newest rows and the dense weights of the last version."""
    newest, model.layers = model.layers, dense
    try:
        with torch.no_grad():
            answer: NDArray[np.float32] = model(*_tensors(inputs)).squeeze(1).numpy()
    finally:
        model.layers = newest
    return answer


def _show(outcome: Outcome) -> None:
    table = Table(title="AUC over the second half, each batch predicted before training on it")
    table.add_column("served")
    table.add_column("AUC", justify="right")
    table.add_column("")
    for way in WAYS:
        value = outcome.auc(way)
        table.add_row(way, f"{value:.4f}", "█" * round((value - 0.65) * 400))
    console.print(table)
    delays = np.array(outcome.delays_s) * 1000
    console.print(
        f"From the end of a step to its rows being served: p50 {np.percentile(delays, 50):.0f} ms, "
        f"p99 {np.percentile(delays, 99):.0f} ms over {len(delays)} steps."
    )


def _plot(outcome: Outcome, path: Path) -> None:
    """AUC so far, by ratings replayed."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    counts = np.cumsum([len(part) for part in outcome.liked])
    places = range(5, len(counts) + 1, max(1, len(counts) // 100))
    for way in WAYS:
        axes.plot([counts[i - 1] for i in places], [outcome.auc(way, i) for i in places], label=way)
    axes.set(xlabel="ratings replayed", ylabel="AUC so far", title="MovieLens-100k, in order of time")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
    console.print(f"Plot: {path}")


@click.command()
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the initial weights.")
@click.option(
    "--limit", type=click.IntRange(min=1), help="Largest number of ratings to replay.  [default: the whole half]"
)
@click.option("--broker", metavar="KAFKA_URL", help="[default: one is started]")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), default=Path("online-learning.png"), show_default=True
)
def main(seed: int, limit: int | None, broker: str | None, plot: Path) -> None:
    """Train while a real Triton serves, and compare frozen, reloaded and streamed models."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no server keeps running
    try:
        samples = Samples.read()
        with ExitStack() as stack:
            url = broker or stack.enter_context(started_broker())
            outcome = replay(samples, Trainer(seed), url, limit=limit)
        _show(outcome)
        _plot(outcome, plot)
    except HotrowError as error:
        console.print(f"[red]online_learning: {error}[/]")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
