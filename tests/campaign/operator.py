"""Actions of operators: they publish, load, roll back and replace versions in place."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inference_session import InferenceSession
from inference_session.errors import HotrowError, UnavailableError
from inference_session.platform.drafts import exchange
from inference_session.version_directory.publishing import publish_version
from tests.campaign.contents import MODEL, write_version
from tests.campaign.expectations import Content, Expectations, Permit, Writer
from tests.campaign.faults import Faults
from tests.campaign.plan import CATCH_UP_S, Plan
from tests.campaign.settling import await_none, differing, raise_any
from tests.campaign.stores import Stores
from tests.campaign.target import Target, rows_of
from tests.campaign.writers import RowWriter

_SEEN_S = 2.0
"""Time within which the launcher has seen which version serves, on a busy machine too."""


class Operator:
    """One deployment's. Used by one thread."""

    def __init__(
        self, plan: Plan, folder: Path, *, stores: Stores, target: Target, expectations: Expectations, faults: Faults
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._stores = stores
        self._target = target
        self._expectations = expectations
        self._faults = faults
        self._next = 1
        self.contents: dict[int, Content] = {}
        """By version, the content of its folder."""
        self.serving = Content(0, 0, 0)
        self.writer: RowWriter | None = None
        self._before, self._replaced_s = self.serving, 0.0
        """The content that served before, and when it was replaced."""
        self._after_restart: list[Content] = []

    @property
    def others(self) -> list[int]:
        """Versions in the repository that do not serve."""
        return sorted(self.contents.keys() - {self.serving.version})

    def directory(self, version: int) -> Path:
        """Of a version, in the repository."""
        return self._folder / "repository" / MODEL / str(version)

    def publish(self) -> int:
        """A version from a training appears in the repository; its number."""
        version, self._next = self._next, self._next + 1
        content = Content(version * 100, version, version)
        source = self._folder / "sources" / str(version)
        write_version(source, content=content.number, tag=content.tag, settings=self._stores.settings(version))
        publish_version(source, self._folder / "repository", MODEL, version=version)
        self._stores.push(self.directory(version), volatile=self._faults.is_healthy("volatile"))
        if not self._plan.has_files:
            shutil.rmtree(self.directory(version) / "tables")
        self.contents[version] = content
        self._expectations.add(content)
        return version

    def swap(self) -> None:
        """A new version."""
        self.load(self.publish())

    def load(self, version: int) -> None:
        """Let a version serve."""
        self._replace(self.contents[version], lambda: self._target.load(self.directory(version)))

    def replace_in_place(self) -> None:
        """Another dense network in the folder of the version that serves."""
        old = self.serving
        new = Content(old.number + 1, old.version, old.tag)
        directory, beside = self.directory(old.version), self._folder / "beside"
        write_version(beside, content=new.number, tag=new.tag, settings=self._stores.settings(new.version))
        self._expectations.add(new)

        def replace() -> None:
            for name in ("dense.onnx", "MANIFEST.json"):
                (beside / name).replace(directory / name)
            self._target.update_in_place(new.number)

        is_stream = self._plan.writer is Writer.STREAM
        if is_stream and (self._plan.has_rocksdb or self._plan.cache_bytes):
            # update-rows.md, "Run several servers": others than its writer see what is in a RocksDB a second later.
            # consistency.md, "What is not promised": what a process has cached, after it has applied the message.
            self._expectations.permit("stream behind", Permit.OLD_ROWS)
        self._replace(new, replace)
        shutil.rmtree(beside)
        is_well = self._faults.is_healthy("stream") and self._faults.is_healthy("volatile")
        if is_well and (is_stream or not self._plan.is_redis_alone):
            self.catch_up()

    def catch_up(self) -> None:
        """Wait until all rows published, or written without an error, are served; older rows are wrong from then on."""
        assert self.writer is not None
        with self.writer.lock:
            self.writer.flush()
            await_none(self.differing)
            if self._plan.writer is Writer.STREAM:
                self._expectations.raise_to(self.serving.version, self._expectations.begun(self.serving.version))
        self._expectations.lift("stream behind")

    def differing(self) -> list[str]:
        """Wrong answers while no operation is under way, as texts."""
        return differing(self._expectations, self.serving, self._target)

    def swap_after_damage(self) -> None:
        """A version is damaged on disk, and refused; the next one is published from good files, and is right."""
        damaged = self.publish()
        for file in self.directory(damaged).glob("tables/*/*"):
            _damage(file)
        new = self.publish()
        if self._plan.has_files:
            with pytest.raises(HotrowError):
                self._target.load(self.directory(damaged))
        shutil.rmtree(self.directory(damaged))
        del self.contents[damaged]
        self.load(new)

    def damage_what_serves(self) -> None:
        """Files of the version that serves are replaced by damaged ones: it still answers, but cannot be loaded until
        they are restored.
        """
        directory = self.directory(self.serving.version)
        with _restored([*directory.glob("tables/*/*"), directory / "dense.onnx"], self._folder / "good") as files:
            for file in files:
                _damage(file)
            self.sweep()
            with pytest.raises(HotrowError):
                InferenceSession.open(directory, verify="full")
            self.sweep()

    def replace_database(self) -> None:
        """The RocksDB of the version that serves is replaced by a copy, which is read from then on. No process can
        write to the copy before its writer has ended (use-stores.md), so another version takes over.
        """
        assert self.writer is not None
        old, database = self.serving.version, self._stores.database(self.serving.version)
        new, copy = self.publish(), database.with_name("copy")
        with self.writer.lock:
            if self._plan.writer is Writer.STREAM:
                self.catch_up()
            shutil.copytree(database, copy)
            assert exchange(database, copy)
            self.refresh()
            raise_any(self.differing())
            shutil.rmtree(copy)
            raise_any(self.differing())
            self.load(new)
        del self.contents[old]

    def expect_restart(self) -> None:
        """The server is about to be killed. A newly started one serves the newest version; one that the launcher
        restarts serves the version that the launcher last saw, which may be a moment old (run-a-server.md).
        """
        self._after_restart = [self.serving, self.contents[max(self.contents)]]
        if time.monotonic() - self._replaced_s < _SEEN_S and self._before.version in self.contents:
            self._after_restart.append(self.contents[self._before.version])
        self._expectations.may_serve(self._after_restart)

    def take_restart(self, number: int) -> None:
        """It answers again, by this content."""
        found = [content for content in self._after_restart if content.number == number]
        assert found, f"content {number} serves after a restart, and not one of {self._after_restart}"
        self.serving = found[0]
        self._expectations.may_serve(found)

    def refresh(self) -> None:
        """The cache is read again from the stores."""
        with contextlib.suppress(UnavailableError):
            self._target.refresh()

    def sweep(self) -> None:
        """Request every key, which evicts the hot ones."""
        with contextlib.nullcontext() if self._faults.is_healthy("server") else contextlib.suppress(HotrowError):
            rows_of(self._target)

    def _replace(self, new: Content, act: Callable[[], None]) -> None:
        """Let another content take over by `act`, and note the answers allowed meanwhile and afterwards."""
        assert self.writer is not None
        with self.writer.lock:
            self.writer.flush() if self._faults.is_healthy("stream") else None
            published = self._expectations.begun(new.version)
        if self._plan.is_redis_alone and new.version != self.serving.version:
            # Redis may have lost its rows of this version, by a fault or because of `keep_versions`.
            self._expectations.permit("rolled back", Permit.OLD_ROWS)
            self._expectations.forget_shown(new.version)
        is_current = self._faults.is_healthy("stream")
        if not is_current:
            self._expectations.permit("stream behind", Permit.OLD_ROWS)
        # Direct writes go to the session that serves, so they wait while another takes over.
        with self.writer.lock if self._plan.writer is Writer.DIRECT else contextlib.nullcontext():
            self._expectations.may_serve([one for one in (self.serving, new) if one.number])
            began_s = time.monotonic()
            act()
            self._expectations.may_serve([new])
            self._before, self._replaced_s = self.serving, time.monotonic()
            self.contents[new.version] = self.serving = new
            self._expectations.lift("rolled back")
        if self._plan.writer is Writer.STREAM and is_current and time.monotonic() - began_s < CATCH_UP_S:
            self._expectations.raise_to(new.version, published)


def _damage(file: Path) -> None:
    """Flip a bit of the file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink()  # a separate file: others may share the old one by hard links, or have mapped it
    file.write_bytes(content)


@contextlib.contextmanager
def _restored(files: list[Path], folder: Path) -> Iterator[list[Path]]:
    """Restores files at the end."""
    folder.mkdir()
    for number, file in enumerate(files):
        shutil.copyfile(file, folder / str(number))
    try:
        yield files
    finally:
        for number, file in enumerate(files):
            (folder / str(number)).replace(file)
        folder.rmdir()
