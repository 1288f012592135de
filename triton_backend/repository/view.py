"""The user's repository as Triton sees it: links, and our own config.pbtxt for models of HugeCTR and HPS.

Their users' config.pbtxt asks for a GPU, which Triton refuses on a machine without one, and lacks dynamic batching.
We never write to the user's files, and a Load call has to see changes made just before. So a model folder of the view
holds the user's config.pbtxt, rewritten when Triton opens it (leased_file.py), and two kinds of links. A link to the
user's folder shows Triton that something has changed. Links to the version directories are listed by Triton after it
has read the configuration. Models of other backends are links to the user's folders, unless these hold something that
Triton would stumble over: then links to all else in them take the place of the link.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from inference_session.platform.drafts import exchange
from inference_session.platform.repeated_call import RepeatedCall
from triton_backend.repository import text_format
from triton_backend.repository.leased_file import LeasedFile
from triton_backend.repository.model_config import CONFIG_FILE
from triton_backend.repository.servable import (
    IN_PLACE_BACKENDS,
    SOURCE_LINK,
    is_version,
    misreading,
    model_folders,
    read_config,
)

_SCHEDULERS = ("dynamic_batching", "sequence_batching", "ensemble_scheduling")
_INTERVAL_S = 0.01
_SETTLED_NS = 2_000_000_000
"""Age from which a further change of a folder surely changes its time too."""


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
        self._seen: list[int] = []
        """What `_changes` said when the view was last brought up to date; []: it may have to be again."""
        self.moved_to_cpu: set[str] = set()
        """Models whose config.pbtxt asks for a GPU that does not exist."""

    @classmethod
    @contextmanager
    def followed(cls, repository: Path, folder: Path, *, has_gpu: bool) -> Iterator[RepositoryView]:
        """A view in a newly created folder, kept up to date during the context."""
        folder.mkdir()
        view = cls(repository, folder, has_gpu=has_gpu)
        view.refresh()
        failure = f"changes of {repository} could not be followed"
        calls = RepeatedCall("hotrow-repository-view", view._follow, _INTERVAL_S, failure=failure)
        with closing(view), closing(calls):
            yield view

    def refresh(self) -> None:
        """Follow the set of models."""
        present = {path.name: path for path in model_folders(self._repository)}
        for name in {path.name for path in self._folder.iterdir()} - set(present):
            self._remove(name)
        for name, source in present.items():
            if name not in self._configs:
                self._add(source, self._folder / name)

    def close(self) -> None:
        """Stop following."""
        for config in self._configs.values():
            config.close()

    def _follow(self) -> None:
        for config in self._configs.values():
            with suppress(OSError):  # for example a full disk; it is tried again
                config.serve()
        with suppress(OSError):  # changed again while it was read
            if self._seen != (changed := self._changes()):
                self.refresh()
                self._seen = changed if abs(time.time_ns() - max(changed)) > _SETTLED_NS else []

    def _changes(self) -> list[int]:
        """When the repository and each config.pbtxt behind a link changed: the file may come long after its folder."""
        linked = [path.name for path in self._folder.iterdir() if path.name not in self._configs]
        return [_changed_ns(self._repository), *(_changed_ns(self._repository / name / CONFIG_FILE) for name in linked)]

    def _add(self, source: Path, target: Path) -> None:
        if _read_backend(source) not in IN_PLACE_BACKENDS and not _is_misread(source):
            if not target.exists():
                target.symlink_to(source)
            return
        draft = self._draft(target.name)
        draft.mkdir()
        (draft / CONFIG_FILE).write_text(self._adapted(source, draft), encoding="utf-8")
        _put_in_place(draft, target)
        self._configs[target.name] = LeasedFile(
            target / CONFIG_FILE, source / CONFIG_FILE, lambda: self._adapted(source, target)
        )

    def _remove(self, name: str) -> None:
        """The user's files are behind links, which are not followed."""
        removed = self._draft(name)
        (self._folder / name).rename(removed)
        if config := self._configs.pop(name, None):
            config.close()
        _delete(removed)

    def _draft(self, name: str) -> Path:
        """A path that Triton does not see, to make and delete a model folder; leftovers of failures are deleted."""
        folder = self._folder.with_name(f"{self._folder.name}.draft")
        folder.mkdir(exist_ok=True)
        _delete(folder / name)
        return folder / name

    def _adapted(self, source: Path, target: Path) -> str:
        """The rewritten text of config.pbtxt; also updates the links next to it."""
        try:
            text = _config_text(source)
            config = text_format.parse(text)
            is_in_place = _backend(config) in IN_PLACE_BACKENDS
            _follow_links(source, target, _is_version_folder if is_in_place else _is_harmless)
        except (OSError, ValueError) as error:
            return f"# {CONFIG_FILE} cannot be read\n{error}\n"  # which makes the load fail with a message
        if not is_in_place:
            return text
        if not self._has_gpu and _move_to_cpu(config):
            self.moved_to_cpu.add(target.name)
        _join_requests(config)
        return text_format.write(config)


def _put_in_place(draft: Path, target: Path) -> None:
    """Put a folder atomically where nothing or a link is: Triton must not find a model without its files."""
    if not target.is_symlink():
        draft.rename(target)
    elif exchange(draft, target):
        draft.unlink()
    else:
        target.unlink()
        draft.rename(target)


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
    """The backend of a model; empty where its config.pbtxt cannot be read, which Triton will report."""
    try:
        return _backend(text_format.parse((source / CONFIG_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return ""


def _config_text(source: Path) -> str:
    """A model's config.pbtxt. Where there is none, it names the backend that Triton cannot detect behind our links."""
    file = source / CONFIG_FILE
    return file.read_text(encoding="utf-8") if file.exists() else f'backend: "{read_config(source).backend}"\n'


def _is_misread(source: Path) -> bool:
    """Whether a model's folder holds something that Triton must not see. Triton will report one that it cannot read."""
    try:
        return any(map(misreading, source.iterdir()))
    except OSError:
        return False


def _backend(config: text_format.Message) -> str:
    return str(config.get("backend", [""])[-1])


def _changed_ns(path: Path) -> int:
    """When a file or folder was last changed, even by a copy that keeps times; 0: it is absent."""
    try:
        return path.stat().st_ctime_ns
    except OSError:
        return 0


def _is_version_folder(path: Path) -> bool:
    return path.is_dir() and is_version(path.name)


def _is_harmless(path: Path) -> bool:
    """Whether Triton may see an entry of a model's folder: versions, labels, samples for its warm-up and others."""
    return path.name != CONFIG_FILE and not path.name.startswith(".") and not misreading(path)


def _follow_links(source: Path, target: Path, is_shown: Callable[[Path], bool]) -> None:
    """Links to the user's folder, and to those entries in it that are shown."""
    wanted = {path.name: path for path in source.iterdir() if is_shown(path)}
    wanted[SOURCE_LINK] = source
    present = {path.name for path in target.iterdir() if path.is_symlink()}
    for name in present - set(wanted):
        (target / name).unlink()
    for name in set(wanted) - present:
        (target / name).symlink_to(wanted[name])


def _move_to_cpu(config: text_format.Message) -> bool:
    """Have instances that ask for a GPU run on the CPU; returns whether there are any."""
    groups = [group for group in _messages(config, "instance_group") if group.get("kind", [""])[-1] == "KIND_GPU"]
    for group in groups:
        group["kind"] = ["KIND_CPU"]
        group.pop("gpus", None)
    return bool(groups)


def _join_requests(config: text_format.Message) -> None:
    """Have Triton join waiting requests of any lengths."""
    if not any(name in config for name in _SCHEDULERS):
        config["dynamic_batching"] = [{}]
    for tensor in _messages(config, "input"):
        tensor.setdefault("allow_ragged_batch", ["true"])


def _messages(config: text_format.Message, field: str) -> list[text_format.Message]:
    """The messages of a field; Triton reports anything else in it."""
    return [value for value in config.get(field, []) if isinstance(value, dict)]
