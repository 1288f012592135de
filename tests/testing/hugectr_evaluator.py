"""Answers requests from an imported version directory with plain NumPy, dictionaries and ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from inference_session.model_spec import DENSE_FILE, TableSpec
from inference_session.requests.hugectr_csr import Bags, RequestFormat, decode_keys, decode_request
from inference_session.version_directory.session_file import read_spec

Inputs = Mapping[str, NDArray[Any]]


class Evaluator:
    """One imported version."""

    def __init__(self, directory: Path) -> None:
        self.spec = read_spec(directory)
        self._tables = [_read_table(directory / "tables" / table.folder, table) for table in self.spec.tables]
        if self.spec.layout == "hugectr":
            providers = ["CPUExecutionProvider"]
            self._network = ort.InferenceSession(str(directory / DENSE_FILE), providers=providers)

    def predict(self, inputs: Inputs) -> NDArray[np.float32]:
        """Predictions [samples, columns] of a request of the hugectr backend."""
        options = dict(self.spec.layout_options)
        dense_input = options.pop("dense_input")
        request = decode_request(inputs, RequestFormat(**{**options, "slots": tuple(options["slots"])}))
        arrays = {dense_input: request.dense}
        for table, lookup in enumerate(self.spec.lookups):
            vectors = self._pool(table, request.keys, request.bags[table], lookup.pooling)
            arrays[lookup.dense_input] = vectors.reshape(request.num_samples, options["slots"][table], -1)
        wanted = {item.name for item in self._network.get_inputs()}
        outputs = self._network.run(None, {name: array for name, array in arrays.items() if name in wanted})
        return np.concatenate(outputs, axis=1)

    def vectors(self, inputs: Inputs) -> NDArray[np.float32]:
        """OUTPUT0 of a request of the hps backend, flat."""
        keys, offsets = decode_keys(inputs, len(self._tables))
        rows = [
            self._row(table, key)
            for table in range(len(self._tables))
            for key in keys[offsets[table] : offsets[table + 1]].tolist()
        ]
        return np.concatenate([np.empty(0, np.float32), *rows])

    def _pool(self, table: int, keys: NDArray[np.int64], bags: Bags, pooling: str) -> NDArray[np.float32]:
        pooled = np.zeros((len(bags.begins), self.spec.tables[table].embedding_dim))
        for i, (begin, end) in enumerate(zip(bags.begins, bags.ends, strict=True)):
            for key in keys[begin:end].tolist():
                pooled[i] += self._row(table, key)
            if pooling == "mean" and end > begin:
                pooled[i] /= end - begin
        return pooled.astype(np.float32)

    def _row(self, table: int, key: int) -> NDArray[np.float32]:
        spec = self.spec.tables[table]
        default = np.full(spec.embedding_dim, spec.default_vector, np.float32)
        return self._tables[table].get(key, default)


def _read_table(folder: Path, table: TableSpec) -> dict[int, NDArray[np.float32]]:
    keys = np.fromfile(folder / "key", np.int64)
    vectors = np.fromfile(folder / "emb_vector", np.float32).reshape(table.num_rows, table.embedding_dim)
    return dict(zip(keys.tolist(), vectors, strict=True))
