"""An oracle for imported versions: NumPy look-ups around ONNX Runtime."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from inference_session.model_spec import LookupSpec, ModelSpec
from inference_session.version_directory.session_file import read_spec

Arrays = dict[str, NDArray[Any]]


def run_network(path: Path, inputs: Arrays) -> Arrays:
    """All outputs of a model file; it gets those of the inputs that it has."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    network = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in network.get_outputs()]
    return dict(zip(names, network.run(names, {i.name: inputs[i.name] for i in network.get_inputs()}), strict=True))


def evaluate(version_dir: Path, inputs: Arrays) -> Arrays:
    """The outputs of an imported model, computed as session.json describes."""
    spec = read_spec(version_dir)
    values = dict(inputs)
    if (version_dir / "keys.onnx").exists():
        values |= run_network(version_dir / "keys.onnx", inputs)
    blocks: dict[str, list[NDArray[Any]]] = {}
    for lookup in spec.lookups:
        blocks.setdefault(lookup.dense_input, []).append(_look_up(version_dir, spec, lookup, values))
    for name, parts in blocks.items():
        values[name] = np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
    return run_network(version_dir / "dense.onnx", values)


def _look_up(version_dir: Path, spec: ModelSpec, lookup: LookupSpec, values: Arrays) -> NDArray[np.float32]:
    table, keys = spec.table_in(lookup.table), values[lookup.keys]
    assert keys.dtype in (np.int64, np.int32)
    if lookup.columns is not None:
        keys = keys[:, slice(*lookup.columns)]
    rows = np.fromfile(version_dir / "tables" / table.folder / "emb_vector", table.dtype)
    vectors = rows.reshape(table.num_rows, table.embedding_dim)[keys].astype(np.float32)
    if lookup.weights is not None:
        assert values[lookup.weights].dtype == np.float32
        assert values[lookup.weights].shape == keys.shape
        vectors *= values[lookup.weights][..., None]
    if lookup.bags is not None:
        cuts = zip(*(values[name] for name in lookup.bags), strict=True)
        sums = [(vectors[begin:end].sum(axis=0), len(vectors[begin:end])) for begin, end in cuts]
        return np.array([s / max(count, 1) if lookup.pooling == "mean" else s for s, count in sums], np.float32)
    if lookup.pooling != "none":
        vectors = getattr(np, lookup.pooling)(vectors, axis=-2)
    elif table.row_shape is not None:
        vectors = vectors.reshape(keys.shape + table.row_shape)
    return vectors.reshape(len(keys), math.prod(vectors.shape[1:])) if lookup.joined else vectors
