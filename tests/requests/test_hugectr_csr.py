"""Requests of HugeCTR and HPS are decoded as a plain loop would, or refused with the input's name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference_session.errors import InvalidRequestError
from inference_session.requests.hugectr_csr import RequestFormat, decode_keys, decode_request

Inputs = dict[str, NDArray[Any]]


def request(bags: list[list[list[list[int]]]], dense_dim: int, key_type: str = "int64") -> Inputs:
    """The three inputs for `bags[sample][table][slot]`, written down as the format says."""
    num_tables = len(bags[0])
    keys = [key for sample in bags for table in sample for slot in table for key in slot]
    offsets: list[int] = []
    for table in range(num_tables):
        offsets.append(0)
        base = len(offsets) - 1
        for sample in bags:
            for slot in sample[table]:
                offsets.append(offsets[-1] + len(slot))
        assert offsets[base] == 0
    dense = np.arange(len(bags) * dense_dim, dtype=np.float32)
    return {
        "DES": dense.reshape(1, -1),
        "CATCOLUMN": np.array(keys, key_type).reshape(1, -1),
        "ROWINDEX": np.array(offsets, np.int32).reshape(1, -1),
    }


@st.composite
def all_bags(draw: st.DrawFn) -> tuple[list[list[list[list[int]]]], tuple[int, ...]]:
    slots = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    num_samples = draw(st.integers(1, 5))
    key = st.integers(0, 2**32 - 1)
    bag = st.lists(key, max_size=3)
    sample = st.tuples(*[st.lists(bag, min_size=n, max_size=n) for n in slots]).map(list)
    return draw(st.lists(sample, min_size=num_samples, max_size=num_samples)), slots


@given(all_bags(), st.integers(0, 3), st.sampled_from(["int64", "uint32"]), st.booleans())
def test_every_bag_is_found_again(
    made: tuple[list[list[list[list[int]]]], tuple[int, ...]], dense_dim: int, key_type: str, is_flat: bool
) -> None:
    """Any number of tables, slots and keys, empty bags too: the positions lead to the keys that were sent."""
    bags, slots = made
    inputs = request(bags, dense_dim, key_type)
    if is_flat:
        inputs = {name: array.reshape(-1) for name, array in inputs.items()}

    decoded = decode_request(inputs, RequestFormat(dense_dim, slots, key_type))  # type: ignore[arg-type]

    assert decoded.num_samples == len(bags)
    assert decoded.dense.shape == (len(bags), dense_dim)
    assert decoded.keys.dtype == np.int64
    for table, (begins, ends, num_keys) in enumerate(decoded.bags):
        found = [decoded.keys[begin:end].tolist() for begin, end in zip(begins, ends, strict=True)]
        assert found == [slot for sample in bags for slot in sample[table]]
        assert begins.dtype == ends.dtype == np.int64
        assert num_keys == sum(map(len, found))
    assert (decoded.ragged is None) == all(len(slot) == 1 for sample in bags for table in sample for slot in table)


def test_the_example_of_the_documentation_is_decoded() -> None:
    """Ten samples of a wide table with two slots and a deep one with 26, one key each."""
    inputs = {
        "DES": np.zeros((1, 130), np.float32),
        "CATCOLUMN": np.arange(280).reshape(1, -1),
        "ROWINDEX": np.array([*range(21), *range(261)], np.int32).reshape(1, -1),
    }

    decoded = decode_request(inputs, RequestFormat(13, (2, 26)))

    assert decoded.num_samples == 10
    assert decoded.bags[0].begins[:4].tolist() == [0, 1, 28, 29]
    assert decoded.bags[1].begins[:3].tolist() == [2, 3, 4]


FORM = RequestFormat(2, (1, 2), max_samples=3)
BAGS = [[[[7]], [[1, 2], []]], [[[]], [[3], [4]]]]

WRONG: list[tuple[str, Any, str]] = [
    ("DES", None, "input 'DES' is missing; a request holds 'DES', 'CATCOLUMN', 'ROWINDEX'"),
    ("EXTRA", np.zeros((1, 1)), "input 'EXTRA' is unknown"),
    ("DES", np.zeros((1, 4)), "input 'DES': data type float64, expected float32"),
    ("DES", np.zeros((2, 2), np.float32), r"input 'DES': shape \[2, 2\], expected \[1, n\]"),
    ("DES", np.zeros((1, 1, 4), np.float32), r"input 'DES': shape \[1, 1, 4\], expected \[1, n\]"),
    ("DES", np.float32(1), r"input 'DES': shape \[\], expected \[1, n\]"),
    (
        "DES",
        np.zeros((1, 3), np.float32),
        r"input 'DES': 3 values, expected 4 \(2 samples according to 'ROWINDEX', of 2 dense",
    ),
    ("DES", np.zeros((1, 0), np.float32), "input 'DES': 0 values, expected 4"),
    ("CATCOLUMN", np.zeros((1, 5), np.uint32), "input 'CATCOLUMN': data type uint32, expected int64"),
    ("CATCOLUMN", np.zeros((1, 4), np.int64), "input 'CATCOLUMN': 4 keys, expected 5"),
    ("CATCOLUMN", np.zeros((1, 6), np.int64), "input 'CATCOLUMN': 6 keys, expected 5"),
    ("ROWINDEX", np.zeros((1, 8), np.int64), "input 'ROWINDEX': data type int64, expected int32"),
    ("ROWINDEX", np.zeros((1, 7), np.int32), r"'ROWINDEX': 7 offsets, expected samples \* 3 \+ 2 \(2 tables with 1, 2"),
    ("ROWINDEX", np.zeros((1, 0), np.int32), "'ROWINDEX': 0 offsets"),
    ("ROWINDEX", np.zeros((1, 14), np.int32), "4 samples, more than the model's max_batch_size 3"),
    ("ROWINDEX", np.int32([[1, 1, 1, 0, 2, 2, 3, 4]]), "the offsets of table 0 start with 1, not 0"),
    ("ROWINDEX", np.int32([[0, 1, 1, 1, 3, 3, 4, 5]]), "the offsets of table 1 start with 1, not 0"),
    ("ROWINDEX", np.int32([[0, 1, 1, 0, 2, 1, 3, 4]]), "offset 2 of table 1 is 1, less than 2, the offset before it"),
    ("ROWINDEX", np.int32([[0, -1, 1, 0, 2, 2, 3, 4]]), "offset 1 of table 0 is -1, less than 0, the offset before it"),
    ("ROWINDEX", np.int32([[0, 1, 2**31 - 1, 0, 2, 2, 3, 2**31 - 1]]), "5 keys, expected 4294967294"),
]


@pytest.mark.parametrize(("name", "value", "expected"), WRONG)
def test_a_malformed_request_is_refused_with_the_input_and_what_was_expected(
    name: str, value: Any, expected: str
) -> None:
    """Nothing is read by offsets that were not checked."""
    inputs = request(BAGS, 2)
    inputs[name] = value
    if value is None:
        del inputs[name]

    with pytest.raises(InvalidRequestError, match=expected):
        decode_request(inputs, FORM)


def test_no_samples_are_no_error() -> None:
    """The two start offsets alone: nothing is asked, nothing is answered."""
    inputs = {
        "DES": np.zeros((1, 0), np.float32),
        "CATCOLUMN": np.zeros((1, 0), np.int64),
        "ROWINDEX": np.zeros((1, 2), np.int32),
    }

    decoded = decode_request(inputs, FORM)

    assert decoded.num_samples == 0
    assert decoded.dense.shape == (0, 2)
    assert [bags.begins.size for bags in decoded.bags] == [0, 0]


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), min_size=1, max_size=4))
def test_keys_of_hps_are_found_again(tables: list[list[int]]) -> None:
    """All keys of one table, then those of the next."""
    decoded = decode_keys(
        {
            "KEYS": np.array([key for keys in tables for key in keys], np.int64).reshape(1, -1),
            "NUMKEYS": np.array([[len(keys) for keys in tables]], np.int32),
        },
        len(tables),
    )

    for table, keys in enumerate(tables):
        assert decoded.keys[decoded.offsets[table] : decoded.offsets[table + 1]].tolist() == keys


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"KEYS": np.zeros((1, 5), np.int64)}, "input 'NUMKEYS' is missing"),
        (
            {"KEYS": np.zeros((1, 5), np.int32), "NUMKEYS": np.int32([[2, 3]])},
            "'KEYS': data type int32, expected int64",
        ),
        ({"KEYS": np.zeros((1, 5), np.int64), "NUMKEYS": np.int64([[2, 3]])}, "'NUMKEYS': data type int64"),
        ({"KEYS": np.zeros((1, 5), np.int64), "NUMKEYS": np.int32([[5]])}, "'NUMKEYS': 1 counts, expected 2"),
        ({"KEYS": np.zeros((1, 5), np.int64), "NUMKEYS": np.int32([[-2, 7]])}, "the count of table 0 is -2, below 0"),
        ({"KEYS": np.zeros((1, 5), np.int64), "NUMKEYS": np.int32([[2, 4]])}, "'KEYS': 5 keys, expected 6"),
        (
            {"KEYS": np.zeros((1, 5), np.int64), "NUMKEYS": np.int32([[2**31 - 1, 3]])},
            "'KEYS': 5 keys, expected 2147483650",
        ),
    ],
)
def test_malformed_keys_of_hps_are_refused(inputs: Inputs, expected: str) -> None:
    """Counts are checked before a key is read by them."""
    with pytest.raises(InvalidRequestError, match=expected):
        decode_keys(inputs, 2)


@given(st.binary(max_size=80), st.binary(max_size=80), st.binary(max_size=80))
def test_random_bytes_are_decoded_or_refused(dense: bytes, keys: bytes, offsets: bytes) -> None:
    """The worst result of any request is an error, and no position is outside the keys."""
    inputs = {
        "DES": np.frombuffer(dense[: len(dense) // 4 * 4], np.float32),
        "CATCOLUMN": np.frombuffer(keys[: len(keys) // 8 * 8], np.int64),
        "ROWINDEX": np.frombuffer(offsets[: len(offsets) // 4 * 4], np.int32),
    }
    try:
        decoded = decode_request(inputs, RequestFormat(0, (1, 1)))
    except InvalidRequestError:
        return
    for begins, ends, _ in decoded.bags:
        assert ((begins >= 0) & (begins <= ends) & (ends <= decoded.keys.size)).all()
