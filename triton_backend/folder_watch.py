"""Linux's inotify: says within a millisecond that something in a folder has changed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_CLOSE_WRITE, _MOVED, _CREATE, _DELETE, _ATTRIBUTES = 0x8, 0xC0, 0x100, 0x200, 0x4
_CHANGES = _CLOSE_WRITE | _MOVED | _CREATE | _DELETE | _ATTRIBUTES
_LOOK_AGAIN_S = 0.5
"""Network file systems do not report what other machines change."""

_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def watch(folders: Callable[[], Iterable[Path]], changed: Callable[[], None]) -> Iterator[None]:
    """Call `changed` from a thread after every change in the folders, and every half second, until the context ends.

    `folders` is asked again after each change. Where inotify is not to be had, the half second remains.
    """
    events = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    stop, stopping = os.pipe()
    watched = [stop] if events < 0 else [stop, events]

    def work() -> None:
        while True:
            if events >= 0:
                for folder in folders():
                    _libc.inotify_add_watch(events, os.fsencode(folder), _CHANGES)  # once more does no harm
            ready, _, _ = select.select(watched, [], [], _LOOK_AGAIN_S)
            if stop in ready:
                return
            if events in ready:
                os.read(events, 1 << 16)
            with contextlib.suppress(OSError):  # changed again while it was read: there will be another event
                changed()

    thread = threading.Thread(target=work, name="hotrow-folder-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(stopping, b".")
        thread.join()
        for handle in (*watched, stopping):
            os.close(handle)
