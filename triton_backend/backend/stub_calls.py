"""Shortens what Triton's stub does in Python around each call of `execute`, in its process, which serves one model.

The stub imports NumPy for each input, and asyncio after `execute`. It does so outside of any Python function, so that
CPython asks the module `builtins` how to import. The specs of other modules say that their import has ended; that of
`builtins` does not, and CPython makes an AttributeError, with its text, and drops it: 4,400 instructions.
"""

from __future__ import annotations

import asyncio  # noqa: F401  the stub imports it on the first request otherwise, which then takes 12 ms
import builtins


def shorten_calls() -> None:
    """May be called more than once."""
    vars(builtins.__spec__).setdefault("_initializing", False)
