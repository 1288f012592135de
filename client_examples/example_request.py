"""What the examples ask the model `movielens`: what will a student who likes Star Wars and
Indiana Jones think of five movies?

Every input has one row per sample; 0 fills up lists. The numbers are MovieLens' own; see model_repository/movielens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MODEL = "movielens"
TASKS = ("liked", "loved")
MOVIES = {
    181: "Return of the Jedi",
    172: "The Empire Strikes Back",
    64: "Shawshank Redemption",
    1: "Toy Story",
    243: "Jungle2Jungle",
}
TYPES = {"int64": "INT64", "float32": "FP32"}


def inputs() -> dict[str, NDArray[np.generic]]:
    """One row per movie: a user with known age, occupation and taste, but no user id."""
    samples = len(MOVIES)
    genres = [[1, 2, 14, 15, 17, 0], [1, 2, 8, 14, 15, 17], [8, 0, 0, 0, 0, 0], [3, 4, 5, 0, 0, 0], [4, 5, 0, 0, 0, 0]]
    return {
        "user_id": np.zeros((samples, 1), np.int64),
        "age": np.full((samples, 1), 24),
        "gender": np.full((samples, 1), 1),
        "occupation": np.full((samples, 1), 19),
        "liked_movies": np.tile([50, 174, 210, 0, 0, 0, 0, 0, 0, 0], (samples, 1)),
        "disliked_movies": np.zeros((samples, 10), np.int64),
        "mean_rating": np.full((samples, 1), 4.0, np.float32),
        "num_ratings": np.full((samples, 1), 3.0, np.float32),
        "movie_id": np.array(list(MOVIES)).reshape(-1, 1),
        "genres": np.array(genres),
    }


def show(predictions: NDArray[np.float32]) -> None:
    """Print predictions float32 [movies, tasks], the best first."""
    for title, scores in sorted(zip(MOVIES.values(), predictions, strict=True), key=lambda pair: -pair[1][0]):
        print(f"{title:<24}", *(f"{task} {score:.1%}" for task, score in zip(TASKS, scores, strict=True)), sep="  ")
