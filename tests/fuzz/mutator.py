"""Makes damaged bytes from valid ones, the same from the same seed."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

ODD_BYTES = (
    *(b"\0", b"\xff" * 8, b"\x7f", b"\x80", b'"', b"\\", b",", b"\n", b"\xef\xbb\xbf", b"../", b"1e999", b"NaN"),
    *(b"{", b"[", b"[" * 3000, b"{" * 3000, b"9" * 5000),
)
ODD_NUMBERS = (0, 1, -1, 127, 255, 2**15, 2**31 - 1, -(2**31), 2**32, 2**53, 2**63 - 1, -(2**63), 2**64, 10**400)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 1.5, -0.0, float("inf"), float("nan"), "", "x" * 5000, "../../x", "/", "\0", "\ud800", "ÿ"),
    *([], {}, [[]], [None], {"": {}}, [0] * 300),
    *ODD_NUMBERS,
)
_NUMBER = re.compile(rb"-?\d+")
_MOST_STEPS = 4


class Mutator:
    """Damages one thing after the other."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._steps: tuple[Callable[[bytearray], None], ...] = (
            *(self._flip, self._overwrite, self._overwrite_number, self._insert, self._cut, self._repeat),
            *(self._truncate, self._exchange, self._renumber),
        )

    def mutated(self, data: bytes) -> bytes:
        """Bytes that differ a little from these; if they are JSON, half of the time only values differ."""
        if data[:1] == b"{" and self.random.random() < 0.5:
            try:
                return self._mutated_json(json.loads(data))
            except (ValueError, RecursionError):  # it begins like JSON
                pass
        changed = bytearray(data)
        for _ in range(self.random.randint(1, _MOST_STEPS)):
            self.random.choice(self._steps)(changed)
        return bytes(changed)

    def _mutated_json(self, document: Any) -> bytes:
        for _ in range(self.random.randint(1, _MOST_STEPS)):
            places = list(_places(document))
            if not places:
                break
            holder, key = self.random.choice(places)
            change = self.random.randrange(6)
            if change == 0:
                del holder[key]
            elif change == 1 and isinstance(holder, dict):
                holder["other"] = holder.pop(key)
            elif change == 2 and isinstance(holder, list):
                holder.append(copy.deepcopy(holder[key]))
            elif change == 3:
                other, its_key = self.random.choice(places)
                holder[key] = copy.deepcopy(other[its_key])
            else:
                holder[key] = copy.deepcopy(self.random.choice(ODD_VALUES))
        return json.dumps(document).encode()

    def _span(self, data: bytearray) -> tuple[int, int]:
        begin = self.random.randint(0, len(data))
        longest = self.random.choice((1, 4, 8, 64, len(data)))
        return begin, min(len(data), begin + self.random.randint(0, longest))

    def _flip(self, data: bytearray) -> None:
        if data:
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)

    def _overwrite(self, data: bytearray) -> None:
        begin, end = self._span(data)
        data[begin:end] = self.random.randbytes(end - begin)

    def _overwrite_number(self, data: bytearray) -> None:
        begin, width = self._span(data)[0], self.random.choice((1, 2, 4, 8))
        number = self.random.choice(ODD_NUMBERS) % 256**width
        data[begin : begin + width] = number.to_bytes(width, self.random.choice(("little", "big")))

    def _insert(self, data: bytearray) -> None:
        begin, _ = self._span(data)
        data[begin:begin] = self.random.choice((*ODD_BYTES, self.random.randbytes(self.random.randint(1, 16))))

    def _cut(self, data: bytearray) -> None:
        begin, end = self._span(data)
        del data[begin:end]

    def _repeat(self, data: bytearray) -> None:
        begin, end = self._span(data)
        data[begin:begin] = data[begin:end] * self.random.choice((1, 2, 50))

    def _truncate(self, data: bytearray) -> None:
        del data[self.random.randint(0, len(data)) :]

    def _exchange(self, data: bytearray) -> None:
        """Put one part in the place of another."""
        (begin, end), (other, other_end) = self._span(data), self._span(data)
        data[begin:end] = data[other:other_end]

    def _renumber(self, data: bytearray) -> None:
        """Write another number for one in digits."""
        if found := list(_NUMBER.finditer(data[:1_000_000])):
            match = self.random.choice(found)
            begin, end = match.span()
            data[begin:end] = self.random.choice((*(str(number).encode() for number in ODD_NUMBERS), b"9" * 5000))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a document: its container, and its key there."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)
