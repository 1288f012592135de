"""Self-contained HTML pages with Matplotlib figures, with light and dark colours, also for phones."""

from __future__ import annotations

import contextlib
import html
import io
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAINT = "#dde1e7"
"""Colour of guide lines."""
_INK = "#1d2433"
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2433; --faint: #dde1e7; --paper: #ffffff; --alarm: #c1121f }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --faint: #3b4252; --paper: #14171d; --alarm: #ff6b6b } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 70rem;
  margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.5rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal }
th, td { padding: .2rem 1rem .2rem 0; text-align: right; border-bottom: 1px solid var(--faint) }
th:first-child, td:first-child, .word { text-align: left }
.wide { overflow-x: auto } .wide svg { display: block; width: 100%; min-width: 40rem; height: auto }
.lead { font-size: 1.1rem } .chosen { font-weight: 600; color: var(--alarm) } .strong td { font-weight: 600 }
summary { cursor: pointer }
"""
# The browser must fetch nothing, even if a name in the page contains markup.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_page(title: str, parts: Iterable[str]) -> str:
    """A complete page of these HTML parts."""
    head = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{text(title)}</title><style>{_STYLE}</style></head><body>"
    )
    return "\n".join([head, *parts, "</body></html>\n"])


def wide(content: str) -> str:
    """Wraps content that may be wider than a phone's screen, so that it scrolls sideways on its own."""
    # Scrolling by keyboard needs a focus.
    return f"<div class='wide' tabindex='0'>{content}</div>"


def text(value: object) -> str:
    """The text escaped for HTML."""
    return html.escape(str(value))


@contextlib.contextmanager
def page_colors() -> Iterator[None]:
    """In this context figures are drawn in placeholder colours, which `svg` replaces by the page's."""
    import matplotlib as mpl

    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    colors: dict[Any, str] = {**dict.fromkeys(inked, _INK), "grid.color": FAINT}
    with mpl.rc_context(colors):
        yield


def svg(figure: Figure) -> str:
    """A figure as SVG for a page: no background, ink and guides in the page's colours."""
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None}, transparent=True)
    drawn = written.getvalue()[written.getvalue().index("<svg") :]
    return wide(drawn.replace(_INK, "var(--ink)").replace(FAINT, "var(--faint)"))
