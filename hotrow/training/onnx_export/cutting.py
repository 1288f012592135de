"""Finds the modules of a model that are look-ups, and replaces them by stand-ins while the rest is traced.

Look-ups are cut out at the boundary of a module: its inputs are ids, its outputs are vectors. A stand-in does
the same by operators that the importer of ONNX models takes for look-ups (a gather, a product, a sum), on a tensor that
only has the table's shape.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hotrow.training.hash_embeddings.embedding import HashEmbedding, HashEmbeddingBag
from hotrow.training.hash_embeddings.table import HashTable
from hotrow.training.onnx_export.collisions import check_supported, known_ids, num_shards, preprocess, shards_of
from hotrow.training.tables import KnownKeys, Table, local_shards
from inference_session.errors import UnsupportedModelError


@dataclass
class Cut:
    """A module that is cut out."""

    path: str
    module: nn.Module
    tables: list[Table]
    stand_in: Callable[[Cut], nn.Module]
    order: list[str] = field(default_factory=list)
    """Names of the vectors in the order in which the live module outputs them; empty until it has run."""


def find_cuts(model: nn.Module) -> list[Cut]:
    """The modules to be cut out, in the model's order; tables have distinct names.

    Raises:
        UnsupportedModelError: a module with a table cannot be cut out; names it by its path.
    """
    cuts = list(_find(model, "", set()))
    if not cuts:
        raise UnsupportedModelError(
            "the model has no embedding table; export it with torch.onnx and import that with `hotrow import onnx`"
        )
    _name_apart(cuts)
    return cuts


def _find(module: nn.Module, path: str, seen: set[int]) -> Iterator[Cut]:
    if id(module) in seen:
        return
    seen.add(id(module))
    if (cut := _cut(module, path)) is not None:
        yield cut
        return
    for name, child in module.named_children():
        yield from _find(child, f"{path}.{name}" if path else name, seen)


def _cut(module: nn.Module, path: str) -> Cut | None:
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return _cut_plain(module, path)
    if isinstance(module, HashTable):
        return _cut_hashed(module, path)
    if "torchrec" not in sys.modules:
        return None
    kind = _torchrec_kind(module)
    if kind is None:
        if type(module).__module__.startswith("torchrec.distributed.") and hasattr(module, "_lookups"):
            raise UnsupportedModelError(f"{path}: a {type(module).__name__} is not supported as an embedding table")
        return None
    if kind in ("mc_bags", "mc_lists"):
        return _cut_collisions(module, path, bags=kind == "mc_bags")
    return _cut_collection(module, path, bags=kind == "bags")


def _name_apart(cuts: list[Cut]) -> None:
    """Tables have the names of their config; of two with one name, the later one is prefixed by its module's path."""
    taken: dict[str, Table] = {}
    for cut in cuts:
        for table in cut.tables:
            if taken.setdefault(table.name, table) is not table:
                table.name = f"{cut.path}.{table.name}"
                taken[table.name] = table


# torch.nn


def _cut_plain(module: nn.Embedding | nn.EmbeddingBag, path: str) -> Cut:
    base = nn.Embedding if isinstance(module, nn.Embedding) else nn.EmbeddingBag
    _check_forward(module, base, path)
    if module.max_norm is not None:
        raise UnsupportedModelError(
            f"{_where(module, path)} is not supported as an embedding table: max_norm changes rows as they are read"
        )
    weight = module.weight
    table = Table(
        name=path or "embedding",
        path=path,
        num_rows=weight.shape[0],
        embedding_dim=weight.shape[1],
        dtype=weight.dtype,
        weight=lambda: module.weight,
        device=_device(weight),
    )
    kind = EmbeddingStandIn if base is nn.Embedding else BagStandIn
    return Cut(path, module, [table], lambda cut: kind(cut.module, cut.tables[0]))


def _check_forward(module: nn.Module, base: type[nn.Module], path: str) -> None:
    if type(module).forward is not base.forward:
        raise UnsupportedModelError(
            f"{_where(module, path)} is not supported as an embedding table: its class overrides forward"
        )


def _where(module: nn.Module, path: str) -> str:
    return f"{path or 'the model'} ({type(module).__name__})"


def _cut_hashed(module: HashTable, path: str) -> Cut:
    base = HashEmbedding if isinstance(module, HashEmbedding) else HashEmbeddingBag
    _check_forward(module, base, path)

    def known() -> KnownKeys:
        keys = module.rows().keys
        rows = torch.arange(1, len(keys) + 1, device=keys.device)
        return KnownKeys(keys, rows, unknown_row=0, num_served=len(keys))

    table = Table(
        name=path or "embedding",
        path=path,
        num_rows=len(module),
        embedding_dim=module.embedding_dim,
        dtype=torch.float32,
        weight=module.numbered_vectors,
        device=module.device,
        known=known,
        hash_table=module,
    )
    kind = EmbeddingStandIn if base is HashEmbedding else BagStandIn
    return Cut(path, module, [table], lambda cut: kind(cut.module, cut.tables[0]))


def _device(weight: Any) -> torch.device:
    return weight.to_local().device if hasattr(weight, "to_local") else weight.device


class _StandIn(nn.Module):
    """Replaces a module of one table, whose attributes it has."""

    def __init__(self, original: Any, table: Table) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = table.num_rows, table.embedding_dim
        self.padding_idx = original.padding_idx
        self._table, self._answered = table, _answered(original)

    @property
    def weight(self) -> Tensor:
        """The whole table; the importer refuses a model that uses it other than by rows."""
        return _weights(self._table)


class EmbeddingStandIn(_StandIn):
    """Replaces an nn.Embedding."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name that torch gives it
        """Int [any shape] to [the same, embedding_dim]."""
        vectors = functional.embedding(_indices(input), self.weight)
        return vectors.to(self._answered or vectors.dtype)


class BagStandIn(_StandIn):
    """Replaces an nn.EmbeddingBag."""

    def __init__(self, original: Any, table: Table) -> None:
        super().__init__(original, table)
        self.mode, self.include_last_offset = original.mode, original.include_last_offset

    def forward(
        self,
        input: Tensor,  # noqa: A002  the name that torch gives it
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """As nn.EmbeddingBag."""
        pooled = self._pooled(_indices(input), offsets, per_sample_weights)
        return pooled.to(self._answered or pooled.dtype)

    def _pooled(self, keys: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Tensor:
        present = None if self.padding_idx is None else keys != self.padding_idx
        if keys.dim() == 2:
            return self._matrix(keys, present, weights)
        if offsets is None:
            raise UnsupportedModelError(f"{self._table.path}: a list of ids needs offsets")
        if _in_the_example(keys.shape[0]) == _in_the_example(offsets.shape[0]):
            raise UnsupportedModelError(
                f"{self._table.path}: the example has as many ids as offsets; give one with two lists or more in which "
                "these numbers differ"
            )
        bounds = offsets
        if not self.include_last_offset:
            # Part of the offsets, and the end behind them, would let torch ask for three lists or more.
            bounds = torch.cat([offsets, offsets.new_full((1,), 1) * keys.shape[0]])
        return self._lists(keys, bounds[:-1], bounds[1:], present, weights)

    def _matrix(self, keys: Tensor, present: Tensor | None, weights: Tensor | None) -> Tensor:
        vectors = functional.embedding(keys, self.weight)
        if self.mode == "max":
            if present is None:
                return vectors.amax(1)
            lowest = torch.where(present[..., None], vectors, -torch.inf).amax(1)
            return torch.where(present.any(1, keepdim=True), lowest, 0.0)
        if present is None and weights is None:
            return vectors.sum(1) if self.mode == "sum" else vectors.mean(1)
        factors = _product(present, weights, vectors.dtype)
        if self.mode == "mean" and present is not None and factors is not None:
            factors = factors / present.sum(1, keepdim=True).clamp(min=1)
        return vectors.sum(1) if factors is None else (vectors * factors[..., None]).sum(1)

    def _lists(
        self, keys: Tensor, begins: Tensor, ends: Tensor, present: Tensor | None, weights: Tensor | None
    ) -> Tensor:
        if self.mode == "max":
            raise UnsupportedModelError(f"{self._table.path}: the maximum over lists with offsets is not supported")
        factors = _product(present, weights, self.weight.dtype)
        pooled = pool_lists(_factored(functional.embedding(keys, self.weight), factors), begins, ends)
        if self.mode == "sum":
            return pooled
        counts = ends - begins
        if present is not None:
            before = functional.pad(present.to(torch.int64).cumsum(0), (1, 0))  # keys in front of each place
            counts = before[ends] - before[begins]
        return pooled / counts.clamp(min=1)[:, None]


def _in_the_example(size: int | torch.SymInt) -> int:
    """A size as it is in the example that is traced; to compare open sizes themselves would limit them."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _answered(original: nn.Module) -> torch.dtype | None:
    """The type of the vectors that a hash embedding answers, whose rows are float32; None: that of the rows."""
    return original.vector_dtype if isinstance(original, HashTable) else None


def _indices(keys: Tensor) -> Tensor:
    """Keys of a type that look-ups of torch and ONNX take; hash embeddings take every type of integers."""
    return keys if keys.dtype in (torch.int32, torch.int64) else keys.to(torch.int64)


def _product(present: Tensor | None, weights: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if present is None or weights is None:
        return weights if present is None else present.to(dtype)
    return weights * present.to(dtype)


def _factored(vectors: Tensor, factors: Tensor | None) -> Tensor:
    return vectors if factors is None else vectors * factors[:, None]


def _weights(table: Table) -> Tensor:
    if table.placeholder is None:
        raise UnsupportedModelError(f"{table.path}: read outside of the traced network")
    return table.placeholder


def pool_lists(vectors: Tensor, begins: Tensor, ends: Tensor) -> Tensor:
    """Sums over concatenated lists, as one operator; dense_network.py says what it becomes in ONNX."""
    pooled: Tensor = torch.onnx.ops.symbolic(
        "hotrow.training::PoolLists",
        (vectors, begins.to(torch.int64), ends.to(torch.int64)),
        dtype=vectors.dtype,
        shape=(begins.shape[0], vectors.shape[1]),
        version=1,
    )
    return pooled


# TorchRec


def _torchrec_kind(module: nn.Module) -> str | None:
    from torchrec.distributed.embedding import ShardedEmbeddingCollection
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
    from torchrec.distributed.mc_embedding import ShardedManagedCollisionEmbeddingCollection
    from torchrec.distributed.mc_embeddingbag import ShardedManagedCollisionEmbeddingBagCollection
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
    from torchrec.modules.mc_embedding_modules import (
        ManagedCollisionEmbeddingBagCollection,
        ManagedCollisionEmbeddingCollection,
    )

    kinds = {
        "bags": (EmbeddingBagCollection, ShardedEmbeddingBagCollection),
        "lists": (EmbeddingCollection, ShardedEmbeddingCollection),
        "mc_bags": (ManagedCollisionEmbeddingBagCollection, ShardedManagedCollisionEmbeddingBagCollection),
        "mc_lists": (ManagedCollisionEmbeddingCollection, ShardedManagedCollisionEmbeddingCollection),
    }
    return next((kind for kind, classes in kinds.items() if type(module) in classes), None)


def table_configs(module: Any, *, bags: bool) -> list[Any]:
    """TorchRec's own descriptions of a collection's tables."""
    return list(module._embedding_bag_configs if bags else module._embedding_configs)


def _cut_collection(module: Any, path: str, *, bags: bool) -> Cut:
    configs = table_configs(module, bags=bags)
    tables = [_table(module, config, path, bags=bags) for config in configs]
    return Cut(path, module, tables, lambda cut: CollectionStandIn(cut, configs, module, bags=bags))


def _cut_collisions(module: Any, path: str, *, bags: bool) -> Cut:
    if module._return_remapped_features:
        raise UnsupportedModelError(
            f"{path} is not supported as an embedding table: return_remapped_features returns row numbers"
        )
    inner = module._embedding_module
    configs = table_configs(inner, bags=bags)
    tables = [_table(inner, config, f"{path}._embedding_module", bags=bags) for config in configs]
    for table, config in zip(tables, configs, strict=True):
        collisions = module._managed_collision_collection._managed_collision_modules[config.name]
        check_supported(collisions, f"{path}._managed_collision_collection: {config.name!r}")
        table.known, table.prepare = partial(known_ids, collisions), partial(preprocess, collisions)
        if num_shards(collisions) > 1:
            table.shards_of = partial(shards_of, collisions)

    def stand_in(cut: Cut) -> nn.Module:
        return CollisionsStandIn(CollectionStandIn(cut, configs, inner, bags=bags))

    return Cut(path, module, tables, stand_in)


def _table(module: Any, config: Any, path: str, *, bags: bool) -> Table:
    name = f"{'embedding_bags' if bags else 'embeddings'}.{config.name}.weight"

    def weight() -> Any:
        return module.state_dict().get(name)

    if getattr(config, "use_virtual_table", False):
        raise UnsupportedModelError(
            f"{path}: table {config.name!r} is virtual (use_virtual_table), which is not supported"
        )
    now = weight()
    device = next((shard.tensor.device for shard in local_shards(now, path)), torch.device("cpu"))
    dtype = torch.float32 if now is None else now.dtype
    return Table(config.name, path, config.num_embeddings, config.embedding_dim, dtype, weight, device)


class CollectionStandIn(nn.Module):
    """Replaces TorchRec's collections of tables: pooled (bags), or a vector for each id (lists)."""

    def __init__(self, cut: Cut, configs: list[Any], module: Any, *, bags: bool) -> None:
        super().__init__()
        from torchrec.modules.embedding_modules import get_embedding_names_by_table

        self._bags = bags
        self._weighted = bool(getattr(module, "_is_weighted", False))
        self._need_indices = bool(getattr(module, "_need_indices", False))
        self._order = cut.order
        self._readings = [
            (name, feature, config, table)
            for config, table, names in zip(configs, cut.tables, get_embedding_names_by_table(configs), strict=True)
            for name, feature in zip(names, config.feature_names, strict=True)
        ]
        self._configs = configs

    def embedding_bag_configs(self) -> list[Any]:
        """As the original."""
        return self._configs

    embedding_configs = embedding_bag_configs

    def forward(self, features: Any) -> Any:
        """A KeyedTensor of pooled vectors, or a dict of jagged tensors."""
        lists = features.to_dict()
        if not self._bags:
            return {name: self._vectors(lists[feature], table) for name, feature, _, table in self._readings}
        from torchrec.sparse.jagged_tensor import KeyedTensor

        pooled = {name: self._pooled(lists[feature], *rest) for name, feature, *rest in self._readings}
        order = self._order or list(pooled)
        widths = [pooled[name].shape[1] for name in order]
        return KeyedTensor(keys=order, length_per_key=widths, values=torch.cat([pooled[n] for n in order], dim=1))

    def _pooled(self, lists: Any, config: Any, table: Table) -> Tensor:
        from hotrow.training.onnx_export.served_features import ServedMatrix

        means = config.pooling.name == "MEAN"
        if isinstance(lists, ServedMatrix) and (not table.has_keys or table.shards_of is not None):
            factors = lists.present.float()
            if self._weighted and lists.weight_matrix is not None:
                factors = factors * lists.weight_matrix
            if means:
                factors = factors / lists.lengths().clamp(min=1)[:, None]
            keys = torch.where(lists.present, lists.matrix, 0)
            return (_read(table, keys).float() * factors[..., None]).sum(1)
        counts = lists.lengths().to(torch.int64)
        ends = counts.cumsum(0)
        factors = lists.weights() if self._weighted else None
        vectors = _factored(_read(table, lists.values()).float(), factors)
        pooled = pool_lists(vectors, ends - counts, ends)
        return pooled / counts.clamp(min=1)[:, None] if means else pooled

    def _vectors(self, lists: Any, table: Table) -> Any:
        from hotrow.training.onnx_export.served_features import ServedLists, ServedMatrix

        if isinstance(lists, ServedMatrix) and not table.has_keys:
            keys = torch.where(lists.present, lists.matrix, 0)
            vectors = functional.embedding(keys, _weights(table)).float()
            return lists.with_values(vectors, lists.matrix if self._need_indices else None)
        values = lists.values()
        vectors = _read(table, values).float()
        return ServedLists(vectors, lists.lengths(), values if self._need_indices else None)


class CollisionsStandIn(nn.Module):
    """Replaces a collection with managed collisions."""

    def __init__(self, collection: CollectionStandIn) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, features: Any, mutate_miss_lengths: bool = True) -> tuple[Any, None]:
        """As the original: the output of the collection, and no remapped features."""
        return self.collection(features), None


def _read(table: Table, keys: Tensor) -> Tensor:
    if table.prepare is not None:
        keys = table.prepare(keys)
    vectors = functional.embedding(keys, _weights(table))
    if table.shards_of is None or table.unknown_vectors is None:
        return vectors
    unknown = functional.embedding(table.shards_of(keys), table.unknown_vectors)
    return torch.where(vectors[..., :1] == table.unknown_value, unknown, vectors)
