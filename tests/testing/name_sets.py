"""A std::set of names as libstdc++ has it in memory, in an object of ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

COLOR, PARENT, LEFT, RIGHT, CHARACTERS, LENGTH = range(6)
"""Words of a node of a std::set of names."""


def insert_all(owner: Any, names: Sequence[str]) -> tuple[Any, ...]:
    """Make a std::set of these names in the owner, inserted in this order, without balance; returns its memory."""
    texts = [np.array(bytearray(name.encode()) or [0], np.uint8) for name in names]
    nodes = np.zeros((len(names), 6), np.int64)
    address = [nodes.ctypes.data + 48 * i for i in range(len(names))]
    encoded = [name.encode() for name in names]
    header = ctypes.addressof(owner) + type(owner).wanted.offset
    nodes[:, CHARACTERS], nodes[:, LENGTH] = [text.ctypes.data for text in texts], list(map(len, encoded))
    nodes[0, PARENT] = header
    for i in range(1, len(names)):
        at, child = 0, 0
        while True:
            side = LEFT if encoded[i] < encoded[at] else RIGHT
            child = nodes[at, side]
            if not child:
                break
            at = address.index(child)
        nodes[at, side], nodes[i, PARENT] = address[i], address[at]
    first, last = encoded.index(min(encoded)), encoded.index(max(encoded))
    owner.wanted[:] = 0, address[0], address[first], address[last], len(names)
    return nodes, texts
