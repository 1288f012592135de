"""Which Redis servers have a store's rows: the one that a URL or a sentinel names, or the masters of a Cluster."""

from __future__ import annotations

import binascii
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from inference_session.errors import HotrowError, StoreError, UnavailableError, fresh, without_frames
from inference_session.parameter_server.redis.connection import Address, Deadline, RedirectedError, Reply
from inference_session.urls.store_url import StoreUrl

_MIN_REFRESH_S = 0.1
_NUM_SLOTS = 16_384
_MALFORMED = (TypeError, ValueError, IndexError, AttributeError)
"""What taking a reply apart raises that no Redis gives."""

Result = TypeVar("Result")
Ask = Callable[[Address, tuple[str, ...], Deadline], Reply]
"""Sends a command to a server, and gives its reply; an error is raised."""


class Topology(ABC):
    """Where hashes are. Thread-safe."""

    @abstractmethod
    def address(self, name: bytes, deadline: Deadline) -> Address:
        """The server that has the hash of this name."""

    @abstractmethod
    def servers(self, deadline: Deadline) -> Sequence[Address]:
        """All servers that have rows."""

    def refresh(self, deadline: Deadline) -> None:  # noqa: B027
        """Ask again which server has which slots, where that may change."""


class OneServer(Topology):
    """The server that the URL names, or the socket."""

    def __init__(self, url: StoreUrl) -> None:
        self._address = url.host, url.port

    def address(self, name: bytes, deadline: Deadline) -> Address:  # noqa: ARG002
        return self._address

    def servers(self, deadline: Deadline) -> Sequence[Address]:  # noqa: ARG002
        return [self._address]


class Cluster(Topology):
    """The masters of a Redis Cluster, as its nodes name them."""

    def __init__(self, url: StoreUrl, ask: Ask) -> None:
        self._name = str(url)
        self._ask = ask
        self._nodes: list[Address] = [(url.host, url.port)]
        """All nodes ever seen, those that answered last first."""
        self._slots: list[Address | None] = []
        self._addresses: dict[bytes, Address] = {}
        self._refreshed = -_MIN_REFRESH_S
        self._lock = threading.Lock()

    def address(self, name: bytes, deadline: Deadline) -> Address:
        """See Topology. A RedirectedError where no node had the slot when we last asked."""
        address = self._addresses.get(name)
        if address is None:
            if not self._slots:
                self.refresh(deadline)
            address = self._slots[slot_of(name)]
            if address is None:
                raise RedirectedError(f"no node of {self._name!r} serves the slot of {name!r}")
            self._addresses[name] = address
        return address

    def servers(self, deadline: Deadline) -> Sequence[Address]:
        if not self._slots:
            self.refresh(deadline)
        return sorted(set(filter(None, self._slots)))

    def refresh(self, deadline: Deadline) -> None:
        """Ask the nodes which of them has which slots; at most ten times a second, however many threads ask."""
        with self._lock:
            if time.monotonic() - self._refreshed >= _MIN_REFRESH_S or not self._slots:
                ranges, node = ask_one_of(self._nodes, self._slots_by, deadline)
                self._take(ranges, node)
                self._refreshed = time.monotonic()
            self._addresses = {}

    def _slots_by(self, node: Address, deadline: Deadline) -> list[_SlotRange]:
        """What a node knows. One that has left the Cluster, and may run on, knows no slots, and must hide no others."""
        ranges = _slot_ranges(self._ask(node, ("CLUSTER", "SLOTS"), deadline), node)
        if not ranges:
            raise UnavailableError(
                f"store {self._name!r}: the node at {node[0]}:{node[1]} knows no slots; has it left its Cluster?"
            )
        return ranges

    def _take(self, ranges: Sequence[_SlotRange], node: Address) -> None:
        slots: list[Address | None] = [None] * _NUM_SLOTS
        for first, last, nodes in ranges:
            slots[first : last + 1] = [nodes[0]] * (last + 1 - first)
        self._slots = slots
        heard_of = [other for known in ranges for other in known.nodes]
        self._nodes = list(dict.fromkeys([node, *heard_of, *self._nodes]))


class Sentinel(Topology):
    """The master that sentinels name. Replicas are never asked: each connection checks that its server is a master."""

    def __init__(self, url: StoreUrl, ask: Ask) -> None:
        """`ask`: asks a sentinel."""
        self._url = url
        self._ask = ask
        self._sentinels: list[Address] = list(url.sentinels)
        """The one that answered last comes first."""
        self._master: Address | None = None
        self._refreshed = -_MIN_REFRESH_S
        self._lock = threading.Lock()

    def address(self, name: bytes, deadline: Deadline) -> Address:  # noqa: ARG002
        return self._master or self._ask_for_master(deadline)

    def servers(self, deadline: Deadline) -> Sequence[Address]:
        return [self.address(b"", deadline)]

    def refresh(self, deadline: Deadline) -> None:
        """Ask the sentinels for the master. While none of them answers, the last known one stays."""
        try:
            self._ask_for_master(deadline)
        except (UnavailableError, StoreError):
            if self._master is None:
                raise

    def _ask_for_master(self, deadline: Deadline) -> Address:
        """At most ten times a second, however many threads ask."""
        with self._lock:
            if self._master is not None and time.monotonic() - self._refreshed < _MIN_REFRESH_S:
                return self._master
            master, answering = ask_one_of(self._sentinels, self._master_of, deadline)
            self._sentinels.sort(key=lambda address: address != answering)
            self._master, self._refreshed = master, time.monotonic()
            return master

    def _master_of(self, sentinel: Address, deadline: Deadline) -> Address:
        """The answer of one sentinel. If it knows no such master, it may have lost its settings."""
        name = self._url.master_name
        reply: Any = self._ask(sentinel, ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name), deadline)
        if reply is None:
            where = f"{sentinel[0]}:{sentinel[1]}"
            raise UnavailableError(f"store {str(self._url)!r}: the sentinel at {where} knows no master {name!r}")
        try:
            return _address(reply, sentinel)
        except _MALFORMED as error:
            raise UnavailableError(f"the sentinel at {sentinel[0]}:{sentinel[1]} sent an invalid reply") from error


def ask_one_of(
    addresses: Iterable[Address], ask: Callable[[Address, Deadline], Result], deadline: Deadline
) -> tuple[Result, Address]:
    """The answer of the first server that gives one, and which it was. Each has half of the time that is left, so that
    some may hang.
    """
    failure: HotrowError = UnavailableError("no server was asked, because the time limit had passed")
    for number, address in enumerate(addresses):
        share = Deadline(max(1, (deadline.end_ns - time.monotonic_ns()) // 2_000_000))
        try:
            return ask(address, share), address
        except (UnavailableError, StoreError) as error:
            failure = failure if number else without_frames(error)
    raise fresh(failure)


def masters_known_to(node: Address, ask: Ask, deadline: Deadline) -> set[Address]:
    """The masters of the Cluster that a server belongs to; StoreError where it belongs to none."""
    ranges = _slot_ranges(ask(node, ("CLUSTER", "SLOTS"), deadline), node)
    return {slots.nodes[0] for slots in ranges}


def slot_of(name: bytes) -> int:
    """The slot of a Cluster that a name belongs to: of what stands in its first braces, if there is anything."""
    _, opened, rest = name.partition(b"{")
    tag, closed, _ = rest.partition(b"}")
    return binascii.crc_hqx(tag if opened and closed and tag else name, 0) % _NUM_SLOTS


class _SlotRange(NamedTuple):
    """Slots, and the nodes that have them."""

    first: int
    last: int
    nodes: list[Address]
    """The master comes first."""


def _slot_ranges(reply: Any, asked: Address) -> list[_SlotRange]:
    """What a reply to CLUSTER SLOTS says. A node without a host is the one asked."""
    try:
        return [
            _SlotRange(*_slots(first, last), [_address(node, asked) for node in nodes])
            for first, last, *nodes in reply
            if nodes
        ]
    except _MALFORMED as error:
        raise UnavailableError(f"Redis at {asked[0]}:{asked[1]} sent an invalid reply to CLUSTER SLOTS") from error


def _slots(first: Any, last: Any) -> tuple[int, int]:
    """The numbers of slots; ValueError where there are no such slots."""
    if not 0 <= int(first) <= int(last) < _NUM_SLOTS:
        raise ValueError(f"slots {first} to {last}")
    return int(first), int(last)


def _address(node: Any, asked: Address) -> Address:
    host = (node[0] or b"").decode(errors="replace")
    return (host if host not in ("", "?") else asked[0]), int(node[1])
