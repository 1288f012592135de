"""Times networks that begin with a Concat of vectors and dense inputs, with concat inputs and with the Concat.

    python benchmarks/concat_inputs.py                    nine rounds
    python benchmarks/concat_inputs.py --quick            three rounds
    python benchmarks/concat_inputs.py --device cuda:0    on a GPU

26 tables of 20,000 rows, ids in separate inputs, 13 dense inputs. The same version is opened twice. In each round, both
sessions answer the same batches by `FastPath.run`, one session after the other.

A line shows, for requests x samples, the processor time of a call with concat inputs (on a GPU the time by the clock),
and this time relative to that with the Concat: of the best rounds, and as median and range over the rounds.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from inference_session import InferenceSession, Request
from tests.testing.onnx_models import import_model, model_of

FEATURES, ROWS, DENSE = 26, 20_000, 13
NETWORKS = ((16, (64, 1)), (128, (512, 256, 1)))
"""The width of vectors, and those of layers."""
CASES = ((1, 1), (1, 64), (8, 64), (1, 1024))
GPU_CASES = ((1, 64), (1, 1024), (8, 1024), (16, 1024))
NUM_BATCHES = 40
FEW_SAMPLES = 16_384
"""At most so many samples in a round, unless a batch has more."""

Arrays = list[NDArray[Any]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    num_rounds = 3 if options.quick else 9
    for dim, layers in NETWORKS:
        print(f"dim {dim}, layers of {', '.join(map(str, layers))}")
        with tempfile.TemporaryDirectory(prefix="hotrow-concat-inputs-") as folder:
            measure_all(write(Path(folder), dim, layers), options.device, num_rounds)


def write(folder: Path, dim: int, layers: tuple[int, ...]) -> Path:
    """The version directory of a model with random weights."""
    rng, x, nodes = np.random.default_rng(0), "x", []
    constants = {f"table{i}": rng.random((ROWS, dim), np.float32) for i in range(FEATURES)}
    for i, (width, num) in enumerate(itertools.pairwise((FEATURES * dim + DENSE, *layers))):
        constants[f"w{i}"] = rng.standard_normal((width, num), np.float32) / np.float32(width)
        is_last = i + 1 == len(layers)
        nodes.append(f"m{i} = MatMul({x}, w{i}) " + ("y = Sigmoid" if is_last else f"x{i} = Relu") + f"(m{i})")
        x = f"x{i}"
    vectors = [f"v{i} = Gather(table{i}, ids{i})" for i in range(FEATURES)]
    concat = f"x = Concat<axis = 1>({', '.join(f'v{i}' for i in range(FEATURES))}, dense)"
    ids = ", ".join(f"int64[n] ids{i}" for i in range(FEATURES))
    graph = f"g ({ids}, float[n, {DENSE}] dense) => (float[n, 1] y) {{ {' '.join([*vectors, concat, *nodes])} }}"
    return import_model(folder, model_of(graph, constants)).version_dir


def measure_all(version: Path, device: str, num_rounds: int) -> None:
    """Measure all cases of a model, and print them."""
    open_session = partial(InferenceSession.open, version, device=device, dense_threads=1)
    with mock.patch("inference_session.execution.model.concat_operands", return_value=None):
        concatenating = open_session()
    with concatenating, open_session() as concat:
        for num_requests, num_samples in CASES if device == "cpu" else GPU_CASES:
            batches = random_batches(num_requests, num_samples)
            for session in (concat, concatenating):
                record(session, batches[0], num_requests)
            clock = time.process_time if device == "cpu" else time.perf_counter
            rounds = [
                (seconds(concat, batches, num_requests, clock), seconds(concatenating, batches, num_requests, clock))
                for _ in range(num_rounds + 1)
            ][1:]
            own, others = map(np.array, zip(*rounds, strict=True))
            ratios, best = own / others, own.min() / others.min()
            print(
                f"{num_requests} x {num_samples:<5} {1e6 * own.min():>7,.1f} µs   {best:.2f} /"
                f" {np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})",
                flush=True,
            )


def record(session: InferenceSession, arrays: Arrays, num_requests: int) -> None:
    """Answer a batch until a GPU has recorded its shape, as a server's first requests do."""
    names = [f"ids{i}" for i in range(FEATURES)] + ["dense"]
    parts = [arrays[begin : begin + len(names)] for begin in range(0, len(arrays), len(names))]
    for _ in range(3):
        session.run_many([Request(dict(zip(names, part, strict=True)), None) for part in parts])
    if session.fast_path.run(arrays, num_requests) is None:
        raise SystemExit("the fast path does not answer this batch")


def random_batches(num_requests: int, num_samples: int) -> list[Arrays]:
    """The arrays of some batches, in the order of the model's inputs."""
    rng = np.random.default_rng(num_samples)

    def request() -> Arrays:
        ids = [rng.integers(0, ROWS, num_samples) for _ in range(FEATURES)]
        return [*ids, rng.random((num_samples, DENSE), np.float32)]

    return [[array for _ in range(num_requests) for array in request()] for _ in range(NUM_BATCHES)]


def seconds(session: InferenceSession, batches: list[Arrays], num_requests: int, clock: Callable[[], float]) -> float:
    """The time of a call."""
    num_samples = num_requests * len(batches[0][0])
    repetitions = max(1, FEW_SAMPLES // (num_samples * len(batches)))
    begin = clock()
    for _ in range(repetitions):
        for arrays in batches:
            session.fast_path.run(arrays, num_requests)
    return (clock() - begin) / (repetitions * len(batches))


if __name__ == "__main__":
    main()
