"""What a process leaves for the next one is whole, and only its user can read or replace it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_session.platform.state_file import read_state, write_state
from inference_session.platform.user_cache import lock_file, make_private


@pytest.fixture(params=[0o000, 0o022, 0o077], ids="{:03o}".format)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """One that hides nothing, the usual one, and one that hides all."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_other_users_have_no_part_in_it(umask: int, tmp_path: Path) -> None:
    """Folders and files that hotrow makes are its user's alone; a folder that exists keeps its mode."""
    (tmp_path / "open").mkdir()
    mode = (tmp_path / "open").stat().st_mode
    write_state(tmp_path / "open" / "state" / "ctr" / "hot", b"keys")
    with lock_file(tmp_path / "open" / "imports"):
        pass

    made = [path for path in (tmp_path / "open").rglob("*") if path.stat().st_mode & 0o077]
    assert made == []
    assert (tmp_path / "open").stat().st_mode == mode
    assert read_state(tmp_path / "open" / "state" / "ctr" / "hot") == b"keys"


def test_a_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    """Where others may write to the folder, they know which name is staged next."""
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / f".tmp-{os.getpid()}-hot").symlink_to(tmp_path / "victim")

    write_state(tmp_path / "hot", b"keys")

    assert (tmp_path / "victim").read_bytes() == b"precious"
    assert read_state(tmp_path / "hot") == b"keys"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hot", "victim"]


def test_a_private_folder_may_exist(tmp_path: Path) -> None:
    """Two processes may make it at once."""
    assert make_private(make_private(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
