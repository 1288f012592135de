"""Opening a version of 2 GiB of tables: goal G6, and what ONNX Runtime alone takes to load the dense network.

    python benchmarks/opening.py [--gib 2]

The vectors are sparse files of zeros: opening must not read them. Each round is a process of its own, imports aside.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from triton import graph

from inference_session.model_spec import DENSE_FILE, TABLES_FOLDER, LookupSpec, ModelSpec, TableSpec, TensorSpec
from inference_session.version_directory.manifest import FORMAT, MANIFEST_FILE
from inference_session.version_directory.session_file import write_spec

ROUNDS = 7
NUM_TABLES, DIM = 26, 128
ROUND = """
import json, sys, time
import onnxruntime, psutil
from inference_session.session import InferenceSession

def timed(work):
    begin = time.perf_counter()
    result = work()
    return result, 1e3 * (time.perf_counter() - begin)

process = psutil.Process()
before = process.memory_full_info().uss
network, ort_ms = timed(lambda: onnxruntime.InferenceSession(sys.argv[1] + "/dense.onnx"))
del network
session, first_ms = timed(lambda: InferenceSession.open(sys.argv[1]))
private_mb = (process.memory_full_info().uss - before) / 1e6
session.close()
session, again_ms = timed(lambda: InferenceSession.open(sys.argv[1]))
session.close()
print(json.dumps({"ort_ms": ort_ms, "first_ms": first_ms, "again_ms": again_ms, "private_mb": private_mb}))
"""


def main() -> None:
    """Write the version, open it in several processes, print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of all tables together")
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder) / "model" / "1"
        write_version(version, round(parser.parse_args().gib * 2**30 / NUM_TABLES / DIM / 4))
        rounds = [json.loads(subprocess.check_output([sys.executable, "-c", ROUND, version])) for _ in range(ROUNDS)]
    medians = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    print(f"ONNX Runtime alone          {medians['ort_ms']:8.1f} ms")
    for name, goal in (("first_ms", 150), ("again_ms", 50)):
        ratio = medians[name] / medians["ort_ms"]
        print(f"opening, {name.removesuffix('_ms'):<18} {medians[name]:8.1f} ms  {ratio:.1f} x  goal <= {goal} ms")
    print(f"private memory taken        {medians['private_mb']:8.1f} MB  goal <= 100 MB")


def write_version(version: Path, rows_per_table: int) -> None:
    """A version with tables of zeros that take no disk."""
    names = [f"table{i}" for i in range(NUM_TABLES)]
    for name in names:
        folder = version / TABLES_FOLDER / name
        folder.mkdir(parents=True)
        with (folder / "emb_vector").open("wb") as file:
            file.truncate(rows_per_table * DIM * 4)
    rng = np.random.default_rng(0)
    layers = [rng.standard_normal(shape, np.float32) for shape in ((NUM_TABLES * DIM, 64), (64, 1))]
    onnx.save(graph(None, layers), version / DENSE_FILE)
    spec = ModelSpec(
        inputs=tuple(TensorSpec(name, "int64", (-1, 1)) for name in names),
        outputs=(TensorSpec("click", "float32", (-1, 1)),),
        tables=tuple(TableSpec(name, name, rows_per_table, DIM, keys="row_number") for name in names),
        lookups=tuple(LookupSpec(name, name, "vectors", joined=True) for name in names),
        labels=("click",),
        label_outputs=("click",),
    )
    write_spec(spec, version)
    files = {p.relative_to(version).as_posix(): p.stat().st_size for p in version.rglob("*") if p.is_file()}
    entries = {name: {"bytes": size, "sha256": ""} for name, size in files.items()}  # opening checks sizes
    (version / MANIFEST_FILE).write_text(json.dumps({"format": FORMAT, "files": entries}))


if __name__ == "__main__":
    main()
