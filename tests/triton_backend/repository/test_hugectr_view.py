"""The repository as Triton sees it: always the present state of the user's."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.testing.servers import wait_until
from triton_backend.repository.text_format import parse, write
from triton_backend.repository.view import RepositoryView

CONFIG = """
backend: "hugectr"
max_batch_size: 64,
input [ { name: "DES" data_type: TYPE_FP32 dims: [ -1 ] } ]
instance_group [ { count: 2 kind: KIND_GPU gpus: [ 0 ] } ]
parameters { key: "config" value { string_value: "with \\"quotes\\" and: 1" } }
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One model of HugeCTR, one of another backend."""
    for name, config in (("ctr", CONFIG), ("other", 'backend: "python" instance_group [ { kind: KIND_GPU } ]')):
        (tmp_path / "repository" / name / "1").mkdir(parents=True)
        (tmp_path / "repository" / name / "config.pbtxt").write_text(config, encoding="utf-8")
    return tmp_path / "repository"


@pytest.fixture
def view(repository: Path, tmp_path: Path) -> Iterator[RepositoryView]:
    """A view on a machine without a GPU."""
    with RepositoryView.followed(repository, tmp_path / "view", has_gpu=False) as view:
        yield view


def config_of(folder: Path) -> dict[str, list[Any]]:
    """A model's configuration as a server would read it."""
    return parse((folder / "config.pbtxt").read_text(encoding="utf-8"))


def test_a_gpu_that_is_not_there_is_not_asked_for(view: RepositoryView, tmp_path: Path) -> None:
    """The model moves to the CPU and its requests are joined; all else is the user's."""
    config = config_of(tmp_path / "view/ctr")

    assert config["instance_group"] == [{"count": ["2"], "kind": ["KIND_CPU"]}]
    assert config["dynamic_batching"] == [{}]
    assert config["input"][0]["allow_ragged_batch"] == ["true"]
    assert config["parameters"] == parse(CONFIG)["parameters"]
    assert view.moved_to_cpu == {"ctr"}


def test_where_there_is_a_gpu_it_is_asked_for(repository: Path, tmp_path: Path) -> None:
    """Only the batching is added."""
    with RepositoryView.followed(repository, tmp_path / "view", has_gpu=True) as view:
        assert config_of(tmp_path / "view/ctr")["instance_group"] == parse(CONFIG)["instance_group"]
        assert view.moved_to_cpu == set()


def test_models_of_other_backends_are_links(view: RepositoryView, repository: Path, tmp_path: Path) -> None:
    """Nothing of theirs is ours to change."""
    assert (tmp_path / "view/other").readlink() == repository / "other"


def test_a_folder_that_cannot_be_read_is_left_to_triton(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other models are served."""
    list_folder = Path.iterdir

    def list_readable(path: Path) -> Iterator[Path]:
        if path == repository / "other":
            raise PermissionError(13, "Permission denied", str(path))
        return list_folder(path)

    monkeypatch.setattr(Path, "iterdir", list_readable)  # the tests' user may read everything
    with RepositoryView.followed(repository, tmp_path / "view", has_gpu=False):
        assert (tmp_path / "view/other").readlink() == repository / "other"
        assert config_of(tmp_path / "view/ctr")["dynamic_batching"] == [{}]


def test_what_is_read_is_what_was_written_just_before(view: RepositoryView, repository: Path, tmp_path: Path) -> None:
    """However often, and with no time between: configuration and versions are those of the user's folder."""
    for number in range(2, 30):
        (repository / "ctr" / str(number)).mkdir()
        text = CONFIG.replace("max_batch_size: 64", f"max_batch_size: {number}")
        (repository / "ctr/config.pbtxt").write_text(text, encoding="utf-8")

        assert config_of(tmp_path / "view/ctr")["max_batch_size"] == [str(number)]
        assert (tmp_path / "view/ctr" / str(number)).is_dir()


def test_versions_that_are_gone_are_not_seen(view: RepositoryView, repository: Path, tmp_path: Path) -> None:
    """Nor is anything that Triton would mistake for a version."""
    (repository / "ctr/2").mkdir()
    (repository / "ctr/0_sparse_2000.model").mkdir()
    shutil.rmtree(repository / "ctr/1")

    config_of(tmp_path / "view/ctr")
    assert sorted(path.name for path in (tmp_path / "view/ctr").iterdir()) == [".source", "2", "config.pbtxt"]


def test_models_come_and_go(repository: Path, tmp_path: Path) -> None:
    """As in the user's repository, which may be at the top of a file system."""
    (tmp_path / "view").mkdir()
    view = RepositoryView(repository, tmp_path / "view", has_gpu=False)
    view.refresh()
    shutil.copytree(repository / "ctr", repository / "third")
    shutil.rmtree(repository / "ctr")
    (repository / "file").touch()
    (repository / "lost+found").mkdir()
    view.refresh()

    assert sorted(path.name for path in (tmp_path / "view").iterdir()) == ["other", "third"]
    view.close()


def test_a_configuration_may_come_long_after_its_folder(view: RepositoryView, repository: Path, tmp_path: Path) -> None:
    """As when a large model is copied, or another backend is chosen; with the times of the copied file."""
    for name in ("late", "other"):
        (repository / name / "1").mkdir(parents=True, exist_ok=True)
        wait_until((tmp_path / "view" / name).is_symlink, "the folder to be seen")
    for path in (repository, repository / "other"):
        os.utime(path, (0, 0))
    for name in ("late", "other"):
        shutil.copy2(repository / "ctr/config.pbtxt", repository / name / "config.pbtxt")

    for name in ("late", "other"):
        wait_until(lambda seen=tmp_path / "view" / name: not seen.is_symlink(), "the view")  # type: ignore[misc]
        assert config_of(tmp_path / "view" / name)["instance_group"] == [{"count": ["2"], "kind": ["KIND_CPU"]}]


def test_a_model_is_never_seen_half_made(view: RepositoryView, repository: Path, tmp_path: Path) -> None:
    """While its backend becomes one of ours, each look finds a configuration and the versions."""
    models = [tmp_path / "view" / f"model_{number}" for number in range(30)]
    for model in models:
        shutil.copytree(repository / "other", repository / model.name)
        wait_until(model.is_symlink, "the folder to be seen")
    states: list[tuple[bool, bool]] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            states.extend(((model / "config.pbtxt").exists(), (model / "1").is_dir()) for model in models)

    with ThreadPoolExecutor(1) as thread:
        looking = thread.submit(look)
        try:
            for model in models:
                shutil.copy2(repository / "ctr/config.pbtxt", repository / model.name / "config.pbtxt")
                wait_until(lambda model=model: not model.is_symlink(), "the change to be seen")  # type: ignore[misc]
        finally:
            done.set()
        looking.result()

    assert set(states) == {(True, True)}


def test_a_full_disk_makes_nobody_wait(view: RepositoryView, repository: Path, tmp_path: Path) -> None:
    """If no file can be made next to the one that is read, the reader gets the true content at once."""
    obstacle = tmp_path / "view/ctr/.tmp-config.pbtxt"

    def write(number: int) -> None:
        text = CONFIG.replace("max_batch_size: 64", f"max_batch_size: {number}")
        (repository / "ctr/.next").write_text(text, encoding="utf-8")
        (repository / "ctr/.next").replace(repository / "ctr/config.pbtxt")  # the view reads at any moment

    def size() -> list[str]:
        return config_of(tmp_path / "view/ctr")["max_batch_size"]

    obstacle.mkdir()
    write(1)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(size).result(30) == ["1"]  # Linux would let the reader in after 45 s
    write(2)
    wait_until(lambda: size() == ["2"], "the change to be seen")
    obstacle.rmdir()
    write(3)
    wait_until(lambda: size() == ["3"], "the change to be seen")


def test_a_model_may_change_to_another_backend(view: RepositoryView, repository: Path, tmp_path: Path) -> None:
    """Its configuration is the user's own from then on."""
    text = 'backend: "hotrow" instance_group [ { kind: KIND_GPU } ]'
    (repository / "ctr/config.pbtxt").write_text(text, encoding="utf-8")

    assert (tmp_path / "view/ctr/config.pbtxt").read_text(encoding="utf-8") == text


@pytest.mark.parametrize("text", ["{", 'backend: "hugectr" instance_group: "x" input: 3', ""])
def test_a_broken_configuration_is_left_to_triton(
    view: RepositoryView, repository: Path, tmp_path: Path, text: str
) -> None:
    """The view keeps working; the server says what is wrong."""
    (repository / "ctr/config.pbtxt").write_text(text, encoding="utf-8")
    (tmp_path / "view/ctr/config.pbtxt").read_text(encoding="utf-8")

    (repository / "ctr/config.pbtxt").write_text(CONFIG, encoding="utf-8")
    assert config_of(tmp_path / "view/ctr")["instance_group"] == [{"count": ["2"], "kind": ["KIND_CPU"]}]


def test_reading_changes_no_time(view: RepositoryView, repository: Path, tmp_path: Path) -> None:
    """A server that compares times finds a change only where the user made one."""
    for _ in range(2):
        config_of(tmp_path / "view/ctr")
        for name in ("ctr", "ctr/config.pbtxt"):
            assert (tmp_path / "view" / name).stat().st_mtime_ns == (repository / name).stat().st_mtime_ns


def test_what_is_written_is_read_again() -> None:
    """Strings stay strings, words stay words."""
    message = parse(CONFIG + 'name: "64" version_policy: { specific { versions: [ 1, 2 ] } }')

    assert parse(write(message)) == message
    assert 'name: "64"' in write(message)
    assert "max_batch_size: 64" in write(message)
