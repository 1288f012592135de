"""Imports models with context inputs, and compares their ranking networks with the original on tiled inputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto

from inference_session.importers.onnx.replay import Replay
from inference_session.importers.report import ImportReport
from inference_session.model_spec import BLOCK_CONTEXT, RANKING_FILE, RANKING_KEYS_FILE, ROW_CONTEXT
from inference_session.requests.blocks import arrange
from tests.testing.onnx_evaluation import Arrays, run_network
from tests.testing.onnx_models import import_model, model_of, table

TOLERANCE = 1e-6


def check_ranking(
    tmp_path: Path, model: ModelProto, context: Sequence[str], *requests: tuple[Arrays, Sequence[int]]
) -> ImportReport:
    """Import a model; requests, each with its contexts' candidates, get the original's answers to tiled inputs."""
    report = import_model(tmp_path, model, context=context)
    for inputs, counts in requests:
        assert_alike(tmp_path, report, inputs, counts)
    return report


def assert_alike(tmp_path: Path, report: ImportReport, inputs: Arrays, counts: Sequence[int]) -> None:
    """One request."""
    expected = run_network(tmp_path / "model.onnx", tiled(report.spec.context, inputs, counts))
    for name, found in rank(report, inputs, counts).items():
        limit = TOLERANCE * max(1.0, float(np.abs(expected[name]).max(initial=0)))
        np.testing.assert_allclose(found, expected[name], rtol=0, atol=limit, err_msg=name)


def tiled(context: Collection[str], inputs: Arrays, counts: Sequence[int]) -> Arrays:
    """Inputs with a context's row for each of its candidates; `context`: the names of its inputs."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return {name: array[rows] if name in context else array for name, array in inputs.items()}


def rank(report: ImportReport, inputs: Arrays, counts: Sequence[int]) -> Arrays:
    """The answers of the ranking networks."""
    spec = report.spec
    assert spec.ranking is not None
    blocks = arrange(np.array(counts), may_pad=spec.ranking.may_pad)
    placed = {
        name: array if name in spec.context or blocks.candidates is None else array[blocks.candidates]
        for name, array in inputs.items()
    }
    replay = Replay(
        report.version_dir,
        replace(spec, lookups=spec.ranking.lookups),
        dense_file=RANKING_FILE,
        keys_file=RANKING_KEYS_FILE,
    )
    outputs = replay.run({**placed, ROW_CONTEXT: blocks.row_context, BLOCK_CONTEXT: blocks.block_context})
    names = [tensor.name for tensor in spec.outputs]
    return {
        name: output if blocks.rows is None else output[blocks.rows]
        for name, output in zip(names, outputs, strict=True)
    }


def network(report: ImportReport) -> ModelProto:
    """The ranking network."""
    return onnx.load(report.version_dir / RANKING_FILE)


def operators(report: ImportReport) -> list[str]:
    """The operators of the ranking network, in their order."""
    return [node.op_type for node in network(report).graph.node]


COUNTS = ((6,), (2, 2, 2), (4, 1), (1, 1, 1), (1, 40, 0, 3))
DIM = 4


def matrix(*shape: int, seed: int = 7) -> NDArray[np.float32]:
    """Random weights."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def requests(**shapes: tuple[int, ...]) -> list[tuple[Arrays, tuple[int, ...]]]:
    """Random requests: `u_…` is the context's; names in `_f` are numbers, others keys."""
    found = []
    for seed, counts in enumerate(COUNTS):
        random, inputs = np.random.default_rng(seed), {}
        for name, shape in shapes.items():
            size = (len(counts) if name.startswith("u") else sum(counts), *shape)
            is_number = name.endswith("_f")
            inputs[name] = random.standard_normal(size, np.float32) if is_number else random.integers(0, 1000, size)
        found.append((inputs, counts))
    return found


CONTEXT = ("user", "clicks")
USERS, ITEMS = table(dim=DIM, seed=1), table(dim=DIM, seed=2)
_RANKER = """ranker (int64[n] user, int64[n, length] clicks, int64[n] item) => (float[n, 1] score) {
    u = Gather(users, user)
    h = Gather(items, clicks)
    p = ReduceSum<keepdims = 0>(h, one)
    t = Gather(items, item)
    both = Add(u, p)
    product = Mul(both, t)
    score = ReduceSum<keepdims = 1>(product, one)
}"""


def small_ranker() -> ModelProto:
    """A model that scores items for users by vectors alone; `CONTEXT` are its context inputs."""
    return model_of(_RANKER, {"users": USERS, "items": ITEMS, "one": np.array([1])})


def random_keys(num_contexts: int, num_candidates: int, seed: int = 0) -> Arrays:
    """A request to `small_ranker`."""
    random = np.random.default_rng(seed)
    shapes = {"user": (num_contexts,), "clicks": (num_contexts, 3), "item": (num_candidates,)}
    return {name: random.integers(0, len(USERS), shape) for name, shape in shapes.items()}
