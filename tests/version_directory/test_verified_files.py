"""Which files need not be read again, and which must be."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from inference_session import InferenceSession
from inference_session.errors import ModelFormatError
from inference_session.importers.onnx import import_onnx
from inference_session.platform.progress import Progress
from inference_session.platform.user_cache import state_folder
from inference_session.version_directory import manifest
from inference_session.version_directory.publishing import publish_version
from inference_session.version_directory.verified_files import VerifiedFiles, verified_state
from tests.testing import small_model
from tests.testing.onnx_models import model_of, table
from tests.testing.servers import wait_until

CHECKSUM = "00"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small file."""
    path = tmp_path / "file"
    path.write_bytes(b"content")
    return path


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as old from the beginning."""
    monkeypatch.setattr("inference_session.version_directory.verified_files._SETTLED_NS", -1)


def remembering(file: Path) -> VerifiedFiles:
    """The checksum that a later process knows of a verified file."""
    known = VerifiedFiles(file.with_name("m.verified"))
    known.add(verified_state(file), CHECKSUM)
    known.save()
    return VerifiedFiles(file.with_name("m.verified"))


def rewrite(file: Path, content: bytes) -> None:
    """Write to a file and set its time of modification back, as `cp -p` and `rsync --times` do."""
    before = verified_state(file)

    def is_written() -> bool:
        """Whether the write came after the tick of the file system's clock in which the state was taken."""
        file.write_bytes(content)
        os.utime(file, ns=(before[3], before[3]))
        return verified_state(file) != before

    wait_until(is_written, "the next tick of the file system's clock")
    assert verified_state(file)[:-1] == before[:-1]


@pytest.mark.usefixtures("settled")
def test_a_file_is_known_by_each_of_its_names(file: Path) -> None:
    """A file is known where its state and its checksum are; a copy is another file."""
    link = file.with_name("link")
    link.hardlink_to(file)
    known = remembering(file)
    shutil.copy2(file, file.with_name("copy"))

    assert known.holds(verified_state(link), CHECKSUM)
    assert not known.holds(verified_state(file), "01")
    assert not known.holds(verified_state(file.with_name("copy")), CHECKSUM)
    assert not known.holds(verified_state(file.with_name("absent")), CHECKSUM)


@pytest.mark.usefixtures("settled")
def test_a_file_whose_time_of_modification_was_set_back_is_not_known(file: Path) -> None:
    """The time of change tells."""
    known = remembering(file)

    rewrite(file, b"CONTENT")

    assert not known.holds(verified_state(file), CHECKSUM)


@pytest.mark.parametrize("modified_s", [0, 10**10])
def test_a_file_that_was_just_changed_is_not_remembered(
    file: Path, modified_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A further change within the same tick would not show, whatever its time of modification says."""
    monkeypatch.setattr("inference_session.version_directory.verified_files._SETTLED_NS", 10**18)  # 31 years
    os.utime(file, (modified_s, modified_s))

    assert not remembering(file).holds(verified_state(file), CHECKSUM)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read to verify them."""
    names: list[str] = []
    sha256_of = manifest.sha256_of

    def record(path: Path, progress: Progress | None = None) -> str:
        names.append(path.name)
        return sha256_of(path, progress)

    monkeypatch.setattr(manifest, "sha256_of", record)
    return names


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose servers keep their state in a folder of the test."""
    monkeypatch.setenv("HOTROW_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "repository"


def load(version_dir: Path) -> None:
    """Verify a version as a server does."""
    state_dir = state_folder(version_dir.parent.parent)
    InferenceSession.open(version_dir, verify="full", state_dir=str(state_dir)).close()


@pytest.mark.usefixtures("settled")
def test_what_a_publication_has_linked_and_read_is_not_read_again(repository: Path, read: list[str]) -> None:
    """Although the link has changed the files' state. Later damage is found."""
    small_model.write(repository.parent / "out")
    load(publish_version(repository.parent / "out", repository, "ctr").version_dir)
    second = publish_version(repository.parent / "out", repository, "ctr").version_dir
    read.clear()

    load(second)
    assert read == []

    vectors = second / "tables" / "user_weight" / "emb_vector"
    rewrite(vectors, bytes(vectors.stat().st_size))
    with pytest.raises(ModelFormatError, match="user_weight/emb_vector: damaged"):
        load(second)


@pytest.mark.usefixtures("settled")
def test_what_an_import_has_linked_and_read_is_not_read_again(repository: Path, read: list[str]) -> None:
    """An import links the tables that the version before has too."""
    path = repository.parent / "model.onnx"
    graph = "agraph (int64[N, 3] x) => (float[N, 4] y) { g = Gather(W, x) y = ReduceSum <keepdims = 0> (g, axes) }"
    onnx.save(model_of(graph, {"W": table(), "axes": np.array([1])}), path)
    load(import_onnx(path, repository, "ctr").version_dir)
    second = import_onnx(path, repository, "ctr").version_dir
    read.clear()

    load(second)

    assert "emb_vector" not in read


def test_a_publication_keeps_nothing_where_no_version_was_served(repository: Path) -> None:
    """A trainer's machine gets no folder of state."""
    small_model.write(repository.parent / "out")
    for _ in range(2):
        publish_version(repository.parent / "out", repository, "ctr")

    assert not state_folder(repository).exists()
