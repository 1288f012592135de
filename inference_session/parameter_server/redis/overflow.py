"""How many rows of a table a Redis may hold, and which of them leave when there are more: HPS's overflow settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import ConfigurationError
from inference_session.parameter_server.redis import layout
from inference_session.parameter_server.redis.connection import PlainCommand
from inference_session.urls.store_url import StoreUrl

_FIELDS_PER_STEP = 1000
"""Fields that one command goes through: few enough not to delay other clients."""

Policy = Literal["evict_oldest", "evict_random", "evict_least_used"]


@dataclass(frozen=True)
class Overflow:
    """The limit of one partition of a table."""

    margin: int
    """Rows that it may hold."""
    policy: Policy
    target: float
    """The part of `margin` that is left when it held more."""

    @classmethod
    def of(cls, url: StoreUrl) -> Overflow | None:
        """The limit that a URL's options set, None if they set none; ConfigurationError names a wrong one."""
        margin = url.count("overflow_margin", 0)
        policy = url.options.get("overflow_policy", "evict_oldest")
        if policy not in get_args(Policy):
            allowed = ", ".join(get_args(Policy))
            raise ConfigurationError(f"store {str(url)!r}: overflow_policy cannot be {policy!r}; allowed: {allowed}")
        target = _fraction(url, url.options.get("overflow_resolution_target", "0.8"))
        return cls(margin, policy, target) if margin else None  # type: ignore[arg-type]

    def excess(self, num_rows: int) -> int:
        """How many rows must leave a partition that holds this many.

        One stays at least: a hash without rows counts as lost (ordered_writes.py), so updates would be written again
        and again.
        """
        return 0 if num_rows <= self.margin else num_rows - max(1, math.floor(self.margin * self.target))

    @property
    def counts_uses(self) -> bool:
        """Whether rows are marked with numbers of uses instead of times."""
        return self.policy == "evict_least_used"

    def scores(self, marks: Iterable[bytes]) -> NDArray[np.int64]:
        """The scores that rank rows, int64 [n]: the lowest leave first. An older mark of the other kind counts as 0."""
        read = _uses if self.counts_uses else _time
        return np.array([read(mark) for mark in marks], np.int64)


class Eviction:
    """Makes room in partitions, in small steps."""

    def __init__(self, overflow: Overflow, replies: Callable[[Sequence[PlainCommand]], list[Any]]) -> None:
        """`replies`: sends commands and returns their replies."""
        self._overflow = overflow
        self._replies = replies

    def make_room(self, tag: str, partitions: Sequence[int]) -> None:
        """Evict rows of a table from those of the partitions that hold more than they may."""
        sizes = self._replies([("HLEN", layout.rows_name(tag, partition)) for partition in partitions])
        for partition, size in zip(partitions, sizes, strict=True):
            excess = self._overflow.excess(int(size))
            if excess and self._overflow.policy != "evict_random":
                excess -= self._evict(tag, partition, self._lowest(tag, partition, excess))
            while excess > 0:  # rows without a mark are chosen at random
                step = min(excess, _FIELDS_PER_STEP)
                [fields] = self._replies([("HRANDFIELD", layout.rows_name(tag, partition), step)])
                if not fields:
                    break
                excess -= self._evict(tag, partition, fields)

    def _lowest(self, tag: str, partition: int, count: int) -> Sequence[bytes]:
        """The keys of this many rows to evict first, as far as rows are marked."""
        cursor = -1
        keys: list[bytes] = []
        scores: list[NDArray[np.int64]] = []
        while cursor:
            name = layout.times_name(tag, partition)
            [reply] = self._replies([("HSCAN", name, max(cursor, 0), "COUNT", _FIELDS_PER_STEP)])
            cursor, marks = layout.scanned(reply)
            keys += marks
            scores.append(self._overflow.scores(marks.values()))
        lowest = np.argsort(np.concatenate(scores), kind="stable")[:count]
        return [keys[i] for i in lowest.tolist()]

    def _evict(self, tag: str, partition: int, fields: Sequence[bytes]) -> int:
        """Drop rows and their marks; returns how many rows there were."""
        rows, marks = layout.rows_name(tag, partition), layout.times_name(tag, partition)
        num_rows = 0
        for begin in range(0, len(fields), _FIELDS_PER_STEP):
            part = fields[begin : begin + _FIELDS_PER_STEP]
            num_rows += int(self._replies([("HDEL", rows, *part), ("HDEL", marks, *part)])[0])
        return num_rows


def num_uses(mark: bytes | None) -> int:
    """Uses that a mark counts."""
    return 0 if mark is None else _uses(mark)


def _uses(mark: bytes) -> int:
    return int(mark) if mark.isdigit() and len(mark) < 19 else 0


def _time(mark: bytes) -> int:
    return int.from_bytes(mark, "little", signed=True) if len(mark) == 8 else 0


def _fraction(url: StoreUrl, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        raise ConfigurationError(
            f"store {str(url)!r}: overflow_resolution_target cannot be {text!r}; allowed: numbers from 0 to 1"
        )
    return number
