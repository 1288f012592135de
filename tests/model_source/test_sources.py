"""The contract of every source of files, on a local folder and on a real HDFS."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_session.errors import ConfigurationError
from inference_session.model_source import ModelSource, create_source
from tests.testing.hadoop import Hdfs
from tests.testing.servers import wait_until
from tests.testing.sources import CONTENT, put

_numbers = itertools.count()


class SourceContract:
    """A source's tests subclass this; the fixture `source` is an empty folder that exists."""

    @pytest.fixture
    def source(self) -> Iterator[ModelSource]:
        raise NotImplementedError

    def test_entries_tell_all_files_and_folders(self, source: ModelSource) -> None:
        """Files at any depth and folders are listed by path, files with their sizes; a file is a list of itself."""
        put(source, "b/c/deep", b"123")
        put(source, "a name", b"")
        source.make_folder("empty/inner")

        found = [(entry.path, entry.num_bytes, entry.is_folder) for entry in source.entries()]

        assert found == [
            ("a name", 0, False),
            ("b", 0, True),
            ("b/c", 0, True),
            ("b/c/deep", 3, False),
            ("empty", 0, True),
            ("empty/inner", 0, True),
        ]
        assert source.entries("b/c/deep") == [source.stat("b/c/deep")]

    def test_what_is_absent_is_none_or_an_error(self, source: ModelSource) -> None:
        """The state of a missing path is None; reading or listing it is an OSError that names it."""
        assert source.stat("nothing") is None
        for call in (lambda: source.entries("nothing"), lambda: source.read("nothing", 0, 1)):
            with pytest.raises(OSError, match="nothing"):
                call()

    @settings(max_examples=15)
    @given(begin=st.integers(0, len(CONTENT)), size=st.integers(0, len(CONTENT)))
    def test_any_range_is_read(self, source: ModelSource, begin: int, size: int) -> None:
        """A range of bytes is what a slice of the content is; one beyond the end is an OSError."""
        if source.stat("content") is None:
            put(source, "content", CONTENT)
        if begin + size > len(CONTENT):
            with pytest.raises(OSError, match="content"):
                source.read("content", begin, size)
        else:
            assert source.read("content", begin, size) == CONTENT[begin : begin + size]

    def test_a_write_goes_on_at_the_end(self, source: ModelSource) -> None:
        """A failed write keeps its bytes; the next write calls for the rest only, and the whole file is right."""
        asked: list[int] = []

        def failing(begin: int) -> Iterator[bytes]:
            yield CONTENT[:3_000_000]
            raise InterruptedError("no more")

        def rest(begin: int) -> Iterator[bytes]:
            asked.append(begin)
            yield CONTENT[begin:]

        with pytest.raises(InterruptedError, match="no more"):
            source.write("folder/content", failing)
        source.write("folder/content", rest)

        entry = source.stat("folder/content")
        assert entry is not None
        assert entry.num_bytes == len(CONTENT)
        assert source.read("folder/content", 0, len(CONTENT)) == CONTENT
        assert 0 <= asked[-1] <= 3_000_000

    def test_a_rename_never_replaces(self, source: ModelSource) -> None:
        """A folder moves to a free path; it does not move onto a file or folder that exists, and stays."""
        put(source, "one/file", b"1")
        source.make_folder("two")
        put(source, "three", b"3")
        for target in ("two", "three"):
            with pytest.raises(ConfigurationError, match=f"{target}.*already exists"):
                source.rename("one", target)
        source.rename("one", "four")

        assert [entry.path for entry in source.entries()] == ["four", "four/file", "three", "two"]

    def test_remove_takes_all_and_asks_nothing(self, source: ModelSource) -> None:
        """Files, folders with all they hold and nothing at all can be removed."""
        put(source, "folder/file", b"1")
        put(source, "file", b"1")
        for path in ("folder", "file", "nothing", "file"):
            source.remove(path)
        assert source.entries() == []

    def test_a_change_changes_the_stamp(self, source: ModelSource) -> None:
        """Two states of a file of one size differ in their stamps."""
        put(source, "file", b"1")
        before = source.stat("file")
        assert before is not None

        def is_another() -> bool:
            """The clock of a file system may stand still for a moment."""
            source.remove("file")
            put(source, "file", b"2")
            return source.stat("file") != before

        wait_until(is_another, "another stamp")
        assert source.stat("file") == source.stat("file")


class TestLocalSource(SourceContract):
    @pytest.fixture
    def source(self, tmp_path: Path) -> Iterator[ModelSource]:
        (tmp_path / "root").mkdir()
        with create_source(tmp_path / "root") as source:
            yield source

    def test_links_are_followed_but_not_in_circles(self, source: ModelSource, tmp_path: Path) -> None:
        """A link to a folder is that folder; one to a folder above itself, to nothing or to a device is refused."""
        put(source, "real/file", b"1")
        (tmp_path / "root" / "link").symlink_to(tmp_path / "root" / "real")
        assert [entry.path for entry in source.entries()] == ["link", "link/file", "real", "real/file"]
        for name, target in (("circle", tmp_path / "root"), ("broken", tmp_path / "none"), ("device", "/dev/null")):
            (tmp_path / "root" / "real" / name).symlink_to(target)
            with pytest.raises(OSError, match=name):
                source.entries()
            (tmp_path / "root" / "real" / name).unlink()


class TestHdfsSource(SourceContract):
    @pytest.fixture
    def source(self, hdfs: Hdfs) -> Iterator[ModelSource]:
        with create_source(f"{hdfs.url}/contract/{next(_numbers)}/{os.getpid()}") as source:
            source.make_folder("")
            yield source
