"""Open files that processes of one user pass to each other by a name, so that what they point to exists once.

Who comes first makes the files, while others wait. Each process that has them passes them to those that come later:
what they point to lives until the last process has closed them, also if the one that made it has died.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from inference_session.errors import ConfigurationError, as_thrown

_log = logging.getLogger(__name__)
_TIMEOUT_S = 10.0
"""For a process that has the files: it passes them at once, unless it has been stopped."""
_MAX_FILES = 64
_LENGTH_BYTES = 8
_PAUSE_S = 1.0
"""Of an offer for which its process has too many open files."""


class OpenFiles(NamedTuple):
    """Files, and what they are."""

    description: bytes
    descriptors: Sequence[int]
    """1 to 64."""


class FileExchange:
    """The files of one name."""

    def __init__(self, name: str) -> None:
        """`name`: of hexadecimal digits, the same in all processes for what has the same contents.

        Raises:
            ConfigurationError: the folder for sockets cannot be made, or belongs to another user; by the methods, a
                file or a socket cannot be opened.
        """
        self._folder, self._name = private_folder(), name

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Make other processes wait that make, ask for or offer files of this name: all of it is done in turns."""
        with _explained(self._folder), _opened(self._folder) as folder:
            lock = os.open(f"lock.{self._name[0]}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.info("Waiting while another process opens tables")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def ask(self) -> OpenFiles | None:
        """The files as another process has them, for the caller to close; None where no process answers."""
        with _explained(self._folder):
            found = [path for path in sorted(self._folder.iterdir()) if path.name.startswith(f"{self._name}.")]
            return next(filter(None, map(_asked, found)), None)

    def offer(self, files: OpenFiles) -> FileOffer:
        """Pass files to processes that ask for them, until the offer is closed; they stay the caller's."""
        with _explained(self._folder):
            return FileOffer(self._folder / f"{self._name}.{secrets.token_hex(8)}", files)


class FileOffer:
    """A thread that passes open files to those who connect to a socket."""

    def __init__(self, path: Path, files: OpenFiles) -> None:
        self._files = files
        self._closing = threading.Event()
        with contextlib.ExitStack() as opened:
            folder = opened.enter_context(_opened(path.parent))
            fcntl.flock(folder, fcntl.LOCK_SH)  # systemd does not clean a folder up that somebody has locked
            self._socket = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._socket.bind(_address(folder, path.name))
            opened.callback(path.unlink, missing_ok=True)
            self._socket.listen()
            self._thread = threading.Thread(target=self._work, name="hotrow-open-files", daemon=True)
            self._thread.start()
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Pass them to nobody any more."""
        self._closing.set()
        with contextlib.suppress(OSError):  # it has been closed before
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:  # where garbage is collected, that may be this one
            self._thread.join()
        self._opened.close()

    def _work(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                self._closing.wait(_PAUSE_S)  # if it is not closing, the process has too many open files
                continue
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_TIMEOUT_S)
                length = len(self._files.description).to_bytes(_LENGTH_BYTES, "little")
                socket.send_fds(connection, [length], list(self._files.descriptors))
                connection.sendall(self._files.description)


def _asked(path: Path) -> OpenFiles | None:
    """The files; None where nobody passes them, in time."""
    try:
        return _received(path)
    except ConnectionRefusedError:  # its process has ended
        path.unlink(missing_ok=True)
    except (ConnectionError, FileNotFoundError, TimeoutError, BlockingIOError):
        pass  # it ends just now, or has been stopped
    return None


def _received(path: Path) -> OpenFiles:
    """OSError where nobody passes them; TimeoutError where nobody does in time."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT_S)
        with _opened(path.parent) as folder:
            connection.connect(_address(folder, path.name))
        found, descriptors, flags, _ = socket.recv_fds(connection, _LENGTH_BYTES, _MAX_FILES)
        try:
            if flags & socket.MSG_CTRUNC:  # not all of them came
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # noqa: TRY301  closes them
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            length = int.from_bytes(found + _read(connection, _LENGTH_BYTES - len(found)), "little")
            return OpenFiles(_read(connection, length), descriptors)
        except BaseException:
            close_all(descriptors)
            raise


def close_all(descriptors: Sequence[int]) -> None:
    """Close open files."""
    for descriptor in descriptors:
        os.close(descriptor)


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        part = connection.recv(num_bytes - len(found))
        if not part:
            raise ConnectionError("the other process ended the connection")
        found += part
    return found


def private_folder() -> Path:
    """The folder in which the processes of this user meet.

    Raises:
        ConfigurationError: it cannot be made, or belongs to another user.
    """
    with _explained("the folder for temporary files"):
        folder = Path(tempfile.gettempdir()) / f"hotrow-{os.getuid()}"
    with _explained(folder):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
        found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigurationError(f"{folder} must be a folder of this user that no other user may enter; remove it")
    return folder


@contextlib.contextmanager
def _explained(folder: Path | str) -> Iterator[None]:
    """ConfigurationError where a file or a socket cannot be opened."""
    try:
        yield
    except OSError as error:
        too_many = error.errno in {errno.EMFILE, errno.ENFILE}
        way_out = "raise the limit of open files (ulimit -n)" if too_many else "set TMPDIR to a writable folder"
        raise ConfigurationError(
            f"{folder}: processes cannot pass memory to each other there ({error.strerror}); {way_out}"
        ) from as_thrown(error)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _address(folder: int, name: str) -> str:
    """Of a socket: short, wherever the folder is, as a socket's address has 107 bytes at most."""
    return f"/proc/self/fd/{folder}/{name}"
