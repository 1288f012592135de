"""Calls of a parameter server, and of the rows over it, that only tests make."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inference_session.parameter_server.base import FetchRequest
from inference_session.parameter_server.server import ParameterServer
from inference_session.rows.base import Rows
from inference_session.rows.stored import StoredRows
from tests.testing.servers import PATIENCE_S, wait_until


def fetch_any(server: ParameterServer, requests: Sequence[FetchRequest]) -> list[NDArray[np.bool_]]:
    """`ParameterServer.fetch` for keys that may come more than once; returns for each request which were found."""
    unique = [np.unique(request.keys, return_inverse=True) for request in requests]
    once = [
        FetchRequest(request.table, keys, np.empty((len(keys), request.out.shape[1]), np.float32))
        for request, (keys, _) in zip(requests, unique, strict=True)
    ]
    results = []
    for request, fetched, (_, inverse), hits in zip(requests, once, unique, server.fetch(once), strict=True):
        found = hits[inverse]
        request.out[found] = fetched.out[inverse[found]]
        results.append(found)
    return results


def await_promotions(server: ParameterServer) -> None:
    """Return when all promotions queued so far are done."""
    wait_until(lambda: not server.upkeep.promotions.any_wait, "all promotions to be taken")
    with server.upkeep._writes.lock:  # held while those that were taken are inserted
        pass


def await_inserts(rows: Rows) -> None:
    """Return when rows that look-ups missed are in the caches."""
    assert isinstance(rows, StoredRows)
    assert all(reader.late is None or reader.late.wait(PATIENCE_S) for reader in rows.readers)
