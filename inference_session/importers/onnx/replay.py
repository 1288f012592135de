"""Runs an imported version with plain NumPy look-ups, to compare it with the original before it is published."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.importers.onnx.evaluation import open_network
from inference_session.model_spec import (
    DENSE_FILE,
    KEYS_FILE,
    TABLES_FOLDER,
    VECTOR_FILE,
    LookupSpec,
    ModelSpec,
    NamedArrays,
    Pooling,
)


class Replay:
    """A draft of a version, opened.

    Args:
        as_served: whether ONNX Runtime optimises the dense network.
    """

    def __init__(
        self,
        directory: Path,
        spec: ModelSpec,
        *,
        dense_file: str = DENSE_FILE,
        keys_file: str = KEYS_FILE,
        as_served: bool = False,
    ) -> None:
        self._spec = spec
        self._dense = open_network(directory / dense_file, optimised=as_served)
        self._keys = open_network(directory / keys_file) if (directory / keys_file).exists() else None
        self._tables = {
            table.folder: np.memmap(
                directory / TABLES_FOLDER / table.folder / VECTOR_FILE,
                np.dtype(table.dtype).newbyteorder("<"),
                "r",
                shape=(table.num_rows, table.embedding_dim),
            )
            for table in spec.tables
        }

    def run(self, arrays: NamedArrays) -> list[NDArray[Any]]:
        """All outputs of the model, in the order of its spec, for inputs by name."""
        results = _run(self._dense, self.feeds(arrays))
        return [results[output.name] for output in self._spec.outputs]

    def feeds(self, arrays: NamedArrays) -> NamedArrays:
        """All values that the dense network can read: these inputs, the keys, the looked-up vectors."""
        values = {**arrays, **_run(self._keys, arrays)} if self._keys else dict(arrays)
        blocks: dict[str, list[NDArray[Any]]] = {}
        for lookup in self._spec.lookups:
            blocks.setdefault(lookup.dense_input, []).append(self._look_up(lookup, values))
        for name, parts in blocks.items():
            values[name] = np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
        return values

    def _look_up(self, lookup: LookupSpec, values: NamedArrays) -> NDArray[np.float32]:
        table, keys = self._spec.table_in(lookup.table), values[lookup.keys]
        if lookup.columns is not None:
            keys = keys[:, slice(*lookup.columns)]
        vectors = np.asarray(self._tables[lookup.table][keys], np.float32)
        if lookup.bags is not None:
            return _pooled_bags(vectors, lookup.pooling, *(values[name] for name in lookup.bags))
        if lookup.weights is not None:
            vectors = vectors * values[lookup.weights][..., None]
        if lookup.pooling == "none":
            row_shape = (table.embedding_dim,) if table.row_shape is None else table.row_shape
            vectors = vectors.reshape(keys.shape + row_shape)
        elif lookup.pooling == "max":
            vectors = vectors.max(axis=-2)
        else:
            vectors = vectors.sum(axis=-2) if lookup.pooling == "sum" else vectors.mean(axis=-2)
        return vectors.reshape(len(vectors), math.prod(vectors.shape[1:])) if lookup.joined else vectors


def _pooled_bags(
    vectors: NDArray[np.float32], pooling: Pooling, begins: NDArray[Any], ends: NDArray[Any]
) -> NDArray[np.float32]:
    pooled = np.zeros((len(begins), vectors.shape[1]), np.float32)
    for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        if len(bag := vectors[begin:end]):
            pooled[i] = getattr(bag, pooling)(axis=0)
    return pooled


def _run(network: Any, values: NamedArrays) -> NamedArrays:
    names = [output.name for output in network.get_outputs()]
    feeds = {value.name: values[value.name] for value in network.get_inputs()}
    return dict(zip(names, network.run(names, feeds), strict=True))
