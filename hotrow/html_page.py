"""Pages of one HTML file that needs no other, by day and by night, on a phone as well; Matplotlib's figures in them."""

from __future__ import annotations

import contextlib
import html
import io
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAINT = "#dde1e7"
"""Of lines that only guide the eye."""
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
# A browser is told to fetch nothing, whatever a name that got into the page may say.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_page(title: str, parts: Iterable[str]) -> str:
    """A whole page of these parts, which are HTML."""
    head = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{text(title)}</title><style>{_STYLE}</style></head><body>"
    )
    return "\n".join([head, *parts, "</body></html>\n"])


def wide(content: str) -> str:
    """What may be wider than a phone's screen, and is moved sideways there without the rest of the page."""
    # With the keyboard as well, which needs a focus.
    return f"<div class='wide' tabindex='0'>{content}</div>"


def text(value: object) -> str:
    """For HTML."""
    return html.escape(str(value))


@contextlib.contextmanager
def page_colors() -> Iterator[None]:
    """Within, figures are drawn in the page's colours, which `svg` has the page choose."""
    import matplotlib as mpl

    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    colors: dict[Any, str] = {**dict.fromkeys(inked, _INK), "grid.color": FAINT}
    with mpl.rc_context(colors):
        yield


def svg(figure: Figure) -> str:
    """A figure as it goes into a page: no background, ink and guides of the page's own colours."""
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None}, transparent=True)
    drawn = written.getvalue()[written.getvalue().index("<svg") :]
    return wide(drawn.replace(_INK, "var(--ink)").replace(FAINT, "var(--faint)"))
