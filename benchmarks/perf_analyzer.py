"""NVIDIA's perf_analyzer against a running server, over HTTP and gRPC, with requests made for the model.

    hotrow serve --repository model_repository &
    python benchmarks/perf_analyzer.py --model ctr

The program is fetched from PyPI once, into the cache folder; where the machine's C library is older than it needs, a
newer one is installed next to it, from the Debian mirror that this machine's apt uses.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

VERSION = "2.60.0"
NEEDED_GLIBC = (2, 38)
DEBIAN_SUITE = "trixie"
DEBIAN_PACKAGES = ("libc6", "libstdc++6", "libgcc-s1", "libssl3t64", "zlib1g", "libzstd1")
NUM_REQUESTS = 20


def cache_folder() -> Path:
    """Where fetched programs are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hotrow" / f"perf_analyzer-{VERSION}"


def perf_analyzer() -> list[str]:
    """The command that starts perf_analyzer; the first call fetches it."""
    folder = cache_folder()
    program = folder / "perf_analyzer" / "bin" / "perf_analyzer"
    if not program.exists():
        fetch_program(folder)
    program.chmod(0o755)
    name, version = platform.libc_ver()
    if name == "glibc" and tuple(map(int, version.split("."))) >= NEEDED_GLIBC:
        return [str(program)]
    libraries = folder / "libraries" / "usr/lib/x86_64-linux-gnu"
    if not libraries.exists():
        fetch_libraries(folder / "libraries")
    loader = libraries / "ld-linux-x86-64.so.2"
    return [str(loader), "--library-path", f"{libraries}:/lib/x86_64-linux-gnu", str(program)]


def fetch_program(folder: Path) -> None:
    """Download perf_analyzer's wheel and unpack it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as download:
        options = ["--no-deps", "--only-binary=:all:", "--platform", "manylinux_2_38_x86_64", "--dest", download]
        run([sys.executable, "-m", "pip", "download", "--quiet", *options, f"perf-analyzer=={VERSION}"])
        (wheel,) = Path(download).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)


def fetch_libraries(folder: Path) -> None:
    """Unpack a newer Debian's C library into a separate folder; nothing is installed."""
    with tempfile.TemporaryDirectory() as work:
        lists = Path(work) / "lists"
        (lists / "partial").mkdir(parents=True)
        sources = Path(work) / "sources.list"
        sources.write_text(f"deb {debian_mirror()} {DEBIAN_SUITE} main\n", encoding="utf-8")
        apt = [
            "apt-get",
            "--quiet=2",
            f"-oDir::Etc::sourcelist={sources}",
            "-oDir::Etc::sourceparts=-",
            f"-oDir::State::lists={lists}",
            "-oDir::State::status=/dev/null",
            "-oAPT::Sandbox::User=root",
        ]
        run([*apt, "update"])
        run([*apt, "download", *DEBIAN_PACKAGES], cwd=Path(work))
        for package in Path(work).glob("*.deb"):
            run(["dpkg-deb", "-x", str(package), str(folder)])


def debian_mirror() -> str:
    """The Debian mirror in this machine's apt configuration."""
    for file in (Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*.sources"))):
        if file.exists() and (found := re.search(r"https?://\S+/debian\b/?(?=\s|$)", file.read_text(encoding="utf-8"))):
            return found.group()
    raise SystemExit(
        "perf_analyzer needs glibc 2.38, and no Debian mirror is configured here: run it on a newer system"
    )


def run(command: list[str], **options: Any) -> None:
    """Run a command; end with its output where it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}")


_DTYPES = {"INT64": np.int64, "INT32": np.int32, "FP32": np.float32, "FP16": np.float32, "FP64": np.float64}


def input_data(metadata: dict[str, Any], *, samples: int, length: int, max_key: int, batched: bool) -> dict[str, Any]:
    """The content of an `--input-data` file: different random requests for a model of this metadata.

    Args:
        samples: rows of a request.
        length: size of all other open dimensions.
        max_key: integers are drawn below this.
        batched: perf_analyzer wants shapes without the samples, and sends `samples` of these entries as one batch.
    """
    rng = np.random.default_rng(0)
    entries = []
    for _ in range(NUM_REQUESTS * (samples if batched else 1)):
        entry = {}
        for tensor in metadata["inputs"]:
            shape = [int(size) for size in tensor["shape"]]
            shape = shape[1:] if batched else [samples, *shape[1:]]
            shape = [length if size < 0 else size for size in shape]
            entry[tensor["name"]] = {"content": content(rng, tensor["datatype"], shape, max_key), "shape": shape}
        entries.append(entry)
    return {"data": entries}


def content(rng: np.random.Generator, datatype: str, shape: list[int], max_key: int) -> list[Any]:
    """Random values of a tensor, flat."""
    if datatype == "BYTES":
        return [f"value{i}" for i in rng.integers(0, max_key, np.prod(shape, dtype=int))]
    if datatype == "BOOL":
        return [bool(bit) for bit in rng.integers(0, 2, np.prod(shape, dtype=int))]
    dtype = _DTYPES.get(datatype, np.int64)
    if np.issubdtype(dtype, np.floating):
        return [float(x) for x in rng.random(shape, np.float32).ravel()]
    return [int(key) for key in rng.integers(0, max_key, shape).ravel()]


def measure(
    model: str,
    url: str,
    protocol: str,
    *,
    data: Path,
    batch: int | None,
    concurrency: int,
    seconds: float = 2.0,
    timeout_s: float | None = None,
) -> dict[str, float]:
    """One run of perf_analyzer: `infer/s` (requests), and latencies `p50`, `p99` in microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table.csv"
        batching = ["-b", str(batch)] if batch else []
        stop = ["-p", str(int(seconds * 1000)), "-s", "500", "-r", "12"]  # lax: rounds and medians take care of noise
        command = ["-m", model, "-u", url, "-i", protocol, "--input-data", str(data), *batching, *stop]
        run([*perf_analyzer(), *command, "--concurrency-range", str(concurrency), "-f", str(table)], timeout=timeout_s)
        with table.open(encoding="utf-8") as file:
            row = next(csv.DictReader(file))
    requests = float(row["Inferences/Second"]) / (batch or 1)
    return {"requests/s": requests, "p50": float(row["p50 latency"]), "p99": float(row["p99 latency"])}


def main() -> None:
    """Measure a model of a running server."""
    import tritonclient.http

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--http", default="localhost:8000")
    parser.add_argument("--grpc", default="localhost:8001")
    parser.add_argument("--samples", type=int, default=64, help="rows of a request")
    parser.add_argument("--length", type=int, default=20, help="size of dimensions that may have any, such as bags")
    parser.add_argument("--max-key", type=int, default=1000, help="ids are drawn below this")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    arguments = parser.parse_args()

    with tritonclient.http.InferenceServerClient(arguments.http) as client:
        metadata = client.get_model_metadata(arguments.model)
        batched = client.get_model_config(arguments.model).get("max_batch_size", 0) > 0
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "requests.json"
        requests = input_data(
            metadata,
            samples=arguments.samples,
            length=arguments.length,
            max_key=arguments.max_key,
            batched=batched,
        )
        data.write_text(json.dumps(requests), encoding="utf-8")
        print(f"{'protocol':<9}{'concurrency':>12}{'requests/s':>12}{'samples/s':>12}{'p50 us':>9}{'p99 us':>9}")
        for protocol, url in (("http", arguments.http), ("grpc", arguments.grpc)):
            for concurrency in arguments.concurrency:
                batch = arguments.samples if batched else None
                row = measure(arguments.model, url, protocol, data=data, batch=batch, concurrency=concurrency)
                print(
                    f"{protocol:<9}{concurrency:>12}{row['requests/s']:>12.0f}"
                    f"{row['requests/s'] * arguments.samples:>12.0f}{row['p50']:>9.0f}{row['p99']:>9.0f}"
                )


if __name__ == "__main__":
    main()
