"""Fetches the programs that tests need and that come in no package of the test environment, once per machine.

`python -m tests.testing.downloads` runs before the tests, so that no test needs the network.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from demo import movielens
from inference_session.errors import UnavailableError
from tests.testing import ROOT
from tests.testing.hadoop import jars
from tests.testing.programs import script_module
from tests.testing.redis_with_tls import tls_redis_binary


def main() -> None:
    """Fetch what is not in the user's cache folder yet."""
    perf_analyzer = script_module(ROOT / "benchmarks" / "perf_analyzer.py").perf_analyzer
    for fetch in (jars, tls_redis_binary, movielens.fetch, perf_analyzer):
        _try(fetch)


def _try(fetch: Callable[[], object]) -> None:
    """Fetch a program; where it cannot be had, say so: the tests that need it are skipped."""
    try:
        fetch()
    except (pytest.skip.Exception, UnavailableError, SystemExit) as error:
        print(error, file=sys.stderr)


if __name__ == "__main__":
    main()
