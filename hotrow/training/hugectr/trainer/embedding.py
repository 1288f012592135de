"""The table of an embedding layer: rows by key, created when training first reads a key, with optimizer states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from hotrow.training.hash_embeddings.key_index import mixed_bits
from hotrow.training.hash_embeddings.rows import HashRows, Rows
from hotrow.training.hugectr.arguments.enums import Update_t
from hotrow.training.hugectr.arguments.parameters import OptParamsPy
from hotrow.training.hugectr.trainer.batch import DeviceBags
from hotrow.training.hugectr.trainer.optimizers import Rule, table_rule
from hotrow.training.hugectr.trainer.processes import Processes
from hotrow.training.row_access import add_up, gather, longer

_LIMIT = 0.05
"""HugeCTR draws the elements of a new row evenly from -0.05 to 0.05."""
_FRACTION_BITS = 24
_ODD = 0x1E3779B97F4A7C15
"""Keeps the columns of a key apart before their bits are mixed."""


@dataclass
class BatchRows:
    """The rows of one batch, whose gradients torch adds up."""

    rows: Tensor
    """int64 [rows]: those that this process keeps, each once if there are `places`."""
    kept: Tensor | None
    """int64 [rows], where they are among the distinct keys of the batch; None if they are all."""
    vectors: Tensor
    """[keys, embedding_dim], a leaf of the graph of gradients: of the distinct keys, or of all."""
    places: Tensor | None
    """int64 [n], which of the vectors each key of the batch has; None if the first has the first, and so on."""


class EmbeddingTable:
    """Rows, their keys and an index, all in device memory. Of several processes, each keeps the rows of its keys."""

    def __init__(
        self, name: str, embedding_dim: int, params: OptParamsPy, *, seed: int = 0, processes: Processes | None = None
    ) -> None:
        """UnsupportedModelError: the optimizer cannot train a table."""
        self.name = name
        self.embedding_dim = embedding_dim
        self.is_trainable = True
        self.read_from = ""
        """The sparse folder that rows were read from last."""
        self.rule = table_rule(params)
        self._moves_all = params.update_type is Update_t.Global and self.rule.moves_untouched
        self._processes = processes or Processes(0, 1, torch.device("cpu"))
        self._device = self._processes.device
        self.finds_distinct = self._processes.count > 1 or self._device.type == "cpu"
        """Whether each key of a batch is searched once. A GPU is faster without, and adds gradients up by rows."""
        self.rows = _TableRows(embedding_dim, self.rule, self._device, seed)
        self._is_changed: Tensor | None = None
        """bool [rows], since they were taken last; None where nobody takes them."""

    @property
    def num_rows(self) -> int:
        """Rows that have a key, on this process."""
        return self.rows.num_rows

    @property
    def keys(self) -> Tensor:
        """int64 [num_rows]"""
        return self.rows.all().keys

    @property
    def weight(self) -> Tensor:
        """[num_rows, embedding_dim], in the order of `keys`."""
        return self.rows.all().vectors

    @property
    def states(self) -> list[Tensor]:
        """As `weight`, by the names of the rule's states."""
        return list(self.rows.all().states.values())

    @property
    def columns(self) -> list[Tensor]:
        """The saved columns, by rows: keys [rows], vectors [rows, dim], states [rows, …]."""
        return [self.keys, self.weight, *self.states]

    def keeps(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether this process keeps the rows of keys, int64 [n]: bool [n]."""
        return self._processes.owns(torch.from_numpy(np.array(keys))).numpy()

    def touch(self, bags: DeviceBags) -> BatchRows:
        """The rows of a batch's keys, new ones made.

        All processes call it with the same batch. On a GPU the host waits for the number of rows.
        """
        keys, places = bags.distinct_keys if self.finds_distinct else (bags.keys, None)
        kept = self._kept(keys)
        rows = self.rows.find_or_add(keys if kept is None else keys[kept])
        vectors = self._vectors(rows, kept, len(keys))
        return BatchRows(rows, kept, vectors.requires_grad_(self.is_trainable), places)

    def pool(self, vectors: Tensor, places: Tensor | None, bags: DeviceBags, combiner: str) -> Tensor:
        """[lists, embedding_dim] of a process's own samples; zeros where a list is empty.

        Args:
            vectors: [any, embedding_dim].
            places: int64 [n], which vector each key of the batch has; as `BatchRows.places`.
            combiner: `sum` or `mean`.
        """
        if places is None:
            return self._pool_all(vectors, bags, combiner)
        own = places[bags.own]
        if bags.width == 1:
            return _GatherFunction.apply(vectors, own)
        if bags.width:
            return functional.embedding_bag(own.view(-1, bags.width), vectors, mode=combiner)
        return functional.embedding_bag(own, vectors, bags.offsets, mode=combiner, include_last_offset=True)

    def find(self, bags: DeviceBags) -> tuple[Tensor, Tensor]:
        """Vectors, [any, embedding_dim], and which of them each key of a batch has, int64 [n].

        Keys that were never trained on have zeros, as serving answers them. All processes call it with the same batch.
        """
        if self._processes.count == 1:
            return self.rows.vectors[: self.num_rows + 1], self.rows.find(bags.keys)
        keys, places = bags.distinct_keys
        kept = self._kept(keys)
        return self._vectors(self.rows.find(keys[kept]), kept, len(keys)), places

    def update(self, touched: BatchRows, gradient: Tensor, lr: float) -> None:
        """One step of the optimizer, given the gradients of `touched.vectors`, which may be overwritten."""
        self.rows.steps += 1
        self.rule.lr = lr
        if self._is_changed is not None:
            if len(self._is_changed) < len(self.rows.vectors):
                self._is_changed = longer(self._is_changed, len(self.rows.vectors), 0)
            self._is_changed[slice(1, self.num_rows + 1) if self._moves_all else touched.rows] = True
        gradient = gradient if touched.kept is None else gradient[touched.kept]
        if self._moves_all:
            used = self.rows.all()
            gradient = add_up(self.num_rows, touched.rows - 1, gradient)
            self.rule.update(used.vectors, gradient, used.states, self.rows.steps)
        else:
            self.rows.learn(touched.rows, gradient.contiguous(), are_distinct=touched.places is not None)

    def track_changes(self) -> None:
        """Note from now on which rows change."""
        self._is_changed = torch.zeros(len(self.rows.vectors), dtype=torch.bool, device=self._device)

    def take_changes(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Keys [n] and vectors [n, embedding_dim], kept by this process, that changed since the last call."""
        if self._is_changed is None:
            raise ValueError("track_changes comes first")
        rows = self._is_changed.nonzero().squeeze(1)
        self._is_changed.zero_()
        return self.rows.index.keys[rows].cpu().numpy(), self.rows.vectors[rows].cpu().numpy()

    def load(self, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Replace all rows by int64 [n] and float32 [n, embedding_dim], those of this process; states begin anew."""
        _, last = np.unique(keys[::-1], return_index=True)  # of rows with one key, the last is found when served
        order = np.sort(len(keys) - 1 - last)
        self.rows.clear()
        self.rows.put(Rows(torch.from_numpy(keys[order]), torch.from_numpy(vectors[order])))
        self.rows.steps = 0
        if self._is_changed is not None:
            self._is_changed.zero_()

    def rows_of(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 [n] to the rows that this process keeps, int64 [n]; 0 for other keys."""
        return self.rows.find(torch.from_numpy(keys).to(self._device)).cpu().numpy()

    def set_state(self, name: str, rows: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        """Set a state of some rows, as `rows_of` gives them, to [n, embedding_dim]."""
        places = torch.from_numpy(rows).to(self._device)
        self.rows.states[name].index_copy_(0, places, torch.from_numpy(values).to(self._device))

    def _pool_all(self, vectors: Tensor, bags: DeviceBags, combiner: str) -> Tensor:
        """As `pool`, of vectors that are those of the batch's keys, in their order."""
        if bags.width == 1:
            return vectors
        if bags.width:
            lists = vectors.view(-1, bags.width, self.embedding_dim)
            return lists.sum(dim=1) if combiner == "sum" else lists.mean(dim=1)
        places = torch.arange(len(vectors), device=self._device)
        return functional.embedding_bag(places, vectors, bags.offsets, mode=combiner, include_last_offset=True)

    def _kept(self, keys: Tensor) -> Any:
        """int64 [rows]: which keys this process keeps the rows of; None where it is the only one."""
        return None if self._processes.count == 1 else self._processes.owns(keys).nonzero().squeeze(1)

    def _vectors(self, rows: Tensor, kept: Tensor | None, num_keys: int) -> Tensor:
        """[num_keys, embedding_dim]: the vectors of a batch's distinct keys, each from the process that keeps it."""
        if kept is None:
            return self.rows.vectors.index_select(0, rows)
        vectors = self.rows.vectors.new_zeros((num_keys, self.embedding_dim))
        vectors[kept] = self.rows.vectors.index_select(0, rows)
        return self._processes.add_up(vectors)


class _TableRows(HashRows):
    """Rows whose first vectors follow from key and seed alone: the same on any number of processes."""

    def __init__(self, embedding_dim: int, rule: Rule, device: torch.device, seed: int) -> None:
        super().__init__(torch.empty((0, embedding_dim)), rule, device)
        self._seed = seed

    def initial_vectors(self, keys: Tensor) -> Tensor:
        """float32 [n, embedding_dim]"""
        columns = torch.arange(1, self.initial.shape[1] + 1, device=keys.device) * _ODD
        start = mixed_bits(torch.tensor(self._seed % 2**63))
        bits = mixed_bits(mixed_bits(keys + start)[:, None] + columns)
        fractions = (bits & ((1 << _FRACTION_BITS) - 1)).to(torch.float32) / (1 << _FRACTION_BITS)
        return (2.0 * fractions - 1.0) * _LIMIT


class _GatherFunction(torch.autograd.Function):
    """Vectors by their numbers. torch's own embedding sorts the numbers in backward, by a dozen of kernels on a GPU."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, places: Tensor) -> Tensor:
        """[any, embedding_dim] and int64 [n] to [n, embedding_dim]."""
        ctx.num_vectors, ctx.places = len(vectors), places
        return gather(vectors, places)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None]:
        """[vectors, dim]: the sum of the gradients, [n, dim], of each vector."""
        return add_up(ctx.num_vectors, ctx.places, gradients), None
