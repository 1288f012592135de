"""The commands that a store sends, as they go over the wire."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import HotrowError, UnavailableError
from inference_session.kernels.records import address_of
from inference_session.parameter_server.base import FetchRequest
from inference_session.parameter_server.redis import layout
from inference_session.parameter_server.redis.connection import PlainCommand, as_argument
from inference_session.parameter_server.redis.replies import REPLY

_BYTES_PER_CALL = 16 << 10


class Command(Protocol):
    """A command for the server that has a hash."""

    @property
    def name(self) -> bytes:
        """The name of a hash, by which the server is found; all hashes of a command are on the same server."""

    @property
    def num_bytes(self) -> int:
        """Bytes of rows that are sent or answered."""

    @property
    def may_write(self) -> bool:
        """Whether it may change what the server holds."""

    def payload(self) -> bytes | memoryview:
        """The bytes to send."""

    def singles(self) -> Iterator[Command]:
        """The same as commands that are one each to Redis."""


class Read(NamedTuple):
    """Some HMGETs that one server answers, over one connection: keys of one or several partitions of a table."""

    tag: str
    request: FetchRequest
    found: NDArray[np.bool_]
    """By position in the request."""
    order: NDArray[np.int64]
    """Positions of keys in the request."""
    commands: NDArray[np.int64]
    """See Hmgets; their keys are order[begin:end]."""
    wire: memoryview
    """The commands as they are sent."""
    may_write: bool = False

    @property
    def name(self) -> bytes:
        return layout.rows_name(self.tag, int(self.commands[0, 0]))

    @property
    def num_bytes(self) -> int:
        num_keys = int(self.commands[-1, 2]) - int(self.commands[0, 1])
        row_bytes: int = 4 * self.request.out.shape[1]
        return num_keys * (row_bytes + 16)

    def payload(self) -> memoryview:
        return self.wire

    def replies(self) -> NDArray[np.void]:
        """What is expected: REPLY records."""
        out, begins, ends = self.request.out, self.commands[:, 1], self.commands[:, 2]
        replies = np.empty(len(self.commands), REPLY)
        replies["num_keys"], replies["row_bytes"] = ends - begins, 4 * out.shape[1]
        replies["positions_address"] = address_of(self.order) + 8 * begins
        replies["output_address"], replies["output_stride"] = address_of(out), out.strides[0]
        replies["found_address"] = address_of(self.found)
        return replies

    def singles(self) -> Iterator[Read]:
        """See Command."""
        sent = 0
        for number in range(len(self.commands)):
            end = int(self.commands[number, 3]) - self._wire_begin()
            yield self._replace(commands=self.commands[number : number + 1], wire=self.wire[sent:end])
            sent = end

    def _wire_begin(self) -> int:
        return int(self.commands[-1, 3]) - len(self.wire)


class Write(NamedTuple):
    """One command that changes fields of a hash and is answered by a number."""

    verb: bytes
    name: bytes
    fields: NDArray[np.void]
    arguments_per_field: int
    may_write: bool = True

    @property
    def num_replies(self) -> int:
        return 1

    @property
    def num_bytes(self) -> int:
        return int(self.fields.nbytes)

    def payload(self) -> bytes:
        num_fields = len(self.fields) * self.arguments_per_field
        return layout.command(self.verb, self.name, fields=self.fields, num_fields=num_fields)

    def singles(self) -> Iterator[Write]:
        """See Command."""
        yield self


class WriteAbsent(NamedTuple):
    """One HSETNX for each of some fields of a hash, which Redis has for single fields only."""

    name: bytes
    fields: NDArray[np.void]
    """Whole commands."""
    may_write: bool = True

    @property
    def num_bytes(self) -> int:
        return int(self.fields.nbytes)

    @property
    def num_replies(self) -> int:
        return len(self.fields)

    def payload(self) -> bytes:
        return self.fields.tobytes()

    def singles(self) -> Iterator[WriteAbsent]:
        """See Command."""
        return (WriteAbsent(self.name, self.fields[i : i + 1]) for i in range(len(self.fields)))


@dataclass
class Call:
    """Any rare command whose second argument is a name. Its reply is kept here."""

    arguments: PlainCommand
    reply: Any = None
    may_write: bool = True

    @property
    def name(self) -> bytes:
        return as_argument(self.arguments[1])

    @property
    def num_bytes(self) -> int:
        """Approximate size of the reply: a step of a scan."""
        return _BYTES_PER_CALL

    def payload(self) -> bytes:
        return layout.command(*map(as_argument, self.arguments))

    def singles(self) -> Iterator[Call]:
        """See Command."""
        yield self


def refuse_misfit(command: PlainCommand, reply: Any) -> None:
    """Raise where Redis never gives such a reply to the command: the peer is not Redis, or replies are out of step."""
    verb = as_argument(command[0]).decode()
    fits = _FITS.get(verb)
    if fits is not None and not isinstance(reply, HotrowError) and not fits(reply, command):
        raise UnavailableError(f"the reply to {verb} is not valid in the Redis protocol: {str(reply)[:60]}")


def _is_bytes_list(reply: Any) -> bool:
    return isinstance(reply, list) and all(isinstance(element, bytes) for element in reply)


def _is_scan_step(reply: Any, command: PlainCommand) -> bool:
    if not isinstance(reply, list) or len(reply) != 2 or not _is_bytes_list(reply[1]):
        return False
    is_cursor = isinstance(reply[0], bytes) and reply[0].isdigit()
    return is_cursor and (command[0] != "HSCAN" or len(reply[1]) % 2 == 0)


def _is_row_list(reply: Any, command: PlainCommand) -> bool:
    is_list = isinstance(reply, list) and len(reply) == len(command) - 2
    return is_list and all(element is None or isinstance(element, bytes) for element in reply)


_FITS: dict[str, Callable[[Any, PlainCommand], bool]] = {
    **dict.fromkeys(("HLEN", "HSET", "HDEL", "UNLINK"), lambda reply, _: isinstance(reply, int)),
    **dict.fromkeys(("SCAN", "HSCAN"), _is_scan_step),
    "GET": lambda reply, _: reply is None or isinstance(reply, bytes),
    "HMGET": _is_row_list,
    "HRANDFIELD": lambda reply, _: _is_bytes_list(reply),
}
"""By the verb of a command, whether a reply fits it."""


def asking(command: Command) -> bytes:
    """A single command for a node of a Cluster that is just being given the slot."""
    return layout.command(b"ASKING") + bytes(command.payload())


def set_times(tag: str, partition: int, keys: NDArray[np.int64]) -> Write:
    """The command that sets the time of keys of one partition, int64 [n], to now."""
    now = np.full((len(keys), 1), int(time.time()), "<i8")
    return Write(b"HSET", layout.times_name(tag, partition), layout.row_fields(keys, now), 2)
