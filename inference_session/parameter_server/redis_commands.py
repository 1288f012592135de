"""The commands that rows travel by: what they are over the wire, and the same through the `redis` package."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.embedding_cache.kernels.layout import address_of
from inference_session.parameter_server import redis_layout as layout
from inference_session.parameter_server.base import FetchRequest
from inference_session.parameter_server.redis_replies import REPLY


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

    def run(self, client: Any) -> None:
        """The same through the `redis` package."""
        _, keys, out = self.request
        for partition, begin, end, _ in self.commands.tolist():
            positions = self.order[begin:end]
            name = layout.rows_name(self.tag, partition)
            rows = client.execute_command("HMGET", name, *(key.tobytes() for key in keys[positions]))
            for position, row in zip(positions.tolist(), rows, strict=True):
                if row is not None:
                    out[position] = np.frombuffer(row, "<f4")
                    self.found[position] = True


class Write(NamedTuple):
    """One command that changes fields of a hash and is answered by a number."""

    verb: bytes
    name: bytes
    fields: NDArray[np.void]
    arguments_per_field: int

    @property
    def num_replies(self) -> int:
        return 1

    @property
    def num_bytes(self) -> int:
        return int(self.fields.nbytes)

    def payload(self) -> bytes:
        num_fields = len(self.fields) * self.arguments_per_field
        return layout.command(self.verb, self.name, fields=self.fields, num_fields=num_fields)

    def run(self, client: Any) -> None:
        """The same through the `redis` package."""
        names = ("key", "row")[: self.arguments_per_field]
        arguments = [field[name].tobytes() for field in self.fields for name in names]
        client.execute_command(self.verb.decode(), self.name, *arguments)


class WriteAbsent(NamedTuple):
    """One HSETNX for each of some fields of a hash, which Redis has for single fields only."""

    name: bytes
    fields: NDArray[np.void]
    """Whole commands."""

    @property
    def num_bytes(self) -> int:
        return int(self.fields.nbytes)

    @property
    def num_replies(self) -> int:
        return len(self.fields)

    def payload(self) -> bytes:
        return self.fields.tobytes()

    def run(self, client: Any) -> None:
        """The same through the `redis` package."""
        for field in self.fields:
            client.execute_command("HSETNX", self.name, field["key"].tobytes(), field["row"].tobytes())


def set_times(tag: str, partition: int, keys: NDArray[np.int64]) -> Write:
    """The command that sets the time of keys of one partition to now."""
    now = np.full((len(keys), 1), int(time.time()), "<i8")
    return Write(b"HSET", layout.times_name(tag, partition), layout.row_fields(keys, now), 2)
