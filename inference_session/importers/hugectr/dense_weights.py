"""The dense `.model` file: raw float32, the weights of all trained layers in the order of the graph, nothing else.

And the JSON file next to it, with the running statistics of the BatchNorm layers, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from inference_session.errors import ModelFormatError, UnsupportedModelError
from inference_session.importers.hugectr.graph import Layer
from inference_session.importers.hugectr.json_file import JsonFile, read_json, shown

FloatArray = npt.NDArray[np.float32]

MAX_DENSE_BYTES = 0x70000000
"""An ONNX file holds at most 2 GiB, of which some is for other constants."""


class DenseWeights:
    """Hands out the weights layer by layer, and checks at the end that the file held exactly those."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            num_bytes = path.stat().st_size
            if num_bytes >= MAX_DENSE_BYTES:
                raise UnsupportedModelError(
                    f"{path}: {num_bytes} bytes; a dense network is limited to {MAX_DENSE_BYTES}"
                )
            self._elements = np.fromfile(path, dtype="<f4") if num_bytes else np.empty(0, np.float32)
        except OSError as error:
            raise ModelFormatError(f"{path}: cannot be read: {error.strerror or error}") from error
        if num_bytes % 4:
            raise ModelFormatError(f"{path}: {num_bytes} bytes are not a whole number of float32 elements")
        self._taken = 0

    @property
    def num_elements(self) -> int:
        """Elements of the file."""
        return self._elements.size

    def take(self, layer: Layer, what: str, *shape: int) -> FloatArray:
        """The next weights as float32 [*shape]; ModelFormatError where the file ends before."""
        count = math.prod(shape)
        left = self._elements.size - self._taken
        if count > left:
            raise ModelFormatError(
                f"{self._path}: {layer}: {what} {list(shape)} needs {count} elements from element {self._taken} on, "
                f"but only {left} of {self._elements.size} are left; check that the file belongs to this graph"
            )
        self._taken += count
        return self._elements[self._taken - count : self._taken].reshape(shape)

    def finish(self) -> None:
        """Check that nothing is left over."""
        if self._taken != self._elements.size:
            raise ModelFormatError(
                f"{self._path}: the graph's layers take {self._taken} elements ({self._taken * 4} bytes), the file has "
                f"{self._elements.size} ({self._elements.size * 4} bytes); does it belong to this graph?"
            )


@dataclass(frozen=True)
class Statistics:
    """Running mean and variance of one BatchNorm layer, float32 [width]."""

    mean: FloatArray
    variance: FloatArray


class StatisticsFile:
    """The statistics of the BatchNorm layers in a file, in the graph's order."""

    def __init__(self, path: Path) -> None:
        self._file = read_json(path, ModelFormatError)
        self._positions = self._batch_norms()

    def _batch_norms(self) -> Iterator[int]:
        layers = self._file.document.get("layers")
        if not isinstance(layers, list):
            self._file.fail(("layers",), f"expected a list, found {shown(layers)}")
        for position, item in enumerate(layers):
            if not isinstance(item, dict):
                self._file.fail(("layers", position), f"expected an object, found {shown(item)}")
            if item.get("type", "BatchNorm") == "BatchNorm":
                yield position

    def take(self, layer: str, width: int) -> Statistics:
        """The next layer's statistics; ModelFormatError where there are none, or they have another width."""
        position = next(self._positions, None)
        if position is None:
            self._file.fail(("layers",), f"holds no statistics for {layer}; check that the file belongs to this graph")
        mean = _elements(self._file, position, "mean", width)
        variance = _elements(self._file, position, "var", width)
        if (variance < 0).any():
            self._file.fail(("layers", position, "var"), "a variance cannot be negative")
        return Statistics(mean, variance)

    def finish(self) -> None:
        """Check that nothing is left over."""
        if (position := next(self._positions, None)) is not None:
            self._file.fail(
                ("layers", position), ("the graph has no BatchNorm layer for this; check that the files match")
            )


class BatchStatistics:
    """The statistics of the layers of a graph, which needs no file if no layer has any."""

    def __init__(self, path: Path | None) -> None:
        self._file = StatisticsFile(path) if path else None

    def take(self, layer: Layer, width: int) -> Statistics:
        """As `StatisticsFile.take`; ModelFormatError also where there is no file."""
        if self._file is None:
            layer.fail("its running mean and variance are missing; name their file as 'non_trainable_params_file'")
        return self._file.take(str(layer), width)

    def finish(self) -> None:
        """Check that nothing is left over."""
        if self._file is not None:
            self._file.finish()


def _elements(file: JsonFile, position: int, name: str, width: int) -> FloatArray:
    raw = file.document["layers"][position].get(name)
    numbers = isinstance(raw, list) and all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in raw)
    if not numbers or len(raw) != width:
        file.fail(("layers", position, name), f"expected a list of {width} numbers, found {shown(raw)}")
    try:
        array = np.array(raw, np.float64)
    except OverflowError:
        array = np.full(width, np.inf)
    if not (np.abs(array) <= np.finfo(np.float32).max).all():
        file.fail(("layers", position, name), "a number is too large for float32")
    return array.astype(np.float32)
