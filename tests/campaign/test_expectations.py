"""The model itself: right answers pass, and each kind of wrong one is found."""

from __future__ import annotations

import numpy as np
import pytest

from tests.campaign.contents import TABLES, Arrays, Question, random_question
from tests.campaign.expectations import Content, Expectations, Permit, Ticket, Writer, WrongAnswerError
from tests.campaign.rows import Integers, decode, encode

USER, _, ITEM = TABLES
FIRST, SECOND = Content(100, 1, 1), Content(200, 2, 2)
KEY = np.array([7])


def question_of(table_key: int) -> Question:
    """A question for one key of every table."""
    positions = {table.name: np.array([[table_key]]) for table in TABLES}
    return Question(positions, np.array([[table_key]]), {})


def answer_of(content: Content, question: Question, numbers: dict[str, int], tag: int | None = None) -> Arrays:
    """What a content answers where a table's rows are of this write."""
    rows = {}
    for table in TABLES:
        keys, number = question.positions[table.name], numbers.get(table.name, 0)
        whose = content.tag if not number or tag is None else tag
        rows[f"{table.name}_rows"] = encode(table.number, keys.ravel(), whose, number).reshape(*keys.shape, -1)
    rows["bag_rows"] = rows["item_rows"][:, 0]
    return {**rows, "content": np.full((1, 1), content.number, np.float32)}


@pytest.fixture
def model() -> Expectations:
    """Direct writes, the first version serving."""
    model = Expectations(Writer.DIRECT)
    for content in (FIRST, SECOND):
        model.add(content)
    model.may_serve([FIRST])
    return model


def write(model: Expectations, *, delete: bool = False, version: int = 1) -> Integers:
    """An acknowledged write of `user`."""
    numbers = model.begin_write(version, USER, KEY, delete=delete)
    model.acknowledge(version, USER, KEY, numbers)
    return numbers


def ask(model: Expectations) -> Ticket:
    """The one question of these tests."""
    return model.ask(question_of(7))


def test_vectors_say_what_they_are() -> None:
    """Any field may be as large as a campaign needs; another key, and a vector with any element changed, is no row."""
    rng = np.random.default_rng(0)
    keys, tags, numbers = rng.integers(0, 900, (3, 500)) * [[1], [900], [900]]
    vectors = encode(1, keys, tags, numbers)

    whole, found_tags, found_numbers = decode(1, keys, vectors.astype(np.float16).astype(np.float32))

    assert whole.all()
    np.testing.assert_array_equal([found_tags, found_numbers], [tags, numbers])
    assert not decode(0, keys, vectors)[0].any()
    assert not decode(1, keys + 1, vectors)[0].any()
    for column in range(vectors.shape[1]):
        changed = vectors.copy()
        changed[:, column] += 1
        assert not decode(1, keys, changed)[0].any()


def test_the_rows_of_the_files_are_right(model: Expectations) -> None:
    """Before any write."""
    ticket = ask(model)
    model.check(ticket, answer_of(FIRST, ticket.question, {}))
    assert model.num_checked == 4


def test_a_write_under_way_may_be_seen_or_not(model: Expectations) -> None:
    """Until it is acknowledged; then it must be visible."""
    numbers = model.begin_write(1, USER, KEY)
    for seen in (0, 1):
        ticket = ask(model)
        model.check(ticket, answer_of(FIRST, ticket.question, {"user": seen}))
    model.acknowledge(1, USER, KEY, numbers)
    ticket = ask(model)
    with pytest.raises(WrongAnswerError, match="found: write 0"):
        model.check(ticket, answer_of(FIRST, ticket.question, {}))


def test_what_was_shown_once_is_not_taken_back(model: Expectations) -> None:
    """Not to a question that begins later; one that was under way may still get the older row."""
    model.begin_write(1, USER, KEY)
    before = ask(model)
    model.check(before, answer_of(FIRST, before.question, {"user": 1}))
    model.check(before, answer_of(FIRST, before.question, {}))
    after = ask(model)
    with pytest.raises(WrongAnswerError):
        model.check(after, answer_of(FIRST, after.question, {}))


def test_a_write_that_nobody_has_begun_is_wrong(model: Expectations) -> None:
    """So is one of another tag."""
    ticket = ask(model)
    with pytest.raises(WrongAnswerError, match="found: write 1"):
        model.check(ticket, answer_of(FIRST, ticket.question, {"user": 1}))
    write(model)
    ticket = ask(model)
    with pytest.raises(WrongAnswerError, match="found: write 1 of tag 5"):
        model.check(ticket, answer_of(FIRST, ticket.question, {"user": 1}, tag=5))


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, 1e30])
@pytest.mark.parametrize("elements", [slice(None), slice(0, 4), slice(7, 8)], ids=["all", "half", "last"])
def test_neither_a_default_nor_half_a_row_is_right(model: Expectations, value: float, elements: slice) -> None:
    """Where a row is held."""
    ticket = ask(model)
    answer = answer_of(FIRST, ticket.question, {})
    answer["user_rows"][0, 0, elements] = value
    with pytest.raises(WrongAnswerError, match=r"found: (no row of this key|the default vector)"):
        model.check(ticket, answer)


def test_a_deleted_key_is_answered_by_the_default(model: Expectations) -> None:
    """Once that is acknowledged, by nothing else; until then by the row as well."""
    write(model)
    default = answer_of(FIRST, question_of(7), {})
    default["user_rows"][:] = USER.default
    numbers = model.begin_write(1, USER, KEY, delete=True)
    ticket = ask(model)
    model.check(ticket, answer_of(FIRST, ticket.question, {"user": 1}))
    model.check(ticket, default)
    model.acknowledge(1, USER, KEY, numbers)
    ticket = ask(model)
    model.check(ticket, default)
    with pytest.raises(WrongAnswerError):
        model.check(ticket, answer_of(FIRST, ticket.question, {"user": 1}))
    with pytest.raises(WrongAnswerError):
        model.check(ticket, answer_of(FIRST, ticket.question, {}))
    model.files_show = True
    model.check(ticket, answer_of(FIRST, ticket.question, {}))


def test_versions_do_not_mix(model: Expectations) -> None:
    """An answer has one content, which serves, and its rows."""
    ticket = ask(model)
    with pytest.raises(WrongAnswerError, match="an answer of contents"):
        model.check(ticket, answer_of(SECOND, ticket.question, {}))
    model.may_serve([FIRST, SECOND])
    model.check(ticket, answer_of(SECOND, ticket.question, {}))
    mixed = answer_of(SECOND, ticket.question, {})
    mixed["item_rows"] = answer_of(FIRST, ticket.question, {})["item_rows"]
    with pytest.raises(WrongAnswerError, match="found: write 0 of tag 1"):
        model.check(ticket, mixed)
    later = ask(model)
    model.may_serve([SECOND])
    model.check(later, answer_of(FIRST, later.question, {}))
    last = ask(model)
    with pytest.raises(WrongAnswerError, match="an answer of contents"):
        model.check(last, answer_of(FIRST, last.question, {}))


def test_permits_end(model: Expectations) -> None:
    """A permit stays valid for questions asked while it held; it is not valid for later ones."""
    write(model)
    model.permit("fault", Permit.ERRORS, Permit.DEFAULTS, Permit.OLD_ROWS)
    during = ask(model)
    model.lift("fault")
    after = ask(model)
    default = answer_of(FIRST, during.question, {})
    model.check(during, default)
    default["user_rows"][:] = USER.default
    model.check(during, default)
    model.fail(during, ValueError("no answer"))
    for judge in (lambda: model.check(after, default), lambda: model.fail(after, ValueError("no answer"))):
        with pytest.raises(WrongAnswerError):
            judge()


def test_a_stream_has_one_history_for_all_versions() -> None:
    """Its rows have no version's tag; a version that has applied all writes answers no older ones."""
    model = Expectations(Writer.STREAM)
    for content in (FIRST, SECOND):
        model.add(content)
    model.may_serve([FIRST, SECOND])
    model.begin_write(1, USER, KEY)
    model.raise_to(2, model.begun(2))
    ticket = ask(model)
    model.check(ticket, answer_of(FIRST, ticket.question, {}))
    model.check(ticket, answer_of(SECOND, ticket.question, {"user": 1}, tag=0))
    with pytest.raises(WrongAnswerError):
        model.check(ticket, answer_of(SECOND, ticket.question, {}))


def test_questions_ask_for_all_that_matters() -> None:
    """Over many: every key, duplicates, row numbers from the end."""
    rng = np.random.default_rng(0)
    questions = [random_question(rng) for _ in range(300)]
    for table in TABLES:
        asked = np.concatenate([question.positions[table.name].ravel() for question in questions])
        assert set(asked.tolist()) == set(range(len(table.keys)))
    assert any((question.inputs["user_keys"] < 0).any() for question in questions)
