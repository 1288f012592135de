"""What one request still wants while it goes from tier to tier."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inference_session.parameter_server.base import FetchRequest


@dataclass
class WantedRows:
    """The rows of one table that a request asks for, each key once."""

    table: str
    keys: NDArray[np.int64]
    """[n]"""
    vectors: NDArray[np.float32]
    """[n, embedding_dim]; what is not found may hold anything, such as rows of a tier that failed half way."""
    found: NDArray[np.bool_]
    """[n]"""
    left: NDArray[np.int64]
    """Positions of the keys that no tier has had so far; those known to be unknown are not among them."""
    moment: int
    """Of the write log, when the fetch began."""

    def missing(self) -> FetchRequest:
        """A request for the keys that are left, straight to their place as long as these are all."""
        if len(self.left) == len(self.keys):
            return FetchRequest(self.table, self.keys, self.vectors)
        vectors = np.empty((len(self.left), self.vectors.shape[1]), np.float32)
        return FetchRequest(self.table, self.keys[self.left], vectors)

    def take(self, fetched: FetchRequest, hits: NDArray[np.bool_]) -> None:
        """Enter what a tier had of the missing keys."""
        if hits.all() and fetched.out is self.vectors:  # as a rule
            self.found[:], self.left = True, self.left[:0]
            return
        positions = self.left[hits]
        if fetched.out is not self.vectors:
            self.vectors[positions] = fetched.out[hits]
        self.found[positions] = True
        self.left = self.left[~hits]
