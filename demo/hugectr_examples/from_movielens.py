"""MovieLens-100k in the formats of Criteo, REES46 and MIND: small real data to try the examples on.

If the ratings are unavailable, the examples use generated ones, and say so.
"""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from demo.movielens import NUM_MOVIES, NUM_USERS, Movie, MovieLens, Ratings, User, fetch
from inference_session.errors import UnavailableError

_SHOWN_TOGETHER = 8
"""Number of movies in a generated impression of the news format."""


def read_movielens() -> MovieLens:
    """The data set; otherwise generated ratings and a message."""
    try:
        return MovieLens.read(fetch())
    except UnavailableError as error:
        print(f"{error}\nThe example goes on with generated ratings.")
        return _generated()


def _generated(num_ratings: int = 20_000) -> MovieLens:
    random = np.random.default_rng(0)
    users, movies = random.integers(1, NUM_USERS, num_ratings), random.integers(1, NUM_MOVIES, num_ratings)
    stars = 1 + (users % 5 * (movies % 7)) % 5
    times = 880_000_000 + np.sort(random.integers(0, 10_000_000, num_ratings))
    genres = [("Action",), ("Comedy",), ("Drama",)]
    return MovieLens(
        {user: User(20 + user % 50, "FM"[user % 2], "other") for user in range(1, NUM_USERS)},
        {movie: Movie(f"movie {movie}", "1990", genres[movie % 3]) for movie in range(1, NUM_MOVIES)},
        Ratings(users, movies, stars, times),
    )


def write_criteo(data: MovieLens, folder: Path) -> None:
    """`train.txt`: whether a rating has 4 or 5 stars; ratings so far, age; hashes of user, movie and genres."""
    seen_users, seen_movies = np.zeros(NUM_USERS + 1, int), np.zeros(NUM_MOVIES + 1, int)
    with (folder / "train.txt").open("w", encoding="ascii") as file:
        for user_id, movie_id, stars, time in _each(data.ratings):
            user, movie = data.user(user_id), data.movie(movie_id)
            counts = [seen_users[user_id], seen_movies[movie_id], user.age, time // 3600 % 24, len(movie.genres)]
            values = [user_id, movie_id, user.gender, user.occupation, movie.year, *movie.genres[:6]]
            hashes = [f"{hash_of(value):08x}" for value in values]
            cells = [str(int(stars >= 4)), *map(str, counts), *[""] * 8, *hashes, *[""] * (26 - len(hashes))]
            file.write("\t".join(cells) + "\n")
            seen_users[user_id] += 1
            seen_movies[movie_id] += 1


def write_rees46(data: MovieLens, path: Path) -> None:
    """Events of a shop: 5 stars are a purchase, 4 a product in the cart, fewer a view."""
    with path.open("w", encoding="utf-8") as file:
        file.write("event_time,event_type,product_id,category_id,category_code,brand,price,user_id,user_session\n")
        for user_id, movie_id, stars, time in _each(data.ratings):
            movie = data.movie(movie_id)
            when = datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
            kind = {5: "purchase", 4: "cart"}.get(stars, "view")
            genre = movie.genres[0] if movie.genres else ""
            file.write(f"{when},{kind},{movie_id},{genre},,{movie.year},{movie_id % 100}.5,{user_id},{user_id}\n")


def write_mind(data: MovieLens, folder: Path) -> None:
    """`news.tsv` and `behaviors.tsv`: movies as news, those with 4 or 5 stars as clicks."""
    with (folder / "news.tsv").open("w", encoding="utf-8") as file:
        for number, item in data.movies.items():
            file.write(f"N{number}\t{item.genres[0] if item.genres else ''}\t\t{item.title}\t\t\t[]\t[]\n")
    clicks: dict[int, list[str]] = {}
    waiting: dict[int, list[str]] = {}
    with (folder / "behaviors.tsv").open("w", encoding="utf-8") as file:
        for number, (user, movie, stars, time) in enumerate(_each(data.ratings)):
            shown = waiting.setdefault(user, [])
            shown.append(f"N{movie}-{int(stars >= 4)}")
            if len(shown) == _SHOWN_TOGETHER:
                when = datetime.fromtimestamp(time, timezone.utc).strftime("%m/%d/%Y %I:%M:%S %p")
                history = " ".join(clicks.get(user, []))
                file.write(f"{number}\tU{user}\t{when}\t{history}\t{' '.join(shown)}\n")
                clicks.setdefault(user, []).extend(text[:-2] for text in shown if text.endswith("-1"))
                waiting[user] = []


def hash_of(value: object) -> int:
    """A 32-bit hash of the value, as in Criteo's columns."""
    return int.from_bytes(str(value).encode()[-4:].rjust(4, b"\0"), "big") * 2654435761 % 2**32


def _each(ratings: Ratings) -> list[tuple[int, int, int, int]]:
    columns = (ratings.users.tolist(), ratings.movies.tolist(), ratings.stars.tolist(), ratings.times.tolist())
    return list(zip(*columns, strict=True))
