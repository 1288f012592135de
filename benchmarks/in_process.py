"""Requests in process, compared with the whole network in plain ONNX Runtime: goal G7c.

    python benchmarks/in_process.py            4 M rows, fifteen rounds
    python benchmarks/in_process.py --quick    400 k rows, five rounds

The model of triton.py: 26 features, a table each, dim 16, one packed input, MLP 64-1, one thread. In a round each way
answers the same requests a few hundred times, in turns:

arrays    `InferenceSession.run_arrays`, as the Triton backend calls it
requests  `InferenceSession.run` or `run_many`, as a program calls it
plain     ONNX Runtime on the original; several requests are joined by NumPy and their answers split

A line shows the median time of a call, and the median and range of plain's time over that of `arrays` and `requests`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from triton import FEATURES, Network, write_models, write_ours

from inference_session import InferenceSession, Request
from inference_session.requests.outputs import JoinedAnswer

CASES = ((1, 1, "5"), (1, 64, "3"), (8, 64, "2.8"), (1, 1024, "2.5"))
"""Requests, samples of each, and how often faster than plain they should be."""
ROUND_S = 0.03
"""Seconds that a way is repeated in a round."""

Ways = dict[str, Callable[[], Any]]


def main() -> None:
    """Write the model, and measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rows_per_table = (400_000 if quick else 4_000_000) // FEATURES
    with tempfile.TemporaryDirectory(prefix="hotrow-in-process-") as name:
        folder = Path(name)
        write_models(folder / "repository", folder / "model", Network(rows_per_table), ())
        write_ours(folder / "repository", folder / "model" / "plain.onnx", "hotrow", precision="float32")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        plain = onnxruntime.InferenceSession(
            folder / "model" / "plain.onnx", options, providers=["CPUExecutionProvider"]
        )
        with InferenceSession.open(folder / "repository" / "hotrow" / "1", dense_threads=1) as session:
            for num_requests, num_samples, goal in CASES:
                rng = np.random.default_rng(num_samples)
                ids = [rng.integers(0, rows_per_table, (num_samples, FEATURES)) for _ in range(num_requests)]
                ways = ways_to_answer(session, plain, ids)
                check_answers(ways)
                print(line(f"{num_requests} x {num_samples}", measure(ways, 5 if quick else 15), goal), flush=True)


def ways_to_answer(session: InferenceSession, plain: Any, ids: list[NDArray[np.int64]]) -> Ways:
    """Each answers these requests with a list of arrays."""
    arrays: list[NDArray[Any]] = list(ids)
    requests = [Request({"ids": each}, ("click",)) for each in ids]
    ends = np.cumsum([len(each) for each in ids])[:-1]
    if len(ids) == 1:
        return {
            "arrays": lambda: split(session.run_arrays(arrays, 1, ("click",))),
            "requests": lambda: [session.run({"ids": ids[0]}, ("click",))["click"]],
            "plain": lambda: [plain.run(["click"], {"ids": ids[0]})[0]],
        }
    return {
        "arrays": lambda: split(session.run_arrays(arrays, len(ids), ("click",))),
        "requests": lambda: [each["click"] for each in session.run_many(requests)],  # type: ignore[index]
        "plain": lambda: np.split(plain.run(["click"], {"ids": np.concatenate(ids)})[0], ends),
    }


def split(joined: JoinedAnswer | None) -> list[NDArray[Any]]:
    """The array of each request."""
    return [each["click"] for each in joined.split()] if joined else []


def check_answers(ways: Ways) -> None:
    """All ways must agree before they are timed."""
    expected = ways["plain"]()
    for answer in ways.values():
        for found, wanted in zip(answer(), expected, strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-6)


def measure(ways: Ways, rounds: int) -> dict[str, list[float]]:
    """Seconds of one call, by way and round."""
    repetitions = {name: max(3, int(ROUND_S / seconds_of_one(answer, 3))) for name, answer in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, answer in ways.items():
            seconds[name].append(seconds_of_one(answer, repetitions[name]))
    return seconds


def seconds_of_one(answer: Callable[[], Any], repetitions: int) -> float:
    """The mean over this many calls."""
    begin = time.perf_counter()
    for _ in range(repetitions):
        answer()
    return (time.perf_counter() - begin) / repetitions


def line(name: str, seconds: dict[str, list[float]], goal: str) -> str:
    """The line of one case in the table."""
    parts = [f"{way} {1e6 * statistics.median(found):7.1f} us" for way, found in seconds.items()]
    for way in ("arrays", "requests"):
        ratios = np.array(seconds["plain"]) / np.array(seconds[way])
        parts.append(f"{way} x {np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})")
    return f"{name:>9}  {'  '.join(parts)}  goal {goal}"


if __name__ == "__main__":
    main()
