"""The statements of our sources, for tests of how these are written."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def statements(path: Path) -> Iterator[ast.stmt]:
    """All statements of a Python file, also those within others.

    `ast.walk` visits each part of each expression as well, which are twelve times as many nodes.
    """
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, (ast.stmt, ast.excepthandler, ast.match_case)):
                waiting.append(node)
            if isinstance(node, ast.stmt):
                yield node
