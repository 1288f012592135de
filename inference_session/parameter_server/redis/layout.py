"""How rows lie in Redis: the layout of HPS 24.06, so that its fleets and ours read and fill the same store.

    hps_et{<tag>/p<partition>}v    hash: key, 8 bytes little endian → row, float32 little endian
    hps_et{<tag>/p<partition>}t    hash: key → time of the last insert or touch, int64 seconds since 1970
    hps_et{<tag>/p<partition>}n    hash: which updates of streams the rows contain (hotrow's own, ordered_writes.py)

Each partition has its own hashes. The braces keep its hashes in one slot, so that a table spreads over a
cluster. A key's partition is its mixed bits modulo the number of partitions (HPS since 4.2), or the key itself, as a
number without sign, modulo that number (before). Redis stores neither the scheme nor the number of partitions.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.kernels.cpu.intrinsics import kernel

DEFAULT_PARTITIONS = 8
"""What HPS's documentation recommends for Redis, and what we write unless a setting says otherwise."""
MAX_PROBED_PARTITIONS = 64
"""Partitions in which an existing table is looked for when the number is not given."""

KEY_FIELD = np.dtype([("length", "S4"), ("key", "<i8"), ("end", "S2")])
"""A key as an argument of a command: `$8 CRLF key CRLF`. No padding: the array is the bytes to send."""

_ZERO = ord("0")
_ARRAY, _HMGET, _BEFORE_KEY, _LINE_END = (
    np.frombuffer(text, np.uint8) for text in (b"*", b"\r\n$5\r\nHMGET\r\n", b"$8\r\n", b"\r\n")
)
_MAX_HEAD_BYTES = 64
"""Bytes of an HMGET before the name, at most."""


class Partitioning(NamedTuple):
    """How a table's keys are spread over partitions."""

    num_partitions: int
    mixes: bool = True
    """Whether the bits of keys are mixed first."""


_HASH_NAME = re.compile(rb"hps_et\{(?P<tag>.+)/p(?P<partition>\d+)\}[vtn]", re.DOTALL)


def rows_name(tag: str, partition: int) -> bytes:
    """Name of the hash of rows."""
    return b"hps_et{%b/p%d}v" % (tag.encode(), partition)


def times_name(tag: str, partition: int) -> bytes:
    """Name of the hash of times."""
    return b"hps_et{%b/p%d}t" % (tag.encode(), partition)


def applied_name(tag: str, partition: int) -> bytes:
    """Name of the hash that says which updates of streams the rows contain; only hotrow uses it."""
    return b"hps_et{%b/p%d}n" % (tag.encode(), partition)


def note_name(tag: str) -> bytes:
    """Name of the string that says what has been pushed of a table; only hotrow uses it."""
    return b"hotrow_push{%b}" % tag.encode()


def split_name(name: bytes) -> tuple[str, int] | None:
    """Tag and partition of a hash of rows or what belongs to them; None for any other name."""
    match = _HASH_NAME.fullmatch(name)
    return None if match is None else (match["tag"].decode(errors="replace"), int(match["partition"]))


@kernel
def mixed(key: Any) -> Any:
    """Pelle Evensen's mixer rrxmrrxmsx_0, by which HPS spreads keys: uint64 → uint64."""
    one, two = np.uint64(25), np.uint64(50)
    key ^= ((key >> one) | (key << (np.uint64(64) - one))) ^ ((key >> two) | (key << (np.uint64(64) - two)))
    key *= np.uint64(0xA24BAED4963EE407)
    one, two = np.uint64(24), np.uint64(49)
    key ^= ((key >> one) | (key << (np.uint64(64) - one))) ^ ((key >> two) | (key << (np.uint64(64) - two)))
    key *= np.uint64(0x9FB21C651E98DF25)
    return key ^ (key >> np.uint64(28))


@kernel
def _sort(
    keys: NDArray[np.uint64],
    mixes: bool,
    partitions: NDArray[np.int64],
    order: NDArray[np.int64],
    bounds: NDArray[np.int64],
) -> None:
    """Counting sort; bounds[p] ends up as the end of partition p in `order`."""
    num_partitions = len(bounds) - 1
    for i in range(len(keys)):
        number = mixed(keys[i]) if mixes else keys[i]
        partitions[i] = np.int64(number % np.uint64(num_partitions))
        bounds[partitions[i] + 1] += 1
    for p in range(num_partitions):
        bounds[p + 1] += bounds[p]
    for i in range(len(keys)):
        p = partitions[i]
        order[bounds[p]] = i
        bounds[p] += 1


@kernel
def _write_text(text: Any, begin: int, end: int, to: NDArray[np.uint8], at: int) -> int:
    """Append text[begin:end]; returns where it ends."""
    for i in range(begin, end):
        to[at] = text[i]
        at += 1
    return at


@kernel
def _write_number(number: int, to: NDArray[np.uint8], at: int) -> int:
    """Append decimal digits; returns where they end."""
    power = 1
    while number // power >= 10:
        power *= 10
    while power > 0:
        to[at] = _ZERO + number // power % 10
        power //= 10
        at += 1
    return at


@kernel
def _write_key(key: Any, to: NDArray[np.uint8], at: int) -> int:
    """Append a key as an argument; returns where it ends."""
    at = _write_text(_BEFORE_KEY, 0, len(_BEFORE_KEY), to, at)
    for byte in range(8):
        to[at] = np.uint8(key >> np.uint64(8 * byte))
        at += 1
    return _write_text(_LINE_END, 0, len(_LINE_END), to, at)


@kernel
def _write_hmgets(  # noqa: PLR0917  compiled functions take their arguments by position
    keys: NDArray[np.uint64],
    order: NDArray[np.int64],
    bounds: NDArray[np.int64],
    names: NDArray[np.uint8],
    name_bounds: NDArray[np.int64],
    max_keys: int,
    commands: NDArray[np.int64],
    to: NDArray[np.uint8],
) -> int:
    """Write one HMGET after the other, of keys that are ordered by partition; returns how many."""
    count, at, begin = 0, 0, 0
    for p in range(len(name_bounds) - 1):
        while begin < bounds[p]:
            end = min(begin + max_keys, bounds[p])
            at = _write_text(_ARRAY, 0, len(_ARRAY), to, at)
            at = _write_number(end - begin + 2, to, at)
            at = _write_text(_HMGET, 0, len(_HMGET), to, at)
            at = _write_text(names, name_bounds[p], name_bounds[p + 1], to, at)
            for i in range(begin, end):
                at = _write_key(keys[order[i]], to, at)
            commands[count, 0], commands[count, 1], commands[count, 2], commands[count, 3] = p, begin, end, at
            begin = end
            count += 1
    return count


@functools.cache
def compile_kernels() -> None:
    """Compile what is here, or load it from Numba's cache, before a request waits for an answer."""
    hmgets("", np.zeros(1, np.int64), Partitioning(1), max_keys=1)


def partition_of(keys: NDArray[np.int64], partitioning: Partitioning) -> NDArray[np.int64]:
    """The partition of each key, int64 [n]."""
    return _sorted(keys, partitioning)[0]


def by_partition(keys: NDArray[np.int64], partitioning: Partitioning) -> tuple[NDArray[np.int64], list[int]]:
    """Positions of the keys by partition, in their order within it; partition p is order[bounds[p] : bounds[p + 1]]."""
    _, order, ends = _sorted(keys, partitioning)
    return order, [0, *ends[:-1].tolist()]


class Hmgets(NamedTuple):
    """The commands that fetch some keys."""

    order: NDArray[np.int64]
    """Positions of the keys in the order in which they are asked for."""
    commands: NDArray[np.int64]
    """[num_commands, 4]: partition; where its keys begin and end in `order`; where it ends in `wire`."""
    wire: memoryview
    """The commands to send."""


def hmgets(tag: str, keys: NDArray[np.int64], partitioning: Partitioning, *, max_keys: int) -> Hmgets:
    """The HMGETs for some keys of a table, int64 [n], contiguous, at most that many in one command."""
    _, order, ends = _sorted(keys, partitioning)
    names, name_bounds, longest = _names_as_arguments(tag, partitioning.num_partitions)
    most = min(partitioning.num_partitions, len(keys)) + len(keys) // max_keys
    wire = np.empty(most * (_MAX_HEAD_BYTES + longest) + len(keys) * KEY_FIELD.itemsize, np.uint8)
    commands = np.empty((most, 4), np.int64)
    count = _write_hmgets(_as_numbers(keys), order, ends, names, name_bounds, max_keys, commands, wire)
    return Hmgets(order, commands[:count], wire.data)


@functools.lru_cache(maxsize=1024)
def _names_as_arguments(tag: str, num_partitions: int) -> tuple[NDArray[np.uint8], NDArray[np.int64], int]:
    """The names of the hashes of rows as arguments of commands; where each begins, and the end; the longest's bytes."""
    names = [b"$%d\r\n%b\r\n" % (len(name), name) for name in (rows_name(tag, p) for p in range(num_partitions))]
    lengths = list(map(len, names))
    return np.frombuffer(b"".join(names), np.uint8), np.cumsum([0, *lengths]), max(lengths)


def _sorted(
    keys: NDArray[np.int64], partitioning: Partitioning
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The partition of each key, their positions by partition, and where each partition ends among these; and a 0."""
    partitions, order = np.empty(len(keys), np.int64), np.empty(len(keys), np.int64)
    ends = np.zeros(partitioning.num_partitions + 1, np.int64)
    _sort(_as_numbers(keys), partitioning.mixes, partitions, order, ends)
    return partitions, order, ends


def _as_numbers(keys: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Keys as numbers without sign; in memory that may be written, as compiled code is for one type of arrays."""
    return (keys if keys.flags.writeable else keys.copy()).view(np.uint64)


def key_fields(keys: NDArray[np.int64]) -> NDArray[np.void]:
    """Keys, int64 [n], as arguments of a command."""
    fields = np.empty(len(keys), KEY_FIELD)
    fields["length"], fields["key"], fields["end"] = b"$8\r\n", keys, b"\r\n"
    return fields


def row_fields(keys: NDArray[np.int64], rows: NDArray[np.generic], before: bytes = b"") -> NDArray[np.void]:
    """Keys and rows [n, any] in turn as arguments of a command; `before` precedes each pair."""
    num_bytes = rows.shape[1] * rows.itemsize
    head, between = before + b"$8\r\n", b"\r\n$%d\r\n" % num_bytes
    layout = [
        ("head", f"S{len(head)}"),
        ("key", "<i8"),
        ("between", f"S{len(between)}"),
        ("row", f"V{num_bytes}"),
        ("end", "S2"),
    ]
    fields = np.empty(len(keys), layout)
    fields["head"], fields["key"], fields["between"], fields["end"] = head, keys, between, b"\r\n"
    fields["row"] = np.ascontiguousarray(rows).view(f"V{num_bytes}").reshape(len(keys))
    return fields


def scanned(reply: Any) -> tuple[int, dict[bytes, bytes]]:
    """The next cursor, 0 at the end, and the fields that a step of HSCAN answers."""
    cursor, fields = reply
    return int(cursor), dict(zip(fields[::2], fields[1::2], strict=True))


def command_head(*arguments: bytes, num_fields: int) -> bytes:
    """The beginning of a command: arguments, to be followed by this many more."""
    return b"*%d\r\n" % (len(arguments) + num_fields) + b"".join(b"$%d\r\n%b\r\n" % (len(a), a) for a in arguments)


def command(*arguments: bytes, fields: NDArray[np.void] | None = None, num_fields: int = 0) -> bytes:
    """A command as it goes over the wire: arguments, then `num_fields` more that `fields`, records, have laid out."""
    return command_head(*arguments, num_fields=num_fields) + (b"" if fields is None else fields.tobytes())


def fitting_partitionings(samples: Mapping[int, Iterable[bytes]], max_misplaced: float = 0.0) -> list[Partitioning]:
    """How a table may have been partitioned, inferred from some keys of each partition, the likeliest first.

    With few keys several ways fit, each of which finds the keys given; with no keys, all ways fit.
    `max_misplaced`: the fraction of the keys that may lie in a partition which is not theirs.
    """
    keys = {p: np.frombuffer(b"".join(fields), np.int64) for p, fields in samples.items()}
    mixing = map(Partitioning, (DEFAULT_PARTITIONS, *range(1, MAX_PROBED_PARTITIONS + 1)))
    plain = (Partitioning(count, mixes=False) for count in range(2, MAX_PROBED_PARTITIONS + 1))
    candidates = dict.fromkeys(chain(mixing, plain))
    most = max_misplaced * sum(map(len, keys.values()))
    return [candidate for candidate in candidates if _fits(keys, candidate, most)]


def _fits(keys: Mapping[int, NDArray[np.int64]], partitioning: Partitioning, max_misplaced: float) -> bool:
    """Whether no more keys than that lie in another partition than theirs."""
    num_misplaced = 0
    for partition, part in keys.items():
        num_misplaced += int((partition_of(part, partitioning) != partition).sum())
        if num_misplaced > max_misplaced:
            return False
    return True
