"""Rows that are sent to a topic, and awaited in a session."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inference_session import InferenceSession
from tests.testing.servers import wait_until

DEFAULT = [0.5, -0.5]
FIRST_THAT_ABORTS = 0x02050000
"""A version of librdkafka, 2.5.0; pyproject.toml asks for an older one where there is any."""


def packed(*keys: int) -> list[bytes]:
    return [key.to_bytes(8, "little", signed=True) for key in keys]


def vectors(value: float, *, rows: int = 1, dim: int = 4) -> NDArray[np.float32]:
    return np.full((rows, dim), value, np.float32)


def await_rows(session: InferenceSession, table: str, keys: ArrayLike, expected: ArrayLike) -> None:
    """Wait until these rows are served; a failure says what the stream of the session has done by then."""

    def are_served() -> bool:
        rows = session.lookup(table, keys)
        return np.array_equal(rows, np.broadcast_to(expected, rows.shape))

    try:
        wait_until(are_served, f"rows of {table} to be served")
    except AssertionError as error:
        raise AssertionError(f"{error}: {session.stats()['updates']}") from error
