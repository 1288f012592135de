"""Shows the examples of commands as code, on the page that mkdocs-click generates: Markdown joins their lines."""

from __future__ import annotations

import re
from textwrap import dedent
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.structure.pages import Page

_EXAMPLES = re.compile(r"<p>(?P<title>Example.*:)\n(?P<lines>(?:  .*\n?)+)</p>")


def on_page_content(html: str, page: Page, **_: object) -> str:
    """The builder calls this with each page's HTML."""
    return _EXAMPLES.sub(_as_code, html) if page.file.src_uri == "reference/commands.md" else html


def _as_code(found: re.Match[str]) -> str:
    return f'<p>{found["title"]}</p>\n<div class="highlight"><pre><code>{dedent(found["lines"])}</code></pre></div>'
