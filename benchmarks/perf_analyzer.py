"""NVIDIA's perf_analyzer against a running server, over HTTP and gRPC, with requests that the model accepts.

    hotrow serve --repository model_repository &
    python client_examples/perf_analyzer_input.py model_repository/ctr --output ctr.json
    python benchmarks/perf_analyzer.py --model ctr --input-data ctr.json

The program is fetched from PyPI once, into the cache folder; where the machine's C library is older than it needs, a
newer one is installed next to it, from the Debian mirror that this machine's apt uses.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

VERSION = "2.60.0"
NEEDED_GLIBC = (2, 38)
DEBIAN_SUITE = "trixie"
DEBIAN_PACKAGES = ("libc6", "libstdc++6", "libgcc-s1", "libssl3t64", "zlib1g", "libzstd1")


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
    parser.add_argument("--input-data", type=Path, required=True, help="as perf_analyzer_input.py writes it")
    parser.add_argument("--http", default="localhost:8000")
    parser.add_argument("--grpc", default="localhost:8001")
    parser.add_argument("--samples", type=int, default=64, help="rows of a request")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    arguments = parser.parse_args()

    with tritonclient.http.InferenceServerClient(arguments.http) as client:
        batched = client.get_model_config(arguments.model).get("max_batch_size", 0) > 0
    print(f"{'protocol':<9}{'concurrency':>12}{'requests/s':>12}{'samples/s':>12}{'p50 us':>9}{'p99 us':>9}")
    for protocol, url in (("http", arguments.http), ("grpc", arguments.grpc)):
        for concurrency in arguments.concurrency:
            batch = arguments.samples if batched else None
            row = measure(
                arguments.model, url, protocol, data=arguments.input_data, batch=batch, concurrency=concurrency
            )
            print(
                f"{protocol:<9}{concurrency:>12}{row['requests/s']:>12.0f}"
                f"{row['requests/s'] * arguments.samples:>12.0f}{row['p50']:>9.0f}{row['p99']:>9.0f}"
            )


if __name__ == "__main__":
    main()
