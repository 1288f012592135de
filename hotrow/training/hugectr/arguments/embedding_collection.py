"""HugeCTR's embedding collections, of releases 3.8 and later, as the embedding and dense layers that they equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from hotrow.training.checks import check, member, whole
from hotrow.training.hugectr.arguments.enums import CommunicationStrategy, CompressionStrategy, Embedding_t, Layer_t
from hotrow.training.hugectr.arguments.parameters import (
    DataReaderSparseParam,
    DenseLayer,
    Input,
    OptParamsPy,
    SparseEmbedding,
)
from inference_session.errors import ConfigurationError, UnsupportedModelError

_COMBINERS = {"sum": "sum", "average": "mean", "mean": "mean", "concat": "concat"}


@dataclass(frozen=True)
class EmbeddingTableConfig:
    """A table. It grows with the keys it meets: `max_vocabulary_size`, -1 for any number, has no effect.

    Releases before 4.2 name it by `table_id`, and its optimizer by `opt_params_py`; `min_key` and `max_key` have no
    effect.
    """

    name: str = ""
    max_vocabulary_size: int = -1
    ev_size: int = 0
    opt_params_or_empty: OptParamsPy | None = None
    init_param_or_empty: Any = None
    table_id: int | None = field(default=None, kw_only=True)
    min_key: int | None = field(default=None, kw_only=True)
    max_key: int | None = field(default=None, kw_only=True)
    opt_params_py: OptParamsPy | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.table_id is not None and not self.name:
            object.__setattr__(self, "name", str(self.table_id))
        check(isinstance(self.name, str) and bool(self.name), "EmbeddingTableConfig: name", self.name, "text")
        for name, least in (("max_vocabulary_size", -1), ("ev_size", 1)):
            whole(f"EmbeddingTableConfig {self.name!r}: {name}", getattr(self, name), least)
        if self.init_param_or_empty is not None:
            raise UnsupportedModelError(
                f"EmbeddingTableConfig {self.name!r}: init_param_or_empty is not supported; leave it out: new rows are "
                "drawn evenly between -0.05 and 0.05"
            )

    @property
    def optimizer(self) -> OptParamsPy | None:
        """Its own optimizer, if it has one."""
        return self.opt_params_or_empty or self.opt_params_py


@dataclass(frozen=True)
class EmbeddingTablePlaceHolder:
    """A table of release 3.7, whose look-ups have two dimensions. The vocabulary and the keys have no effect."""

    id_space: int
    max_vocabulary_size: int
    ev_size: int
    min_key: int
    max_key: int
    opt_params_py: OptParamsPy | None = None

    def __post_init__(self) -> None:
        whole("EmbeddingTablePlaceHolder: id_space", self.id_space, 0)

    @property
    def config(self) -> EmbeddingTableConfig:
        """The same table in later releases."""
        return EmbeddingTableConfig(str(self.id_space), self.max_vocabulary_size, self.ev_size, self.opt_params_py)


@dataclass(frozen=True)
class _EmbeddingLookup:
    table: EmbeddingTableConfig
    bottom: str
    top: str
    combiner: str
    """As the caller said."""
    is_flat: bool = False
    """Whether its output has two dimensions, as in release 3.7."""

    def num_vectors(self, data: Input) -> int:
        """How many vectors are side by side in its output."""
        return self._sparse(data).nnz_per_slot[0] if self.combiner == "concat" else 1

    def layers(self, data: Input) -> tuple[SparseEmbedding, list[DenseLayer]]:
        """The embedding layer, and the dense layers, with the same output: [samples, 1, ev_size * num_vectors], or
        without the dimension of one.
        """
        self._check_slots(data)
        count, combiner = self.num_vectors(data), _COMBINERS[self.combiner]
        is_same = count == 1 and not self.is_flat
        by_key = self.top if is_same else f"{self.top}_keys"
        embedding = SparseEmbedding(
            Embedding_t.DistributedSlotSparseEmbeddingHash, 0, self.table.ev_size,
            "sum" if combiner == "concat" else combiner, by_key, self.bottom,
            optimizer=self.table.optimizer, table=self.table.name,
        )  # fmt: skip
        if is_same:
            return embedding, []
        width, steps = count * self.table.ev_size, 0 if self.is_flat else 1
        return embedding, [DenseLayer(Layer_t.Reshape, [by_key], [self.top], time_step=steps, leading_dim=width)]

    def _sparse(self, data: Input) -> DataReaderSparseParam:
        sparse = {item.top_name: item for item in data.data_reader_sparse_param_array}
        if self.bottom not in sparse:
            raise ConfigurationError(f"{self}: no sparse input {self.bottom!r} in Input; there are {sorted(sparse)}")
        return sparse[self.bottom]

    def _check_slots(self, data: Input) -> None:
        sparse = self._sparse(data)
        if sparse.slot_num != 1:
            raise ConfigurationError(
                f"{self}: {self.bottom!r} has {sparse.slot_num} slots; sparse inputs of embedding "
                "collections have slot_num 1"
            )
        if sparse.keys_are_slots and self.combiner != "concat":
            raise UnsupportedModelError(
                f"{self}: {self.combiner!r} of {self.bottom!r}, which another look-up reads with 'concat', is not "
                "supported; use 'concat' and a layer behind it"
            )

    def __str__(self) -> str:
        return f"embedding_lookup (top_name {self.top!r})"


class EmbeddingCollectionConfig:
    """Look-ups in tables, which several look-ups may share. `use_exclusive_keys` and `comm_strategy` have no effect."""

    def __init__(
        self, use_exclusive_keys: bool = False, comm_strategy: CommunicationStrategy = CommunicationStrategy.Uniform
    ) -> None:
        member("EmbeddingCollectionConfig: comm_strategy", comm_strategy, CommunicationStrategy)
        self._look_ups: list[_EmbeddingLookup] = []
        self._joined_top = ""
        """The one tensor with the outputs of all look-ups, where the caller gave lists; else empty."""

    def embedding_lookup(
        self,
        table_config: EmbeddingTableConfig | Sequence[EmbeddingTableConfig],
        bottom_name: str | Sequence[str],
        top_name: str,
        combiner: str | Sequence[str],
    ) -> None:
        """Add a look-up, whose top is [samples, 1, ev_size]; or several by lists, whose one top has all side by side.

        Raises:
            ConfigurationError: a combiner, or lists of different lengths, or lists after another look-up.
        """
        if isinstance(table_config, EmbeddingTableConfig):
            self._add_one(table_config, str(bottom_name), top_name, str(combiner))
            return
        tables, bottoms, combiners = list(table_config), list(bottom_name), list(combiner)
        if isinstance(bottom_name, str) or isinstance(combiner, str):
            raise ConfigurationError(
                f"embedding_lookup (top_name {top_name!r}): with a list of tables, bottom_name and combiner are lists"
            )
        if self._look_ups or not len(tables) == len(bottoms) == len(combiners) > 0:
            raise ConfigurationError(
                f"embedding_lookup (top_name {top_name!r}): {len(tables)} tables, {len(bottoms)} bottom_name, "
                f"{len(combiners)} combiner; lists need one each, and are all look-ups of their collection"
            )
        self._joined_top = top_name
        for i, (table, bottom, each) in enumerate(zip(tables, bottoms, combiners, strict=True)):
            self._add(table, bottom, f"{top_name}_look_up{i}", each)

    def shard(
        self,
        shard_matrix: Sequence[Sequence[str]],
        shard_strategy: Sequence[tuple[str, Sequence[str | tuple[str, int]]]],
        compression_strategy: Mapping[CompressionStrategy, Sequence[str]] | None = None,
    ) -> None:
        """Where HugeCTR keeps rows: without effect. ConfigurationError: no such table or strategy."""
        for kind, _ in shard_strategy:
            check(kind in ("mp", "dp"), "shard: strategy", kind, "'mp', 'dp'")
        named = [name for names in shard_matrix for name in names]
        named += [each if isinstance(each, str) else each[0] for _, names in shard_strategy for each in names]
        named += [name for names in (compression_strategy or {}).values() for name in names]
        if unknown := sorted({*named} - {*self.table_names}):
            raise ConfigurationError(f"shard: no table {unknown}; there are {list(self.table_names)}")

    @property
    def table_names(self) -> tuple[str, ...]:
        """Its tables, in the order of their first look-ups."""
        return tuple(dict.fromkeys(look_up.table.name for look_up in self._look_ups))

    def data(self, data: Input) -> Input:
        """The data layer as its look-ups read it: inputs of `concat` have a slot for each key.

        Raises:
            ConfigurationError: `data` lacks a sparse input.
        """
        several = {look_up.bottom for look_up in self._look_ups if look_up.num_vectors(data) > 1}
        read = copy(data)
        read.data_reader_sparse_param_array = [copy(item) for item in data.data_reader_sparse_param_array]
        for item in read.data_reader_sparse_param_array:
            item.keys_are_slots |= item.top_name in several
        return read

    def layers(self, data: Input) -> tuple[list[SparseEmbedding], list[DenseLayer]]:
        """One embedding layer for each look-up; and the dense layers that put their outputs side by side, if any.

        Raises:
            ConfigurationError: `data` lacks a sparse input, or it has several slots.
            UnsupportedModelError: `concat` and another combiner of one sparse input with several keys.
        """
        found = [look_up.layers(data) for look_up in self._look_ups]
        embeddings, layers = [embedding for embedding, _ in found], [layer for _, each in found for layer in each]
        if not self._joined_top:
            return embeddings, layers
        tops, side_by_side = [look_up.top for look_up in self._look_ups], f"{self._joined_top}_look_ups"
        width = sum(look_up.table.ev_size * look_up.num_vectors(data) for look_up in self._look_ups)
        return embeddings, [
            *layers,
            DenseLayer(Layer_t.Concat, tops, [side_by_side], axis=2),
            DenseLayer(Layer_t.Reshape, [side_by_side], [self._joined_top], leading_dim=width),
        ]

    def _add_one(
        self, table: EmbeddingTableConfig, bottom: str, top: str, combiner: str, *, is_flat: bool = False
    ) -> None:
        if self._joined_top:
            raise ConfigurationError(
                f"embedding_lookup: {self._joined_top!r} has all outputs of this collection; make another for more"
            )
        self._add(table, bottom, top, combiner, is_flat=is_flat)

    def _add(self, table: EmbeddingTableConfig, bottom: str, top: str, combiner: str, *, is_flat: bool = False) -> None:
        owner = f"embedding_lookup (top_name {top!r})"
        check(combiner in _COMBINERS, f"{owner}: combiner", combiner, str(sorted(_COMBINERS)))
        same = [look_up.table for look_up in self._look_ups if look_up.table.name == table.name]
        if same and same[0] != table:
            raise ConfigurationError(f"{owner}: two tables have the name {table.name!r}")
        self._look_ups.append(_EmbeddingLookup(table, bottom, top, combiner, is_flat))


class EmbeddingPlanner(EmbeddingCollectionConfig):
    """Makes an embedding collection in releases before 4.2."""

    def embedding_lookup(
        self,
        table_config: Any = None,
        bottom_name: str | Sequence[str] = "",
        top_name: str = "",
        combiner: str | Sequence[str] = "",
        *,
        emb_table: EmbeddingTablePlaceHolder | None = None,
    ) -> None:
        """As in `EmbeddingCollectionConfig`; with a table of release 3.7, the top has no dimension of one.

        Raises:
            ConfigurationError: as there.
        """
        table = table_config if emb_table is None else emb_table
        if not isinstance(table, EmbeddingTablePlaceHolder):
            super().embedding_lookup(table, bottom_name, top_name, combiner)
        else:
            self._add_one(table.config, str(bottom_name), top_name, str(combiner), is_flat=True)

    def create_embedding_collection(self, *_plan: Any, **_named: Any) -> EmbeddingCollectionConfig:
        """The collection of its look-ups. A plan, which says where HugeCTR keeps rows, has no effect."""
        return self
