"""Two recommenders as ONNX files, of the kinds that PyTorch and JAX export, with requests and ONNX Runtime's answers.

The answers are those of plain ONNX Runtime on the whole model, before anything is taken out of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from tests.testing.onnx_evaluation import run_network
from tests.testing.onnx_models import model_of

NUM_REQUESTS = 512
_IDS = {"user_id": 27_000, "video_id": 7500, "author_id": 5400, "music_id": 5800, "onehot_feat3": 1400}
"""Inputs with large tables, and how many rows these have."""
_SMALL = {"tag": 108, "tab": 16, "hour": 25, "upload_type": 13, "music_type": 7, "user_active_degree": 10}
_TASKS = ("is_click", "long_view", "is_like")


class _Graph:
    """Lines of ONNX's text form, and the weights that they name."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.lines: list[str] = []
        self.weights: dict[str, NDArray[Any]] = {}
        self._count = 0

    def add(self, expression: str) -> str:
        """Add a node; the name of its output."""
        self._count += 1
        name = f"t{self._count}"
        self.lines.append(f"{name} = {expression}")
        return name

    def weight(self, *shape: int, scale: float = 0.0) -> str:
        """A random weight; its name."""
        self._count += 1
        name = f"w{self._count}"
        random = self.random.normal(scale=scale or shape[0] ** -0.5, size=shape)
        self.weights[name] = random.astype(np.float32)
        return name

    def table(self, name: str, rows: int, dim: int) -> str:
        """An embedding table; its name."""
        self.weights[name] = self.random.normal(size=(rows, dim)).astype(np.float32)
        return name

    def layer(self, tensor: str, inputs: int, outputs: int, activation: str = "Relu") -> str:
        """A dense layer."""
        made = self.add(f"Gemm({tensor}, {self.weight(inputs, outputs)}, {self.weight(outputs)})")
        return self.add(f"{activation}({made})") if activation else made

    def model(self, inputs: str, outputs: str) -> onnx.ModelProto:
        """The model; `inputs` and `outputs` in text form."""
        return model_of(f"recommender ({inputs}) => ({outputs}) {{ {' '.join(self.lines)} }}", self.weights)


def write_multi_task(folder: Path) -> None:
    """Experts and gates over five large tables, small ones and a pooled history; three predictions."""
    graph = _Graph(11)
    graph.weights.update(one=np.array([1]), zero=np.array(0), eps=np.array(1e-6, np.float32))
    parts = ["dense_features", _history(graph)]
    width = 6 + 32
    for name, rows in {**_IDS, **_SMALL}.items():
        dim = 32 if rows > 7000 else 16 if rows > 1000 else 8
        table = graph.table(f"emb_{name}", rows, dim)
        parts.append(graph.add(f"Squeeze({graph.add(f'Gather({table}, {name})')}, one)"))
        width += dim
    features = graph.add(f"Concat <axis = 1> ({', '.join(parts)})")
    experts = [graph.layer(graph.layer(features, width, 64), 64, 32) for _ in range(3)]
    stacked = graph.add(f"Concat <axis = 1> ({', '.join(graph.add(f'Unsqueeze({each}, one)') for each in experts)})")
    for task in _TASKS:
        gate = graph.add(f"Softmax <axis = 1> ({graph.layer(features, width, 3, '')})")
        weighted = graph.add(f"Mul({stacked}, {graph.add(f'Unsqueeze({gate}, two)')})")
        tower = graph.layer(graph.add(f"ReduceSum <keepdims = 0> ({weighted}, one)"), 32, 16)
        graph.lines.append(f"{task} = Identity({graph.layer(tower, 16, 1, 'Sigmoid')})")
    graph.weights["two"] = np.array([2])
    ids = ", ".join(f"int64[b, 1] {name}" for name in {**_IDS, **_SMALL})
    outputs = ", ".join(f"float[b, 1] {task}" for task in _TASKS)
    model = graph.model(f"{ids}, int64[b, 20] hist_video_ids, float[b, 6] dense_features", outputs)
    _write(folder, model, _multi_task_requests(graph.random))


def _history(graph: _Graph) -> str:
    """The mean of the videos of the history; 0 stands for none."""
    vectors = graph.add("Gather(emb_video_id, hist_video_ids)")
    known = graph.add(f"Cast <to = 1> ({graph.add('Greater(hist_video_ids, zero)')})")
    known = graph.add(f"Unsqueeze({known}, two)")
    total = graph.add(f"ReduceSum <keepdims = 0> ({graph.add(f'Mul({vectors}, {known})')}, one)")
    count = graph.add(f"Max({graph.add(f'ReduceSum <keepdims = 0> ({known}, one)')}, eps)")
    return graph.add(f"Div({total}, {count})")


def _multi_task_requests(random: np.random.Generator) -> dict[str, NDArray[Any]]:
    inputs: dict[str, NDArray[Any]] = {
        name: random.integers(0, rows, (NUM_REQUESTS, 1)) for name, rows in {**_IDS, **_SMALL}.items()
    }
    lengths = random.integers(0, 21, (NUM_REQUESTS, 1))
    history = random.integers(1, _IDS["video_id"], (NUM_REQUESTS, 20))
    inputs["hist_video_ids"] = np.where(np.arange(20) < lengths, history, 0)
    inputs["dense_features"] = random.normal(size=(NUM_REQUESTS, 6)).astype(np.float32)
    return inputs


def write_pairwise(folder: Path) -> None:
    """Columns of one int32 matrix of ids, and the products of all pairs of vectors; one prediction."""
    graph = _Graph(12)
    sizes = [*_IDS.values(), *_SMALL.values()]
    graph.weights.update(one=np.array([1]), zero=np.array(0, np.int32))
    bottom = graph.layer(graph.layer("dense_features", 6, 64), 64, 16)
    vectors = [graph.add(f"Unsqueeze({bottom}, one)")]
    for column, rows in enumerate(sizes):
        graph.weights[f"column_{column}"] = np.array(column, np.int32)
        column_ids = graph.add(f"Gather <axis = 1> (sparse_ids, column_{column})")
        graph.weights[f"rows_{column}"] = np.array(rows - 1, np.int32)
        inside = graph.add(f"Min({graph.add(f'Max({column_ids}, zero)')}, rows_{column})")
        found = graph.add(f"Gather({graph.table(f'table_{column}', rows, 16)}, {inside})")
        vectors.append(graph.add(f"Unsqueeze({found}, one)"))
    stacked = graph.add(f"Concat <axis = 1> ({', '.join(vectors)})")
    products = graph.add(f"MatMul({stacked}, {graph.add(f'Transpose <perm = [0, 2, 1]> ({stacked})')})")
    count = len(vectors)
    graph.weights["pairs"] = np.array([i * count + j for i in range(count) for j in range(i)])
    graph.weights["flat"] = np.array([0, count * count])
    pairs = graph.add(f"Gather <axis = 1> ({graph.add(f'Reshape({products}, flat)')}, pairs)")
    joined = graph.add(f"Concat <axis = 1> ({bottom}, {pairs})")
    hidden = graph.layer(joined, 16 + count * (count - 1) // 2, 64)
    graph.lines.append(f"is_click = Identity({graph.layer(hidden, 64, 1, 'Sigmoid')})")
    model = graph.model(f"int32[b, {len(sizes)}] sparse_ids, float[b, 6] dense_features", "float[b, 1] is_click")
    ids = np.stack([graph.random.integers(0, rows, NUM_REQUESTS) for rows in sizes], axis=1).astype(np.int32)
    dense = graph.random.normal(size=(NUM_REQUESTS, 6)).astype(np.float32)
    _write(folder, model, {"sparse_ids": ids, "dense_features": dense})


def _write(folder: Path, model: onnx.ModelProto, requests: Mapping[str, NDArray[Any]]) -> None:
    folder.mkdir(parents=True)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, folder / "model.onnx")
    np.savez(folder / "requests.npz", **requests)  # type: ignore[arg-type]
    np.savez(folder / "expected.npz", **run_network(folder / "model.onnx", dict(requests)))  # type: ignore[arg-type]
