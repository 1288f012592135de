"""Readers of public data sets, on generated rows in the formats in which they are published."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from demo.hugectr_examples import from_movielens, original_formats
from demo.hugectr_examples.original_formats import Rows, read_criteo, read_mind, read_rees46
from demo.movielens import Movie, MovieLens, Ratings, User
from inference_session.errors import ModelFormatError

pytestmark = pytest.mark.training


EVENTS = "event_time,event_type,product_id,category_id,category_code,brand,price,user_id,user_session\n"


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


@pytest.mark.parametrize("label", ["", "7", "-1"])
def test_a_label_of_criteo_is_0_or_1(tmp_path: Path, label: str) -> None:
    rows = [["1", *["0"] * 39], [label, *["0"] * 39]]
    (tmp_path / "train.txt").write_text("".join("\t".join(row) + "\n" for row in rows))
    with pytest.raises(ModelFormatError, match=f"train.txt: row 2: the label is {label or 'missing'}; expected 0 or 1"):
        read_criteo(tmp_path, 10)


def test_days_of_criteo_are_read_in_order_of_time(tmp_path: Path) -> None:
    for day, label in ((0, 0), (2, 0), (10, 1)):
        (tmp_path / f"day_{day}").write_text("\t".join([str(label), *["0"] * 39]) + "\n")
    assert read_criteo(tmp_path, 3).labels.ravel().tolist() == [0, 0, 1]


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
    with pytest.raises(
        ModelFormatError, match=r"2019-Oct\.csv: begins with no header of the columns event_time, event_type, "
    ):
        read_rees46(path, 10)


@pytest.mark.parametrize(("time", "found"), [("yesterday", "'yesterday'"), ("", "missing")])
def test_a_wrong_time_of_an_event_is_named(tmp_path: Path, time: str, found: str) -> None:
    path = tmp_path / "events.csv"
    path.write_text(f"{EVENTS}2019-10-01 00:00:00 UTC,view,1,2,,,1.0,3,x\n{time},view,1,2,,,1.0,3,x\n")
    with pytest.raises(ModelFormatError, match=f"events.csv: row 2: event_time is {found}; expected"):
        read_rees46(path, 10)


def test_a_column_of_events_that_is_not_used_may_begin_with_any_number_of_empty_values(tmp_path: Path) -> None:
    path = tmp_path / "events.csv"
    lines = [f"2019-10-01 00:00:00 UTC,view,1,2,{code},,1.0,3,x\n" for code in [*[""] * 40_000, "electronics"]]
    path.write_text(EVENTS + "".join(lines))
    assert len(read_rees46(path, 50_000).labels) == 40_001


def test_events_without_a_row_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.csv"
    path.write_text(EVENTS)
    with pytest.raises(ModelFormatError, match=r"events\.csv: no rows"):
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


def write_mind(folder: Path, *, impressions: str = "N2-1 N3-0", news: bytes = b"N1\tnews\n") -> None:
    (folder / "news.tsv").write_bytes(news)
    (folder / "behaviors.tsv").write_text(f"1\tU13\t11/11/2019 9:05:58 AM\tN1\t{impressions}\n" * 2)


@pytest.mark.parametrize("shown", ["N2", "N2-x", "N2-"])
def test_news_that_are_not_labelled_are_refused(tmp_path: Path, shown: str) -> None:
    """As in the test part of the data set, whose labels are not published."""
    write_mind(tmp_path, impressions=f"N1-1 {shown}")
    with pytest.raises(ModelFormatError, match=rf"behaviors\.tsv:1: '{shown}'; expected a news item and -0 or -1"):
        read_mind(tmp_path, 100)


def test_behaviors_are_read_no_further_than_wanted(tmp_path: Path) -> None:
    write_mind(tmp_path)
    with (tmp_path / "behaviors.tsv").open("a") as file:
        file.write("no behavior\n")
    assert len(read_mind(tmp_path, 3).labels) == 3


def test_files_of_mind_that_are_no_text_or_missing_are_named(tmp_path: Path) -> None:
    write_mind(tmp_path, news=b"N1\tcaf\xe9\n")
    with pytest.raises(ModelFormatError, match=r"news\.tsv: .*UTF-8"):
        read_mind(tmp_path, 100)
    (tmp_path / "news.tsv").unlink()
    with pytest.raises(ModelFormatError, match=r"news\.tsv: no such file"):
        read_mind(tmp_path, 100)
    write_mind(tmp_path, impressions="")
    with pytest.raises(ModelFormatError, match=r"behaviors\.tsv: no rows"):
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
