"""KeysByTable: every key that was added is taken once, alone or with all keys of its table."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inference_session.parameter_server.keys_by_table import KeysByTable

TABLES = st.sampled_from(["a", "b"])
KEYS = st.none() | st.lists(st.integers(-5, 5), max_size=7).map(lambda keys: np.array(keys, np.int64))


@given(adds=st.lists(st.tuples(TABLES, KEYS), max_size=12), max_keys=st.integers(1, 5))
def test_what_is_added_is_taken_in_pieces(adds: list[tuple[str, np.ndarray | None]], max_keys: int) -> None:
    """In pieces of the size asked for; a table of which all keys were added comes as a whole."""
    unwritten = KeysByTable(1_000_000)
    for table, keys in adds:
        unwritten.add(table, keys)
    whole = {table for table, keys in adds if keys is None}
    expected = [(t, key) for t, keys in adds if t not in whole and keys is not None for key in keys.tolist()]

    taken: list[tuple[str, int]] = []
    while unwritten:
        table, keys = unwritten.take(max_keys)
        if keys is None:
            whole.remove(table)
        else:
            assert 0 < len(keys) <= max_keys
            taken += [(table, key) for key in keys.tolist()]

    assert sorted(taken) == sorted(expected)
    assert not whole


def test_too_many_keys_become_all_keys() -> None:
    """Different keys: the same keys, added again and again, stay single keys."""
    unwritten = KeysByTable(20)
    for _ in range(50):
        unwritten.add("same", np.arange(5))
        unwritten.add("other", np.arange(3))
    for begin in range(0, 50, 5):
        unwritten.add("many", np.arange(begin, begin + 5))

    listed = {table: None if keys is None else set(keys.tolist()) for table, keys in unwritten.as_dict().items()}
    taken: dict[str, set[int] | None] = {}
    while unwritten:
        table, keys = unwritten.take(1000)
        taken[table] = None if keys is None else set(keys.tolist())
    assert taken == {"same": set(range(5)), "other": set(range(3)), "many": None}
    assert listed == taken
