"""What the manual's site changes in generated pages (docs/_hooks.py)."""

from __future__ import annotations

import runpy
from types import SimpleNamespace

from tests.testing.manual import ROOT

HOOKS = runpy.run_path(str(ROOT / "docs/_hooks.py"))
HTML = "<p>Examples:\n  hotrow top\n  hotrow top --once</p>\n<p>Usage:</p>"


def content(html: str, page: str) -> str:
    return str(HOOKS["on_page_content"](html, page=SimpleNamespace(file=SimpleNamespace(src_uri=page))))


def test_examples_of_commands_are_code() -> None:
    """Each line of an example stays a line."""
    found = content(HTML, "reference/commands.md")
    assert "<pre><code>hotrow top\nhotrow top --once</code></pre>" in found
    assert found.startswith("<p>Examples:</p>")
    assert found.endswith("<p>Usage:</p>")


def test_other_pages_stay_as_they_are() -> None:
    """Only the page of commands is changed."""
    assert content(HTML, "index.md") == HTML
