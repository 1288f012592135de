"""An engine whose network reads vectors and inputs of requests as one matrix (rewrites/concat_inputs.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.dense_engine.base import BoundRun, ConcatInput, DenseEngine, GivenColumns, PreparedRuns
from inference_session.device.base import Columns, Device
from inference_session.errors import InvalidRequestError


class ConcatEngine(DenseEngine):
    """Puts given inputs next to the vectors that look-ups have written, and runs another engine on that."""

    def __init__(self, engine: DenseEngine, concat_inputs: tuple[ConcatInput, ...], device: Device) -> None:
        """`engine`: its network has the concat inputs; `device`: where they are."""
        self._engine, self._device = engine, device
        self.concat_inputs = concat_inputs
        self.input_names = engine.input_names | {given.name for each in concat_inputs for given in each.given}
        self.output_names, self.narrow_inputs = engine.output_names, engine.narrow_inputs
        self.input_types = engine.input_types

    def prepare(self) -> PreparedRuns | None:
        return self._engine.prepare()

    def run(
        self, inputs: Mapping[str, Any], outputs: Sequence[str], prepared: PreparedRuns | None = None
    ) -> list[np.ndarray[Any, Any]]:
        with self._device.request():
            self._fill(inputs)
            return self._engine.run(self._own(inputs), outputs, prepared)

    def may_bind(self, outputs: Sequence[str]) -> bool:
        return self._engine.may_bind(outputs)

    def bind(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> BoundRun | None:
        filled = self._fill(inputs)
        bound = self._engine.bind(self._own(inputs), outputs)
        if bound is None:
            return None
        names = [given.name for each in self.concat_inputs for given in each.given]
        arrays = [array for columns in filled for array in columns.arrays]
        bound.inputs = {**bound.inputs, **dict(zip(names, arrays, strict=True))}
        uploads = [columns.upload for columns in filled if columns.upload is not None]
        return ConcatRun(bound, uploads) if uploads else bound

    def end_warm_up(self) -> None:
        self._engine.end_warm_up()
        self.replays = self._engine.replays

    def close(self) -> None:
        self._engine.close()

    def _own(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """What the other engine reads."""
        return {name: inputs[name] for name in self._engine.input_names}

    def _fill(self, inputs: Mapping[str, Any]) -> list[Columns]:
        """Fill the columns of all concat inputs, other than vectors."""
        filled = []
        for concat in self.concat_inputs:
            matrix = inputs[concat.name]
            arrays = [_as_columns(inputs[given.name], given, len(matrix)) for given in concat.given]
            columns = self._device.columns(matrix, concat.first_given, [given.width for given in concat.given])
            columns.fill(arrays)
            filled.append(columns)
        return filled


class ConcatRun(BoundRun):
    """A run of a network whose concat inputs are copied to the device before."""

    def __init__(self, bound: BoundRun, uploads: Sequence[Callable[[], object]]) -> None:
        self.inputs, self._bound, self._uploads = bound.inputs, bound, uploads

    def run(self) -> list[NDArray[Any]]:
        for upload in self._uploads:
            upload()
        return self._bound.run()


def _as_columns(array: Any, given: GivenColumns, num_samples: int) -> Any:
    """A given input as a matrix; InvalidRequestError where it does not fit next to vectors of this many samples."""
    if array.shape[:1] != (num_samples,) or array.size != num_samples * given.width or array.dtype != np.float32:
        raise InvalidRequestError(
            f"the network cannot compute these values: {given.name!r} is {array.dtype} {list(array.shape)}, expected"
            f" float32 of {num_samples} samples with {given.width} elements"
        )
    return array.reshape(num_samples, given.width)
