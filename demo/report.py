"""The demo's output: recommendations to judge, accuracy compared with training's, latency."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from demo.client import MODEL, Client, Predictions
from demo.movielens import NUM_MOVIES, NUM_USERS, TASKS, Inputs, MovieLens, Ratings, take
from hotrow.answer_quality.auc import auc_by_label

REPOSITORY = Path(__file__).parent.parent / "model_repository"
NUM_SHOWN = 5
LATENCY_SAMPLES = 64
LATENCY_REQUESTS = 1000
NUM_WARM_UP = 50

console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)


def show_recommendations(data: MovieLens, users: Sequence[int], client: Client) -> None:
    """Show for each user the movies, not rated when training ended, that the model ranks highest."""
    past, later = data.ratings[slice(data.num_train)], data.ratings[slice(data.num_train, None)]
    for user in users:
        own = past.of(user)
        movies = np.setdiff1d(np.arange(1, NUM_MOVIES + 1), own.movies)
        predictions = client.predict(data.request(user, own, movies.tolist()))
        best = np.argsort(-predictions[:, 0], kind="stable")[:NUM_SHOWN]
        console.print(_portrait(data, user, own))
        console.print(_ranking(data, movies[best].tolist(), predictions[best], later.of(user)))


def _portrait(data: MovieLens, user_id: int, past: Ratings) -> str:
    user = data.user(user_id)
    person = f"{user.age}, {user.gender}, {user.occupation}" if user.age else "of whom nothing is known"
    best = past.movies[np.argsort(-past.stars, kind="stable")[:4]]
    titles = "; ".join(data.movie(int(movie)).title for movie in best)
    return f"\n[bold]User {user_id}[/] ({person})" + (f", whose favourites are: {titles}" if titles else "")


def _ranking(data: MovieLens, movies: Sequence[int], predictions: Predictions, later: Ratings) -> Table:
    table = Table("movie", "year", "genres")
    for heading in TASKS:
        table.add_column(heading, justify="right")
    table.add_column("what the user said later")
    stars = dict(zip(later.movies.tolist(), later.stars.tolist(), strict=True))
    for movie_id, scores in zip(movies, predictions, strict=True):
        movie = data.movie(movie_id)
        percents = [f"{score:.0%}" for score in scores]
        table.add_row(movie.title, movie.year, ", ".join(movie.genres), *percents, "★" * stars.get(movie_id, 0))
    return table


def show_auc(data: MovieLens, client: Client) -> None:
    """AUC over the held-out ratings, through Triton, next to the AUC that training printed."""
    inputs, labels = data.samples()
    held_out = slice(data.num_train, None)
    begin = time.perf_counter()
    served = auc_by_label(labels[held_out], client.predict(take(inputs, held_out)))
    elapsed = time.perf_counter() - begin
    with np.load(REPOSITORY / MODEL / "expected.npz") as expected:
        trained = expected["held_out_auc"]
    console.print(f"\n{len(labels) - data.num_train} held-out ratings asked over gRPC in {elapsed:.1f} s. AUC:")
    for task, now, then in zip(TASKS, served, trained, strict=True):
        console.print(f"  {task}: {now:.4f} through Triton, {then:.4f} by plain ONNX Runtime after training")


def show_agreement(data: MovieLens, user: int, over_grpc: Client, over_http: Client) -> None:
    """The same requests over both protocols."""
    request = data.request(user, data.ratings.of(user), range(1, LATENCY_SAMPLES + 1))
    same = np.array_equal(over_grpc.predict(request), over_http.predict(request))
    word = "the same" if same else "[red]different[/]"
    console.print(f"\nHTTP and gRPC, asked the same {LATENCY_SAMPLES} samples, give {word} answers.")


def show_latency(client: Client) -> None:
    """The latency that one client sees."""
    batches = [_random_request(seed) for seed in range(16)]
    elapsed_ms = np.array([_elapsed_ms(client, batches[i % 16]) for i in range(LATENCY_REQUESTS)])[NUM_WARM_UP:]
    p50, p99 = np.percentile(elapsed_ms, [50, 99])
    console.print(
        f"Latency over gRPC, {LATENCY_SAMPLES} samples a request, one client: p50 {p50:.2f} ms, p99 {p99:.2f} ms "
        f"({len(elapsed_ms)} requests)."
    )


def _random_request(seed: int) -> Inputs:
    rng = np.random.default_rng(seed)
    movies = rng.integers(1, NUM_MOVIES + 1, LATENCY_SAMPLES)
    past = Ratings(*rng.integers(1, 6, (4, 30)))
    return MovieLens().request(int(rng.integers(1, NUM_USERS + 1)), past, movies.tolist())


def _elapsed_ms(client: Client, inputs: Inputs) -> float:
    begin = time.perf_counter()
    client.predict(inputs)
    return (time.perf_counter() - begin) * 1000
