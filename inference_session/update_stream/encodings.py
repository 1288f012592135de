"""The two encodings in which HPS and its successors put rows into Kafka messages. Pure functions, no Kafka.

    row      Kafka key: the row's key, 8 or 4 bytes; value: float32 [embedding_dim]; no value: the row is deleted
    batch    Kafka key: empty; value: "HCTR", uint32 bytes per vector, then of each row key (8 or 4 bytes) and vector

All numbers are little endian; keys of 8 bytes are int64, of 4 bytes uint32. A batch does not state its key width:
its length tells, and where both widths fit, the one whose vectors look like vectors is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import InvalidRequestError

MAGIC = b"HCTR"
HEADER_BYTES = 8
KEY_TYPES: dict[int, np.dtype[np.int64] | np.dtype[np.uint32]] = {8: np.dtype("<i8"), 4: np.dtype("<u4")}
"""Types of keys by their width in bytes, the preferred one first."""
REASONS = ("no_key", "key_width", "vector_width", "unknown_encoding", "truncated", "not_finite", "unknown_table")
"""Why a message may be refused."""

_PLAUSIBLE = (1e-20, 1e6)
"""Magnitudes of a trained vector's elements, unless they are zero; generous: it tells keys from vectors."""


KeyValue: TypeAlias = "tuple[bytes | None, bytes | None]"
"""A Kafka message's key and value. A plain tuple: the garbage collector need not scan thousands of them."""


class Refusal(NamedTuple):
    """A message that is not (or not wholly) applied."""

    position: int
    """The position of the message among those decoded."""
    reason: str
    """One of REASONS."""
    text: str
    """What was found, what was expected."""


class Updates(NamedTuple):
    """Changed rows of one table, each key once."""

    keys: NDArray[np.int64]
    """[n], rows to be inserted."""
    vectors: NDArray[np.float32]
    """[n, embedding_dim]"""
    deleted: NDArray[np.int64]
    """[m], rows to be erased."""
    refusals: Sequence[Refusal]
    origins: NDArray[np.intp]
    """[n]: the position of the message that each inserted row came in."""
    deleted_origins: NDArray[np.intp]
    """[m]: the same of erased rows."""


class _Rows(NamedTuple):
    """Rows in the order in which they were sent."""

    keys: NDArray[np.int64]
    vectors: NDArray[np.float32]
    """Zeros where the row is deleted."""
    deleted: NDArray[np.bool_]
    origins: NDArray[np.intp]
    """The message that each row came in."""

    def at(self, which: NDArray[np.bool_] | NDArray[np.intp]) -> _Rows:
        """Some of the rows."""
        return _Rows(self.keys[which], self.vectors[which], self.deleted[which], self.origins[which])


class _MalformedError(Exception):
    """A message cannot be decoded; arguments: one of REASONS, and a text."""


def decode(
    messages: Sequence[KeyValue], embedding_dim: int, *, allow_non_finite: bool = False, min_key: int | None = None
) -> Updates:
    """The rows in messages of one table, in either encoding, of equal keys the last.

    Args:
        messages: in the order in which they were sent.
        embedding_dim: elements of the table's vectors.
        allow_non_finite: whether rows with NaN or infinite elements are taken; otherwise each is refused, alone.
        min_key: rows with smaller keys are refused; None: any key is one.
    """
    rows = _rows_alike(messages, embedding_dim)
    refusals: list[Refusal] = []
    if rows is None:
        rows = _rows_one_by_one(messages, embedding_dim, refusals)
    if not allow_non_finite and not np.isfinite(rows.vectors).all():
        finite = np.logical_and.reduce(np.isfinite(rows.vectors), axis=1)
        rows = _refuse(rows, finite, "not_finite", "a row contains NaN or infinite elements", refusals)
    if min_key is not None:
        rows = _refuse(rows, rows.keys >= min_key, "key_width", "a key is below 0, so it is not a row number", refusals)
    return _last_of_each_key(rows, refusals)


def encode_batch(keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> bytes:
    """One batch message: keys int64 [n], vectors float32 [n, embedding_dim]; keys are written with 8 bytes."""
    rows = np.empty(len(keys), _row_type(8, vectors.shape[1]))
    rows["key"], rows["vector"] = keys, vectors
    return b"".join([MAGIC, (4 * vectors.shape[1]).to_bytes(4, "little"), rows.tobytes()])


def encode_keys(keys: NDArray[np.int64]) -> list[bytes]:
    """The Kafka keys of row messages, of keys int64 [n]."""
    return _bytes_of_each(keys.astype("<i8", copy=False).reshape(-1, 1))


def encode_vectors(vectors: NDArray[np.float32]) -> list[bytes]:
    """The values of row messages, of vectors float32 [n, embedding_dim]."""
    return _bytes_of_each(vectors.astype("<f4", copy=False))


def check_rows(keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
    """Raise InvalidRequestError unless these are rows: int64 [n] and float32 [n, embedding_dim]."""
    fit = keys.ndim == 1 and vectors.ndim == 2 and len(keys) == len(vectors) and vectors.shape[1] > 0
    if not fit or keys.dtype != np.int64 or vectors.dtype != np.float32:
        raise InvalidRequestError(
            f"rows are keys int64 [n] and vectors float32 [n, embedding_dim],"
            f" found {keys.dtype} {list(keys.shape)} and {vectors.dtype} {list(vectors.shape)}"
        )


def _bytes_of_each(rows: NDArray[np.generic]) -> list[bytes]:
    rows = np.ascontiguousarray(rows)
    as_list: list[bytes] = rows.view(f"V{rows.itemsize * rows.shape[1]}").reshape(-1).tolist()
    return as_list


def _row_type(key_bytes: int, embedding_dim: int) -> np.dtype[np.void]:
    return np.dtype([("key", KEY_TYPES[key_bytes]), ("vector", "<f4", (embedding_dim,))])


def _rows_alike(messages: Sequence[KeyValue], embedding_dim: int) -> _Rows | None:
    """The rows of messages that are all whole rows with 8-byte keys, without a step per message; None: some are not."""
    keys, values = zip(*messages, strict=True) if messages else ((), ())
    row_bytes = 4 * embedding_dim
    try:
        alike = {*map(len, keys)} <= {8} and {*map(len, values)} <= {row_bytes}
    except TypeError:  # a key or a value is missing
        return None
    if not alike:
        return None
    return _Rows(
        np.frombuffer(b"".join(keys), KEY_TYPES[8]).astype(np.int64, copy=False),
        np.frombuffer(b"".join(values), "<f4").reshape(len(messages), embedding_dim),
        np.zeros(len(messages), np.bool_),
        np.arange(len(messages)),
    )


def _rows_one_by_one(messages: Sequence[KeyValue], embedding_dim: int, refusals: list[Refusal]) -> _Rows:
    parts = [_no_rows(embedding_dim)]
    for position, message in enumerate(messages):
        rows = _rows_or_refusal(message, embedding_dim, position)
        if isinstance(rows, Refusal):
            refusals.append(rows)
        else:
            parts.append(rows)
    keys, vectors, deleted, origins = map(np.concatenate, zip(*parts, strict=True))
    return _Rows(keys, vectors, deleted, origins)


def _no_rows(embedding_dim: int) -> _Rows:
    vectors = np.empty((0, embedding_dim), np.float32)
    return _Rows(np.empty(0, np.int64), vectors, np.empty(0, np.bool_), np.empty(0, np.intp))


def _rows_or_refusal(message: KeyValue, embedding_dim: int, position: int) -> _Rows | Refusal:
    key, value = message
    try:
        if not key or (value is not None and _is_batch(value, embedding_dim)):
            keys, vectors = _batch(value, embedding_dim)
        else:
            keys, vectors = _row(key, value, embedding_dim)
    except _MalformedError as error:
        return Refusal(position, *error.args)
    return _Rows(keys, vectors, np.full(len(keys), value is None), np.full(len(keys), position))


def _is_batch(value: bytes, embedding_dim: int) -> bool:
    """Whether a message that has a key is still a batch; a row's vector may begin with any bytes."""
    return value.startswith(MAGIC) and len(value) != 4 * embedding_dim


def _row(key: bytes, value: bytes | None, embedding_dim: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    if len(key) not in KEY_TYPES:
        raise _MalformedError("key_width", f"a key has {len(key)} bytes, expected 8 or 4")
    keys = np.frombuffer(key, KEY_TYPES[len(key)]).astype(np.int64)
    if value is None:
        return keys, np.zeros((1, embedding_dim), np.float32)
    if len(value) != 4 * embedding_dim:
        raise _MalformedError("vector_width", f"a vector has {len(value)} bytes, expected {4 * embedding_dim}")
    return keys, np.frombuffer(value, "<f4").reshape(1, embedding_dim)


def _batch(value: bytes | None, embedding_dim: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    if value is None:
        raise _MalformedError("no_key", "a message has neither key nor value")
    if not value.startswith(MAGIC):
        raise _MalformedError(
            "unknown_encoding", f"a message without a key starts with {value[:4]!r}, expected {MAGIC!r}"
        )
    if len(value) < HEADER_BYTES:
        raise _MalformedError(
            "truncated", (f"a batch has {len(value)} bytes, fewer than the {HEADER_BYTES} of its header")
        )
    vector_bytes, num_bytes = int.from_bytes(value[4:8], "little"), len(value) - HEADER_BYTES
    if num_bytes and vector_bytes != 4 * embedding_dim:
        raise _MalformedError(
            "vector_width", f"the vectors of a batch have {vector_bytes} bytes, expected {4 * embedding_dim}"
        )
    widths = [width for width in KEY_TYPES if num_bytes % (width + vector_bytes) == 0]
    if num_bytes and not widths:
        raise _MalformedError("truncated", f"a batch ends within a row: {num_bytes} bytes after its header")
    if not num_bytes:
        return _no_rows(embedding_dim)[:2]
    readings = [np.frombuffer(value, _row_type(width, embedding_dim), offset=HEADER_BYTES) for width in widths]
    rows = readings[0] if len(readings) == 1 else _likelier(*readings)
    return rows["key"].astype(np.int64), rows["vector"]


def _likelier(wide: NDArray[np.void], narrow: NDArray[np.void]) -> NDArray[np.void]:
    """How a batch is to be read whose length allows keys of 8 bytes and of 4. The rarer ones must explain its bytes
    well: vectors that are wrong, as after training has diverged, are implausible in both readings.
    """
    implausible = _num_implausible(narrow)
    return narrow if implausible < min(_num_implausible(wide), narrow["vector"].size / 4) else wide


def _num_implausible(rows: NDArray[np.void]) -> int:
    """The number of elements that no trained vector would have, such as keys read as float32."""
    low, high = _PLAUSIBLE
    magnitudes = np.abs(rows["vector"])
    return int((~((magnitudes == 0) | ((magnitudes > low) & (magnitudes < high)))).sum())


def is_ambiguous(num_rows: int, embedding_dim: int) -> bool:
    """Whether a batch of so many rows with keys of 8 bytes is as long as one of more rows with keys of 4."""
    return num_rows % (1 + embedding_dim) == 0


def _refuse(rows: _Rows, allowed: NDArray[np.bool_], reason: str, text: str, refusals: list[Refusal]) -> _Rows:
    """The rows that are allowed; each message with other rows is refused once."""
    if allowed.all():
        return rows
    refusals += [Refusal(position, reason, text) for position in np.unique(rows.origins[~allowed]).tolist()]
    return rows.at(allowed)


def _last_of_each_key(rows: _Rows, refusals: list[Refusal]) -> Updates:
    """The last row of each key, in the order of the keys' bytes, in which stores keep them."""
    _, last = np.unique(rows.keys[::-1].byteswap().view(np.uint64), return_index=True)
    rows = rows.at(len(rows.keys) - 1 - last)
    if not rows.deleted.any():
        return Updates(rows.keys, rows.vectors, rows.keys[:0], refusals, rows.origins, rows.origins[:0])
    inserted, deleted = rows.at(~rows.deleted), rows.at(rows.deleted)
    return Updates(inserted.keys, inserted.vectors, deleted.keys, refusals, inserted.origins, deleted.origins)
