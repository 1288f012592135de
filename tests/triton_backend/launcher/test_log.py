"""The reason why a server ended, as its log gives it."""

from __future__ import annotations

import io

import pytest

from triton_backend.launcher.log import ServerLog

FAILED = b"E1128 05:48:02.5 1 model_lifecycle.cc:642] \"failed to load 'ctr' version 2: Internal: no such file\"\n"


def test_a_load_that_failed_during_the_start_is_the_reason() -> None:
    """It is shown once, without the server's prefix."""
    log = ServerLog(io.BytesIO(FAILED + FAILED + b"other\n"), verbose=False)

    assert log.reason() == "model 'ctr' version 2 failed to load: no such file"


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        ("tritonserver: unrecognized option '--x'\n", ""),
        ("", 'Bad option: "--x".\nGot x\n'),
        ("", "Error: Use of '--x' requires setting '--y' as well.\n"),
    ],
)
def test_a_refused_flag_is_the_reason(before: str, behind: str) -> None:
    """It was buried in the list of all flags, some 400 lines long."""
    flags = "Usage: tritonserver [options]\n  --help\n\tPrint usage\n\nHTTP:\n"
    log = ServerLog(io.BytesIO(f"{before}{flags}{behind}".encode()), verbose=False)

    assert log.reason() == f"its last lines:\n{before}{behind}".rstrip()


def test_flags_are_listed_where_all_lines_are_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    """As with `hotrow serve --verbose`."""
    flags = "Usage: tritonserver [options]\n  --help\n\tPrint usage\n"
    ServerLog(io.BytesIO(flags.encode()), verbose=True).finish()

    assert capsys.readouterr().err == flags


WITHOUT_GPU = (
    'E1128 1 ensemble_scheduler.cc:1468] "unable to create stream for ens: CUDA driver version is insufficient for '
    'CUDA runtime version"\n'
    'W1128 1 pinned_memory_manager.cc:170] "failed to allocate pinned system memory: no pinned memory pool, falling '
    'back to non-pinned system memory"\n'
)
"""As Triton 24.10 logs for an ensemble, and for a model with a response cache."""


def test_a_machine_without_a_gpu_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    """What is not shown is known to do no harm; an ensemble that has no stream for another reason is shown."""
    other = 'E1128 1 ensemble_scheduler.cc:1468] "unable to create stream for ens: out of memory"\n'
    ServerLog(io.BytesIO((WITHOUT_GPU + other).encode()), verbose=False).finish()

    assert capsys.readouterr().err == other


def test_a_load_that_failed_earlier_is_not_the_reason_of_a_crash() -> None:
    """The server served meanwhile, with or without that model."""
    started = ServerLog(io.BytesIO(FAILED + b"Signal (11) received.\n"), verbose=False)
    started.finish()
    started.server_is_ready()

    assert started.crashed.is_set()
    assert started.reason().endswith("Signal (11) received.")
