"""Fixtures for all tests, and the switch that turns skips into failures where everything must run."""

from __future__ import annotations

import contextlib
import gc
import getpass
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.testing.example_models import ExampleModels
    from tests.testing.hadoop import Hdfs

# Inherited by every process that tests start. The threads of OpenBLAS start with `import numpy`, and look for work for
# some hundredths of a second before they sleep; each takes as much processor time as the import itself.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # 2 to this power, in ticks of the processor's clock

pytest.register_assert_rewrite("tests.testing")  # so that contracts say what they found, as tests do

REAL_DATA = "HOTROW_REAL_DATA"
_WAITING = ("tests/update_stream/", "tests/parameter_server/redis/", "tests/test_chaos", "tests/model_source/test_hdfs")
"""Tests that wait for brokers and other servers longer than they compute."""
_SHARED = ("hdfs", "served")
"""Servers that the tests of several files share: these run in one process, so that each server is started once."""
_skipped: list[str] = []

# The same examples on every machine, however slow it is. But hypothesis also draws constants of our modules that have
# been imported by then: a test that runs alone may get other examples than in a run of all, and never fail. Fixtures
# serve all examples of a test, and properties all implementations of a contract, which hypothesis takes for mistakes.
settings.register_profile(
    "any machine",
    deadline=None,
    derandomize=True,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.differing_executors),
)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> ExampleModels:
    """Models with requests and answers, which no test writes to."""
    from tests.testing.example_models import example_models

    return example_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder that HOTROW_REAL_DATA names; tests that need it carry the marker `real_data`."""
    return Path(os.environ[REAL_DATA])


@pytest.fixture(scope="session")
def hdfs() -> Iterator[Hdfs]:
    """A NameNode and a DataNode of this machine, for all tests that leave them as they were."""
    from tests.testing.hadoop import Hdfs
    from tests.testing.shared_servers import until_last_test

    with until_last_test("hdfs") as servers:
        servers.enter_context(pytest.MonkeyPatch.context()).setenv("HADOOP_USER_NAME", getpass.getuser())
        yield servers.enter_context(Hdfs())


@pytest.fixture(scope="session", autouse=True)
def forked_trials() -> Iterator[None]:
    """Networks that tests import and publish are tried in forks of one process; tests of trials start new ones."""
    from inference_session.dense_engine import trial
    from tests.testing.forked_trials import ForkedTrials

    trials = ForkedTrials()
    with trials, pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "_open_apart", trials.open_apart)
        yield


@pytest.fixture(scope="session")
def tritonserver() -> None:
    """Skip where there is no tritonserver for this Python."""
    from inference_session.errors import HotrowError
    from triton_backend.launcher.installation import find_installation

    try:
        find_installation()
    except HotrowError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A Chromium; not kept for all tests, since while Playwright runs, the thread has an event loop."""
    from tests.testing.browser import started_browser

    with started_browser() as browser:
        yield browser


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that is collected is garbage: looking for it again and again takes a third of the processor time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of a file in one process, which shares its fixtures, and all that share a server.

    Slow tests are in no group, as they share no fixture. The slowest come first, so that no process is left
    with one at the end. Those that wait for servers come before those that compute, which use the processors meanwhile.
    """
    from tests.testing.shared_servers import expect_tests

    if not os.environ.get(REAL_DATA):
        without = [item for item in items if item.get_closest_marker("real_data")]
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in without]
    items.sort(key=_order)
    expect_tests(group for group in map(_group, items) if group in _SHARED)
    for item in items:
        if not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.xdist_group(_group(item)))


def _group(item: pytest.Item) -> str:
    fixtures = getattr(item, "fixturenames", ())
    return next((name for name in _SHARED if name in fixtures), item.nodeid.partition("::")[0])


def _order(item: pytest.Item) -> int:
    if item.get_closest_marker("slow"):
        return 0
    waits = item.nodeid.startswith(_WAITING) or item.get_closest_marker("triton") or _group(item) == "hdfs"
    return 1 if waits else 2


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Child processes of each test hear Ctrl-C and hang-ups. GPU tests take turns with those that fill its memory."""
    from tests.testing.full_device import shared_device

    # A shell makes its background jobs ignore Ctrl-C, and so may a command that a test ran in this process; `nohup`
    # makes a command ignore hang-ups.
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)

    with shared_device() if item.get_closest_marker("gpu") else contextlib.nullcontext():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """The last test that shares a server ends it; what goes wrong then is an error of that test."""
    from tests.testing.shared_servers import count_test

    try:
        return (yield)
    finally:
        if (group := _group(item)) in _SHARED:
            count_test(group)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _skipped and _skips_fail(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if _skipped and _skips_fail(config):
        terminalreporter.write_line(f"{len(_skipped)} tests were skipped where everything must run: a failure.")


@pytest.hookimpl(trylast=True)  # pytest itself collects, for what was not closed
def pytest_unconfigure() -> None:
    """As a process ends, Python would look for garbage in all that it has imported and collected."""
    gc.freeze()


def _skips_fail(config: pytest.Config) -> bool:
    """In continuous integration, and where the tests of the GPU are asked for by name."""
    return bool(os.environ.get("HOTROW_NO_SKIPS")) or config.option.markexpr.strip() == "gpu"
