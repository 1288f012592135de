"""One look-up in a hash embedding, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hotrow.training.kernels import device_rows
from hotrow.training.row_access import add_up, gather


@dataclass(frozen=True)
class LookupResult:
    """The places of the vectors, and the receiver of their gradients."""

    table: Tensor
    """float32 [rows, embedding_dim]"""
    rows: Tensor | None
    """int64 [m]: the row in `table` of each distinct key; None where that is the number of the key."""
    num_keys: int
    """m, the distinct keys."""
    places: Tensor
    """int64 [n]: the number of each key among the distinct keys."""
    learn: Callable[[Tensor], None]
    """Takes the gradients of the distinct keys, [m, embedding_dim]."""
    new_sums: Callable[[], Tensor] | None = None
    """Makes the zeros to which gradients are added up, [m, embedding_dim]; None where they may be anywhere."""

    def learn_sums(
        self, places: Tensor, gradients: Tensor, sources: Tensor | int = 1, factors: Tensor | None = None
    ) -> None:
        """Learn the sums of the gradients of each distinct key; arguments as those of `add_up`."""
        sums = None if self.new_sums is None else self.new_sums()
        self.learn(add_up(self.num_keys, places, gradients, sources, factors, sums))

    def row_of_keys(self) -> Tensor:
        """int64 [n]: the row in `table` of each key."""
        return self.places if self.rows is None else self.rows[self.places]

    def of_distinct(self) -> LookupResult:
        """The look-up of each distinct key once."""
        return replace(self, places=torch.arange(self.num_keys, device=self.places.device))

    def vectors(self) -> Tensor:
        """float32 [m, embedding_dim], of the distinct keys."""
        return self.table if self.rows is None else gather(self.table, self.rows)

    def place_of(self, keys: Tensor, key: int) -> int | None:
        """The distinct key that this key is, if it is among the keys, int64 [n]."""
        found = self.places[keys == key]
        return int(found[0]) if len(found) else None


class Vectors(torch.autograd.Function):
    """The vector of each key."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, look_up: LookupResult) -> Tensor:
        """`anchor`: a tensor that has a gradient, as the rows themselves are no tensors of autograd."""
        ctx.look_up = look_up
        ctx.save_for_backward(look_up.places)
        return gather(look_up.table, look_up.row_of_keys())

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[None, None]:
        """Passes the sum of each distinct key's gradients, [n, dim], to the learner."""
        look_up = ctx.look_up
        (places,) = ctx.saved_tensors  # raises where a graph that was not retained goes backward again
        look_up.learn_sums(places, gradients)
        return None, None


@dataclass(frozen=True)
class Bags:
    """Which keys are together."""

    begins: Tensor | int
    """int64 [bags + 1]; or how many keys each bag has, at least 1."""
    num_bags: int
    num_keys: int
    mode: str
    padding: int | None
    """The distinct key that takes no part."""

    def pool(self, rows: Tensor, table: Tensor, weights: Tensor | None) -> Tensor:
        """[bags, embedding_dim] of rows [n] of a table; `padding` is a row of it."""
        if not self.num_keys:  # zeros that have gradients, as in other batches
            nothing = table[:0].sum() if weights is None else table[:0].sum() + weights.sum()
            return nothing + table.new_zeros((self.num_bags, table.shape[1]))
        options: dict[str, Any] = {"mode": self.mode, "per_sample_weights": weights, "include_last_offset": True}
        begins = self.begins
        if isinstance(begins, int):
            begins = torch.arange(self.num_bags + 1, device=rows.device).mul_(begins)
        return functional.embedding_bag(rows, table, begins, padding_idx=self.padding, **options)

    def pool_by_kernel(self, look_up: LookupResult, weights: Tensor | None) -> Tensor:
        """As `pool`, not of maxima, where `device_rows` has kernels."""
        is_mean = self.mode == "mean"
        factors = self._present(look_up.places) if is_mean else self.factors(look_up.places, weights)
        factors = None if factors is None else factors.contiguous()
        pooled = look_up.table.new_empty((self.num_bags, look_up.table.shape[1]))
        begins = self.begins if isinstance(self.begins, int) else self.begins.contiguous()
        device_rows.pool(pooled, begins, look_up.places, factors, look_up.table, look_up.rows, is_mean=is_mean)
        return pooled

    def bag_of_keys(self) -> Tensor | int:
        """int64 [n]; or how many keys each bag has."""
        if isinstance(self.begins, int):
            return self.begins
        counts = self.begins.diff()
        bags = torch.arange(len(counts), device=counts.device)
        return torch.repeat_interleave(bags, counts, output_size=self.num_keys)  # without it, the host awaits the GPU

    def factors(self, places: Tensor, weights: Tensor | None) -> Tensor | None:
        """float32 [n]: the part of each vector in its bag; None where all are 1. Not for maxima."""
        present = self._present(places)
        if self.mode == "mean":
            counted = torch.ones(self.num_keys, device=places.device) if present is None else present
            bag_of_keys = self.bag_of_keys()
            if isinstance(bag_of_keys, int):
                by_bag = counted.view(self.num_bags, bag_of_keys)
                return (by_bag / by_bag.sum(1, keepdim=True).clamp(min=1)).view(-1)
            counts = counted.new_zeros(self.num_bags).index_add_(0, bag_of_keys, counted)
            return counted / counts.clamp(min=1)[bag_of_keys]
        if weights is None or present is None:
            return present if weights is None else weights
        return weights * present

    def _present(self, places: Tensor) -> Tensor | None:
        """float32 [n]: 1, and 0 for the key that takes no part; None where all take part."""
        return None if self.padding is None else (places != self.padding).to(torch.float32)


class PoolFunction(torch.autograd.Function):
    """Sums or means of bags."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, look_up: LookupResult, bags: Bags, weights: Tensor | None) -> Tensor:
        """As `Vectors`."""
        ctx.look_up, ctx.bags, ctx.weights = look_up, bags, weights
        ctx.save_for_backward(look_up.places)
        if device_rows.can_run(look_up.places.device):
            return bags.pool_by_kernel(look_up, weights)
        if bags.padding is None:
            return bags.pool(look_up.row_of_keys(), look_up.table, weights)
        return bags.pool(look_up.places, look_up.vectors(), weights)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[None, None, None, None]:
        """As `Vectors`."""
        look_up, bags = ctx.look_up, ctx.bags
        (places,) = ctx.saved_tensors
        factors = bags.factors(places, ctx.weights)
        look_up.learn_sums(places, gradients, bags.bag_of_keys(), factors)
        return None, None, None, None
