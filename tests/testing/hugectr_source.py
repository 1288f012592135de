"""HugeCTR's files of a small model, and requests in the forms in which tests keep them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.dense_engine.base import ConcatInput, GivenColumns
from inference_session.device.host import adjacent_columns
from tests.testing.hugectr_graphs import GraphMaker

Requests = dict[str, dict[str, NDArray[Any]]]
CONCAT = ConcatInput("joined", ("wide", "deep"), 14, (GivenColumns("dense", 2),), 32)
"""What the network of Source's model may read as one input."""


def concat_parts(matrix: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """What is in that input, by the names of the original network."""
    *parts, zeros = adjacent_columns(matrix, (2, 12, 2))
    assert not zeros.any()
    return {"wide": parts[0].reshape(-1, 2, 1), "deep": parts[1].reshape(-1, 3, 4), "dense": parts[2]}


def requests_of(path: Path) -> Requests:
    """The requests of an archive whose arrays are called `<request>__<input>`."""
    requests: Requests = {}
    with np.load(path) as archive:
        for name in archive:
            request, _, tensor = name.rpartition("__")
            requests.setdefault(request, {})[tensor] = archive[name]
    return requests


def array_of(tensor: dict[str, Any]) -> NDArray[Any]:
    """A tensor as a JSON file holds it: its data type, shape and values."""
    dtypes = {"FP32": "float32", "FP64": "float64", "INT64": "int64", "INT32": "int32", "UINT32": "uint32"}
    special = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}
    values = [special.get(value, value) if isinstance(value, str) else value for value in tensor["data"]]
    return np.array(values, dtypes[tensor["datatype"]]).reshape(tensor["shape"])


class Source:
    """HugeCTR files of a small model with two tables, in a folder."""

    def __init__(self, folder: Path, num_rows: tuple[int, int] = (5, 9), *, label_dim: int = 1) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.graph = GraphMaker(
            3, dense_dim=2, embeddings=[("wide", 2, 1), ("deep", 3, 4)], labels=[("label", label_dim)]
        )
        wide = self.graph.add("Reshape", "wide", leading_dim=2)
        deep = self.graph.add("Reshape", "deep", leading_dim=12)
        joined = self.graph.add("Concat", [wide, deep, "dense"])
        loss = "MultiCrossEntropyLoss" if label_dim > 1 else "BinaryCrossEntropyLoss"
        self.graph.loss(self.graph.add("InnerProduct", joined, fc_param={"num_output": label_dim}), loss)
        self.graph.write(folder)
        random = np.random.default_rng(4)
        self.keys = [random.permutation(1000)[:rows].astype(np.int64) for rows in num_rows]
        self.vectors = [
            random.normal(size=(rows, dim)).astype(np.float32) for rows, dim in zip(num_rows, (1, 4), strict=True)
        ]
        for table in range(2):
            self.write_table(table)
        self.settings: dict[str, Any] = {
            "supportlonglong": True,
            "models": [
                {
                    "model": "small",
                    "network_file": "graph.json",
                    "dense_file": "dense.model",
                    "sparse_files": ["0_sparse.model", "1_sparse.model"],
                    "default_value_for_each_table": [0.25, -1],
                    "max_batch_size": 16,
                    "gpucache": True,
                }
            ],
        }

    def table_folder(self, table: int) -> Path:
        return self.folder / f"{table}_sparse.model"

    def write_table(self, table: int) -> None:
        self.table_folder(table).mkdir(exist_ok=True)
        self.keys[table].tofile(self.table_folder(table) / "key")
        self.vectors[table].tofile(self.table_folder(table) / "emb_vector")

    @property
    def model(self) -> dict[str, Any]:
        return self.settings["models"][0]

    def ps_json(self) -> Path:
        path = self.folder / "ps.json"
        path.write_text(json.dumps(self.settings, indent=1), encoding="utf-8")
        return path

    def request(self, key_type: str = "int64") -> dict[str, NDArray[Any]]:
        """Two samples; every slot holds a key of the table, an unknown one, or nothing."""
        offsets = [[0, 1, 1, 3, 4], [0, 2, 3, 3, 4, 4, 5]]
        keys = [*self.some(0, 1), *self.some(1, 3), *self.some(0, 3), *self.some(1, 2)]
        return {
            "DES": np.array([[0.5, -1, 2, 0]], np.float32),
            "CATCOLUMN": np.array([keys]).astype(key_type),
            "ROWINDEX": np.array([[*offsets[0], *offsets[1]]], np.int32),
        }

    def some(self, table: int, count: int) -> list[int]:
        known = self.keys[table].tolist()
        return [known[i % len(known)] if known and i % 2 == 0 else 5000 + i for i in range(count)]


CONFIG = """
name: "NAME"
backend: "hugectr"
max_batch_size: 16,
input [ { name: "DES" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "CATCOLUMN" data_type: KEYS dims: [ -1 ] },
        { name: "ROWINDEX" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
instance_group [ { count: 1 kind: KIND_GPU gpus: [ 0 ] } ]
parameters [ { key: "config" value: { string_value: "graph.json" } } ]
"""


def place_small(folder: Path, source: Source) -> Path:
    """A small model in a folder with its name."""
    source.model["model"] = folder.name
    source.ps_json()
    keys = "TYPE_INT64" if source.settings["supportlonglong"] else "TYPE_UINT32"
    config = CONFIG.replace("NAME", folder.name).replace("KEYS", keys)
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    (folder / "1").mkdir()
    return folder
