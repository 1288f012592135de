"""Functions are short, everywhere: nine in ten fit on half a screen, and none is longer than one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.testing import ROOT

FOLDERS = ("inference_session", "triton_backend", "hotrow", "demo", "client_examples", "benchmarks", "tests")


def functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions of the repository, methods and inner ones included."""
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield path, node


def length(node: ast.stmt) -> int:
    """Lines from `def` to the end, docstring included, decorators not."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_no_function_is_longer_than_a_screen() -> None:
    """50 lines, with the signature and the docstring."""
    for path, node in functions():
        assert length(node) <= 50, f"{path.relative_to(ROOT)}: {node.name} has {length(node)} lines"


def test_nine_functions_in_ten_are_short() -> None:
    """20 lines at most."""
    lengths = [length(node) for _, node in functions()]

    assert sum(lines <= 20 for lines in lengths) / len(lengths) > 0.9
