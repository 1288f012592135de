"""CPU tables and columns that act as those of a device that repeats its launches, and a network bound to memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.dense_engine.base import BoundRun, DenseEngine
from inference_session.device.base import Columns
from inference_session.device.host import HostColumns, HostDevice, adjacent_columns
from inference_session.kernels.records import Lookup
from inference_session.tables.host_tables import HostTables


class LaunchedTables(HostTables):
    """Look-ups may be repeated."""

    is_launched = True

    def repeated(self, lookup: Lookup) -> Callable[[], None]:
        copy = Lookup(lookup.segments.copy(), np.zeros(1, np.int64), np.zeros(len(lookup.segments), np.int64))
        return lambda: HostTables.look_up(self, copy)

    def look_up(self, lookup: Lookup) -> None:
        if lookup.repeat is not None:
            lookup.repeat()
        else:
            super().look_up(lookup)


class Echo(DenseEngine):
    """Returns its inputs under their names; those `given` by requests are copied to bound memory."""

    def __init__(self, input_names: Collection[str], given: Collection[str]) -> None:
        self.input_names = self.output_names = frozenset(input_names)
        self._given = given

    def may_bind(self, outputs: Sequence[str]) -> bool:
        """Always."""
        return True

    def run(self, inputs: Any, outputs: Sequence[str], prepared: Any = None) -> list[Any]:
        return [inputs[name].copy() for name in outputs]

    def bind(self, inputs: Any, outputs: Sequence[str]) -> BoundRun:
        engine, copied = self, {name: inputs[name].copy() for name in self._given}

        class Run(BoundRun):
            inputs = copied

            def run(self) -> list[Any]:
                return engine.run({**inputs, **copied}, outputs)

        return Run()

    def close(self) -> None:
        """There is nothing to free."""


class CopiedColumns(Columns):
    """As a GPU has them: the host writes elsewhere."""

    def __init__(self, matrix: NDArray[np.float32], first: int, widths: Sequence[int]) -> None:
        block = np.full((len(matrix), sum(widths)), np.nan, np.float32)
        self.arrays = adjacent_columns(block, widths)[:-1]
        self.upload = self._upload = lambda: HostColumns(matrix, first, widths).fill(self.arrays)

    def fill(self, arrays: Sequence[Any]) -> None:
        for target, values in zip(self.arrays, arrays, strict=True):
            target[...] = values
        self._upload()


class CopyingDevice(HostDevice):
    """A device whose matrices the host does not write."""

    def columns(self, matrix: Any, first: int, widths: Sequence[int]) -> Any:
        return CopiedColumns(matrix, first, widths)
