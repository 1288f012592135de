"""Servers that the tests of several files share: they end with the last of these tests, not with its process.

A server that nobody asks any more takes processor time from the tests that are left, and memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

_num_left: Counter[str] = Counter()
"""Tests that have not run yet, by the server that they share."""
_open: dict[str, ExitStack] = {}


@contextmanager
def until_last_test(server: str) -> Iterator[ExitStack]:
    """What a session fixture enters its server into; where some of the tests do not run, it ends with the session.

    Tests have to name the fixture, not ask for it while they run: those would find a server that has ended.
    """
    with ExitStack() as stack:
        _open[server] = stack
        yield stack


def expect_tests(servers: Iterable[str]) -> None:
    """Note the server of each test that shares one."""
    _num_left.update(servers)


def count_test(server: str) -> None:
    """Note that a test has run; the last one ends its server."""
    _num_left[server] -= 1
    if _num_left[server] == 0 and server in _open:
        _open.pop(server).close()
