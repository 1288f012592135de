"""What a process leaves for the next one is whole, and only its user can read or replace it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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


def test_a_link_of_another_user_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others may write to the folder, even if they knew which name a draft gets next."""
    monkeypatch.setattr("secrets.token_hex", lambda _: "known")
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / ".tmp-known-hot").symlink_to(tmp_path / "victim")

    write_state(tmp_path / "hot", b"keys")

    assert (tmp_path / "victim").read_bytes() == b"precious"
    assert read_state(tmp_path / "hot") == b"keys"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hot", "victim"]


def test_writers_of_one_state_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Threads of one process, as two sessions of one model: no write fails, and the file is whole at every moment."""
    contents = [bytes([number]) * 100_000 for number in range(4)]
    write_state(tmp_path / "hot", contents[0])
    with ThreadPoolExecutor(4) as threads:
        writes = [threads.submit(write_state, tmp_path / "hot", contents[number % 4]) for number in range(100)]
        while not all(write.done() for write in writes):
            assert read_state(tmp_path / "hot") in contents
        for write in writes:
            write.result()

    assert [path.name for path in tmp_path.iterdir()] == ["hot"]


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop"])
def test_what_is_no_file_counts_as_absent(kind: str, tmp_path: Path) -> None:
    """A pipe has no end before its writer's, and a device none at all."""
    path = tmp_path / "hot"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)

    assert read_state(path) is None


def test_a_private_folder_may_exist(tmp_path: Path) -> None:
    """Two processes may make it at once."""
    assert make_private(make_private(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
