"""The published report: hotrow through a real Triton compared with its peers, as one HTML page.

    python benchmarks/report.py                      bench-report.html, about a quarter of an hour
    python benchmarks/report.py --quick              a few small measurements
    python benchmarks/report.py --figure FILE.png    the main figure as a picture, too

For each network, batch size and number of requests at once, perf_analyzer sends random requests over gRPC to Python
models of the same weights in one server: `null` answers zeros, the least that a Python model costs; `plain` is ONNX
Runtime on the whole graph, tables inside, which is what one writes today; `hotrow` is that graph imported. Rounds are
interleaved, medians shown, because machines change while they are measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

from perf_analyzer import measure, perf_analyzer
from report_page import write_figure, write_page
from serving import serve
from triton import FEATURES, Network, check_answers, write_models, write_requests

MODELS = ("null", "hotrow", "plain")
ATTEMPTS, TIMEOUT_S = 2, 60.0


@dataclass(frozen=True)
class Plan:
    """The networks and loads to measure."""

    networks: dict[str, Network]
    samples: tuple[int, ...]
    """Per request."""
    concurrencies: tuple[int, ...]
    """Requests at once."""
    rounds: int


FULL = Plan(
    {
        "4 M rows x 16, MLP 64": Network(4_000_000 // FEATURES),
        "1 M rows x 64, MLP 512-256": Network(1_000_000 // FEATURES, dim=64, hidden=(512, 256)),
    },
    samples=(1, 64, 256),
    concurrencies=(1, 4, 16, 64),
    rounds=3,
)
QUICK = Plan({"26 k rows x 16, MLP 64": Network(1000)}, samples=(1, 64), concurrencies=(1, 8), rounds=1)


@dataclass(frozen=True)
class Figure:
    """The medians of one model in one case."""

    network: str
    samples: int
    concurrency: int
    model: str
    requests_per_s: float
    range_per_s: tuple[float, float]
    """The minimum and maximum of all rounds."""
    p50_us: float
    p99_us: float


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, help="of which medians are taken")
    parser.add_argument("--out", type=Path, default=Path("bench-report.html"), metavar="FILE.html")
    parser.add_argument("--figure", type=Path, metavar="FILE.png")
    arguments = parser.parse_args()
    for path in filter(None, (arguments.out, arguments.figure)):
        if not path.absolute().parent.is_dir():  # report it before a quarter of an hour of work, not after
            parser.error(f"{path}: there is no such folder")
    perf_analyzer()
    described = machine() | {"load before": load()}
    plan = QUICK if arguments.quick else FULL
    figures = list(run(replace(plan, rounds=arguments.rounds or plan.rounds)))
    results = {"machine": described | {"load after": load()}, "figures": [asdict(figure) for figure in figures]}
    write_page(results, arguments.out)
    arguments.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if arguments.figure:
        write_figure(results, arguments.figure)
    print(f"{arguments.out} and {arguments.out.with_suffix('.json')}")


def run(plan: Plan) -> Iterator[Figure]:
    """Serve each network in turn, and measure all of it."""
    for name, network in plan.networks.items():
        with tempfile.TemporaryDirectory() as folder:
            repository = Path(folder) / "repository"
            write_models(repository, Path(folder), network)
            with serve(repository, *MODELS) as server:
                url = server.endpoints["gRPC"]
                check_answers(url, network.rows_per_table, MODELS)
                yield from run_rounds(name, network, plan, url, Path(folder))


def run_rounds(name: str, network: Network, plan: Plan, url: str, folder: Path) -> Iterator[Figure]:
    """Measure one network, all models in turn in each round."""
    for samples in plan.samples:
        write_requests(folder / f"{samples}.json", network.rows_per_table, samples)
    seen: dict[tuple[int, int], dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for _, samples, concurrency, model in product(range(plan.rounds), plan.samples, plan.concurrencies, MODELS):
        case = f"{name}: {samples} samples, {concurrency} at once, {model}"
        result = measured(model, url, data=folder / f"{samples}.json", batch=samples, concurrency=concurrency)
        if result is None:
            print(f"{case}: perf_analyzer did not end")
            continue
        seen[samples, concurrency][model].append(result)
        print(f"{case}: {result['requests/s']:.0f} requests/s")
    for (samples, concurrency), results in seen.items():
        if len(results) == len(MODELS):  # otherwise nothing can be compared
            yield from (summary(name, samples, concurrency, model, results[model]) for model in MODELS)


def summary(name: str, samples: int, concurrency: int, model: str, results: list[dict[str, float]]) -> Figure:
    """All rounds of one model in one case."""
    rate, p50, p99 = (statistics.median(result[key] for result in results) for key in ("requests/s", "p50", "p99"))
    rates = [result["requests/s"] for result in results]
    return Figure(name, samples, concurrency, model, rate, (min(rates), max(rates)), p50, p99)


def measured(model: str, url: str, **case: Any) -> dict[str, float] | None:
    """One run of perf_analyzer; None if it does not end, as happens with many large requests on a busy machine."""
    for _ in range(ATTEMPTS):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return measure(model, url, "grpc", **case, seconds=1.0, timeout_s=TIMEOUT_S)
    return None


def machine() -> dict[str, str]:
    """The machine and the software of the measurements."""
    processor = "unknown"
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ("hotrow", "numpy", "onnxruntime", "nvidia-pytriton")
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": processor,
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory:.0f} GiB",
        "GPU": gpus(),
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def gpus() -> str:
    """The GPUs by the names of NVIDIA's driver."""
    files = Path("/proc/driver/nvidia/gpus").glob("*/information")
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return ", ".join(line.partition(":")[2].strip() for line in lines if line.startswith("Model:")) or "none"


def load() -> str:
    """The machine's load in the last minute: processes that ran or waited to run."""
    return f"{os.getloadavg()[0]:.1f}"


def version(package: str) -> str:
    """The version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
