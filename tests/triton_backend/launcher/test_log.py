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


def test_a_refused_flag_is_the_reason(capfd: pytest.CaptureFixture[str]) -> None:
    """It was buried in the list of all flags, some 400 lines long, which is not shown."""
    said = b"/opt/bin/tritonserver: unrecognized option '--rate'\nUsage: tritonserver [options]\n\t--id <string>\n"
    log = ServerLog(io.BytesIO(said), verbose=False)

    assert log.reason() == "unrecognized option '--rate'; `tritonserver --help` lists its flags"
    assert capfd.readouterr().err == ""


def test_a_load_that_failed_earlier_is_not_the_reason_of_a_crash() -> None:
    """The server served meanwhile, with or without that model."""
    started = ServerLog(io.BytesIO(FAILED + b"Signal (11) received.\n"), verbose=False)
    started.finish()
    started.server_is_ready()

    assert started.crashed.is_set()
    assert started.reason().endswith("Signal (11) received.")
