"""Trains the example model on MovieLens-100k, imports it into the model repository, and records its expected answers.

    python -m demo.train [--repository model_repository] [--validate]

Needs torch and onnxscript (pip install torch onnxscript); takes about half a minute on two cores. The seed is fixed;
another machine or torch may still give slightly different weights.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from demo.movielens import GENDERS, GENRES, NUM_MOVIES, NUM_USERS, OCCUPATIONS, TASKS, Inputs, MovieLens, fetch, take
from hotrow.answer_quality.auc import auc_by_label

NAME = "movielens"
EMBEDDING_DIM = 16
NUM_EXPERTS = 4
NUM_EPOCHS = 3
BATCH_SIZE = 256
LEARNING_RATE = 2e-3
FORGET_USER = 0.6
"""How often training hides who the user is: most users to come are new ones, known by their history alone."""
FORGET_MOVIE = 0.02
MIN_ROWS = 500
"""Tables of users and movies leave the network; those of a few dozen rows stay."""
NUM_EXPECTED = 256


class MultiTaskRanker(nn.Module):
    """Multi-gate mixture of experts: one pair of probabilities for each user and movie.

    Inputs are int64 [batch, 1] unless said otherwise; 0 is an unknown user, movie, genre …, whose vector is zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(NUM_USERS + 1, EMBEDDING_DIM, padding_idx=0)
        self.movies = nn.Embedding(NUM_MOVIES + 1, EMBEDDING_DIM, padding_idx=0)
        self.genres = nn.Embedding(len(GENRES) + 1, 4, padding_idx=0)
        self.ages = nn.Embedding(20, 4)
        self.genders = nn.Embedding(len(GENDERS) + 1, 2)
        self.occupations = nn.Embedding(len(OCCUPATIONS) + 1, 4)
        # A user without training data keeps the vector of an unknown one.
        nn.init.zeros_(self.users.weight)
        nn.init.normal_(self.movies.weight, std=0.05)
        width = 5 * EMBEDDING_DIM + 4 + 4 + 2 + 4 + 2
        self.experts = nn.ModuleList(_layers(width, 64, 32) for _ in range(NUM_EXPERTS))
        self.gates = nn.ModuleList(nn.Linear(width, NUM_EXPERTS) for _ in TASKS)
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1)) for _ in TASKS)

    def forward(
        self,
        *,
        user_id: Tensor,
        movie_id: Tensor,
        liked_movies: Tensor,
        disliked_movies: Tensor,
        age: Tensor,
        gender: Tensor,
        occupation: Tensor,
        genres: Tensor,
        mean_rating: Tensor,
        num_ratings: Tensor,
    ) -> tuple[Tensor, ...]:
        """Probabilities float32 [batch, 1], one tensor for each task.

        Args:
            liked_movies, disliked_movies: [batch, any length], filled up with 0.
            age: in years.
            genres: of the movie, [batch, any length], filled up with 0.
            mean_rating: of the user so far, float32 [batch, 1], in stars.
            num_ratings: by the user so far, float32 [batch, 1].
        """
        movie = self.movies(movie_id).squeeze(1)
        taste = _mean(self.movies, liked_movies)
        distaste = _mean(self.movies, disliked_movies)
        generosity = (mean_rating - 3.5) * num_ratings / (num_ratings + 3)
        person = [self.ages((age // 5).clamp(0, 19)), self.genders(gender), self.occupations(occupation)]
        features = [
            *[self.users(user_id).squeeze(1), movie, taste, distaste, movie * (taste - distaste)],
            *[_mean(self.genres, genres), *(vector.squeeze(1) for vector in person)],
            *[generosity, torch.log1p(num_ratings)],
        ]
        return self._mix(torch.cat(features, dim=1))

    def _mix(self, features: Tensor) -> tuple[Tensor, ...]:
        experts = torch.stack([expert(features) for expert in self.experts], dim=1)
        weights = [torch.softmax(gate(features), dim=1).unsqueeze(2) for gate in self.gates]
        mixed = [(weight * experts).sum(dim=1) for weight in weights]
        return tuple(torch.sigmoid(tower(mix)) for tower, mix in zip(self.towers, mixed, strict=True))


def _layers(width: int, *sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in sizes:
        layers += [nn.Dropout(0.2), nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers)


def _mean(table: nn.Embedding, keys: Tensor) -> Tensor:
    """Mean of the vectors of all keys but 0, whose vector is zero; zero for none."""
    return cast("Tensor", table(keys).sum(dim=1) / (keys > 0).sum(dim=1, keepdim=True).clamp(min=1))


def train(inputs: Inputs, labels: NDArray[np.float32]) -> MultiTaskRanker:
    """A model that has seen these samples, in random order, `NUM_EPOCHS` times."""
    torch.manual_seed(0)
    model = MultiTaskRanker()
    columns, truth = _tensors(inputs), torch.from_numpy(labels)
    steps = NUM_EPOCHS * -(-len(labels) // BATCH_SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=steps)
    for epoch in range(NUM_EPOCHS):
        losses = [
            _step(model, optimizer, schedule, {name: column[rows] for name, column in columns.items()}, truth[rows])
            for rows in torch.split(torch.randperm(len(labels)), BATCH_SIZE)
        ]
        print(f"epoch {epoch + 1} of {NUM_EPOCHS}: loss {np.mean(losses):.4f}", flush=True)
    return model.eval()


def _step(
    model: MultiTaskRanker,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    batch: dict[str, Tensor],
    truth: Tensor,
) -> float:
    for name, share in (("user_id", FORGET_USER), ("movie_id", FORGET_MOVIE)):
        batch[name] = batch[name] * (torch.rand(batch[name].shape) >= share)
    loss = nn.functional.binary_cross_entropy(torch.cat(model(**batch), dim=1), truth)
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()
    schedule.step()
    return loss.item()


def export(model: MultiTaskRanker, example: Inputs, path: Path) -> None:
    """Write the model as ONNX, for any number of samples and any length of lists."""
    torch.onnx.export(
        model,
        (),
        path,
        kwargs=_tensors(example),
        output_names=TASKS,
        dynamic_shapes={name: {0: "batch"} for name in example},
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    exported = onnx.load(path)
    for element in (*exported.graph.node, *exported.graph.value_info, *exported.graph.input, *exported.graph.output):
        del element.metadata_props[:]  # the exporter notes the places of this file, as the training machine has them
    onnx.save(exported, path)


def random_requests(num_samples: int) -> Inputs:
    """Valid requests about no real user: rows of the data set may not be redistributed."""
    rng = np.random.default_rng(0)
    request = MovieLens().request(0, MovieLens().ratings, [0] * num_samples)
    highest = {
        "user_id": NUM_USERS,
        "movie_id": NUM_MOVIES,
        "liked_movies": NUM_MOVIES,
        "disliked_movies": NUM_MOVIES,
        "age": 99,
        "gender": len(GENDERS),
        "occupation": len(OCCUPATIONS),
        "genres": len(GENRES),
    }
    keys: Inputs = {name: rng.integers(0, top + 1, request[name].shape) for name, top in highest.items()}
    num_ratings = rng.integers(0, 200, (num_samples, 1)).astype(np.float32)
    mean_rating = np.where(num_ratings > 0, rng.uniform(1, 5, (num_samples, 1)), 0).astype(np.float32)
    return {**request, **keys, "num_ratings": num_ratings, "mean_rating": mean_rating}


def predict(path: Path, inputs: Inputs) -> NDArray[np.float32]:
    """Plain ONNX Runtime's answers, all tasks concatenated: float32 [samples, tasks]."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.concatenate(session.run(list(TASKS), inputs), axis=1)


def _tensors(inputs: Inputs) -> dict[str, Tensor]:
    return {name: torch.from_numpy(column) for name, column in inputs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the example model and import it as the next version.")
    parser.add_argument("--repository", type=Path, default=Path(__file__).parent.parent / "model_repository")
    parser.add_argument("--validate", action="store_true", help="hold out the end of the training part; import nothing")
    options = parser.parse_args()
    data = MovieLens.read(fetch())
    inputs, labels = data.samples()
    # Settings are chosen with --validate, without the measurements of `held_out`.
    num_train, end = (70_000, data.num_train) if options.validate else (data.num_train, len(labels))
    model = train(take(inputs, slice(num_train)), labels[:num_train])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        export(model, take(inputs, slice(2)), path)
        held_out = auc_by_label(labels[num_train:end], predict(path, take(inputs, slice(num_train, end))))
        print("held-out AUC:", ", ".join(f"{task} {value:.4f}" for task, value in zip(TASKS, held_out, strict=True)))
        if not options.validate:
            _publish(path, options.repository, held_out)


def _publish(path: Path, repository: Path, held_out: list[float]) -> None:
    """Import the model, and record its answers and its AUC next to it."""
    options = ["--name", NAME, "--repository", str(repository), "--min-rows", str(MIN_ROWS)]
    subprocess.run([sys.executable, "-m", "hotrow", "import", "onnx", str(path), *options], check=True)
    requests = random_requests(NUM_EXPECTED)
    expected: dict[str, Any] = {"predictions": predict(path, requests), "held_out_auc": np.array(held_out)}
    np.savez_compressed(repository / NAME / "expected.npz", **expected, **cast("dict[str, Any]", requests))


if __name__ == "__main__":
    main()
