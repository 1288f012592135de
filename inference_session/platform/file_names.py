"""Names of files in a process that decodes ASCII names only, as Triton's Python processes do.

Python gives them half characters in place of other bytes, which Python's own calls take, and no library does.
"""

from __future__ import annotations


def decoded(text: object) -> str:
    """A path, or a text with paths in it, with their names in UTF-8."""
    return str(text).encode(errors="surrogateescape").decode(errors="replace")
