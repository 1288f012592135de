"""Several instances of a model, each a process, compared with peers with as many: goal G7e.

    taskset -c 0-15 python benchmarks/instances.py [--counts 1,4,8] [--rounds 2]

The models are those of benchmarks/triton.py with packed inputs, with an MLP of 64-1 (`packed`) and of 512-256-1
(`wide`); each instance has one thread. perf_analyzer sends over gRPC, 64 requests at a time, from the same processors.
It prints the medians over the rounds, in Markdown.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from perf_analyzer import measure, perf_analyzer
from serving import serve
from triton import SAMPLES, Figures, Series, check_answers, input_names, networks, write_models, write_requests

CONCURRENT = 64
ROWS_PER_TABLE = 400_000 // 26
MODELS = {"packed": ("null", "hotrow", "plain"), "wide": ("hotrow", "plain")}


def write_repository(folder: Path, repository: Path, count: int) -> None:
    """Each model with this many instances."""
    for name, models in MODELS.items():
        network = networks(ROWS_PER_TABLE)[name]
        write_requests(folder / f"{name}.json", ROWS_PER_TABLE, SAMPLES, input_names(network))
        write_models(repository, folder / name, network, models, f"_{name}")
        for model in models:
            config = repository / f"{model}_{name}" / "config.pbtxt"
            text = config.read_text(encoding="utf-8").replace("count: 1 ", f"count: {count} ")
            config.write_text(text, encoding="utf-8")


def main() -> None:
    """Serve all models, measure them in turn, and print the ratios of the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", default="1,4,8", help="numbers of instances")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a window of perf_analyzer")
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.counts.split(",")]
    perf_analyzer()
    figures = Figures()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for count in counts:  # a server each, because no machine starts all of the processes at once in time
            repository = folder / f"repository_{count}"
            write_repository(folder, repository, count)
            with serve(repository) as server:
                url = server.endpoints["gRPC"]
                for network, models in MODELS.items():
                    check_answers(url, ROWS_PER_TABLE, models, f"_{network}")
                for _ in range(arguments.rounds):
                    measure_all(figures, url, folder, count, arguments.seconds)
    report(figures, counts)


def measure_all(figures: Figures, url: str, folder: Path, count: int, seconds: float) -> None:
    """One round: every model with this many instances."""
    for network, models in MODELS.items():
        for model in models:
            data, name = folder / f"{network}.json", f"{model}_{network}"
            found = measure(name, url, "grpc", data=data, batch=SAMPLES, concurrency=CONCURRENT, seconds=seconds)
            figures.add(Series(network, models, "grpc", (CONCURRENT,)), model, count, found)
            print(f"{network}, {count} x {model}: {found['requests/s']:,.0f} requests/s", flush=True)


def report(figures: Figures, counts: list[int]) -> None:
    """Requests per second and the ratios of the goal."""
    print(f"\n{len(os.sched_getaffinity(0))} processors, {CONCURRENT} requests at a time\n")
    print("| network | instances | null | hotrow | plain | hotrow / null | / plain | / one instance |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for network in MODELS:
        for count in counts:
            rates = {
                model: figures.median(network, "grpc", model, count, "requests/s")
                for model in ("null", "hotrow", "plain")
                if figures.has(network, "grpc", model, count)
            }
            cells = [f"{rates[model]:,.0f}" if model in rates else "-" for model in ("null", "hotrow", "plain")]
            cells += [
                figures.ratio(network, "grpc", "hotrow", model, count) if model in rates else "-"
                for model in ("null", "plain")
            ]
            first = figures.median(network, "grpc", "hotrow", counts[0], "requests/s")
            print(f"| {network} | {count} | {' | '.join(cells)} | {rates['hotrow'] / first:.2f} |")


if __name__ == "__main__":
    main()
