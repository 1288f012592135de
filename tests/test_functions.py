"""Functions are short, everywhere: nine in ten fit on half a screen, and none is longer than one."""

from __future__ import annotations

import ast

import pytest

from tests.testing import ROOT
from tests.testing.statements import statements

FOLDERS = ("inference_session", "triton_backend", "hotrow", "demo", "client_examples", "benchmarks", "tests")


@pytest.fixture(scope="module")
def lengths() -> list[tuple[str, int]]:
    """All functions of the repository, methods and inner ones included, and how many lines each has.

    Docstrings count, decorators do not.
    """
    found = []
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT)
        for node in statements(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                found.append((f"{name}: {node.name}", node.end_lineno - node.lineno + 1))
    return found


def test_no_function_is_longer_than_a_screen(lengths: list[tuple[str, int]]) -> None:
    """50 lines, with the signature and the docstring."""
    for name, length in lengths:
        assert length <= 50, f"{name} has {length} lines"


def test_nine_functions_in_ten_are_short(lengths: list[tuple[str, int]]) -> None:
    """20 lines at most."""
    assert sum(length <= 20 for _, length in lengths) / len(lengths) > 0.9
