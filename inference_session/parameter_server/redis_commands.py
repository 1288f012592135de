"""The commands that rows travel by: what they are over the wire, and the same through the `redis` package."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.parameter_server import redis_layout as layout


class Read(NamedTuple):
    """One HMGET: some keys of one partition of a table."""

    table: str
    name: bytes
    fields: NDArray[np.void]
    positions: NDArray[np.int64]
    out: NDArray[np.float32]
    found: NDArray[np.bool_]
    reply: tuple[int, ...]
    """A REPLY record."""
    num_bytes: int

    def payload(self) -> bytes:
        return layout.command(b"HMGET", self.name, fields=self.fields, num_fields=len(self.fields))

    def run(self, client: Any) -> None:
        """The same through the `redis` package."""
        rows = client.execute_command("HMGET", self.name, *(key.tobytes() for key in self.fields["key"]))
        for position, row in zip(self.positions.tolist(), rows, strict=True):
            if row is not None:
                self.out[position] = np.frombuffer(row, "<f4")
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
