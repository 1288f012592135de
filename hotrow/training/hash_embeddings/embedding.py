"""`HashEmbedding` and `HashEmbeddingBag`: embeddings of any keys, without a vocabulary, that grow as they learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from hotrow.training.hash_embeddings.arguments import one_of
from hotrow.training.hash_embeddings.look_up import Bags, PoolFunction, Vectors
from hotrow.training.hash_embeddings.table import HashTable, eagerly
from inference_session.errors import ConfigurationError


class HashEmbedding(HashTable):
    """Replaces nn.Embedding where keys may have any value, and their number is not known.

        items = HashEmbedding(64, optimizer=Adagrad(0.05), initializer=partial(nn.init.normal_, std=0.01))
        vectors = items(keys)          # int64 [any shape] to float32 [the same, 64]

    A key gets a row when training first reads it. Rows learn in backward: the gradients of a row are summed over the
    whole batch, and the optimizer of the embedding is applied once; no optimizer of torch sees the rows. In
    `eval()` no rows are added, nothing is learned, and unknown keys are answered with zeros.

    In a job of several ranks, each rank looks up the keys of its batch, and the row of a key is on rank
    `key % world_size`; all ranks must look up and go backward the same number of times.
    """

    @eagerly
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name that torch gives it
        """Keys, integers of any shape, to vectors [the same, embedding_dim], float32 or what `.to` made of it.

        Raises:
            ConfigurationError: keys are not integers, or outside of `key_dtype`.
        """
        keys = self.checked(input)
        vectors = Vectors.apply(self._anchor(), self.look_up(keys))
        return vectors.reshape(*input.shape, self.embedding_dim).to(self._dtype)


class HashEmbeddingBag(HashTable):
    """Replaces nn.EmbeddingBag where keys may have any value, and their number is not known.

    Otherwise it is like `HashEmbedding`.
    """

    def __init__(
        self,
        embedding_dim: int,
        optimizer: Any = None,
        initializer: Callable[[Tensor], Any] = nn.init.normal_,
        *,
        mode: Literal["sum", "mean", "max"] = "mean",
        include_last_offset: bool = False,
        **options: Any,
    ) -> None:
        """As `HashEmbedding`, and:

        Args:
            mode: how the vectors of a bag become one.
            include_last_offset: whether `offsets` ends with the number of keys.
        """
        super().__init__(embedding_dim, optimizer, initializer, **options)
        self.mode, self.include_last_offset = one_of("mode", mode, ("sum", "mean", "max")), include_last_offset

    @eagerly
    def forward(
        self,
        input: Tensor,  # noqa: A002  the name that torch gives it
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Bags of keys to vectors [bags, embedding_dim], as `HashEmbedding`; an empty bag is zeros.

        Args:
            input: [bags, keys of each], or [keys] of all bags, concatenated.
            offsets: [bags], where each bag begins in `input`. Only for an `input` of one dimension.
            per_sample_weights: factors of the vectors, shaped as `input`; for sums.

        Raises:
            ConfigurationError: the arguments do not fit each other, or keys are outside of `key_dtype`.
        """
        keys = self.checked(input)
        weights = _weights(per_sample_weights, input, self.mode)
        weights = None if weights is None else weights.to(self.device)
        begins, num_bags = self._begins(input, offsets)
        look_up = self.look_up(keys)
        padding = None if self.padding_idx is None else look_up.place_of(keys, self.padding_idx)
        bags = Bags(begins, num_bags, len(keys), self.mode, padding)
        if self.mode == "max" or (weights is not None and weights.requires_grad):
            pooled = bags.pool(look_up.places, Vectors.apply(self._anchor(), look_up.of_distinct()), weights)
        else:
            pooled = PoolFunction.apply(self._anchor(), look_up, bags, weights)
        return pooled.to(self._dtype)

    def _begins(self, keys: Tensor, offsets: Tensor | None) -> tuple[Tensor | int, int]:
        """Where bags begin, int64 [bags + 1], or how many keys each has; and the number of bags."""
        if keys.dim() == 2:
            if offsets is not None:
                raise ConfigurationError("keys of two dimensions are bags already; give no offsets with them")
            num_bags, width = keys.shape
            return width or torch.zeros(num_bags + 1, dtype=torch.int64, device=self.device), num_bags
        if keys.dim() != 1 or offsets is None:
            raise ConfigurationError(f"keys of {keys.dim()} dimensions: give [bags, keys], or [keys] with offsets")
        if not isinstance(offsets, Tensor) or offsets.dim() != 1 or offsets.dtype not in (torch.int64, torch.int32):
            raise ConfigurationError("offsets are a tensor of one dimension, int64 or int32; give such a tensor")
        begins = offsets.to(torch.int64)
        if not self.include_last_offset:
            begins = functional.pad(begins, (0, 1), value=len(keys))
        counts = begins.diff()
        if not len(begins) or bool((begins[0] != 0) | (begins[-1] != len(keys)) | (counts < 0).any()):
            raise ConfigurationError(
                f"offsets must begin with 0, never decrease, and not exceed {len(keys)}, the number of keys"
                f"{', with which they end as include_last_offset is True' if self.include_last_offset else ''}"
            )
        return begins.to(self.device), len(begins) - 1


def _weights(weights: Tensor | None, keys: Tensor, mode: str) -> Tensor | None:
    if weights is None:
        return None
    if mode != "sum":
        raise ConfigurationError(f"per_sample_weights are for sums; the mode is {mode!r}")
    if weights.shape != keys.shape:
        raise ConfigurationError(
            f"per_sample_weights have shape {list(weights.shape)}, the keys {list(keys.shape)}; both must be the same"
        )
    return weights.to(torch.float32).reshape(-1)
