"""The table of an embedding layer: rows by key, created when training first reads a key, with optimizer states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from hotrow.training.hugectr.enums import Update_t
from hotrow.training.hugectr.optimizers import table_rule
from hotrow.training.hugectr.parameters import OptParamsPy
from hotrow.training.hugectr.readers.block import Bags
from hotrow.training.key_index import HashIndex, distinct

_MIN_ROWS = 1024
_LIMIT = 0.05
"""HugeCTR draws the elements of a new row evenly from -0.05 to 0.05."""


@dataclass
class BatchRows:
    """The rows of one batch, whose gradients torch adds up."""

    rows: Tensor
    """int64 [m], each once."""
    vectors: Tensor
    """[m, embedding_dim], a leaf of the graph of gradients."""


class EmbeddingTable:
    """Rows in device memory; their keys in host memory."""

    def __init__(
        self,
        name: str,
        embedding_dim: int,
        combiner: str,
        params: OptParamsPy,
        *,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """UnsupportedModelError: the optimizer cannot train a table."""
        self.name = name
        self.embedding_dim = embedding_dim
        self.is_trainable = True
        self.num_steps = 0
        """All steps of the optimizer so far."""
        self.rule = table_rule(params)
        self._combiner = combiner
        self._moves_all = params.update_type is Update_t.Global and self.rule.moves_untouched
        self._random = torch.Generator().manual_seed(seed)
        self._device = device or torch.device("cpu")
        self._rows = HashIndex()
        self._weight = torch.zeros((_MIN_ROWS, embedding_dim), device=self._device)
        self._states = [self._fresh(_MIN_ROWS) for _ in self.rule.state_names]
        self._gradient = torch.zeros_like(self._weight) if self._moves_all else None

    @property
    def num_rows(self) -> int:
        """Rows that have a key."""
        return self._rows.num_rows - 1

    @property
    def keys(self) -> Tensor:
        """int64 [num_rows]"""
        return self._rows.keys[1 : self._rows.num_rows]

    @property
    def weight(self) -> Tensor:
        """[num_rows, embedding_dim], in the order of `keys`."""
        return self._weight[1 : self._rows.num_rows]

    @property
    def states(self) -> list[Tensor]:
        """As `weight`, by the names of the rule's states."""
        return [state[1 : self._rows.num_rows] for state in self._states]

    def touch(self, bags: Bags) -> tuple[BatchRows, Tensor]:
        """The rows of a batch, new ones made, and where each of its keys stands among them, int64 [keys]."""
        keys, places = distinct(torch.from_numpy(bags.keys))
        rows = self._find_or_add(keys).to(self._device)
        vectors = self._weight.index_select(0, rows)
        return BatchRows(rows, vectors.requires_grad_(self.is_trainable)), places.to(self._device)

    def pool(self, vectors: Tensor, places: Tensor, offsets: NDArray[np.int64]) -> Tensor:
        """[bags, embedding_dim]: rows of `vectors` summed or averaged; zeros where a bag is empty."""
        if len(places) == len(offsets) - 1 and (np.diff(offsets) == 1).all():
            return functional.embedding(places, vectors)
        ends = torch.from_numpy(offsets).to(self._device)
        return functional.embedding_bag(places, vectors, ends, mode=self._combiner, include_last_offset=True)

    def evaluate(self, bags: Bags) -> Tensor:
        """As `pool`, with zeros for keys that were never trained on, as serving answers them."""
        rows = self._rows.find(torch.from_numpy(bags.keys)).to(self._device)
        return self.pool(self._weight[: self._rows.num_rows], rows, bags.offsets)

    def update(self, touched: BatchRows, gradient: Tensor, lr: float) -> None:
        """One step of the optimizer, given the gradients of the touched rows, [m, embedding_dim]."""
        self.num_steps += 1
        if self._gradient is not None:
            self._update_all(touched.rows, gradient, lr)
            return
        weight = touched.vectors.detach()
        states = [state.index_select(0, touched.rows) for state in self._states]
        self.rule.update(weight, gradient, states, lr, self.num_steps)
        for whole, part in zip([self._weight, *self._states], [weight, *states], strict=True):
            whole.index_copy_(0, touched.rows, part)

    def load(self, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Replace all rows by these; their states begin anew."""
        self._rows = HashIndex()
        self._states = [self._fresh(len(self._weight)) for _ in self.rule.state_names]
        found, last = np.unique(keys[::-1], return_index=True)  # of rows with one key, the last is found when served
        order = np.sort(len(keys) - 1 - last)
        del found
        self._find_or_add(torch.from_numpy(np.ascontiguousarray(keys[order])))
        self._weight[1 : len(order) + 1] = torch.from_numpy(np.ascontiguousarray(vectors[order]))
        self.num_steps = 0

    def load_states(self, states: Sequence[NDArray[np.float32]], num_steps: int) -> None:
        """Set the states, each [num_rows, embedding_dim] in the order of `keys`."""
        for whole, part in zip(self.states, states, strict=True):
            whole.copy_(torch.from_numpy(part.reshape(whole.shape)))
        self.num_steps = num_steps

    def _update_all(self, rows: Tensor, gradient: Tensor, lr: float) -> None:
        assert self._gradient is not None  # noqa: S101  for mypy
        used = self._rows.num_rows
        self._gradient.index_copy_(0, rows, gradient)
        states = [state[:used] for state in self._states]
        self.rule.update(self._weight[:used], self._gradient[:used], states, lr, self.num_steps)
        self._gradient.index_fill_(0, rows, 0.0)

    def _find_or_add(self, keys: Tensor) -> Tensor:
        """The rows of keys, each given once; new keys get initial values."""
        begin = self._rows.num_rows
        rows = self._rows.find_or_add(keys)
        end = self._rows.num_rows
        if end > len(self._weight):
            self._grow(max(end, 2 * len(self._weight)))
        if end > begin:
            first = torch.empty((end - begin, self.embedding_dim))
            self._weight[begin:end] = first.uniform_(-_LIMIT, _LIMIT, generator=self._random).to(self._device)
        return rows

    def _grow(self, num_rows: int) -> None:
        self._weight = _longer(self._weight, torch.zeros((num_rows, self.embedding_dim), device=self._device))
        self._states = [_longer(state, self._fresh(num_rows)) for state in self._states]
        if self._gradient is not None:
            self._gradient = torch.zeros_like(self._weight)

    def _fresh(self, num_rows: int) -> Tensor:
        return torch.full((num_rows, self.embedding_dim), self.rule.first_state, device=self._device)


def _longer(short: Tensor, long: Tensor) -> Tensor:
    long[: len(short)] = short
    return long
