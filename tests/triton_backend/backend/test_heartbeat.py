"""What a backend process does to be watched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from triton_backend.backend import heartbeat


def test_a_full_disk_does_not_end_the_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that cannot beat still looks for its server, and ends when that is gone."""
    (tmp_path / str(os.getpid())).symlink_to("/dev/full")
    looks = iter([False, False, True])
    ended = []
    monkeypatch.setenv(heartbeat.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0)
    monkeypatch.setattr(heartbeat, "is_orphan", lambda: next(looks))
    monkeypatch.setattr(heartbeat, "_leave", lambda: ended.append(True))

    heartbeat._beat()

    assert ended == [True]
