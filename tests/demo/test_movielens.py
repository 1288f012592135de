"""The demo's processing of the data set, on a few generated ratings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from demo.movielens import FILES, MovieLens, fetch

RATINGS = """user_id:token\titem_id:token\trating:float\ttimestamp:float
7\t30\t5\t100
7\t10\t2\t50
8\t10\t4\t60
7\t20\t4\t100
7\t40\t3\t200
"""
MOVIES = """item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq
10\tFirst\t1990\tAction War
20\tSecond\t1991\tunknown
30\tThird\t1992\tDrama
40\tFourth\t1993\tWestern
"""
USERS = """user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token
7\t30\tM\twriter\t12345
8\t40\tF\tadministrator\tE1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache folder with the three files, as `fetch` would have left it."""
    cache = tmp_path / "hotrow" / "ml-100k"
    cache.mkdir(parents=True)
    for name, text in zip(FILES, (RATINGS, MOVIES, USERS), strict=True):
        (cache / name).write_text(text, encoding="utf-8")
    return cache


def test_ratings_come_in_order_of_time(folder: Path) -> None:
    """A slice of them is a period of time."""
    ratings = MovieLens.read(folder).ratings

    assert ratings.times.tolist() == [50, 60, 100, 100, 200]
    assert ratings.movies.tolist() == [10, 10, 20, 30, 40]


def test_a_sample_knows_nothing_of_its_own_second_or_later(folder: Path) -> None:
    """Ratings given in the same second must not reveal each other."""
    inputs, labels = MovieLens.read(folder).samples()

    assert inputs["num_ratings"][:, 0].tolist() == [0, 0, 1, 1, 3]
    assert inputs["disliked_movies"][2].tolist() == [10] + [0] * 9
    assert inputs["liked_movies"][2].any() is np.False_
    assert inputs["liked_movies"][4].tolist() == [20, 30] + [0] * 8
    assert labels.tolist() == [[0, 0], [1, 0], [1, 0], [1, 1], [0, 0]]


def test_people_and_movies_become_keys(folder: Path) -> None:
    """Keys are positions in the published lists, plus one; unknown ones are 0."""
    data = MovieLens.read(folder)

    request = data.request(7, data.ratings.of(7), [10, 20])

    assert request["occupation"].tolist() == [[21], [21]]
    assert request["gender"].tolist() == [[2], [2]]
    assert request["genres"].tolist() == [[1, 17, 0, 0, 0, 0], [0] * 6]
    assert request["mean_rating"].tolist() == [[3.5], [3.5]]


def test_an_empty_data_set_makes_requests_too() -> None:
    """Without the download the demo goes on, by numbers."""
    data = MovieLens()

    request = data.request(3, data.ratings.of(3), [5])

    assert request["user_id"].tolist() == [[3]]
    assert request["num_ratings"].tolist() == [[0]]
    assert data.movie(5).title == "movie 5"


def test_files_in_the_cache_are_not_downloaded_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run needs no network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent.parent))
    monkeypatch.setenv("PATH", "")

    assert fetch() == folder
