"""The user's repository as Triton is to see it: links, and a config.pbtxt of our own for models of HugeCTR and HPS.

Their users' config.pbtxt asks for a GPU, which Triton refuses to a machine that has none, and has no dynamic batching.
The user's files are never written to, and Load calls have to find what he has changed since: a model folder of the view
holds his config.pbtxt, rewritten, and links to his version directories and to his folder; it follows them within
milliseconds. Models of other backends are links to the user's folders.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from triton_backend import text_format
from triton_backend.folder_watch import watch
from triton_backend.in_place import SOURCE_LINK
from triton_backend.model_config import CONFIG_FILE

IN_PLACE_BACKENDS = frozenset({"hugectr", "hps"})
_SCHEDULERS = ("dynamic_batching", "sequence_batching", "ensemble_scheduling")


class RepositoryView:
    """Keeps a folder of links up to date with a repository.

    Args:
        repository: the user's, an absolute path.
        folder: an empty folder of ours.
    """

    def __init__(self, repository: Path, folder: Path, *, has_gpu: bool) -> None:
        self._repository = repository
        self._folder = folder
        self._has_gpu = has_gpu
        self.moved_to_cpu: set[str] = set()
        """Models whose config.pbtxt asks for a GPU that is not there."""

    @classmethod
    @contextmanager
    def followed(cls, repository: Path, folder: Path, *, has_gpu: bool) -> Iterator[RepositoryView]:
        """A view in a folder that is made, up to date as long as the context lasts."""
        folder.mkdir()
        view = cls(repository, folder, has_gpu=has_gpu)
        view.refresh()
        with watch(view.folders, view.refresh):
            yield view

    def folders(self) -> list[Path]:
        """The folders of the user's in which a change matters: the repository, and models that are not mere links."""
        return [self._repository, *(path / SOURCE_LINK for path in self._folder.iterdir() if not path.is_symlink())]

    def refresh(self) -> None:
        """Follow what has changed."""
        present = {path.name: path for path in self._repository.iterdir() if path.is_dir()}
        for link in self._folder.iterdir():
            if link.name not in present:
                _remove(link)
        for name, source in present.items():
            if not name.startswith("."):
                self._refresh_model(source, self._folder / name)

    def _refresh_model(self, source: Path, target: Path) -> None:
        config = _read_config(source / CONFIG_FILE)
        if config is None or config.get("backend", [""])[-1] not in IN_PLACE_BACKENDS:
            if not target.is_symlink():
                _remove(target)
                target.symlink_to(source)
            return
        if target.is_symlink():
            target.unlink()
        target.mkdir(exist_ok=True)
        _follow_links(source, target)
        self._write_config(config, target)

    def _write_config(self, config: text_format.Message, target: Path) -> None:
        if not self._has_gpu and _move_to_cpu(config):
            self.moved_to_cpu.add(target.name)
        _join_requests(config)
        text, path = text_format.write(config), target / CONFIG_FILE
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            staged = self._folder / f".tmp-{target.name}"
            staged.write_text(text, encoding="utf-8")
            staged.replace(path)


def has_gpu() -> bool:
    """Whether the NVIDIA driver shows this process a GPU."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def _read_config(path: Path) -> text_format.Message | None:
    """A config.pbtxt; None where there is none that can be read, which Triton will say."""
    try:
        return text_format.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _follow_links(source: Path, target: Path) -> None:
    """Links to the user's folder, and to the versions in it."""
    wanted = {path.name: path for path in source.iterdir() if path.is_dir() and path.name[0].isdigit()}
    wanted[SOURCE_LINK] = source
    for path in target.iterdir():
        if path.is_symlink() and path.name not in wanted:
            path.unlink()
    for name, path in wanted.items():
        with suppress(FileExistsError):
            (target / name).symlink_to(path)


def _move_to_cpu(config: text_format.Message) -> bool:
    """Have instances run on the CPU that ask for a GPU; whether there are any."""
    groups = [group for group in config.get("instance_group", []) if group.get("kind", [""])[-1] == "KIND_GPU"]
    for group in groups:
        group["kind"] = ["KIND_CPU"]
        group.pop("gpus", None)
    return bool(groups)


def _join_requests(config: text_format.Message) -> None:
    """Have Triton join the requests that wait, whatever their lengths."""
    if not any(name in config for name in _SCHEDULERS):
        config["dynamic_batching"] = [{}]
    for tensor in config.get("input", []):
        tensor.setdefault("allow_ragged_batch", ["true"])


def _remove(path: Path) -> None:
    """Remove a model of the view; the user's files are behind links, which are not followed."""
    if path.is_dir() and not path.is_symlink():
        for entry in path.iterdir():
            entry.unlink()
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
