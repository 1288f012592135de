"""A model that takes HugeCTR's requests, and outputs the inputs of its network unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from inference_session.model_spec import (
    DENSE_FILE,
    TABLES_FOLDER,
    LookupSpec,
    ModelSpec,
    Pooling,
    TableSpec,
    TensorSpec,
)
from inference_session.version_directory import manifest

SLOTS, DENSE_DIM, MAX_SAMPLES = (2, 1, 3), 4, 40
_DIMS = 16, 5, 1
_POOLINGS: tuple[Pooling, ...] = "sum", "mean", "max"
_HIGHEST = {"int64": 2**63 - 1, "uint32": 2**32 - 1}


def spec(key_type: str) -> ModelSpec:
    """With keys of that type."""
    blocks = [TensorSpec(f"bags{t}_out", "float32", (-1, SLOTS[t], _DIMS[t])) for t in range(len(SLOTS))]
    return ModelSpec(
        inputs=(
            TensorSpec("DES", "float32", (-1,)),
            TensorSpec("CATCOLUMN", key_type, (-1,)),
            TensorSpec("ROWINDEX", "int32", (-1,)),
        ),
        outputs=(*blocks, TensorSpec("click", "float32", (-1, DENSE_DIM))),
        tables=tuple(
            TableSpec(f"t{t}", f"t{t}", 30, dim, keys="stored", default_vector=(0.5,) * dim)
            for t, dim in enumerate(_DIMS)
        ),
        lookups=tuple(
            LookupSpec(f"t{t}", f"CATCOLUMN/{t}", f"bags{t}", pooling=pooling) for t, pooling in enumerate(_POOLINGS)
        ),
        labels=tuple(f"click{i}" for i in range(DENSE_DIM)),
        label_outputs=("click",),
        layout="hugectr",
        layout_options={
            "dense_dim": DENSE_DIM,
            "slots": SLOTS,
            "key_type": key_type,
            "max_samples": MAX_SAMPLES,
            "dense_input": "dense",
        },
    )


def write(directory: Path, key_type: str) -> None:
    """Write the model as a version directory."""
    rng = np.random.default_rng(0)
    own = spec(key_type)
    for table in own.tables:
        folder = directory / TABLES_FOLDER / table.folder
        folder.mkdir(parents=True)
        rng.standard_normal((30, table.embedding_dim), np.float32).tofile(folder / "emb_vector")
        rng.permutation([*range(29), _HIGHEST[key_type]]).astype(np.int64).tofile(folder / "key")
    given = [helper.make_tensor_value_info(f"bags{t}", TensorProto.FLOAT, ["n", SLOTS[t], _DIMS[t]]) for t in range(3)]
    given.append(helper.make_tensor_value_info("dense", TensorProto.FLOAT, ["n", DENSE_DIM]))
    made = [helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, None) for tensor in own.outputs]
    nodes = [
        helper.make_node("Identity", [source.name], [target.name]) for source, target in zip(given, made, strict=True)
    ]
    model = helper.make_graph(nodes, "bags", given, made)
    onnx.save(
        helper.make_model(model, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), directory / DENSE_FILE
    )
    manifest.describe_version(own, directory)


def inputs(num_samples: int, rng: np.random.Generator, key_type: str, longest: int = 3) -> dict[str, NDArray[Any]]:
    """A request with bags of 0 to `longest` keys: known, unknown and extreme ones, with duplicates."""
    lengths = [rng.integers(0, longest + 1, (num_samples, width)) for width in SLOTS]
    num_keys = sum(int(each.sum()) for each in lengths)
    lowest = np.iinfo(key_type).min
    edges = np.array([lowest, 0, _HIGHEST[key_type]], key_type)
    drawn = np.where(
        rng.random(num_keys) < 0.1, rng.choice(edges, num_keys), rng.integers(0, 40, num_keys).astype(key_type)
    )
    offsets = [np.concatenate(([0], np.cumsum(each))) for each in lengths]
    return {
        "DES": rng.standard_normal((1, num_samples * DENSE_DIM), np.float32),
        "CATCOLUMN": drawn.astype(key_type)[None],
        "ROWINDEX": np.concatenate(offsets).astype(np.int32)[None],
    }
