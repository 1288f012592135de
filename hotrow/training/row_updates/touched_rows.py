"""Notes which rows training reads, on the rank that holds them, by hooks on the modules that look them up.

TorchRec's own tracker is not used: its ids are local to a shard, it must not be read twice, it knows no managed
collisions, and where it is switched on changes with its releases. What is hooked here are plain modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hotrow.training.hash_embeddings.table import HashTable
from hotrow.training.model_notes import is_exporting
from hotrow.training.onnx_export.cutting import Cut
from hotrow.training.tables import Table
from inference_session.errors import UnsupportedModelError

_MAX_NOTED = 4 << 20
"""The most ids that are kept with duplicates; beyond it, each is kept once."""


class NotedRows:
    """Numbers or keys of rows that were noted since the last `take`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: list[Tensor] = []
        self._num_noted = 0

    def note(self, rows: Tensor) -> None:
        """Integers, duplicates among them. Kept as they are: the caller must not change them later."""
        if rows.numel():
            self._rows.append(rows.detach().reshape(-1))
            self._num_noted += rows.numel()
        if self._num_noted > _MAX_NOTED:
            self._rows = [self.seen()]
            self._num_noted = self._rows[0].numel() // 2  # so that few new ones do not sort all of them again

    def take(self) -> Tensor:
        """int64, ascending, each once; forgets them."""
        rows = self.seen()
        self._rows, self._num_noted = [], 0
        return rows

    def seen(self) -> Tensor:
        """The same as `take`, without forgetting them."""
        if not self._rows:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        return torch.unique(torch.cat([rows.to(torch.int64) for rows in self._rows]))


class TouchedRows(NotedRows):
    """The rows of one table that were read, by their numbers in the whole table; of a hash embedding, their keys."""

    def __init__(self, table: Table) -> None:
        super().__init__(table.device)
        self.table = table
        self.gone = NotedRows(table.device)
        """Keys of a hash embedding that have lost their rows."""
        self.are_own = False
        """Whether they are rows that this rank holds; else it may have read rows that another holds."""


class Watch:
    """Hooks on all look-ups of a model. Rows read without gradients, or for an export, do not count as touched."""

    def __init__(self, cuts: Sequence[Cut]) -> None:
        tables = {id(table): TouchedRows(table) for cut in cuts for table in cut.tables}
        self.touched = list(tables.values())
        """The touched rows of every table, in the order of the cuts."""
        self._hooks: list[Any] = []
        try:
            for cut in cuts:
                self._hooks += _hooked(cut, tables)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            with suppress(KeyError):
                hook.remove()
        self._hooks = []


def _hooked(cut: Cut, touched: dict[int, TouchedRows]) -> Iterator[Any]:
    module: Any = getattr(cut.module, "_embedding_module", cut.module)
    if isinstance(module, HashTable):
        yield module.listen(_noting_keys(touched[id(cut.tables[0])]))
    elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        yield _hook(module, touched[id(cut.tables[0])])
    elif hasattr(module, "_lookups"):
        by_name = {_config_name(table, cut): touched[id(table)] for table in cut.tables}
        for lookup in module._lookups:
            inner = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
            for kernel in inner._emb_modules:
                yield kernel.register_forward_pre_hook(_noting_kernel(kernel, by_name))
    else:
        children = module.embedding_bags if hasattr(module, "embedding_bags") else module.embeddings
        for table, child in zip(cut.tables, children.values(), strict=True):
            yield _hook(child, touched[id(table)])


def _config_name(table: Table, cut: Cut) -> str:
    """The table's name in TorchRec; of two tables with one name, ours is prefixed by a path."""
    return table.name.removeprefix(f"{cut.path}.")


def _is_training() -> bool:
    return torch.is_grad_enabled() and not is_exporting() and not torch.compiler.is_exporting()


def _hook(module: nn.Module, rows: TouchedRows) -> Any:
    def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_training():
            rows.note((args[0] if args else kwargs["input"]).clone())  # the trainer may use its memory again

    return module.register_forward_pre_hook(note, with_kwargs=True)


def _noting_keys(rows: TouchedRows) -> Callable[[Tensor, Tensor], None]:
    def note(read: Tensor, gone: Tensor) -> None:
        rows.note(read)
        rows.gone.note(gone)

    return note


def _noting_kernel(kernel: Any, by_name: dict[str, TouchedRows]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """Notes what TorchRec's kernel looks up: ids that count from the beginning of this rank's shard of each table."""
    readings: list[tuple[TouchedRows, int]] = []
    for table in kernel._config.embedding_tables:
        if table.name not in by_name:
            raise UnsupportedModelError(f"table {table.name!r} is looked up, but is not a table of the model")
        first_row = table.local_metadata.shard_offsets[0] if table.local_metadata is not None else 0
        by_name[table.name].are_own = True
        readings += [(by_name[table.name], int(first_row))] * len(table.feature_names)

    def note(_module: nn.Module, args: tuple[Any, ...]) -> None:
        if not _is_training():
            return
        features = args[0]
        begins = [0]
        for count in features.length_per_key():
            begins.append(begins[-1] + int(count))
        values = features.values()
        for (rows, first_row), begin, end in zip(readings, begins, begins[1:], strict=False):
            rows.note(values[begin:end] + first_row)  # a copy, as above

    return note
