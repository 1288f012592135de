"""A broker whose log a test writes itself: transactions that stay open, are committed or aborted, and compaction.

It answers what a consumer asks, in old versions of Kafka's protocol. The real broker of these tests returns the
messages of aborted transactions, and the one inside the client library writes no markers.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import struct
import threading
import time
from collections import defaultdict
from typing import NamedTuple

Content = tuple[bytes | None, bytes | None]
"""Key and value."""

_FETCH, _LIST_OFFSETS, _METADATA, _FIND_COORDINATOR, _API_VERSIONS = 1, 2, 3, 10, 18
# Produce is never sent; with it and Fetch 4, the client library knows that the log has batches of version 2.
_VERSIONS = {0: 3, _FETCH: 4, _LIST_OFFSETS: 2, _METADATA: 4, _FIND_COORDINATOR: 1, _API_VERSIONS: 0}
_OFFSET_OUT_OF_RANGE, _UNKNOWN_TOPIC, _NO_COORDINATOR, _UNSUPPORTED_VERSION = 1, 3, 15, 35
_READ_COMMITTED = 1
_EARLIEST = -2
_TRANSACTIONAL, _CONTROL = 0x10, 0x20
NO_TRANSACTION = -1
"""The number of the producer of messages that are in none."""
_WAIT_S = 0.02


class _Batch(NamedTuple):
    """Consecutive messages of one producer, or the marker that ends its transaction."""

    offsets: list[int]
    contents: list[Content]
    end: int
    """The offset after it, which stays when messages are compacted."""
    published_ms: int
    producer: int = NO_TRANSACTION
    is_marker: bool = False

    def encoded(self) -> bytes:
        """As a record batch of version 2."""
        first = self.end - 1 if not self.offsets else min(self.offsets[0], self.end - 1)
        in_transaction = 0 if self.producer == NO_TRANSACTION else _TRANSACTIONAL
        records = b"".join(
            _record(offset - first, *content) for offset, content in zip(self.offsets, self.contents, strict=True)
        )
        body = struct.pack(
            ">hiqqqhii",
            in_transaction | (_CONTROL if self.is_marker else 0),
            self.end - 1 - first,
            self.published_ms,
            self.published_ms,
            self.producer,
            0,
            0,
            len(self.offsets),
        )
        body += records
        return struct.pack(">qiibI", first, len(body) + 9, 0, 2, _crc32c(body)) + body


class _Log:
    """Partition 0 of a topic."""

    def __init__(self) -> None:
        self.batches: list[_Batch] = []
        self.begin = self.end = 0
        self.open: dict[int, int] = {}
        """By producer, where its transaction began that has not ended."""
        self.aborted: list[tuple[int, int, int]] = []
        """Producer, first offset, and the offset of its marker."""

    @property
    def stable_end(self) -> int:
        """No transaction that began before it is open."""
        return min(self.open.values(), default=self.end)

    def is_aborted(self, batch: _Batch) -> bool:
        """Whether a batch belongs to a transaction that was aborted."""
        return any(
            producer == batch.producer and begin < batch.end <= marker for producer, begin, marker in self.aborted
        )


class TransactionBroker:
    """One broker, in threads of this process; topics have one partition. A context manager."""

    def __init__(self) -> None:
        self._logs: defaultdict[str, _Log] = defaultdict(_Log)
        self._lock = threading.Lock()
        broker = self

        class Connection(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, EOFError):
                    while True:
                        (size,) = struct.unpack(">i", _receive(self.request, 4))
                        answer = broker._answer(_receive(self.request, size))
                        self.request.sendall(struct.pack(">i", len(answer)) + answer)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Connection)
        self._server.daemon_threads = True
        self._port: int = self._server.server_address[1]
        self.url = f"kafka://127.0.0.1:{self._port}"

    def send(self, topic: str, *contents: Content, transaction: int = NO_TRANSACTION) -> None:
        """Append messages, in the transaction of the producer with this number."""
        with self._lock:
            log = self._logs[topic]
            if transaction != NO_TRANSACTION:
                log.open.setdefault(transaction, log.end)
            offsets = list(range(log.end, log.end + len(contents)))
            log.end += len(contents)
            log.batches.append(_Batch(offsets, list(contents), log.end, _now_ms(), transaction))

    def commit(self, topic: str, transaction: int) -> None:
        """End a producer's transaction: its messages count."""
        self._finish(topic, transaction, is_commit=True)

    def abort(self, topic: str, transaction: int) -> None:
        """End a producer's transaction: its messages do not count."""
        self._finish(topic, transaction, is_commit=False)

    def compact(self, topic: str) -> None:
        """Drop messages that do not count, and those that a later one of their key replaces; offsets stay."""
        with self._lock:
            log = self._logs[topic]
            assert not log.open
            ended = [batch for batch in log.batches if not batch.is_marker and not log.is_aborted(batch)]
            last = {
                key: offset for batch in ended for offset, (key, _) in zip(batch.offsets, batch.contents, strict=True)
            }
            for number, batch in enumerate(log.batches):
                if not batch.is_marker:
                    kept = [i for i, (key, _) in enumerate(batch.contents) if last.get(key) == batch.offsets[i]]
                    log.batches[number] = batch._replace(
                        offsets=[batch.offsets[i] for i in kept], contents=[batch.contents[i] for i in kept]
                    )

    def remove_before(self, topic: str, offset: int) -> None:
        """Drop messages, as retention does."""
        with self._lock:
            log = self._logs[topic]
            log.begin = offset
            log.batches = [batch for batch in log.batches if batch.end > offset]

    def end(self, topic: str) -> int:
        """The offset of the next message."""
        return self._logs[topic].end

    def _finish(self, topic: str, transaction: int, *, is_commit: bool) -> None:
        with self._lock:
            log = self._logs[topic]
            begin = log.open.pop(transaction)
            if not is_commit:
                log.aborted.append((transaction, begin, log.end))
            marker = struct.pack(">hh", 0, is_commit), struct.pack(">hi", 0, 0)
            log.batches.append(_Batch([log.end], [marker], log.end + 1, _now_ms(), transaction, is_marker=True))
            log.end += 1

    def _answer(self, request: bytes) -> bytes:
        kind, version, number = struct.unpack_from(">hhi", request)
        reader = _Reader(request, 8)
        reader.text()  # the client's name
        with self._lock:
            if kind == _API_VERSIONS:
                body = self._api_versions(0 if version == 0 else _UNSUPPORTED_VERSION)
            elif kind == _METADATA:
                body = self._metadata(reader)
            elif kind == _LIST_OFFSETS:
                body = self._list_offsets(reader)
            elif kind == _FIND_COORDINATOR:
                body = struct.pack(">ihhihi", 0, _NO_COORDINATOR, -1, -1, 0, -1)
            else:
                assert kind == _FETCH, kind
                body, is_empty = self._fetch(reader)
        if kind == _FETCH and is_empty:
            time.sleep(_WAIT_S)  # the client asks again at once
        return struct.pack(">i", number) + body

    def _api_versions(self, error: int) -> bytes:
        versions = b"".join(struct.pack(">hhh", kind, 0, highest) for kind, highest in _VERSIONS.items())
        return struct.pack(">hi", error, len(_VERSIONS)) + versions

    def _metadata(self, reader: _Reader) -> bytes:
        count = reader.int32()
        names = sorted(self._logs) if count < 0 else [reader.text() for _ in range(count)]
        body = struct.pack(">iii", 0, 1, 1) + _text("127.0.0.1") + struct.pack(">ih", self._port, -1)
        body += _text("cluster") + struct.pack(">ii", 1, len(names))
        for name in names:
            is_there = name in self._logs
            body += struct.pack(">h", 0 if is_there else _UNKNOWN_TOPIC) + _text(name) + struct.pack(">bi", 0, is_there)
            if is_there:
                body += struct.pack(">hiiiiii", 0, 0, 1, 1, 1, 1, 1)
        return body

    def _list_offsets(self, reader: _Reader) -> bytes:
        reader.int32()
        isolation = reader.int8()
        body, count = b"", reader.int32()
        for _ in range(count):
            name, partitions = reader.text(), reader.int32()
            body += _text(name) + struct.pack(">i", partitions)
            for _ in range(partitions):
                partition, moment = reader.int32(), reader.int64()
                log = self._logs[name]
                end = log.stable_end if isolation == _READ_COMMITTED else log.end
                body += struct.pack(">ihqq", partition, 0, -1, log.begin if moment == _EARLIEST else end)
        return struct.pack(">ii", 0, count) + body

    def _fetch(self, reader: _Reader) -> tuple[bytes, bool]:
        reader.skip(16)  # replica, longest wait, fewest and most bytes
        isolation = reader.int8()
        body, is_empty, count = b"", True, reader.int32()
        for _ in range(count):
            name, partitions = reader.text(), reader.int32()
            body += _text(name) + struct.pack(">i", partitions)
            for _ in range(partitions):
                partition, offset, _ = reader.int32(), reader.int64(), reader.int32()
                found = self._fetch_one(self._logs[name], offset, isolation)
                is_empty &= found.endswith(b"\0\0\0\0")
                body += struct.pack(">i", partition) + found
        return struct.pack(">ii", 0, count) + body, is_empty

    def _fetch_one(self, log: _Log, offset: int, isolation: int) -> bytes:
        stable_end = log.stable_end
        if not log.begin <= offset <= log.end:
            return struct.pack(">hqqii", _OFFSET_OUT_OF_RANGE, log.end, stable_end, 0, 0)
        end = stable_end if isolation == _READ_COMMITTED else log.end
        records = b"".join(batch.encoded() for batch in log.batches if offset < batch.end <= end)
        aborted = [(producer, begin) for producer, begin, marker in log.aborted if offset <= marker and begin < end]
        told = b"".join(struct.pack(">qq", *one) for one in aborted)
        return (
            struct.pack(">hqqi", 0, log.end, stable_end, len(aborted))
            + told
            + struct.pack(">i", len(records))
            + records
        )

    def __enter__(self) -> TransactionBroker:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Reader:
    """Reads numbers and texts of a request in turn."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at

    def skip(self, num_bytes: int) -> bytes:
        self._at += num_bytes
        return self._data[self._at - num_bytes : self._at]

    def int8(self) -> int:
        return self.skip(1)[0]

    def int32(self) -> int:
        return int.from_bytes(self.skip(4), "big", signed=True)

    def int64(self) -> int:
        return int.from_bytes(self.skip(8), "big", signed=True)

    def text(self) -> str:
        return self.skip(max(int.from_bytes(self.skip(2), "big", signed=True), 0)).decode()


def _now_ms() -> int:
    return int(time.time() * 1000)


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _text(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


def _record(offset: int, key: bytes | None, value: bytes | None) -> bytes:
    body = b"\0\0" + _varint(offset)
    for part in (key, value):
        body += _varint(-1) if part is None else _varint(len(part)) + part
    body += _varint(0)  # headers
    return _varint(len(body)) + body


def _varint(number: int) -> bytes:
    rest, encoded = number << 1 ^ number >> 63, b""
    while rest > 0x7F:
        encoded += bytes([rest & 0x7F | 0x80])
        rest >>= 7
    return encoded + bytes([rest])


def _crc_table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [one >> 1 ^ (0x82F63B78 if one & 1 else 0) for one in table]
    return table


_TABLE = _crc_table()


def _crc32c(data: bytes) -> int:
    remainder = 0xFFFFFFFF
    for byte in data:
        remainder = _TABLE[(remainder ^ byte) & 0xFF] ^ remainder >> 8
    return remainder ^ 0xFFFFFFFF
