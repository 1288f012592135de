"""The gradients that one backward finds for one table. It learns them together: a batch may use it more than once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

ONE_THREAD = threading.RLock()
"""Held by whoever adds rows or changes them: several threads of one rank may train one model."""


class PendingGradients(NamedTuple):
    """Gradients that wait for the end of backward."""

    rows: Tensor
    """int64 [n]"""
    gradients: Tensor
    """float32 [n, embedding_dim]"""
    keys: Tensor
    """int64 [n], of the rows"""
    generation: int
    """The generation of the row numbers."""


class LearningTable(Protocol):
    """What learns gradients."""

    def learn(self, learning: Sequence[PendingGradients]) -> None:
        """Apply the optimizer to what one backward found."""


class Backward:
    """The gradients that one backward finds for one table. It lasts as long as that backward, also if that fails."""

    def __init__(self, table: LearningTable) -> None:
        self.gradients: list[PendingGradients] = []
        self.is_over = False
        self._table = table

    def learn(self) -> None:
        """Learn them, at the end of backward."""
        self.is_over = True
        with torch.no_grad(), ONE_THREAD:
            self._table.learn(self.gradients)


_UNDER_WAY: WeakValueDictionary[tuple[int, int], Backward] = WeakValueDictionary()
"""By the number of a backward that is under way, and the identity of its table. Autograd holds them until its end."""


def find_backward(table: LearningTable, *, learns: bool) -> Callable[[], Backward]:
    """Finds the backward that goes through the look-up that is being made.

    If the look-up is itself made in a backward, a checkpoint of torch repeats it, and may go through it in a backward
    of its own (use_reentrant=True). The table then learns at the end of the outer one, like its other look-ups.

    `learns`: whether the table learns from the look-up.
    """
    current = partial(_current, table)
    is_repeated = torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()
    if not (is_repeated and learns):
        return current
    outer = current()
    return lambda: current() if outer.is_over else outer


def _current(table: LearningTable) -> Backward:
    """The one under way. The table learns at its end."""
    number = torch._C._current_graph_task_id(), id(table)
    backward = _UNDER_WAY.get(number)
    if backward is None:
        backward = _UNDER_WAY[number] = Backward(table)
        torch.autograd.Variable._execution_engine.queue_callback(backward.learn)
    return backward
