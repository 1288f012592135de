"""Readers of public data sets, on made-up rows in the formats in which they are published."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from demo.hugectr_examples import from_movielens, original_formats
from demo.hugectr_examples.original_formats import Rows, read_criteo, read_mind, read_rees46
from demo.movielens import Movie, MovieLens, Ratings, User
from inference_session.errors import ModelFormatError

pytestmark = pytest.mark.training


def keys_of(rows: Rows, slot: int) -> list[list[int]]:
    keys, offsets = rows.slots[slot].keys, rows.slots[slot].offsets
    return [keys[offsets[i] : offsets[i + 1]].tolist() for i in range(len(offsets) - 1)]


def test_criteo_rows_have_missing_counts_and_hashes(tmp_path: Path) -> None:
    counts = ["3", "", "-1", *["0"] * 10]
    hashes = ["68fd1e64", "", *["05db9164"] * 24]
    rows = [["1", *counts, *hashes], ["0", *["7"] * 13, *["68fd1e64"] * 26]]
    for name in ("day_0", "day_1"):
        (tmp_path / name).write_text("".join("\t".join(row) + "\n" for row in rows))
    found = read_criteo(tmp_path, 3)
    assert found.labels.ravel().tolist() == [1, 0, 1]
    np.testing.assert_allclose(found.dense[0, :4], np.log1p([3, 0, 0, 0]))
    assert len(found.slots) == len(found.slot_sizes) == 26
    first, second = keys_of(found, 0), keys_of(found, 1)
    assert first[0] == first[1] == first[2] != [0]
    assert second[0] == [0]
    assert second[1] == first[0]
    with pytest.raises(ModelFormatError, match=r"holds neither train\.txt nor day_0"):
        read_criteo(tmp_path.parent, 3)
    (tmp_path / "day_0").write_text("1\t2\n")
    with pytest.raises(ModelFormatError, match="day_0: "):
        read_criteo(tmp_path, 3)


def test_rees46_events_become_wishes(tmp_path: Path) -> None:
    path = tmp_path / "2019-Oct.csv"
    path.write_text(
        "event_time,event_type,product_id,category_id,category_code,brand,price,user_id,user_session\n"
        "2019-10-01 00:00:00 UTC,view,1001,2053,electronics.phone,acme,35.79,541312140,72d7\n"
        "2019-10-01 06:00:01 UTC,cart,1001,2053,,,,541312140,72d7\n"
        "2019-10-02 12:00:00 UTC,purchase,1002,2054,a.b,other,0.00,5,x\n"
    )
    found = read_rees46(path, 10)
    assert found.labels.ravel().tolist() == [0, 1, 1]
    np.testing.assert_allclose(found.dense[:, 0], np.log1p([35.79, 0, 0]), rtol=1e-6)
    np.testing.assert_allclose(found.dense[:, 1], [0, 1, 0], atol=1e-6)
    products, brands, weekdays = (keys_of(found, slot) for slot in (1, 3, 4))
    assert products[0] == products[1] != products[2]
    assert brands[1] == [0]
    assert weekdays[2] == [weekdays[0][0] + 1]
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ModelFormatError, match=r"lacks the columns \['event_time'"):
        read_rees46(path, 10)


def test_mind_impressions_become_samples_with_their_history(tmp_path: Path) -> None:
    (tmp_path / "news.tsv").write_text('N1\tnews\tworld\ttitle\t\t\t[]\t[]\nN2\tsports\tgolf\t"x\t\t\t[]\t[]\n')
    (tmp_path / "behaviors.tsv").write_text(
        "1\tU13\t11/11/2019 9:05:58 AM\tN1 N2\tN2-1 N3-0\n2\tU9\t11/12/2019 6:11:30 PM\t\tN1-0\n"
    )
    found = read_mind(tmp_path, 100)
    assert found.labels.ravel().tolist() == [1, 0, 0]
    past, item, past_kind, item_kind, reader = (keys_of(found, slot) for slot in range(5))
    assert past[0] == past[1]
    assert len(past[0]) == 2
    assert past[2] == []
    assert item[0] == [past[0][1]]
    assert item[2] == [past[0][0]]
    assert item_kind[0] == [past_kind[0][1]]
    assert item_kind[1] == [0]
    assert reader[0] == reader[1] != reader[2]
    (tmp_path / "behaviors.tsv").write_text("1\tU13\n")
    with pytest.raises(ModelFormatError, match=r"behaviors\.tsv:1: 2 fields"):
        read_mind(tmp_path, 100)


def test_movielens_is_written_as_the_readers_take_it(tmp_path: Path) -> None:
    count = 40
    numbers = np.arange(count)
    data = MovieLens(
        {user: User(30, "F", "artist") for user in range(1, 4)},
        {movie: Movie(f"m{movie}", "1990", ("Drama", "War")) for movie in range(1, 6)},
        Ratings(1 + numbers % 3, 1 + numbers % 5, 1 + numbers % 5, 880_000_000 + numbers * 3600),
    )
    from_movielens.write_criteo(data, tmp_path)
    from_movielens.write_rees46(data, tmp_path / "events.csv")
    from_movielens.write_mind(data, tmp_path)
    liked = (data.ratings.stars >= 4).astype(np.float32)
    for rows in (read_criteo(tmp_path, 99), read_rees46(tmp_path / "events.csv", 99)):
        np.testing.assert_array_equal(rows.labels.ravel(), liked)
        train, evaluation = rows.split()
        assert (len(train.labels), len(evaluation.labels)) == (32, 8)
        assert keys_of(train, 0) + keys_of(evaluation, 0) == keys_of(rows, 0)
    news = read_mind(tmp_path, 99)
    assert len(news.labels) == 8 * 3
    assert max(map(len, keys_of(news, 0))) <= original_formats.MAX_CLICKS
