"""The user's repository as Triton is to see it: links, and a config.pbtxt of our own for models of HugeCTR and HPS.

Their users' config.pbtxt asks for a GPU, which Triton refuses to a machine that has none, and has no dynamic batching.
The user's files are never written to, and a Load call has to find what he has changed just before. So a model folder of
the view holds his config.pbtxt, rewritten when Triton opens it (leased_file.py), and links to his folder, through which
Triton sees that something has changed, and to his version directories, which it lists after it has read the
configuration. Models of other backends are links to the user's folders.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from triton_backend.repository import text_format
from triton_backend.repository.leased_file import LeasedFile
from triton_backend.repository.model_config import CONFIG_FILE
from triton_backend.repository.servable import IN_PLACE_BACKENDS, SOURCE_LINK, is_version

_SCHEDULERS = ("dynamic_batching", "sequence_batching", "ensemble_scheduling")
_INTERVAL_S = 0.01
_SETTLED_NS = 2_000_000_000
"""Age from which on a further change of a folder is bound to change its time too."""


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
        self._configs: dict[str, LeasedFile] = {}
        self.moved_to_cpu: set[str] = set()
        """Models whose config.pbtxt asks for a GPU that is not there."""

    @classmethod
    @contextmanager
    def followed(cls, repository: Path, folder: Path, *, has_gpu: bool) -> Iterator[RepositoryView]:
        """A view in a folder that is made, up to date as long as the context lasts."""
        folder.mkdir()
        view = cls(repository, folder, has_gpu=has_gpu)
        view.refresh()
        stopping = threading.Event()
        thread = threading.Thread(target=view._follow, args=(stopping,), name="hotrow-repository-view", daemon=True)
        thread.start()
        try:
            yield view
        finally:
            stopping.set()
            thread.join()
            view.close()

    def refresh(self) -> None:
        """Follow which models there are."""
        present = {path.name: path for path in self._repository.iterdir() if path.is_dir() and path.name[0] != "."}
        for name in {path.name for path in self._folder.iterdir()} - set(present):
            self._remove(name)
        for name, source in present.items():
            if name not in self._configs:
                self._add(source, self._folder / name)

    def close(self) -> None:
        """Follow no more."""
        for config in self._configs.values():
            config.close()

    def _follow(self, stopping: threading.Event) -> None:
        seen: list[int] = []
        while not stopping.wait(_INTERVAL_S):
            for config in self._configs.values():
                with contextlib.suppress(OSError):  # a full disk, for instance; it is tried again
                    config.serve()
            with contextlib.suppress(OSError):  # changed again while it was looked at
                if seen != (changed := self._changes()):
                    self.refresh()
                    seen = changed if abs(time.time_ns() - max(changed)) > _SETTLED_NS else []

    def _changes(self) -> list[int]:
        """When the repository changed, and each config.pbtxt behind a link: it may come long after its folder."""
        linked = [path.name for path in self._folder.iterdir() if path.name not in self._configs]
        return [_changed_ns(self._repository), *(_changed_ns(self._repository / name / CONFIG_FILE) for name in linked)]

    def _add(self, source: Path, target: Path) -> None:
        if _read_backend(source) not in IN_PLACE_BACKENDS:
            if not target.exists():
                target.symlink_to(source)
            return
        staged = self._staged(target.name)
        staged.mkdir()
        (staged / CONFIG_FILE).write_text(self._adapted(source, staged), encoding="utf-8")
        _put_in_place(staged, target)
        self._configs[target.name] = LeasedFile(
            target / CONFIG_FILE, source / CONFIG_FILE, lambda: self._adapted(source, target)
        )

    def _remove(self, name: str) -> None:
        """The user's files are behind links, which are not followed."""
        removed = self._staged(name)
        (self._folder / name).rename(removed)
        if config := self._configs.pop(name, None):
            config.close()
        _delete(removed)

    def _staged(self, name: str) -> Path:
        """Where a model folder is made and deleted, out of Triton's sight, with nothing left of a failed attempt."""
        folder = self._folder.with_name(f"{self._folder.name}.staged")
        folder.mkdir(exist_ok=True)
        _delete(folder / name)
        return folder / name

    def _adapted(self, source: Path, target: Path) -> str:
        """The text of config.pbtxt as it is to be; the links beside it are brought up to date on the way."""
        try:
            _follow_links(source, target)
            text = (source / CONFIG_FILE).read_text(encoding="utf-8")
            config = text_format.parse(text)
        except (OSError, ValueError) as error:
            return f"# {CONFIG_FILE} cannot be read\n{error}\n"  # which makes the load fail, and say so
        if _backend(config) not in IN_PLACE_BACKENDS:
            return text
        if not self._has_gpu and _move_to_cpu(config):
            self.moved_to_cpu.add(target.name)
        _join_requests(config)
        return text_format.write(config)


def _put_in_place(staged: Path, target: Path) -> None:
    """Let a folder appear in one step, where nothing is or a link: Triton must not find a model without its files."""
    if not target.is_symlink():
        staged.rename(target)
    elif _exchange(staged, target):
        staged.unlink()
    else:
        target.unlink()
        staged.rename(target)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False: this file system, or this kernel, cannot."""
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(ctypes.CDLL(None).renameat2(here, os.fsencode(one), here, os.fsencode(other), swap) == 0)


def _delete(path: Path) -> None:
    """Delete a link, or a folder of links and files."""
    if path.is_dir() and not path.is_symlink():
        for entry in path.iterdir():
            entry.unlink()
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def has_gpu() -> bool:
    """Whether the NVIDIA driver shows this process a GPU."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def _read_backend(source: Path) -> str:
    """The backend of a model; empty where its config.pbtxt cannot be read, which Triton will say."""
    try:
        return _backend(text_format.parse((source / CONFIG_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return ""


def _backend(config: text_format.Message) -> str:
    return str(config.get("backend", [""])[-1])


def _changed_ns(path: Path) -> int:
    """When a file or folder was last changed, which no copy can hide by keeping times; 0: it is absent."""
    try:
        return path.stat().st_ctime_ns
    except OSError:
        return 0


def _follow_links(source: Path, target: Path) -> None:
    """Links to the user's folder, and to the versions in it."""
    wanted = {path.name: path for path in source.iterdir() if path.is_dir() and is_version(path.name)}
    wanted[SOURCE_LINK] = source
    present = {path.name for path in target.iterdir() if path.is_symlink()}
    for name in present - set(wanted):
        (target / name).unlink()
    for name in set(wanted) - present:
        (target / name).symlink_to(wanted[name])


def _move_to_cpu(config: text_format.Message) -> bool:
    """Have instances run on the CPU that ask for a GPU; whether there are any."""
    groups = [group for group in _messages(config, "instance_group") if group.get("kind", [""])[-1] == "KIND_GPU"]
    for group in groups:
        group["kind"] = ["KIND_CPU"]
        group.pop("gpus", None)
    return bool(groups)


def _join_requests(config: text_format.Message) -> None:
    """Have Triton join the requests that wait, whatever their lengths."""
    if not any(name in config for name in _SCHEDULERS):
        config["dynamic_batching"] = [{}]
    for tensor in _messages(config, "input"):
        tensor.setdefault("allow_ragged_batch", ["true"])


def _messages(config: text_format.Message, field: str) -> list[text_format.Message]:
    """The messages of a field; anything else there is for Triton to complain about."""
    return [value for value in config.get(field, []) if isinstance(value, dict)]
