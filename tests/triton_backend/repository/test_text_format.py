"""The text format of model configurations."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_backend.repository.text_format import parse, quoted


def test_reads_what_model_configurations_hold() -> None:
    """Messages with and without colon, lists, repeated fields, comments and joined strings."""
    message = parse(
        """
        # a comment
        name: "a" 'b'
        input [ { name: "x" dims: [ -1, 4 ] }, { name: "y"; dims: 2, dims: 3 } ]
        dynamic_batching { }
        parameters: < key: "k" value { string_value: "v" } >
        """
    )

    assert message == {
        "name": ["ab"],
        "input": [{"name": ["x"], "dims": ["-1", "4"]}, {"name": ["y"], "dims": ["2", "3"]}],
        "dynamic_batching": [{}],
        "parameters": [{"key": ["k"], "value": [{"string_value": ["v"]}]}],
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name: "a', "line 1: unexpected '\"'"),
        ("a {\n b: 1", "line 2: expected the name of a field, found the end of the file"),
        ("\nname", "line 2: field 'name' has no value"),
        ("name: }", "line 1: expected a value, found }"),
        ("a: [1 2]", "line 1: expected ',' or '\\]', found 2"),
        ("a{" * 60, "nested more than 50 deep"),
    ],
)
def test_malformed_text_names_the_line(text: str, message: str) -> None:
    """Other text is a ValueError that says where the fault is."""
    with pytest.raises(ValueError, match=message):
        parse(text)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_name_survives_quoting(name: str) -> None:
    """A name with any characters is read back as it was written."""
    assert parse(f"name: {quoted(name)}") == {"name": [name]}


@given(st.text(alphabet="ab{}[]<>:,;\"'\\#\n -1."))
def test_no_text_breaks_the_parser(text: str) -> None:
    """Any text either parses or is a ValueError."""
    with contextlib.suppress(ValueError):
        parse(text)
