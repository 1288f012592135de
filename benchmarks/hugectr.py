"""Measures the cost of HugeCTR's requests: a Wide & Deep model with two tables, by the request and by the batch.

    python benchmarks/hugectr.py [--quick]

Two forms of the same keys, which take turns in one run:
* packed: DES, CATCOLUMN and ROWINDEX are checked and decoded;
* native: the same network and tables with plain inputs, keys [samples, slots] per table.

Both are sent to sessions of this process, and to a real Triton, which serves the user's files in place for the packed
form. Answers are compared before the sessions are timed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client
from numpy.typing import NDArray
from serving import serve, tensors

from inference_session import InferenceSession
from inference_session.importers.hugectr import import_hugectr
from inference_session.model_spec import LookupSpec, ModelSpec, TensorSpec
from inference_session.version_directory import manifest
from inference_session.version_directory.session_file import read_spec
from triton_backend.repository.config_writer import write_model_config

SLOTS = (2, 26)
DIMS = (1, 16)
DENSE_DIM = 13
UNITS = 256
TARGET = 1.15


def write_model(folder: Path, num_rows: int) -> list[NDArray[np.int64]]:
    """The files of a HugeCTR user with this Wide & Deep; returns the keys of each table."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(1)
    width = SLOTS[1] * DIMS[1] + DENSE_DIM
    sizes = [(width, UNITS), (UNITS, UNITS), (UNITS, 1)]
    weights = [part for rows, columns in sizes for part in (random.normal(size=(rows, columns)), np.zeros(columns))]
    np.concatenate([part.ravel() * 0.05 for part in weights]).astype(np.float32).tofile(folder / "dense.model")
    keys = []
    for table, dim in enumerate(DIMS):
        keys.append(np.unique(random.integers(-(2**63), 2**63 - 1, num_rows)))
        (folder / f"table{table}").mkdir()
        keys[-1].tofile(folder / f"table{table}" / "key")
        random.normal(size=(len(keys[-1]), dim)).astype(np.float32).tofile(folder / f"table{table}" / "emb_vector")
    (folder / "graph.json").write_text(json.dumps({"layers": layers()}), encoding="utf-8")
    model = {
        "model": folder.name,
        "network_file": "graph.json",
        "dense_file": "dense.model",
        "sparse_files": ["table0", "table1"],
        "max_batch_size": 4096,
    }
    (folder / "ps.json").write_text(json.dumps({"supportlonglong": True, "models": [model]}), encoding="utf-8")
    return keys


def layers() -> list[dict[str, Any]]:
    """Wide & Deep as HugeCTR writes it."""
    names = ("wide", "deep")
    data = {
        "type": "Data",
        "label": {"top": "label", "label_dim": 1},
        "dense": {"top": "dense", "dense_dim": DENSE_DIM},
        "sparse": [{"top": f"data_{name}", "slot_num": slots} for name, slots in zip(names, SLOTS, strict=True)],
    }
    embeddings = [
        {
            "type": "DistributedSlotSparseEmbeddingHash",
            "bottom": f"data_{name}",
            "top": name,
            "sparse_embedding_hparam": {"embedding_vec_size": dim, "combiner": "sum"},
        }
        for name, dim in zip(names, DIMS, strict=True)
    ]
    full = [("x", "h1", UNITS), ("r1", "h2", UNITS), ("r2", "h3", 1)]
    hidden = [
        {"type": "InnerProduct", "bottom": bottom, "top": top, "fc_param": {"num_output": units}}
        for bottom, top, units in full
    ]
    relus = [{"type": "ReLU", "bottom": f"h{i}", "top": f"r{i}"} for i in (1, 2)]
    return [
        data,
        *embeddings,
        {"type": "Reshape", "bottom": "deep", "top": "flat", "leading_dim": SLOTS[1] * DIMS[1]},
        {"type": "Reshape", "bottom": "wide", "top": "wide_flat", "leading_dim": SLOTS[0]},
        {"type": "Concat", "bottom": ["flat", "dense"], "top": "x"},
        hidden[0],
        relus[0],
        hidden[1],
        relus[1],
        hidden[2],
        {"type": "ReduceSum", "bottom": "wide_flat", "top": "wide_sum", "axis": 1},
        {"type": "Add", "bottom": ["h3", "wide_sum"], "top": "logit"},
        {"type": "BinaryCrossEntropyLoss", "bottom": ["logit", "label"], "top": "loss"},
    ]


def write_native(imported: Path, version_dir: Path) -> None:
    """The imported version once more, with inputs [samples, slots] per table in place of HugeCTR's."""
    # Linked, not copied: hard, as a version's files have to lie in its own directory.
    shutil.copytree(imported / "tables", version_dir / "tables", copy_function=os.link)
    os.link(imported / "dense.onnx", version_dir / "dense.onnx")
    spec = read_spec(imported)
    inputs = [TensorSpec(f"keys{i}", "int64", (-1, slots, 1)) for i, slots in enumerate(SLOTS)]
    lookups = [
        LookupSpec(lookup.table, f"keys{i}", lookup.dense_input, pooling=lookup.pooling)
        for i, lookup in enumerate(spec.lookups)
    ]
    keyed = ModelSpec(
        inputs=(TensorSpec("dense", "float32", (-1, DENSE_DIM)), *inputs),
        outputs=spec.outputs,
        tables=spec.tables,
        lookups=tuple(lookups),
        labels=spec.labels,
        label_outputs=spec.label_outputs,
    )
    manifest.describe_version(keyed, version_dir)


def requests(keys: list[NDArray[np.int64]], num_samples: int, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """One request of the packed form and of the native one; their answers are equal."""
    random = np.random.default_rng(seed)
    dense = random.normal(size=(num_samples, DENSE_DIM)).astype(np.float32)
    bags = [random.choice(table, (num_samples, slots)) for table, slots in zip(keys, SLOTS, strict=True)]
    offsets = [np.arange(num_samples * slots + 1, dtype=np.int32) for slots in SLOTS]
    packed = {
        "DES": dense.reshape(1, -1),
        "CATCOLUMN": np.concatenate(bags, axis=1).reshape(1, -1),
        "ROWINDEX": np.concatenate(offsets).reshape(1, -1),
    }
    return packed, {"dense": dense, **{f"keys{i}": bag[:, :, None] for i, bag in enumerate(bags)}}


def medians(calls: dict[str, Callable[[int], Any]], num_calls: int, num_rounds: int = 5) -> dict[str, float]:
    """Median microseconds of each call, the calls taking turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_rounds):
        for name, call in calls.items():
            for i in range(num_calls):
                begin = time.perf_counter()
                call(i)
                times[name].append(time.perf_counter() - begin)
    return {name: float(np.median(values)) * 1e6 for name, values in times.items()}


def through_library(folder: Path, keys: list[NDArray[np.int64]], num_calls: int) -> None:
    """Packed against native in one process."""
    with (
        InferenceSession.open(folder / "imported/wdl/1") as packed_session,
        InferenceSession.open(folder / "native/wdl/1") as native_session,
    ):
        for num_samples in (1, 10, 64, 512):
            made = [requests(keys, num_samples, seed) for seed in range(20)]
            for packed, native in made:
                np.testing.assert_allclose(packed_session.predict(packed), native_session.predict(native), atol=1e-6)
            found = medians(
                {
                    "packed": lambda i, made=made: packed_session.predict(made[i % 20][0]),
                    "native": lambda i, made=made: native_session.predict(made[i % 20][1]),
                },
                num_calls,
            )
            ratio = found["packed"] / found["native"]
            print(
                f"library, {num_samples:4d} samples: packed {found['packed']:8.1f} us, native "
                f"{found['native']:8.1f} us, ratio {ratio:.3f} (goal <= {TARGET})"
            )


def through_triton(folder: Path, keys: list[NDArray[np.int64]], num_calls: int) -> None:
    """A user's folder in place compared with the import with plain inputs, on one server."""
    repository = folder / "repository"
    repository.mkdir()
    (repository / "wdl").symlink_to(folder / "wdl")
    (folder / "wdl/1").mkdir()
    (folder / "wdl/config.pbtxt").write_text(CONFIG, encoding="utf-8")
    (folder / "native/wdl").rename(repository / "native")
    version_dir = repository / "native/1"
    write_model_config(version_dir, read_spec(version_dir), "native", max_batch_size=4096)
    with serve(repository) as server, grpc_client.InferenceServerClient(server.endpoints["gRPC"]) as client:
        for num_samples in (10, 64):
            drawn = [requests(keys, num_samples, seed) for seed in range(20)]
            made = [[tensors(grpc_client, request) for request in pair] for pair in drawn]
            found = medians(
                {
                    "packed": lambda i, made=made: client.infer("wdl", made[i % 20][0]),
                    "native": lambda i, made=made: client.infer("native", made[i % 20][1]),
                },
                num_calls,
            )
            print(
                f"Triton,  {num_samples:4d} samples: packed {found['packed']:8.1f} us, native "
                f"{found['native']:8.1f} us, ratio {found['packed'] / found['native']:.3f} (goal <= {TARGET})"
            )


CONFIG = """
name: "wdl"
backend: "hugectr"
max_batch_size: 4096,
input [ { name: "DES" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "CATCOLUMN" data_type: TYPE_INT64 dims: [ -1 ] },
        { name: "ROWINDEX" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small tables and few calls: does it run at all?")
    quick = parser.parse_args().quick
    num_rows, num_calls = (10_000, 20) if quick else (1_000_000, 200)
    with tempfile.TemporaryDirectory(prefix="hotrow-benchmark-") as name:
        folder = Path(name)
        keys = write_model(folder / "wdl", num_rows)
        import_hugectr(folder / "wdl/ps.json", folder / "imported")
        write_native(folder / "imported/wdl/1", folder / "native/wdl/1")
        through_library(folder, keys, num_calls)
        through_triton(folder, keys, num_calls)


if __name__ == "__main__":
    main()
