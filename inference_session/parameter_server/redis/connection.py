"""One connection to a Redis server: commands out in bulk, rows in without objects, other replies as objects."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import HotrowError, StoreError, UnavailableError, fresh
from inference_session.kernels.records import address_of
from inference_session.parameter_server.base import LateError
from inference_session.parameter_server.redis.layout import command
from inference_session.parameter_server.redis.replies import CURSOR, POLLIN, STREAM, Status, receive_rows
from inference_session.platform.file_names import as_file_name
from inference_session.urls.store_url import StoreUrl

_BUFFER_BYTES = 256 << 10
_MAX_LINE_BYTES = 1024
_NUMBER = re.compile(rb"-?\d{1,19}")
_MAX_REPLY_BYTES = 512 << 20
"""Redis allows no longer strings. Memory is allocated by the length that a reply states."""
_MAX_DEPTH = 8
"""Levels of lists within lists; no reply that we ask for has more than three."""
PASSING_CODES = frozenset(("LOADING", "READONLY", "OOM", "MASTERDOWN", "TRYAGAIN", "BUSY", "MISCONF", "NOREPLICAS"))
"""Errors of a healthy server that will accept the command later."""

_TLS_FILES = ("tls_ca_certificate", "tls_client_certificate", "tls_client_key")
_TOO_MANY_CLIENTS = "ERR max number of clients"
_WAYS_OUT = {
    "cluster support disabled": "its URL begins with redis:// or rediss://, without +cluster",
    "unknown command `SENTINEL`": "this is a Redis; redis+sentinel:// takes the addresses of sentinels (26379)",
    **dict.fromkeys(
        (f"unknown command `{verb}`" for verb in ("SELECT", "GET", "HMGET", "SCAN")),
        "if this is a sentinel, its URL begins with redis+sentinel:// or rediss+sentinel://",
    ),
    "without any password configured": "it wants no password: leave it out of the URL",
}
"""By what is in a server's error, with backquotes as Redis before 7 writes them: what to do about it."""

RUN_ID_COMMAND = ("INFO", "server")
ORIGIN_COMMAND = ("INFO", "replication")
MEMORY_COMMAND = ("INFO", "memory")

Address = tuple[str, int]
PlainCommand: TypeAlias = "tuple[bytes | str | int, ...]"
"""The verb of a command and its arguments."""
Reply: TypeAlias = "bytes | int | list[Reply] | HotrowError | None"
OnMalformed = Callable[[int, "int | None", int], None]
"""Called for a key whose value is no row of the table: the number of the reply, that of the key within it, and the
value's bytes. None for the key: all keys of the reply, because the value in Redis is not a hash."""


class DisconnectedError(UnavailableError):
    """There is no connection, or it was lost. Worth another try: the server may just have restarted."""


class RedirectedError(UnavailableError):
    """A node of a Cluster says that another node has the slot, or no node is known to have it."""

    def __init__(self, message: str, address: Address | None = None, *, is_ask: bool = False) -> None:
        """`address`: the node that has it. `is_ask`: for this one command, because the slot is just moving there."""
        super().__init__(message)
        self.address = address
        self.is_ask = is_ask


class WrongTypeError(StoreError):
    """The value under a name has another Redis type than the command needs."""


class Deadline:
    """A moment until which a piece of work may wait."""

    def __init__(self, timeout_ms: int) -> None:
        self.timeout_ms = timeout_ms
        self.restart()

    def restart(self) -> None:
        """A piece of the work is done; the next one may take as long again."""
        self.end_ns = time.monotonic_ns() + self.timeout_ms * 1_000_000

    def remaining_s(self) -> float:
        """Seconds left; TimeoutError if there are none."""
        remaining_ns = self.end_ns - time.monotonic_ns()
        if remaining_ns <= 0:
            raise TimeoutError
        return remaining_ns / 1e9


class Certificates:
    """Those that a URL names, or else the system's authorities; files are read again once they have changed. Any thread
    may use them.
    """

    def __init__(self, url: StoreUrl) -> None:
        """Read them; StoreError if they cannot be."""
        self._url = url
        self._files = {name: as_file_name(url.options[name]) for name in _TLS_FILES if name in url.options}
        self._read = self._state(), self._context()

    def current(self) -> ssl.SSLContext:
        """A context with them as they are now; as they were while they cannot be read, as when one of them has been
        replaced and its key not yet.
        """
        state = self._state()
        if state != self._read[0]:
            with contextlib.suppress(StoreError):
                self._read = state, self._context()
        return self._read[1]

    def _state(self) -> object:
        """Differs once a file has changed."""
        states = []
        for path in self._files.values():
            with contextlib.suppress(OSError):
                stat = Path(path).stat()
                states.append((path, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return states

    def _context(self) -> ssl.SSLContext:
        authority, certificate, key = map(self._files.get, _TLS_FILES)
        try:
            context = ssl.create_default_context(cafile=authority)
            if certificate is not None:
                context.load_cert_chain(certificate, key)
        except OSError as error:  # ssl.SSLError is one
            raise StoreError(f"store {str(self._url)!r}: a certificate or key cannot be read: {error}") from error
        return context


class Login(NamedTuple):
    """Credentials and TLS settings that all connections to a store's servers share."""

    url: StoreUrl
    certificates: Certificates | None
    """None: without TLS."""
    must_be_master: bool = False
    """Whether connections to other servers are refused."""

    @classmethod
    def of(cls, url: StoreUrl, *, must_be_master: bool = False) -> Login:
        """Read the certificates that the URL names; StoreError if they cannot be."""
        return cls(url, Certificates(url) if url.uses_tls else None, must_be_master)


class Writer(NamedTuple):
    """A connection that may have been sent writes, as its server knows it."""

    run_id: str
    """Of the process at the other end, as the next one counts its connections from 1 again."""
    number: int


class RedisConnection:
    """A socket that is logged in. For one thread at a time; any error leaves it unusable, to be closed."""

    def __init__(self, login: Login, address: Address, deadline: Deadline) -> None:
        """Connect and log in; UnavailableError names a server that cannot be reached."""
        self._url = login.url
        self._buffer = np.empty(_BUFFER_BYTES, np.uint8)
        self._begin = self._filled = 0  # of what has come and not been read
        self._address = address
        self.name = self._url.path or f"{address[0]}:{address[1]}"
        self._run_id: str | None = None
        self.writer: Writer | None = None
        """What this connection is to the server, if it may be sent writes; number 0: the server does not tell."""
        self._socket = self._connect(login, address, deadline)
        self._plain_socket = self._socket.fileno() if login.certificates is None else -1
        try:
            self._log_in(login, deadline)
        except BaseException:
            self.close()
            raise

    def send(self, data: bytes | memoryview, deadline: Deadline) -> None:
        """Send commands; their replies must be read before anything else is sent."""
        try:
            left = memoryview(data)
            while left:
                self._socket.settimeout(deadline.remaining_s())
                left = left[self._socket.send(left) :]
        except TimeoutError as error:
            raise self._late(deadline) from error
        except OSError as error:
            raise DisconnectedError(f"Redis at {self.name} closed the connection: {error}") from error

    def read_rows(self, replies: NDArray[np.void], deadline: Deadline, on_malformed: OnMalformed) -> None:
        """Read the rows that `replies` (REPLY records) expect to where they say."""
        cursor = np.zeros(1, CURSOR)
        cursor["key"] = -1
        row_bytes = int(replies["row_bytes"].max(initial=0))
        stream = np.zeros(1, STREAM)
        stream["socket"], stream["events"], stream["deadline_ns"] = self._plain_socket, POLLIN, deadline.end_ns
        while True:
            self._drop(self._begin)
            stream["buffer_address"], stream["buffer_bytes"] = address_of(self._buffer), len(self._buffer)
            stream["filled_bytes"] = self._filled
            receive_rows(replies, cursor, stream, address_of(stream))
            self._filled = int(stream["filled_bytes"][0])
            status = Status(int(cursor["status"][0]))
            if status is Status.DONE:
                return
            if status is Status.OTHER_WIDTH:
                on_malformed(int(cursor["reply"][0]), int(cursor["key"][0]) - 1, int(cursor["found_bytes"][0]))
            elif status is Status.OTHER_REPLY:
                self._pass_over_wrong_type(cursor, deadline)
                on_malformed(int(cursor["reply"][0]) - 1, None, 0)
            else:
                self._receive(deadline, row_bytes)

    def read_lines(self, count: int, deadline: Deadline) -> list[bytes]:
        """Read this many one-line replies, numbers or `OK`; an error among them is raised."""
        lines = [self._line(deadline) for _ in range(count)]
        wrong = next((line for line in lines if line[:1] not in (b":", b"+")), None)
        if wrong is not None:
            raise self._failure(wrong)
        return [line[1:] for line in lines]

    def read_replies(self, count: int, deadline: Deadline) -> list[Reply]:
        """Read this many replies of any kind. An error is a reply as well; MOVED and ASK are raised."""
        replies = [self._reply(deadline) for _ in range(count)]
        redirected = next((reply for reply in replies if isinstance(reply, RedirectedError)), None)
        if redirected is not None:
            raise fresh(redirected)
        return replies

    def call(self, commands: Sequence[PlainCommand], deadline: Deadline) -> list[Reply]:
        """Send some commands, and read their replies."""
        self.send(b"".join(command(*map(as_argument, each)) for each in commands), deadline)
        return self.read_replies(len(commands), deadline)

    def run_id(self, deadline: Deadline) -> str:
        """Identifies the process at the other end; StoreError where the user lacks the permission to ask."""
        if self._run_id is None:
            [reply] = self.call([RUN_ID_COMMAND], deadline)
            if isinstance(reply, HotrowError):
                raise fresh(reply)
            self._run_id = run_id_in(reply)
        return self._run_id

    def process(self, deadline: Deadline) -> str:
        """Tells the process at the other end from others; from one of the same address only where this user may ask for
        its run id.
        """
        with contextlib.suppress(StoreError):
            return self.run_id(deadline) or self.name
        return self.name

    def expect_writes(self, deadline: Deadline) -> None:
        """Learn `writer`, by which unanswered writes can be withdrawn; UnavailableError: not now."""
        if self.writer is None:
            reply, info = _answers(self.call([("CLIENT", "ID"), RUN_ID_COMMAND], deadline))
            self._run_id = run_id_in(info) or self._run_id
            number = reply if isinstance(reply, int) and self._run_id else 0
            self.writer = Writer(self._run_id or "", number)

    def withdraw(self, writers: Iterable[Writer], deadline: Deadline) -> None:
        """Return when the server will do nothing more of what other connections have sent it; at once where this user
        may not ask for that. What was sent to an earlier process has ended with it. UnavailableError: the server does
        not do that now.
        """
        with contextlib.suppress(StoreError):
            run_id = self.run_id(deadline)
            numbers = [writer.number for writer in writers if writer.run_id == run_id]
            _answers(self.call([("CLIENT", "KILL", "ID", number) for number in numbers], deadline))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _connect(self, login: Login, address: Address, deadline: Deadline) -> socket.socket:
        try:
            if self._url.path:
                return _connected_to_file(self._url.path, deadline)
            connected = socket.create_connection(address, deadline.remaining_s())
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if login.certificates is None:
                return connected
            connected.settimeout(deadline.remaining_s())  # which is the whole handshake's
            return self._encrypted(connected, login.certificates.current(), address)
        except TimeoutError as error:
            raise UnavailableError(f"Redis at {self.name} cannot be reached: no answer in time") from error
        except OSError as error:
            raise DisconnectedError(f"Redis at {self.name} cannot be reached: {error.strerror or error}") from error
        except UnicodeError as error:  # of the name of a host that a node or a sentinel has told
            raise DisconnectedError(f"Redis at {self.name} cannot be reached: not the name of a host") from error

    def _encrypted(self, plain: socket.socket, context: ssl.SSLContext, address: Address) -> socket.socket:
        name = self._url.options.get("tls_server_name", address[0])
        try:
            return context.wrap_socket(plain, server_hostname=name)
        except TimeoutError as error:
            scheme = self._url.scheme
            raise UnavailableError(
                f"Redis at {self.name} does not answer to TLS in time; if this port has none, write "
                f"{scheme.replace('rediss', 'redis')}:// instead of {scheme}://"
            ) from error

    def _log_in(self, login: Login, deadline: Deadline) -> None:
        commands = []
        password = self._url.current_password()
        if password is not None:
            user = [] if self._url.user is None else [self._url.user.encode()]
            commands.append(command(b"AUTH", *user, password.encode()))
        if self._url.db:
            commands.append(command(b"SELECT", b"%d" % self._url.db))
        if commands:
            self.send(b"".join(commands), deadline)
            self.read_lines(len(commands), deadline)
        if login.must_be_master:
            self._refuse_replica(deadline)

    def _refuse_replica(self, deadline: Deadline) -> None:
        """Raise unless the server is a master: sentinels may name one that has just become a replica."""
        [role] = self.call([("ROLE",)], deadline)
        if isinstance(role, HotrowError):
            raise fresh(role)
        if not isinstance(role, list) or role[:1] != [b"master"]:
            raise DisconnectedError(f"Redis at {self.name} is no longer the master")

    def _receive(self, deadline: Deadline, needed_bytes: int = 0) -> None:
        """Wait for more, with room for a piece of this many bytes and its head."""
        self._drop(self._begin)
        if len(self._buffer) < needed_bytes + _MAX_LINE_BYTES or self._filled == len(self._buffer):
            self._buffer = np.concatenate(
                [self._buffer, np.empty_like(self._buffer, shape=needed_bytes + _BUFFER_BYTES)]
            )
        try:
            self._socket.settimeout(deadline.remaining_s())
            received = self._socket.recv_into(self._buffer[self._filled :].data)
        except TimeoutError as error:
            raise self._late(deadline) from error
        except OSError as error:
            raise DisconnectedError(f"Redis at {self.name} closed the connection: {error}") from error
        if received == 0:
            raise DisconnectedError(f"Redis at {self.name} closed the connection")
        self._filled += received

    def _drop(self, used: int) -> None:
        """Forget the first bytes of the buffer, which have been read."""
        if used:
            rest = self._filled - used
            self._buffer[:rest] = self._buffer[used : self._filled]
            self._begin, self._filled = self._begin - used, rest

    def _line(self, deadline: Deadline) -> bytes:
        """The next line, without its end; of one that is too long, its beginning."""
        while True:
            text = self._buffer[self._begin : min(self._filled, self._begin + _MAX_LINE_BYTES)].tobytes()
            line, end, _ = text.partition(b"\r\n")
            if end or len(text) == _MAX_LINE_BYTES:
                self._begin += len(line) + len(end)
                return line
            self._receive(deadline)

    def _bytes(self, count: int, deadline: Deadline) -> bytes:
        """The next bytes, this many, and the end of their line."""
        while self._filled - self._begin < count + 2:
            self._receive(deadline, count)
        text = self._buffer[self._begin : self._begin + count].tobytes()
        self._begin += count + 2
        return text

    def _pass_over_wrong_type(self, cursor: NDArray[np.void], deadline: Deadline) -> None:
        """Go on after a reply which says that the value under the name is not a hash; raise any other error."""
        error = self._failure(self._line(deadline))
        if cursor["key"][0] >= 0 or not isinstance(error, WrongTypeError):
            raise fresh(error)
        cursor["reply"] += 1

    def _reply(self, deadline: Deadline, depth: int = 0) -> Reply:
        line = self._line(deadline)
        kind, text = line[:1], line[1:]
        if kind == b"+":
            return text
        if kind == b"-":
            return self._failure(line)
        if kind not in (b":", b"$", b"*") or not _NUMBER.fullmatch(text) or depth > _MAX_DEPTH:
            raise self._failure(line)
        number = int(text)
        if kind == b":":
            return number
        if number < 0:
            return None
        if number > _MAX_REPLY_BYTES:
            raise self._failure(line)
        if kind == b"*":
            return [self._reply(deadline, depth + 1) for _ in range(number)]
        return self._bytes(number, deadline)

    def _failure(self, line: bytes) -> HotrowError:
        """The exception for a reply that is an error, or that Redis never sends."""
        text = line[1:200].decode(errors="replace")
        if line[:1] != b"-":
            return UnavailableError(f"the server at {self.name} does not speak the Redis protocol: {line[:60]!r}")
        code = text.partition(" ")[0]
        if code in ("MOVED", "ASK"):
            return self._redirection(text)
        if code == "CLUSTERDOWN":  # also what a node says that has left its Cluster, while others have its slots
            return RedirectedError(f"Redis at {self.name} answers: {text}")
        if code == "WRONGTYPE":
            return WrongTypeError(f"Redis at {self.name} answers: {text}")
        kind = UnavailableError if code in PASSING_CODES or text.startswith(_TOO_MANY_CLIENTS) else StoreError
        said = text.lower().replace("'", "`")
        hint = next((f"; {way}" for sign, way in _WAYS_OUT.items() if sign.lower() in said), "")
        return kind(f"Redis at {self.name} answers: {_without_arguments(text)}{hint}")

    def _redirection(self, text: str) -> HotrowError:
        """What `MOVED <slot> <host>:<port>` and `ASK ...` mean; without a host it is the node that replied."""
        if not self._url.is_cluster:
            scheme = f"{self._url.scheme}+cluster://"
            return StoreError(f"Redis at {self.name} is a node of a Cluster ({text}); use {scheme} in its URL")
        code, _, place = text.partition(" ")
        host, _, port = place.rpartition(" ")[2].rpartition(":")
        address = (host or self._address[0], int(port)) if port.isdecimal() else None
        return RedirectedError(f"Redis at {self.name}: {text}", address, is_ask=code == "ASK")

    def _late(self, deadline: Deadline) -> Exception:
        return LateError(f"Redis at {self.name} did not answer within {deadline.timeout_ms} ms")


def _connected_to_file(path: str, deadline: Deadline) -> socket.socket:
    """A connection to a Unix socket."""
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.settimeout(deadline.remaining_s())
        connected.connect(path)
    except BaseException:
        connected.close()
        raise
    return connected


def _answers(replies: list[Reply]) -> list[Reply]:
    """The replies; an error that will pass is raised."""
    passing = next((reply for reply in replies if isinstance(reply, UnavailableError)), None)
    if passing is not None:
        raise fresh(passing)
    return replies


def as_argument(value: bytes | str | int) -> bytes:
    """An argument of a command, encoded for sending."""
    return value if isinstance(value, bytes) else str(value).encode()


def _without_arguments(text: str) -> str:
    """An error's text without the arguments that Redis may repeat in it: one might be a password."""
    return text.partition(", with args beginning with")[0]


def run_id_in(reply: Reply) -> str:
    """The run id in what a server answers to RUN_ID_COMMAND."""
    return _fields_in(reply).get("run_id", "")


def origin_in(reply: Reply) -> str:
    """Whose rows a server has, from its answer to ORIGIN_COMMAND: the id of the history that it follows as a replica,
    or followed before it became a master; empty for one that was never a replica.
    """
    fields = _fields_in(reply)
    origin = fields.get("master_replid" if fields.get("role") == "slave" else "master_replid2", "")
    return origin if origin.strip("0") else ""  # zeros: none


def eviction_policy_in(reply: Reply) -> str:
    """By which policy a server evicts rows, from its answer to MEMORY_COMMAND; empty: it evicts none, as they never
    expire.
    """
    fields = _fields_in(reply)
    policy = fields.get("maxmemory_policy", "")
    return policy if policy.startswith("allkeys") and fields.get("maxmemory", "0") != "0" else ""


def _fields_in(reply: Reply) -> dict[str, str]:
    lines = reply.decode(errors="replace").splitlines() if isinstance(reply, bytes) else []
    return {name: value for name, _, value in (line.partition(":") for line in lines)}
