"""Versions appear whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from inference_session.errors import ConfigurationError, UnavailableError
from inference_session.platform.drafts import draft_folder, draft_version, next_version, working_folder


def test_a_version_appears_when_it_is_complete(tmp_path: Path) -> None:
    """Until then it has a name that servers ignore."""
    with draft_version(tmp_path / "repository", "ctr") as (draft, target):
        (draft / "file").write_text("x", encoding="utf-8")
        assert [path.name for path in (tmp_path / "repository/ctr").iterdir()] == [".tmp-1"]
        assert target == tmp_path / "repository/ctr/1"

    assert [path.name for path in (tmp_path / "repository/ctr").iterdir()] == ["1"]
    assert (tmp_path / "repository/ctr/1/file").read_text(encoding="utf-8") == "x"


def test_the_next_version_follows_the_highest(tmp_path: Path) -> None:
    """Gaps and other folders do not count."""
    for name in ("1", "7", "notes", "٩", ".tmp-9"):
        (tmp_path / "ctr" / name).mkdir(parents=True)
    assert next_version(tmp_path / "ctr") == 8

    with draft_version(tmp_path, "ctr"):
        pass
    assert (tmp_path / "ctr/8").is_dir()


def test_there_is_no_version_after_the_last(tmp_path: Path) -> None:
    """`hotrow quantize` wrote one that no server can read."""
    (tmp_path / str(2**63 - 1)).mkdir()

    with pytest.raises(ConfigurationError, match=f"version {2**63} is not allowed"):
        next_version(tmp_path)


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    """Not even the folders that were made for this version."""
    with pytest.raises(OSError, match="disk"), draft_version(tmp_path / "new/repository", "ctr") as (draft, _):
        _write_half(draft)

    assert not (tmp_path / "new/repository").exists()


@pytest.mark.parametrize("call", ["os.open", "fcntl.flock"])
def test_a_folder_that_cannot_be_held_is_not_left(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the process has too many open files, or the file system has no locks."""

    def fail(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(call, fail)
    with pytest.raises(OSError, match="no locks available"), draft_version(tmp_path / "repository", "ctr"):
        pass

    assert not (tmp_path / "repository").exists()


def test_a_failure_leaves_no_configuration_of_a_model_without_versions(tmp_path: Path) -> None:
    """Importers write config.pbtxt before the version appears; a server could not load the folder."""
    with pytest.raises(OSError, match="disk"), draft_version(tmp_path, "ctr") as (draft, _):
        _write_configuration(draft.parent)

    assert not (tmp_path / "ctr").exists()


@pytest.mark.parametrize("other", ["1", ".tmp-2", "labels.txt"])
def test_a_failure_leaves_a_configuration_that_others_need(tmp_path: Path, other: str) -> None:
    """Another process writes a version of the same new model."""
    with pytest.raises(OSError, match="disk"), draft_version(tmp_path, "ctr", 3) as (draft, _):
        _write_configuration(draft.parent, other)

    assert sorted(path.name for path in (tmp_path / "ctr").iterdir()) == sorted([other, "config.pbtxt"])


def test_the_error_of_a_full_disk_names_the_folder(tmp_path: Path) -> None:
    """The system's own does not say where."""
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / '7'}'"), draft_folder(tmp_path / "7"):
        Path("/dev/full").write_bytes(b"x")

    assert not list(tmp_path.iterdir())


def _write_configuration(folder: Path, *others: str) -> None:
    for other in others:
        (folder / other).mkdir()
    (folder / "config.pbtxt").touch()
    raise OSError("disk full")


def _write_half(draft: Path) -> None:
    (draft / "half").mkdir()
    raise OSError("disk full")


def test_a_failure_leaves_other_versions_alone(tmp_path: Path) -> None:
    """Only the files that were being written are removed."""
    with draft_version(tmp_path, "ctr"):
        pass
    with pytest.raises(OSError, match="disk"), draft_version(tmp_path, "ctr"):
        raise OSError("disk full")

    assert [path.name for path in (tmp_path / "ctr").iterdir()] == ["1"]


def test_an_existing_version_is_refused(tmp_path: Path) -> None:
    """Versions never change once they exist."""
    (tmp_path / "ctr/3").mkdir(parents=True)

    with (
        pytest.raises(ConfigurationError, match=r"ctr/3: already exists; choose another version"),
        draft_version(tmp_path, "ctr", 3),
    ):
        pytest.fail("must not be entered")


def test_a_version_that_appeared_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    """The first one wins; the other's files are removed."""
    with pytest.raises(ConfigurationError, match="already exists"), draft_version(tmp_path, "ctr", 1):
        (tmp_path / "ctr/1").mkdir()

    assert [path.name for path in (tmp_path / "ctr").iterdir()] == ["1"]


@pytest.mark.parametrize(
    ("model", "version"), [("", 1), ("a/b", 1), ("..", 1), (".hidden", 1), ("ctr", 0), ("ctr", 2**63)]
)
def test_names_that_are_no_folders_are_refused(model: str, version: int, tmp_path: Path) -> None:
    """Nothing is written outside of the repository, and versions are numbers that Triton reads."""
    with pytest.raises(ConfigurationError), draft_version(tmp_path, model, version):
        pytest.fail("must not be entered")


def test_no_version_follows_the_highest_that_can_be(tmp_path: Path) -> None:
    """Triton would serve a number beyond it under another one, or not at all."""
    (tmp_path / "ctr" / str(2**63 - 1)).mkdir(parents=True)

    with (
        pytest.raises(ConfigurationError, match="whole numbers from 1 to 9223372036854775807"),
        draft_version(tmp_path, "ctr"),
    ):
        pytest.fail("must not be entered")


def test_what_a_killed_writer_left_is_taken_over(tmp_path: Path) -> None:
    """Its lock ended with it; its files are removed."""
    left = tmp_path / "ctr/.tmp-1"
    (left / "tables").mkdir(parents=True)
    (left / "tables/key").write_bytes(b"half")
    (left / "link").symlink_to(tmp_path)

    with draft_version(tmp_path, "ctr") as (draft, _):
        assert list(draft.iterdir()) == []
    assert tmp_path.is_dir()


WRITER = """
import sys, pathlib
from inference_session.platform.drafts import draft_version
with draft_version(pathlib.Path(sys.argv[1]), "ctr", int(sys.argv[2])) as (draft, _):
    (draft / "tables").mkdir()
    (draft / "tables" / "key").write_bytes(b"half")
    print("writing", flush=True)
    sys.stdin.read()
"""


def test_what_killed_writers_left_of_other_versions_is_removed(tmp_path: Path) -> None:
    """After an hour without a change: not before, as other machines may write too, and not of a writer that lives."""
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with ExitStack() as stack:
        writers = [stack.enter_context(subprocess.Popen([*command, str(n)], **pipes)) for n in (5, 6, 7)]  # type: ignore[call-overload]
        for writer in writers:
            assert writer.stdout.readline() == b"writing\n"
        for writer in writers[:2]:
            writer.kill()
            writer.wait()
        for path in [
            path for n in (5, 7) for path in (tmp_path / f"ctr/.tmp-{n}", *tmp_path.glob(f"ctr/.tmp-{n}/**/*"))
        ]:
            os.utime(path, (0, 0))
        os.utime(tmp_path / "ctr/.tmp-6", (0, 0))

        with draft_version(tmp_path, "ctr", 9):
            assert sorted(path.name for path in (tmp_path / "ctr").iterdir()) == [".tmp-6", ".tmp-7", ".tmp-9"]
        writers[2].communicate(b"")

    assert (tmp_path / "ctr/7/tables/key").read_bytes() == b"half"


def test_a_writer_at_work_is_not_disturbed(tmp_path: Path) -> None:
    """Its folder is locked for as long as it lives."""
    busy = tmp_path / "ctr/.tmp-1"
    busy.mkdir(parents=True)
    (busy / "file").touch()
    handle = os.open(busy, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(handle, fcntl.LOCK_EX)

    with (
        pytest.raises(UnavailableError, match="another process is writing this version now"),
        draft_version(tmp_path, "ctr"),
    ):
        pytest.fail("must not be entered")
    os.close(handle)

    assert (busy / "file").exists()


@pytest.mark.parametrize("moment", ["after it was found", "after it was opened"])
def test_a_writer_that_ends_in_the_same_moment_is_another_writer(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It renames the folder between any two steps of ours: that is a temporary error, not a missing file."""
    draft, opened = tmp_path / "ctr" / ".tmp-1", os.open
    draft.mkdir(parents=True)

    def finish(path: Path, flags: int) -> int:
        handle = -1 if moment == "after it was found" else opened(path, flags)
        draft.rename(tmp_path / "ctr" / "1")
        return opened(path, flags) if handle < 0 else handle

    monkeypatch.setattr(os, "open", finish)
    with (
        pytest.raises(UnavailableError, match="another process is writing this version"),
        draft_version(tmp_path, "ctr", 1),
    ):
        pass


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    """No writer would put one there: somebody has to remove it."""
    (tmp_path / "ctr").mkdir()
    (tmp_path / "ctr" / ".tmp-1").touch()

    with pytest.raises(FileExistsError, match=r"\.tmp-1"), draft_version(tmp_path, "ctr"):
        pass


def test_a_working_folder_is_removed_at_the_end_or_by_the_next(tmp_path: Path) -> None:
    """Its process may be killed; folders that are held, too new or named otherwise stay."""
    names = ("work-old", "work-new", "work-held", "other")
    for name in names:
        (tmp_path / name / "part").mkdir(parents=True)
        for path in (tmp_path / name, tmp_path / name / "part"):
            os.utime(path, (0, 0) if name != "work-new" else None)
    (tmp_path / "work-link").symlink_to(tmp_path / "other")
    held = os.open(tmp_path / "work-held", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)

    with working_folder(tmp_path, "work-", abandoned_s=60) as folder:
        (folder / "file").touch()
        assert {path.name for path in tmp_path.iterdir()} == {*names, "work-link", folder.name} - {"work-old"}
        with working_folder(tmp_path, "work-") as second:
            assert folder.is_dir()
            assert second != folder
    os.close(held)

    assert {path.name for path in tmp_path.iterdir()} == {"work-held", "work-link", "other"}


def test_a_working_folder_that_another_process_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for an abandoned one between its making and its locking."""
    removed: list[Path] = []
    make = tempfile.mkdtemp

    def make_and_remove(**arguments: Any) -> str:
        path = make(**arguments)
        if not removed:
            removed.append(Path(path))
            shutil.rmtree(path)
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_remove)
    with working_folder(tmp_path, "work-") as folder:
        assert list(tmp_path.iterdir()) == [folder]
        assert folder not in removed
    assert list(tmp_path.iterdir()) == []
