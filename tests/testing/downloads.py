"""Fetches the programs that tests need and that come in no package of the test environment, once per machine.

`python -m tests.testing.downloads` runs before the tests, so that no test needs the network.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from tests.testing.hadoop import jars
from tests.testing.redis_with_tls import tls_redis_binary


def main() -> None:
    """Fetch what is not in the user's cache folder yet."""
    for fetch in (jars, tls_redis_binary):
        _try(fetch)


def _try(fetch: Callable[[], object]) -> None:
    """Fetch a program; where it cannot be had, say so: the tests that need it are skipped."""
    try:
        fetch()
    except pytest.skip.Exception as error:
        print(error, file=sys.stderr)


if __name__ == "__main__":
    main()
