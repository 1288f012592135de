"""Files of HDFS for readers that need local files: copied into the user's cache folder, and kept there.

<cache>/sources/<hash of the URL>/
  lock                     held by the process that copies
  <hash of the state>/     one per state of the source: its files, their sizes and stamps
    <name>                 the file or folder
    MANIFEST.json          its sizes and checksums, written when the copy was complete

A state in the cache is not copied again, unless its bytes no longer match its manifest; only the newest states are
kept.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inference_session.errors import ModelFormatError
from inference_session.model_source.copy import Copy
from inference_session.model_source.create import create_source, is_url, split_place
from inference_session.model_source.inventory import Inventory
from inference_session.platform.boot import boot_id
from inference_session.platform.drafts import working_folder
from inference_session.platform.progress import Progress
from inference_session.platform.user_cache import cache_folder, hashed_name, least_recent_first, lock_file, make_private
from inference_session.version_directory import manifest

NUM_KEPT = 2
"""States of one source that are kept: the newest, and the one before it, which others may be reading."""


_log = logging.getLogger(__name__)


def _sources_folder() -> Path:
    return cache_folder() / "sources"


@contextmanager
def folder_for_links(prefix: str) -> Iterator[Path]:
    """Yield a new folder of the file system that copies are on, named by a prefix, and removed at the end.

    What killed processes left of that prefix is removed first. Other machines that share the file system may not see
    locks, so only folders of this one are.
    """
    with working_folder(make_private(_sources_folder()), f"{prefix}-{hashed_name(boot_id(), 12)}-") as folder:
        yield folder


def fetch(place: str | Path, progress: Progress | None = None) -> Path:
    """The path of a file or folder on this machine: a path unchanged, for a URL the path of a verified copy.

    Raises:
        as `Copy`; ConfigurationError also where the cache cannot be written.
    """
    if not is_url(place):
        return Path(place)
    url = str(place)
    with create_source(url) as source:
        states = json.dumps(sorted(Inventory.of(source).states().items()))
    folder = _folder_of(url)
    with _locked(folder):
        target = folder / hashed_name(states) / split_place(url)[1]
        if not _is_whole(target):
            with Copy(url, target) as copy:
                copy.run(progress)
            manifest.write_manifest(target.parent)
        os.utime(target.parent)
        _remove_old(folder, used=target.parent)
    return target


def forget(place: str | Path) -> None:
    """Remove the copies of a URL, if there are any."""
    if is_url(place) and _folder_of(str(place)).is_dir():
        with _locked(folder := _folder_of(str(place))):
            for state in least_recent_first(folder):
                shutil.rmtree(state)


def link_tree(source: Path, target: Path) -> None:
    """Make a file, or a folder with all its files, appear at another place of the same file system, as hard links."""
    if source.is_dir():
        shutil.copytree(source, target, copy_function=os.link)
    else:
        target.hardlink_to(source)


def _is_whole(copy: Path) -> bool:
    """Whether an undamaged copy exists: every byte is read. A damaged one is removed."""
    if not copy.exists():
        return False
    try:
        manifest.verify(copy.parent, checksums=True)
    except ModelFormatError as error:
        _log.warning("copying %s again: %s", copy, error)
        shutil.rmtree(copy) if copy.is_dir() else copy.unlink()
        return False
    return True


def _folder_of(url: str) -> Path:
    return _sources_folder() / hashed_name(url)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with lock_file(folder) as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _remove_old(folder: Path, used: Path) -> None:
    """Remove all but the most recently used states, of which `used` is the newest. The caller holds the lock."""
    others = [path for path in least_recent_first(folder) if path != used]
    for path in others[: 1 - NUM_KEPT]:
        shutil.rmtree(path)
