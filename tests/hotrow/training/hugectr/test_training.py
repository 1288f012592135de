"""Formulas of HugeCTR's training against slow oracles, and what a model does between compile and its files."""

from __future__ import annotations

import inspect
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hotrow.training import hugectr
from hotrow.training.hash_embeddings import rows as hash_rows
from hotrow.training.hash_embeddings.key_index import SortedIndex, create_index
from hotrow.training.hugectr import DataReaderType_t, DenseLayer, Layer_t, MetricsType, Model, Optimizer_t, Update_t
from hotrow.training.hugectr.graph.graph_json import dense_document, read_dense
from hotrow.training.hugectr.readers.block import Bags, Block
from hotrow.training.hugectr.trainer import batch
from hotrow.training.hugectr.trainer.batch import Batch, DeviceBags, Staging
from hotrow.training.hugectr.trainer.embedding import EmbeddingTable
from hotrow.training.hugectr.trainer.metrics import Metrics, auc
from hotrow.training.hugectr.trainer.optimizers import dense_rule
from hotrow.training.hugectr.trainer.processes import Processes
from hotrow.training.row_access import add_up
from inference_session.errors import ConfigurationError, ModelFormatError, UnsupportedModelError
from inference_session.platform.file_locks import locked
from tests.testing.hugectr_training_samples import SAMPLES, Sample, binary, layer, losses, make_data, make_model
from tests.testing.servers import PATIENCE_S, wait_until

pytestmark = pytest.mark.training
Array = NDArray[np.float64]
ACTIVATIONS = [hugectr.Activation_t.Relu, hugectr.Activation_t.Non]


def oracle_step(  # noqa: PLR0917  a formula's letters
    kind: Optimizer_t, p: Any, w: Array, g: Array, s: dict[str, Array], lr: float, t: int
) -> None:
    """One element-wise step in float64, by HugeCTR's formulas."""
    if kind is Optimizer_t.Adam:
        s["m"] = p.beta1 * s["m"] + (1 - p.beta1) * g
        s["v"] = p.beta2 * s["v"] + (1 - p.beta2) * g * g
        w -= lr * np.sqrt(1 - p.beta2**t) / (1 - p.beta1**t) * s["m"] / (np.sqrt(s["v"]) + p.epsilon)
    elif kind is Optimizer_t.AdaGrad:
        s["sum"] = s["sum"] + g * g
        w -= lr * g / (p.epsilon + np.sqrt(s["sum"]))
    elif kind is Optimizer_t.MomentumSGD:
        s["momentum"] = p.momentum_factor * s["momentum"] - lr * g
        w += s["momentum"]
    elif kind is Optimizer_t.Nesterov:
        old, s["accm"] = s["accm"], p.momentum_factor * s["accm"] - lr * g
        w += -p.momentum_factor * old + (1 + p.momentum_factor) * s["accm"]
    elif kind is Optimizer_t.SGD:
        w -= lr * g
    else:
        tiny = float(np.finfo(np.float32).eps)
        n = s["n"] + g * g
        s["z"] = s["z"] + g + (np.sqrt(s["n"] + tiny) - np.sqrt(n + tiny)) * w / lr
        s["n"] = n
        x = p.lambda1 * (1 - 2 * np.signbit(s["z"])) - s["z"]
        w[:] = x / ((p.beta + np.sqrt(n + tiny)) / lr + p.lambda2) * (np.abs(s["z"]) > p.lambda1)


def optimizer(kind: Optimizer_t, update: Update_t = Update_t.Global) -> hugectr.OptParamsPy:
    return hugectr.CreateOptimizer(kind, update, 0.8, 0.9, 1e-3, 0.1, 0.7, True, beta=0.5, lambda1=0.01, lambda2=0.1)


@pytest.mark.parametrize("kind", Optimizer_t)
def test_dense_optimizers_follow_their_formulas(kind: Optimizer_t) -> None:
    random, params = np.random.default_rng(1), optimizer(kind)
    rule = dense_rule(params)
    expected = random.normal(size=20)
    weight = torch.tensor(expected, dtype=torch.float32)
    states = {name: torch.full((20,), rule.first_state) for name in rule.state_names}
    rule.lr = 0.05
    slow = {name: np.full(20, rule.first_state) for name in rule.state_names}
    for t in range(1, 30):
        gradient = random.normal(size=20)
        rule.update(weight, torch.tensor(gradient, dtype=torch.float32), states, t)
        oracle_step(kind, params, expected, gradient, slow, 0.05, t)
    np.testing.assert_allclose(weight.numpy(), expected, atol=2e-5)


def lists(keys: NDArray[np.int64], offsets: NDArray[np.int64]) -> DeviceBags:
    return DeviceBags(torch.from_numpy(keys), slice(0, len(keys)), torch.from_numpy(offsets), None)


@pytest.mark.parametrize("kind", Optimizer_t)
@pytest.mark.parametrize("update", [Update_t.Local, Update_t.Global])
@pytest.mark.parametrize("combiner", ["sum", "mean"])
@pytest.mark.parametrize("is_as_on_gpu", [False, True])
def test_tables_follow_their_formulas(kind: Optimizer_t, update: Update_t, combiner: str, is_as_on_gpu: bool) -> None:
    random, params, dim = np.random.default_rng(2), optimizer(kind, update), 3
    table = EmbeddingTable("t", dim, params)
    table.finds_distinct = not is_as_on_gpu
    moves_all = update is Update_t.Global and table.rule.moves_untouched
    weights: dict[int, Array] = {}
    states: dict[int, dict[str, Array]] = {}
    for t in range(1, 25):
        counts = random.integers(0, 4, 8)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        keys = random.integers(-5, 5 + t, offsets[-1]) * 2**40
        bags = lists(keys, offsets)
        touched = table.touch(bags)
        for key, vector in zip(table.keys.tolist(), table.weight.numpy().astype(np.float64), strict=True):
            if key not in weights:
                assert (np.abs(vector) <= 0.05).all()
                weights[key] = vector
                states[key] = {name: np.full(dim, table.rule.first_state) for name in table.rule.state_names}
        pooled = table.pool(touched.vectors, touched.places, bags, combiner)
        upstream = random.normal(size=(8, dim))
        gradients = {key: np.zeros(dim) for key in keys.tolist()}
        for bag in range(8):
            own = keys[offsets[bag] : offsets[bag + 1]].tolist()
            share = 1.0 / len(own) if own and combiner == "mean" else 1.0
            np.testing.assert_allclose(
                pooled[bag].detach().numpy(), share * sum((weights[k] for k in own), np.zeros(dim)), atol=2e-5
            )
            for key in own:
                gradients[key] += share * upstream[bag]
        pooled.backward(torch.tensor(upstream, dtype=torch.float32))
        assert touched.vectors.grad is not None
        with torch.no_grad():
            table.update(touched, touched.vectors.grad, 0.05)
        for key in weights if moves_all else gradients:
            oracle_step(kind, params, weights[key], gradients.get(key, np.zeros(dim)), states[key], 0.05, t)
    for key, vector in zip(table.keys.tolist(), table.weight.numpy(), strict=True):
        np.testing.assert_allclose(vector, weights[key], atol=2e-5)


def test_lazy_adam_makes_up_for_steps_in_which_a_row_was_not_touched() -> None:
    params = optimizer(Optimizer_t.Adam, Update_t.LazyGlobal)
    table, random = EmbeddingTable("t", 2, params), np.random.default_rng(3)
    w, m, v, last = {}, {}, {}, {}  # type: ignore[var-annotated]
    for t in range(1, 20):
        keys = np.unique(random.integers(0, 6, 3))
        bags = lists(keys, np.arange(len(keys) + 1))
        touched = table.touch(bags)
        for key, vector in zip(table.keys.tolist(), table.weight.numpy().astype(np.float64), strict=True):
            if key not in w:
                w[key], m[key], v[key], last[key] = vector, np.zeros(2), np.zeros(2), 1
        gradient = random.normal(size=(len(keys), 2))
        table.pool(touched.vectors, touched.places, bags, "sum").backward(torch.tensor(gradient, dtype=torch.float32))
        assert touched.vectors.grad is not None
        with torch.no_grad():
            table.update(touched, touched.vectors.grad, 0.05)
        for key, g in zip(keys.tolist(), gradient, strict=True):
            kept = params.beta1 ** (t - last[key])
            alpha = 0.05 / (1 - params.beta1) * np.sqrt(1 - params.beta2 ** last[key]) / (1 - params.beta1 ** last[key])
            w[key] -= alpha * (1 - kept) * m[key] / (np.sqrt(v[key]) + params.epsilon)
            m[key] = kept * m[key] + (1 - params.beta1) * g
            v[key] = params.beta2 ** (t - last[key]) * v[key] + (1 - params.beta2) * g * g
            last[key] = t
    for key, vector in zip(table.keys.tolist(), table.weight.numpy(), strict=True):
        np.testing.assert_allclose(vector, w[key], atol=2e-5)


def test_lazy_updates_are_for_adam_alone() -> None:
    with pytest.raises(UnsupportedModelError, match="LazyGlobal is for Adam, not SGD"):
        EmbeddingTable("t", 2, optimizer(Optimizer_t.SGD, Update_t.LazyGlobal))


def test_an_index_may_give_rows_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a GPU does: loaded rows, new rows and states still belong to their keys."""
    found = []
    keys, vectors = np.array([9, 2, 7, 2]), np.arange(8, dtype=np.float32).reshape(4, 2)
    for create in (create_index, SortedIndex):
        monkeypatch.setattr(hash_rows, "create_index", create)
        table = EmbeddingTable("t", 2, optimizer(Optimizer_t.AdaGrad))
        table.load(keys, vectors)
        table.set_state("sum", table.rows_of(np.array([7, 9])), np.ones((2, 2), np.float32))
        bags = lists(np.array([5, 2, 5, 1]), np.arange(5))
        touched = table.touch(bags)
        table.pool(touched.vectors, touched.places, bags, "sum").sum().backward()
        assert touched.vectors.grad is not None
        with torch.no_grad():
            table.update(touched, touched.vectors.grad, 0.1)
        assert table.weight[table.rows_of(np.array([7])) - 1].tolist() == [[4.0, 5.0]]
        learned = zip(table.keys.tolist(), table.weight.tolist(), table.states[0].tolist(), strict=True)
        found.append(sorted(learned))
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Optimizer_t.Adam, Optimizer_t.AdaGrad, Optimizer_t.SGD, Optimizer_t.MomentumSGD])
@pytest.mark.parametrize("update", [Update_t.Local, Update_t.Global])
@pytest.mark.parametrize("dim", [1, 6, 16])
def test_a_table_on_a_gpu_learns_what_one_on_the_processor_learns(
    kind: Optimizer_t, update: Update_t, dim: int
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    params, found = optimizer(kind, update), []
    for device in ("cpu", "cuda"):
        place = Processes(0, 1, torch.device(device))
        table = EmbeddingTable("t", dim, params, seed=3, processes=place)
        for step in range(4):
            random = torch.Generator().manual_seed(step)
            keys = torch.randint(-(2**63), 2**63 - 1, (700,), generator=random) >> (55 - step)
            touched = table.touch(DeviceBags(keys.to(device), slice(0, 700), None, 1))
            gradient = (keys[:, None] % 7 - torch.arange(dim) % 3.0).to(device)
            if touched.places is not None:
                gradient = add_up(len(touched.rows), touched.places, gradient)
            with torch.no_grad():
                table.update(touched, gradient, 0.01)
        order = table.keys.argsort()
        found.append([column[order].cpu() for column in table.columns])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_lists_of_one_length_are_pooled_as_others(width: int, combiner: str) -> None:
    keys, upstream = np.array([4, 9, 4, 4, 8, 9], np.int64), torch.arange(12.0).reshape(6, 2)[: 6 // width]
    table, found = EmbeddingTable("t", 2, optimizer(Optimizer_t.SGD)), []
    for finds_distinct in (True, False):
        table.finds_distinct = finds_distinct
        for bags in (
            lists(keys, np.arange(0, 7, width)),
            DeviceBags(torch.from_numpy(keys), slice(0, 6), None, width),
        ):
            touched = table.touch(bags)
            pooled = table.pool(touched.vectors, touched.places, bags, combiner)
            pooled.backward(upstream)
            gradient = touched.vectors.grad
            assert gradient is not None
            places = torch.arange(6) if touched.places is None else touched.places
            sums = torch.zeros(table.num_rows + 1, 2).index_add_(0, touched.rows, gradient)
            assert torch.equal(touched.rows[places], table.touch(lists(keys, np.arange(7))).rows[places])
            found.append((pooled.detach(), sums))
    for ours in found[1:]:
        for mine, yours in zip(ours, found[0], strict=True):
            torch.testing.assert_close(mine, yours)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("size", [2, 4, 6])
def test_a_batch_that_is_sent_ahead_is_the_batch(monkeypatch: pytest.MonkeyPatch, count: int, size: int) -> None:
    """Alone or with others, and the last one may be smaller; its step waits for it on the GPU, the host does not."""
    bags = (Bags(np.arange(12) % 7, width=1), Bags(np.array([-1, 2**62, -1, 5]), np.array([0, 0, 2, 2, 3, 4, 4])))
    columns = np.arange(36, dtype=np.float32).reshape(6, 6)
    block = Block(columns[:, :1], columns[:, :0], bags)
    for rank in range(count):
        plain, staging = (Staging(Processes(rank, count, torch.device("cpu"))) for _ in range(2))
        waits = _without_gpu(monkeypatch, staging)
        sent = staging.send(staging.pack(block))
        for begin in range(0, 6, size):
            assert len(waits) == begin // size
            found = staging.take(sent.part(begin, begin + size))
            _assert_same(found, plain.take(block.part(begin, begin + size)))


def _assert_same(found: Batch, expected: Batch) -> None:
    assert torch.equal(found.labels, expected.labels)
    assert torch.equal(found.dense, expected.dense)
    for mine, yours in zip(found.bags, expected.bags, strict=True):
        assert (mine.own, mine.width) == (yours.own, yours.width)
        assert mine.keys.dtype == torch.int64
        assert torch.equal(mine.keys, yours.keys)
        assert (mine.offsets is None) == (yours.offsets is None)
        if mine.offsets is not None:
            assert mine.offsets.tolist() == (yours.offsets.tolist() if yours.offsets is not None else None)


def _without_gpu(monkeypatch: pytest.MonkeyPatch, staging: Staging) -> list[object]:
    """Let a batch go the way to a GPU in host memory; returns a list that grows when the stream of steps waits."""
    waits: list[object] = []
    event = SimpleNamespace(record=lambda: None)
    monkeypatch.setattr(staging, "_stream", "a stream")
    monkeypatch.setattr(batch, "pinned_memory", lambda size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    for name, value in (("stream", nullcontext), ("device", nullcontext), ("Event", lambda: event)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_event=waits.append))
    return waits


def test_keys_never_trained_on_are_answered_with_zeros_and_get_no_row() -> None:
    table = EmbeddingTable("t", 4, optimizer(Optimizer_t.SGD))
    table.touch(lists(np.array([7, -7]), np.arange(3)))
    bags = lists(np.array([8, 7, 2**62]), np.array([0, 1, 2, 3]))
    found = table.pool(*table.find(bags), bags, "sum")
    assert table.num_rows == 2
    assert not found[0].any()
    assert found[1].any()
    assert not found[2].any()


def test_the_learning_rate_warms_up_and_decays() -> None:
    schedule = hugectr.LearningRateScheduler(1.0, 4, 6, 5, 2.0, 0.1)
    rates = [schedule.get_next() for _ in range(14)]
    expected = [0.25, 0.5, 0.75, 1, 1, 1, 0.8**2, 0.6**2, 0.4**2, 0.1, 0.1, 0.1, 0.1, 0.1]
    np.testing.assert_allclose(rates, expected)
    with pytest.raises(ConfigurationError, match="warmup_steps -1"):
        hugectr.LearningRateScheduler(1.0, -1)


def test_a_schedule_needs_neither_warm_up_nor_steps_of_decay() -> None:
    """As later releases take them."""
    assert hugectr.CreateSolver(warmup_steps=0, decay_steps=0).warmup_steps == 0
    schedule = hugectr.LearningRateScheduler(1.0, 0, 2, 0, 2.0, 0.1)
    assert [schedule.get_next() for _ in range(4)] == [1.0, 1.0, 0.1, 0.1]


def test_metrics_are_what_their_names_say() -> None:
    random = np.random.default_rng(4)
    predictions = random.integers(0, 20, 300) / 20
    labels = (random.random(300) < predictions).astype(np.float64)
    pairs = [(p > q) + 0.5 * (p == q) for p in predictions[labels == 1] for q in predictions[labels == 0]]
    assert auc(predictions, labels) == pytest.approx(np.mean(pairs))
    metrics = Metrics(dict.fromkeys(MetricsType, 1.0))
    for part in (slice(0, 100), slice(100, 300)):
        column = predictions[part, np.newaxis].astype(np.float32)
        metrics.add(column, labels[part, np.newaxis].astype(np.float32), float(part.start))
    found = dict(metrics.take())
    assert found["AUC"] == pytest.approx(np.mean(pairs))
    assert found["AverageLoss"] == 50.0
    assert found["HitRate"] == pytest.approx(labels[predictions.astype(np.float32).astype(np.float64) > 0.8].mean())
    assert 0 < found["NDCG"] <= 1
    assert all(np.isnan(value) for value in dict(metrics.take()).values())  # of no batch
    metrics.add(np.array([[np.nan], [0.8]], np.float32), np.array([[1], [0]], np.float32), np.nan)
    assert np.isnan(dict(metrics.take())["AUC"])
    metrics.add(np.array([[0.9], [0.8], [0.1]], np.float32), np.array([[1], [0], [1]], np.float32), 0.0)
    ideal = 1 + 1 / np.log2(3)
    assert dict(metrics.take())["NDCG"] == pytest.approx((1 + 1 / np.log2(4)) / ideal)


def test_names_order_and_defaults_are_those_of_release_3_4() -> None:
    def order(call: Any) -> list[str]:
        parameters = inspect.signature(call).parameters.values()
        return [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and p.name != "self"]

    assert order(hugectr.CreateSolver)[:12] == [
        "model_name", "seed", "lr_policy", "lr", "warmup_steps", "decay_start", "decay_steps", "decay_power", "end_lr",
        "max_eval_batches", "batchsize_eval", "batchsize",
    ]  # fmt: skip
    assert order(hugectr.CreateSolver)[-1] == "kafka_brockers"
    assert order(hugectr.DataReaderParams)[:5] == ["data_reader_type", "source", "keyset", "eval_source", "check_type"]
    assert order(Model.fit) == [
        "num_epochs", "max_iter", "display", "eval_interval", "snapshot", "snapshot_prefix", "data_source_params"
    ]  # fmt: skip
    assert order(DenseLayer)[2:6] == ["top_names", "factor", "eps", "gamma_init_type"]
    fit = inspect.signature(Model.fit).parameters
    assert [fit[n].default for n in ("num_epochs", "max_iter", "display", "eval_interval")] == [0, 2000, 200, 1000]
    solver = hugectr.CreateSolver()
    assert (solver.lr, solver.batchsize, solver.vvgpu, solver.max_eval_batches) == (0.001, 2048, [[0]], 100)
    adam = hugectr.CreateOptimizer()
    assert (adam.beta1, adam.beta2, adam.epsilon, adam.update_type) == (0.9, 0.999, 1e-7, Update_t.Global)


def sparse_embedding(*values: Any, **named: Any) -> hugectr.SparseEmbedding:
    """With these arguments behind the names."""
    kind = hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash
    return hugectr.SparseEmbedding(kind, 1, 8, "sum", "table", "data", *values, **named)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hugectr.CreateSolver(batchsize=0), "batchsize is 0"),
        (lambda: hugectr.CreateSolver(batchsize="8"), "batchsize is '8'; allowed: whole numbers from 1"),
        (lambda: hugectr.CreateSolver(metrics_spec=[MetricsType.AUC]), "metrics_spec is .*; allowed: a dict of Met"),
        (lambda: hugectr.CreateSolver(metrics_spec={"AUC": 1.0}), "metrics_spec is .*; allowed: a dict of MetricsType"),
        (lambda: hugectr.DataReaderSparseParam("d", 1, False, 0), "DataReaderSparseParam 'd': slot_num is 0"),
        (lambda: hugectr.DataReaderSparseParam("d", [1, -1], False, 2), r"nnz_per_slot is \[1, -1\]; allowed: a whole"),
        (
            lambda: hugectr.Input(source="a", sparse_names=["b"]),
            r"\['source', 'sparse_names'\] .* release 3.0. Name the",
        ),
        (lambda: hugectr.Input("1", "label", 1, "dense", []), "label_dims is '1'; allowed: a whole number from 1"),
        (lambda: hugectr.Input(1, "label", -1, "dense", []), "dense_dim is -1; allowed: whole numbers from 0"),
        (lambda: hugectr.CreateSolver(lr=None), "lr is None; allowed: numbers from 0"),
        (lambda: hugectr.CreateSolver(vvgpu=[1]), r"vvgpu is \[1\]; allowed: a list of lists of GPUs"),
        (lambda: hugectr.CreateOptimizer(beta1="0.9"), "beta1 is '0.9'; allowed: numbers from 0 below 1"),
        (lambda: hugectr.CreateSolver(use_mixed_precision=True, scaler=0.0), "scaler is 0.0; allowed: numbers above 0"),
        (
            lambda: hugectr.CreateOptimizer(Optimizer_t.Adam, "Global"),
            "update_type is 'Global'; allowed: Update_t.Local",
        ),
        (
            lambda: hugectr.CreateSolver(training_callbacks=[1]),
            r"training_callbacks is \[1\]; allowed: a list of Train",
        ),
        (
            lambda: hugectr.DataReaderParams(DataReaderType_t.Parquet, "a", eval_source="b", slot_size_array=["x"]),
            r"DataReaderParams: slot_size_array is \['x'\]; allowed: a list of whole numbers from 0",
        ),
        (
            lambda: sparse_embedding(hugectr.CreateOptimizer()),
            "SparseEmbedding: slot_size_array is .*; allowed: a list of wh",
        ),
        (
            lambda: sparse_embedding(optimizer="Adam"),
            "SparseEmbedding: optimizer is 'Adam'; allowed: what CreateOptimizer",
        ),
        (
            lambda: sparse_embedding(slot_size_array=7),
            "SparseEmbedding: slot_size_array is 7; allowed: a list of whole",
        ),
        (
            lambda: hugectr.Model(hugectr.CreateSolver(), hugectr.CreateOptimizer(), hugectr.CreateOptimizer()),
            "Model: reader_params is .*; allowed: what DataReaderParams returns",
        ),
        (lambda: hugectr.EmbeddingTablePlaceHolder(-1, 10, 4, 0, 10), "id_space is -1; allowed: whole numbers from 0"),
        (
            lambda: DenseLayer(Layer_t.InnerProduct, ["a"], ["b"], num_outputs=[1]),
            r"InnerProduct .*\['num_outputs'\] are not supported",
        ),
        (lambda: hugectr.DataReaderSparseParam("d", 10**30, False, 2), "allowed: a whole number from 0 below 2"),
        (lambda: hugectr.DataReaderSparseParam(["d"], 1, False, 2), r"top_name is \['d'\]; allowed: a name"),
        (lambda: hugectr.DataReaderSparseParam("a", [1, 2], True, 3), "2 numbers in nnz_per_slot for 3 slots"),
        (lambda: hugectr.CreateSolver(seed=1.5), "CreateSolver: seed is 1.5; allowed: whole numbers"),
        (lambda: hugectr.CreateSolver(scaler=[1]), r"CreateSolver: scaler is \[1\]; allowed: numbers from 0"),
        (
            lambda: DenseLayer(Layer_t.ReLU, None, ["b"]),
            "DenseLayer ReLU: bottom_names is None; allowed: a name, or a list of names",
        ),
        (
            lambda: hugectr.DataReaderParams(DataReaderType_t.Parquet, Path("a"), eval_source="b"),
            r"DataReaderParams: source is .*Path\('a'\); allowed: a name, or a list of names",
        ),
        (
            lambda: hugectr.DataReaderParams(DataReaderType_t.Parquet, "a", eval_source=3),
            "DataReaderParams: eval_source is 3; allowed",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises((ConfigurationError, UnsupportedModelError), match=message):
        call()
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = hugectr.Nothing


def batch_norm_network(model: Model) -> None:
    layer(model, Layer_t.InnerProduct, "dense", "fc1", num_output=5)
    layer(model, Layer_t.BatchNorm, "fc1", "bn1", factor=0.25, eps=1e-4)
    layer(model, Layer_t.ELU, "bn1", "elu1", elu_alpha=0.5)
    layer(model, Layer_t.Reshape, "table", "flat", leading_dim=8)
    layer(model, Layer_t.Concat, "elu1 flat", "both")
    layer(model, Layer_t.InnerProduct, "both", "fc2", num_output=2)
    layer(model, Layer_t.Sigmoid, "fc2", "sigmoid")
    layer(model, Layer_t.InnerProduct, "sigmoid", "fc3", num_output=1)
    binary(model, "fc3")


SMALL = Sample(
    DataReaderType_t.Parquet, 4, (("data", 2, False, 2),), (("table", "data", 4, "mean"),),
    batch_norm_network, (30, 20), (2, 1),
)  # fmt: skip


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_data(SMALL, tmp_path)
    return tmp_path


def test_batch_norm_trains_by_batches_and_evaluates_by_running_statistics(small: Path) -> None:
    model = make_model(SMALL, small)
    model.start_data_reading()
    trainer = model.trainer
    statistics = trainer.network.statistics()
    assert not statistics[0][0].any()
    mean, variance = np.zeros(5), np.ones(5)
    for _ in range(3):
        weight, bias = (w.detach().numpy().copy() for w in trainer.weights[:2])
        batch = model.get_data_reader_train().next_batch()
        assert batch is not None
        x = batch.dense @ weight + bias
        mean = 0.75 * mean + 0.25 * x.mean(axis=0)
        variance = 0.75 * variance + 0.25 * x.var(axis=0, ddof=1)
        trainer.train(batch, 0.01)
    np.testing.assert_allclose(statistics[0][0].numpy(), mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(statistics[0][1].numpy(), variance, rtol=1e-4)
    assert model.eval()
    np.testing.assert_allclose(statistics[0][0].numpy(), mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", Optimizer_t)
def test_training_goes_on_from_its_files_as_if_it_had_not_stopped(small: Path, kind: Optimizer_t) -> None:
    sample = Sample(**{**vars(SMALL), "optimizer": {"optimizer_type": kind, "momentum_factor": 0.5}})

    def steps(model: Model, count: int) -> None:
        for _ in range(count):
            assert model.train()

    whole = make_model(sample, small)
    whole.start_data_reading()
    steps(whole, 8)
    first = make_model(sample, small)
    first.start_data_reading()
    steps(first, 4)
    first.save_params_to_files("part", 4)
    second = make_model(sample, small, seed=99)
    second.load_dense_weights("part_dense_4.model")
    second.load_sparse_weights({"table": "part0_sparse_4.model"})
    second.load_dense_optimizer_states("part_opt_dense_4.model")
    second.load_sparse_optimizer_states(["part0_opt_sparse_4.model"])
    second.start_data_reading()
    for _ in range(4):
        second.get_data_reader_train().next_batch()
    steps(second, 4)
    for ours, theirs in zip(second.trainer.weights, whole.trainer.weights, strict=True):
        torch.testing.assert_close(ours, theirs)
    (ours,), (theirs,) = second.trainer.tables, whole.trainer.tables
    known = np.isin(theirs.keys.numpy(), ours.keys.numpy())
    assert known.all()
    before = torch.from_numpy(np.fromfile("part0_sparse_4.model/key", np.int64))
    old = [theirs.keys.tolist().index(key) for key in before.tolist()]
    torch.testing.assert_close(ours.weight[: len(old)], theirs.weight[old])


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], r"field 'layers': holds no statistics for BatchNorm layer 1"),
        ([{"mean": [0.0] * 5, "var": [1.0] * 4}], r"field 'layers\[0\]\.var': expected a list of 5 numbers"),
        ([{"mean": [0.0] * 5, "var": [None] * 5}], r"field 'layers\[0\]\.var': expected a list of 5 numbers"),
        ([{"mean": [0.0] * 5, "var": [-1.0] * 5}], "a variance cannot be negative"),
        ([{"mean": [0.0] * 5, "var": [1.0] * 5}] * 2, r"field 'layers\[1\]': the graph has no BatchNorm layer"),
        ("none", "field 'layers': expected a list"),
    ],
)
def test_dense_weights_are_loaded_with_their_statistics_or_not_at_all(small: Path, layers: Any, message: str) -> None:
    make_model(SMALL, small, seed=5).save_params_to_files("a", 1)
    Path("a_dense_1.model.ntp.json").write_text(json.dumps({"layers": layers}))
    model = make_model(SMALL, small)
    tensors = [*model.trainer.weights, *(tensor for pair in model.trainer.network.statistics() for tensor in pair)]
    before = [tensor.detach().clone() for tensor in tensors]
    with pytest.raises(ModelFormatError, match=message):
        model.load_dense_weights("a_dense_1.model")
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))


def test_tables_are_loaded_all_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sample = SAMPLES["wdl_parquet"]
    make_data(sample, tmp_path)
    model = make_model(sample, tmp_path)
    model.start_data_reading()
    model.train()
    model.save_params_to_files("a", 1)
    model.train()
    before = [table.weight.clone() for table in model.trainer.tables]
    assert len(before) > 1
    files = [f"a{number}_sparse_1.model" for number in range(len(before))]
    os.truncate(f"{files[-1]}/emb_vector", 4)
    with pytest.raises(ModelFormatError, match="4 bytes, expected"):
        model.load_sparse_weights(files)
    for table, old in zip(model.trainer.tables, before, strict=True):
        assert torch.equal(table.weight, old)


def test_files_of_another_model_are_refused(small: Path) -> None:
    model = make_model(SMALL, small)
    model.start_data_reading()
    model.train()
    model.save_params_to_files("a", 1)
    Path("short.model").write_bytes(Path("a_dense_1.model").read_bytes()[:-4])
    with pytest.raises(ModelFormatError, match=r"short\.model: \d+ bytes, expected \d+"):
        model.load_dense_weights("short.model")
    with pytest.raises(ConfigurationError, match="no such file"):
        model.load_dense_weights("nowhere.model")
    with pytest.raises(ConfigurationError, match="2 files for 1 tables"):
        model.load_sparse_weights(["a", "b"])
    with pytest.raises(ConfigurationError, match="no table 'other'"):
        model.load_sparse_weights({"other": "a0_sparse_1.model"})
    for _ in range(3):
        model.train()
    with pytest.raises(ModelFormatError, match="Load the sparse weights of the same snapshot first"):
        model.load_sparse_optimizer_states(["a0_opt_sparse_1.model"])
    with pytest.raises(ModelFormatError, match="Load the sparse weights of the same snapshot first"):
        make_model(SMALL, small).load_sparse_optimizer_states(["a0_opt_sparse_1.model"])
    for opt in ("a_opt_dense_1.model", "a0_opt_sparse_1.model"):
        Path(f"{opt}.json").unlink()
    model.load_dense_optimizer_states("a_opt_dense_1.model")  # as HugeCTR writes it
    model.load_sparse_weights(["a0_sparse_1.model"])
    with pytest.raises(ModelFormatError, match=r"a0_opt_sparse_1\.model\.json, which belongs to it, is missing"):
        model.load_sparse_optimizer_states(["a0_opt_sparse_1.model"])


@pytest.mark.parametrize("kind", [Optimizer_t.Adam, Optimizer_t.AdaGrad, Optimizer_t.MomentumSGD])
def test_dense_weights_are_no_optimizer_states(small: Path, kind: Optimizer_t) -> None:
    """They have the size of one state, and of two in halves. Some values show it, which are no sums of squares."""
    model = make_model(replace(SMALL, optimizer={"optimizer_type": kind}), small)
    model.start_data_reading()
    model.train()
    model.save_params_to_files("a", 1)
    shutil.copy("a_dense_1.model", "renamed.model")
    shown = ["a_dense_1.model"] if kind is Optimizer_t.MomentumSGD else ["a_dense_1.model", "renamed.model"]
    before = [{name: state.clone() for name, state in own.items()} for own in model.trainer.dense_optimizer.states]

    for place in shown:
        with pytest.raises(
            ModelFormatError, match=f"{place}: not optimizer states of '{kind.name}', but perhaps dense"
        ):
            model.load_dense_optimizer_states(place)
    for old, own in zip(before, model.trainer.dense_optimizer.states, strict=True):
        assert all(torch.equal(old[name], state) for name, state in own.items())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_steps", "many", r"model\.json: field 'num_steps' is 'many', expected a whole number from 0"),
        ("num_steps", -1, r"model\.json: field 'num_steps' is -1"),
        ("keys", None, r"model\.key: not the \d+ keys"),
        ("num_rows", "x", r"model\.key: not the x keys"),
        ("num_rows", {}, r"model\.key: not the \{\} keys"),
    ],
)
def test_what_is_wrong_beside_states_is_named(small: Path, field: str, value: Any, message: str) -> None:
    model = make_model(SMALL, small)
    model.start_data_reading()
    model.train()
    model.save_params_to_files("a", 1)
    path = Path("a0_opt_sparse_1.model.json")
    about = {**json.loads(path.read_text()), field: value}
    path.write_text(json.dumps({name: given for name, given in about.items() if given is not None}))
    with pytest.raises(ModelFormatError, match=message):
        model.load_sparse_optimizer_states(["a0_opt_sparse_1.model"])


def test_a_snapshot_that_fails_leaves_no_model(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(SMALL, small)
    model.save_params_to_files("a", 1)
    names = {path.name for path in Path().iterdir() if path.name.startswith("a")}
    assert names == {
        "a0_sparse_1.model", "a0_opt_sparse_1.model", "a0_opt_sparse_1.model.json", "a0_opt_sparse_1.model.key",
        "a_opt_dense_1.model", "a_opt_dense_1.model.json", "a_dense_1.model", "a_dense_1.model.ntp.json",
    }  # fmt: skip
    renamed: list[Path] = []
    rename = Path.rename

    def full(self: Path, target: Path) -> Path:
        renamed.append(self)
        if len(renamed) == 3:
            raise OSError(28, "No space left on device", str(target))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space"):
        model.save_params_to_files("a", 1)
    assert not Path("a_dense_1.model").exists()
    assert not list(Path().glob(".tmp-*"))


def test_a_save_says_that_it_waits_for_another_job(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Which may be a job that was stopped amid a save."""
    model = make_model(SMALL, small)
    printed: list[str] = []

    def is_said() -> bool:
        printed.append(capfd.readouterr().out)
        return "waiting for another job, which is saving there" in "".join(printed)

    with locked(small):
        saving = threading.Thread(target=model.save_params_to_files, args=("a", 1))
        saving.start()
        wait_until(is_said, "the message")
        assert not Path("a_dense_1.model").exists()
    saving.join(PATIENCE_S)
    assert Path("a_dense_1.model").exists()


def test_a_full_disk_names_the_file_and_leaves_the_snapshot_before(small: Path) -> None:
    model = make_model(SMALL, small)
    model.save_params_to_files("a", 1)
    before = {path: path.read_bytes() for path in Path().rglob("a*") if path.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/\.tmp-a_\w+/a"):
            model.save_params_to_files("a", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path: path.read_bytes() for path in Path().rglob("a*") if path.is_file()} == before
    assert not list(Path().glob(".tmp-*"))


def test_frozen_parts_stay_as_they_are(small: Path) -> None:
    model = make_model(SMALL, small)
    model.start_data_reading()
    trainer = model.trainer
    (table,) = trainer.tables

    def state() -> tuple[list[torch.Tensor], torch.Tensor]:
        return [w.detach().clone() for w in trainer.weights], table.weight[:5].clone()

    model.train()
    model.freeze_dense()
    before = state()
    model.train()
    after = state()
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert not torch.equal(before[1], after[1])
    model.unfreeze_dense()
    model.freeze_embedding("table")
    model.train()
    last = state()
    assert torch.equal(after[1], last[1])
    assert not torch.equal(after[0][0], last[0][0])
    model.unfreeze_embedding()
    model.train()
    assert not torch.equal(state()[1], last[1])
    with pytest.raises(ConfigurationError, match="no table 'other'"):
        model.freeze_embedding("other")


def test_epochs_end_with_the_data_and_drop_incomplete_batches(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(SMALL, small, repeat_dataset=False, batchsize=300, batchsize_eval=400)
    model.fit(num_epochs=2, display=1, eval_interval=5, snapshot_prefix="s")
    printed = capsys.readouterr().out
    assert len(losses(printed)) == 11
    assert printed.count("train drop incomplete batch. batchsize:200") == 2
    assert printed.count("eval drop incomplete batch. batchsize:200") == 2
    assert re.search("Finish 2 epochs 12 global iterations with batchsize 300", printed)
    assert "No snapshot was due in 12 iterations (snapshot=10000): model.save_params_to_files('s', 12) saves" in printed
    model.set_source(str(small / "eval.txt"), str(small / "eval.txt"))
    model.fit(num_epochs=1, display=1, eval_interval=0)
    assert len(losses(capsys.readouterr().out)) == 2
    with pytest.raises(ConfigurationError, match="num_epochs is 0"):
        model.fit()
    with pytest.raises(ConfigurationError, match="start_data_reading is for repeat mode"):
        model.start_data_reading()


def test_an_evaluation_begins_again_where_the_one_before_took_the_last_batch(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def network(model: Model) -> None:
        layer(model, Layer_t.InnerProduct, "dense", "fc", num_output=1)
        binary(model, "fc")

    sample = Sample(**{**vars(SMALL), "network": network})
    model = make_model(sample, small, repeat_dataset=False, batchsize_eval=200, max_eval_batches=5, lr=0.0)
    model.fit(num_epochs=1, display=0, eval_interval=5)
    found = re.findall("Evaluation, AUC: (.*)", capsys.readouterr().out)
    assert len(found) == 3
    assert len({*found}) == 1
    assert 0.2 < float(found[0]) < 0.8


def test_an_evaluation_of_no_batch_has_no_value(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(SMALL, small, repeat_dataset=False, batchsize_eval=1001)
    model.fit(num_epochs=1, display=0, eval_interval=15)
    assert "Evaluation, AUC: nan" in capsys.readouterr().out


def test_a_last_batch_of_one_sample_is_learned(small: Path) -> None:
    model = make_model(SMALL, small, repeat_dataset=False, batchsize=1999, drop_incomplete_batch=False)
    model.fit(num_epochs=1, display=0, eval_interval=0)
    assert model.num_fitted == 2
    for mean, variance in model.trainer.network.statistics():
        assert mean.isfinite().all()
        assert (variance > 0).all()


def test_a_loop_of_ones_own_is_the_low_level_api(small: Path) -> None:
    model = make_model(SMALL, small, repeat_dataset=False)
    schedule = model.get_learning_rate_scheduler()
    train, evaluation = model.get_data_reader_train(), model.get_data_reader_eval()
    with pytest.raises(ConfigurationError, match="start reading before"):
        model.train(False)
    evaluation.set_source(str(small / "eval.txt"))
    found = []
    for _ in range(3):
        train.set_source(str(small / "train.txt"))
        while True:
            model.set_learning_rate(schedule.get_next())
            if not model.train(False):
                break
            found.append(model.get_current_loss())
        assert train.is_eof()
        while model.eval(False):
            pass
        assert evaluation.is_eof()
        ((name, value),) = model.get_eval_metrics()
        assert name == "AUC"
        assert 0 < value < 1
        evaluation.set_source()
    assert len(found) == 60
    assert np.mean(found[-10:]) < np.mean(found[:10])


def test_training_ends_at_the_target_of_auc(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(SMALL, small, metrics_spec={MetricsType.AUC: 0.1})
    model.fit(max_iter=50, display=0, eval_interval=10)
    assert "Hit target accuracy AUC 0.100000 at 10 / 50 iterations" in capsys.readouterr().out


class Notes(hugectr.TrainingCallback):
    """Ends the training at an evaluation."""

    def __init__(self, last: int) -> None:
        self.calls: list[str] = []
        self._last = last

    def on_training_start(self) -> None:
        self.calls.append("start")

    def on_training_end(self, current_iter: int) -> None:
        self.calls.append(f"end {current_iter}")

    def on_eval_start(self, current_iter: int) -> bool:
        self.calls.append(f"eval {current_iter}")
        return False

    def on_eval_end(self, current_iter: int, eval_results: Mapping[str, float]) -> bool:
        assert 0 <= eval_results["AUC"] <= 1
        return current_iter == self._last


@pytest.mark.parametrize(
    ("last", "evals", "end"), [(4, ["eval 2", "eval 4"], 4), (9, ["eval 2", "eval 4", "eval 6"], 7)]
)
def test_callbacks_are_told_of_training_and_may_end_it(small: Path, last: int, evals: list[str], end: int) -> None:
    notes = Notes(last)
    model = make_model(SMALL, small, training_callbacks=[notes, hugectr.TrainingCallback()])
    model.fit(max_iter=8, display=0, eval_interval=2)
    assert notes.calls == ["start", *evals, f"end {end}"]


def test_mixed_precision_learns_the_same_within_its_precision(small: Path) -> None:
    """With a scaler, and with the default of 1, as in HugeCTR's own samples of release 23.04 and later."""
    found = []
    for settings in ({}, {"use_mixed_precision": True, "scaler": 1024.0}, {"use_mixed_precision": True}):
        model = make_model(SMALL, small, **settings)
        model.start_data_reading()
        losses_of = []
        for _ in range(20):
            model.train()
            losses_of.append(model.get_current_loss())
        found.append(losses_of)
    for narrow in found[1:]:
        np.testing.assert_allclose(found[0], narrow, atol=0.02)
        assert found[0] != narrow


def test_losses_are_weighted_and_regularized(small: Path) -> None:
    def first_loss(network: Any, **solver: Any) -> tuple[float, Model]:
        model = make_model(Sample(**{**vars(SMALL), "network": network}), small, **solver)
        model.start_data_reading()
        model.train()
        return model.get_current_loss(), model

    def network(**arguments: Any) -> Any:
        def build(model: Model) -> None:
            layer(model, Layer_t.InnerProduct, "dense", "fc", num_output=1)
            layer(model, arguments.pop("kind", Layer_t.BinaryCrossEntropyLoss), "fc label", "loss", **arguments)

        return build

    plain, model = first_loss(network(), lr=0.0)
    sizes = [float(w.detach().abs().sum()) for w in model.trainer.weights]
    squares = [float(w.detach().square().sum()) for w in model.trainer.weights]
    for kind, expected in (("L1", sum(sizes)), ("L2", sum(squares) / 2)):
        regularizer = hugectr.Regularizer_t(kind)
        found, _ = first_loss(network(use_regularizer=True, regularizer_type=regularizer, **{"lambda": 5.0}), lr=0.0)
        assert found == pytest.approx(plain + 5.0 * expected / 100, rel=1e-5)
    weighted, _ = first_loss(network(kind=Layer_t.MultiCrossEntropyLoss, target_weight_vec=[0.25]), lr=0.0)
    assert weighted == pytest.approx(plain / 4, rel=1e-5)


@pytest.mark.parametrize("step", ["train", "eval"])
def test_a_label_that_is_no_class_of_the_loss_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.chdir(tmp_path)

    def network(model: Model) -> None:
        layer(model, Layer_t.InnerProduct, "dense", "fc1", num_output=1)
        layer(model, Layer_t.InnerProduct, "dense", "fc2", num_output=1)
        binary(model, "fc1", "click")
        layer(model, Layer_t.CrossEntropyLoss, "fc2 kind", "loss_kind")

    sample = Sample(**{**vars(SMALL), "network": network, "labels": ("click", "kind")})
    make_data(sample, tmp_path)
    model = make_model(sample, tmp_path)
    model.start_data_reading()
    message = (
        r"txt: sample \d+ has the label 1; CrossEntropyLoss expects the number of a class, 0 to 0: its bottom has 1"
    )
    with pytest.raises(ModelFormatError, match=message):
        getattr(model, step)()


def test_metrics_compare_each_label_with_its_own_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One has two classes, one has no loss."""
    monkeypatch.chdir(tmp_path)

    def network(model: Model) -> None:
        layer(model, Layer_t.InnerProduct, "dense", "fc1", num_output=1)
        layer(model, Layer_t.InnerProduct, "dense", "fc2", num_output=2)
        layer(model, Layer_t.CrossEntropyLoss, "fc2 kind", "loss_kind")
        binary(model, "fc1", "click")

    sample = Sample(**{**vars(SMALL), "network": network, "labels": ("click", "unused", "kind")})
    make_data(sample, tmp_path)
    model = make_model(sample, tmp_path)
    model.start_data_reading()
    assert model.eval()
    model.export_predictions("predictions", "labels")
    click, _, kind = np.array(Path("predictions").read_text().split(), np.float64).reshape(-1, 3).T
    labels = np.array(Path("labels").read_text().split(), np.float64).reshape(-1, 3)
    expected = [auc(click, labels[:, 0]), auc(kind, labels[:, 2])]
    assert dict(model.get_eval_metrics())["AUC"] == pytest.approx(np.mean(expected))


def test_compile_names_losses_that_are_not_there(small: Path) -> None:
    model = make_model(SMALL, small)
    with pytest.raises(ConfigurationError, match="no loss or label 'other'; there are"):
        model.compile(loss_names=["other"], loss_weights=[1.0])
    with pytest.raises(ConfigurationError, match="1 loss_names, but 2 loss_weights"):
        model.compile(loss_names=["label"], loss_weights=[1.0, 2.0])
    fresh = Model(
        hugectr.CreateSolver(),
        hugectr.DataReaderParams(DataReaderType_t.Norm, "a", eval_source="b", check_type=hugectr.Check_t.Non),
        hugectr.CreateOptimizer(),
    )
    with pytest.raises(ConfigurationError, match="the model has no Input"):
        fresh.compile()
    with pytest.raises(ConfigurationError, match=r"Model\.fit comes after Model\.compile"):
        fresh.fit()


def test_a_group_of_layers_is_the_layers_it_stands_for(small: Path) -> None:
    def network(model: Model) -> None:
        model.add(
            hugectr.GroupDenseLayer(
                hugectr.GroupLayer_t.GroupFusedInnerProduct, ["dense"], ["fc1", "fc2", "fc3"], [8, 4, 1],
                hugectr.Activation_t.Non,
            )
        )  # fmt: skip
        binary(model, "fc3")

    model = make_model(Sample(**{**vars(SMALL), "network": network}), small)
    assert [tuple(w.shape) for w in model.trainer.weights] == [(4, 8), (8,), (8, 4), (4,), (4, 1), (1,)]
    model.fit(max_iter=3, display=1)


@pytest.mark.parametrize(
    ("initializer", "weight_limit", "bias_limit"),
    [
        (hugectr.Initializer_t.Default, 4**-0.5, 4**-0.5),
        (hugectr.Initializer_t.Uniform, 4**-0.5, 4**-0.5),
        (hugectr.Initializer_t.XavierUniform, (6 / 604) ** 0.5, (3 / 600) ** 0.5),
    ],
)
def test_an_mlp_is_drawn_by_the_number_of_its_inputs(
    small: Path, initializer: hugectr.Initializer_t, weight_limit: float, bias_limit: float
) -> None:
    def network(model: Model) -> None:
        kinds = {"weight_init_type": initializer, "bias_init_type": initializer}
        layer(model, Layer_t.MLP, "dense", "mlp", num_outputs=[600, 1], activations=ACTIVATIONS, **kinds)
        binary(model, "mlp")

    model = make_model(Sample(**{**vars(SMALL), "network": network}), small)
    weight, bias = (part.detach().abs() for part in model.trainer.weights[:2])
    for values, limit in ((weight, weight_limit), (bias, bias_limit)):
        assert 0.98 * limit < values.max() <= limit
        assert float(values.mean()) == pytest.approx(limit / 2, rel=0.1)


def test_a_script_runs_as_it_is(tmp_path: Path) -> None:
    make_data(SAMPLES["gmf"], tmp_path)
    (tmp_path / "helper.py").write_text("WIDTH = 4\n")
    (tmp_path / "script.py").write_text(
        """
import sys
import hugectr
import hugectr2onnx
from mpi4py import MPI
from hugectr.inference import InferenceParams
from hugectr2onnx.hugectr_loader import ONNX_LAYER_TYPES
from helper import WIDTH

assert MPI.COMM_WORLD.Get_rank() == 0
assert MPI.Is_thread_main()
MPI.COMM_WORLD.Barrier()
assert sys.argv == ["script.py", "--steps", "21"]
solver = hugectr.CreateSolver(batchsize=100, batchsize_eval=100, vvgpu=[[0, 1]], max_eval_batches=1, i64_input_key=True)
reader = hugectr.DataReaderParams(hugectr.DataReaderType_t.Norm, ["train.txt"], eval_source="eval.txt",
                                  check_type=hugectr.Check_t.Non)
model = hugectr.Model(solver, reader, hugectr.CreateOptimizer())
model.add(hugectr.Input(1, "label", 1, "dense", [hugectr.DataReaderSparseParam("data", 1, True, 2)]))
kind = hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash
model.add(hugectr.SparseEmbedding(kind, 1, WIDTH, "sum", "table", "data"))
model.add(hugectr.DenseLayer(hugectr.Layer_t.Reshape, ["table"], ["flat"], leading_dim=2 * WIDTH))
model.add(hugectr.DenseLayer(hugectr.Layer_t.InnerProduct, ["flat"], ["fc"], num_output=1))
model.add(hugectr.DenseLayer(hugectr.Layer_t.BinaryCrossEntropyLoss, ["fc", "label"], ["loss"]))
model.compile()
model.fit(max_iter=int(sys.argv[2]), display=10, eval_interval=20, snapshot=20, snapshot_prefix="files/gmf")
model.graph_to_json("gmf.json")
hugectr2onnx.converter.convert("gmf.onnx", "gmf.json", "files/gmf_dense_20.model", True, ["files/gmf0_sparse_20.model"])
model.add(hugectr.DenseLayer(hugectr.Layer_t.GRU, ["a"], ["b"]))
"""
    )
    command = [sys.executable, "-m", "hotrow.training.hugectr", "script.py", "--steps", "21"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1, done.stderr
    assert len(losses(done.stdout)) == 2
    assert "vvgpu names 2 GPUs, this machine has 0: one process trains whole batches on the processor" in done.stdout
    assert re.search(r"script\.py:28: DenseLayer GRU .* not supported", done.stderr)
    assert (tmp_path / "files" / "gmf_dense_20.model").exists()
    assert (tmp_path / "gmf.onnx").exists()


def test_a_script_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """In one line."""
    command = [sys.executable, "-m", "hotrow.training.hugectr", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (1, "hotrow: script.py: no such script\n")


def test_arguments_of_later_releases_that_change_no_result_are_taken() -> None:
    later = ["train_intra", "train_inter", "eval_intra", "eval_inter"]
    solver = hugectr.CreateSolver(perf_logging=True, **{f"{name}_iteration_overlap": True for name in later})
    assert solver.batchsize == 2048
    reader = hugectr.DataReaderParams(
        DataReaderType_t.Norm, "a", eval_source="b", check_type=hugectr.Check_t.Non, read_file_sequentially=True
    )
    assert reader.num_workers == 12


def test_numbers_of_numpy_are_taken(small: Path) -> None:
    """As scripts compute widths with it."""

    def network(model: Model) -> None:
        layer(model, Layer_t.Slice, "dense", "first second", ranges=np.array([[0, 2], [2, 4]]))
        layer(model, Layer_t.Dropout, "second", "dropped", dropout_rate=np.float32(0.5))
        layer(model, Layer_t.Reshape, "table", "flat", leading_dim=np.int64(8))
        layer(model, Layer_t.Concat, "first dropped flat", "both")
        layer(model, Layer_t.InnerProduct, "both", "fc", num_output=np.int64(1))
        binary(model, "fc")

    tables = (("table", "data", np.int64(4), "mean"),)
    model = make_model(Sample(**{**vars(SMALL), "network": network, "tables": tables}), small, seed=np.int64(3))
    model.fit(max_iter=2, display=0, eval_interval=0)
    model.graph_to_json("graph.json")
    layer(model, Layer_t.InnerProduct, "fc", "other", num_output=object())
    with pytest.raises(ConfigurationError, match=r"<object .* is no value for a layer; give numbers, texts, or lists"):
        model.graph_to_json("graph.json")


def test_an_embedding_of_no_input_is_named(small: Path) -> None:
    sample = Sample(**{**vars(SMALL), "tables": (("table", "other", 4, "mean"),)})
    with pytest.raises(ModelFormatError, match=r"top 'table'\): found \['other'\]; it must be one of .*'data'"):
        make_model(sample, small)


def test_a_table_needs_no_workspace() -> None:
    """As release 4.0 takes it, by slot_size_array or by nothing."""
    kind = hugectr.Embedding_t.LocalizedSlotSparseEmbeddingHash
    names = {"combiner": "sum", "sparse_embedding_name": "table", "bottom_name": "data"}
    table = hugectr.SparseEmbedding(kind, embedding_vec_size=4, slot_size_array=[3, 5], **names)
    assert (table.workspace_size_per_gpu_in_mb, table.slot_size_array) == (0, [3, 5])
    with pytest.raises(TypeError, match="SparseEmbedding lacks embedding_vec_size"):
        hugectr.SparseEmbedding(kind, 10, **names)


def test_a_summary_may_come_before_compile(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(SMALL, small).graph_to_json("graph.json")
    printed = []
    for is_first in (True, False):
        model = bare_model(small)
        model.construct_from_json("graph.json", include_dense_network=True)
        calls = (model.summary, model.compile) if is_first else (model.compile, model.summary)
        capsys.readouterr()
        for call in calls:
            call()
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert "BinaryCrossEntropyLoss" in printed[0]


def bare_model(folder: Path) -> Model:
    reader = hugectr.DataReaderParams(
        DataReaderType_t.Parquet, str(folder / "train.txt"), eval_source=str(folder / "eval.txt"),
        check_type=hugectr.Check_t.Non,
    )  # fmt: skip
    return Model(hugectr.CreateSolver(batchsize=100, i64_input_key=True), reader, hugectr.CreateOptimizer())


def test_arguments_have_hugectrs_names(small: Path) -> None:
    """Those of its overloads too, and numbers of NumPy."""
    sparse = hugectr.DataReaderSparseParam(slot_num=2, is_fixed_length=False, nnz_per_slot=np.int64(2), top_name="data")
    assert sparse.nnz_per_slot == [2, 2]
    model = bare_model(small)
    model.add(input=hugectr.Input(np.int64(1), "label", 4, "dense", [sparse]))
    kind = hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash
    model.add(sparse_embedding=hugectr.SparseEmbedding(kind, 1, 4, "mean", "table", "data"))
    model.add(dense_layer=DenseLayer(Layer_t.InnerProduct, ["dense"], ["fc"], num_output=1))
    model.add(dense_layer=DenseLayer(Layer_t.BinaryCrossEntropyLoss, ["fc", "label"], ["loss"]))
    model.compile()
    model.save_params_to_files("a", 1)
    model.load_sparse_weights(sparse_embedding_files_map={"table": "a0_sparse_1.model"})
    model.load_sparse_optimizer_states(sparse_opt_states_files_map={"table": "a0_opt_sparse_1.model"})
    with pytest.raises(TypeError, match=r"Model\.add takes one layer"):
        model.add(layers=1)
    with pytest.raises(ConfigurationError, match=r"found 'a0_sparse_1\.model'; allowed: a list of paths"):
        model.load_sparse_weights("a0_sparse_1.model")
    for lr in (-1, "x", None):
        with pytest.raises(ConfigurationError, match=r"lr is .*; allowed: numbers from 0"):
            model.set_learning_rate(lr)  # type: ignore[arg-type]


def test_new_sources_are_both_named(small: Path) -> None:
    model = make_model(SMALL, small, repeat_dataset=False)
    with pytest.raises(ConfigurationError, match="source and eval_source name the data, and are required"):
        model.set_source(str(small / "train.txt"))


def test_what_samples_of_later_releases_give_and_leave_out() -> None:
    """`shape` of Reshape, and no checksums of Parquet files, which have none."""
    given = DenseLayer(Layer_t.Reshape, ["a"], ["b"], shape=[-1, 2, 6])
    document = dense_document(given, joins_slots=False)
    assert document == {"type": "Reshape", "bottom": "a", "top": "b", "shape": [-1, 2, 6]}
    assert dense_document(read_dense(document), joins_slots=False) == document
    with pytest.raises(
        UnsupportedModelError, match=r"\['dim'\] are not supported; those of .* 3.4 are, and projection_d"
    ):
        DenseLayer(Layer_t.MultiCross, ["a"], ["b"], dim=2)
    assert hugectr.DataReaderParams(DataReaderType_t.Parquet, "a", eval_source="b").check_type is hugectr.Check_t.Non
    with pytest.raises(TypeError, match="lacks check_type"):
        hugectr.DataReaderParams(DataReaderType_t.Norm, "a", eval_source="b")


def hybrid_model(folder: Path, sizes: list[int], reader: DataReaderType_t = DataReaderType_t.RawAsync) -> Model:
    """As HugeCTR's samples of DLRM, on files whose keys count per slot."""
    params = hugectr.DataReaderParams(
        reader, [str(folder / "train.txt")], eval_source=str(folder / "eval.txt"), check_type=hugectr.Check_t.Non,
        num_samples=400, eval_num_samples=200, slot_size_array=sizes,
        async_param=hugectr.AsyncParam(32, 4, 716800, 2, 512, True, hugectr.Alignment_t.Non),
    )  # fmt: skip
    solver = hugectr.CreateSolver(
        batchsize=100, batchsize_eval=200, max_eval_batches=1, eval_overlap=True, is_dlrm=True
    )
    model = Model(solver, params, hugectr.CreateOptimizer(Optimizer_t.SGD))
    model.add(hugectr.Input(1, "label", 2, "dense", [hugectr.DataReaderSparseParam("data", 1, True, 3)]))
    link = hugectr.HybridEmbeddingParam(
        2, -1, 0.02, 1.3e11, 1.9e11, 1.0, True, True, hugectr.CommunicationType.NVLink_SingleNode,
        hugectr.HybridEmbeddingType.Distributed,
    )  # fmt: skip
    model.add(
        hugectr.SparseEmbedding(
            hugectr.Embedding_t.HybridSparseEmbedding, 1, 4, "sum", "table", "data", sizes, hybrid_embedding_param=link
        )
    )
    config = hugectr.DenseLayerComputeConfig(async_wgrad=True, fuse_wb=False)
    layer(model, Layer_t.MLP, "dense", "mlp1", num_outputs=[8, 4], compute_config=config)
    layer(model, Layer_t.Interaction, "mlp1 table", "interaction interaction_grad")
    layer(
        model, Layer_t.MLP, "interaction interaction_grad", "mlp2", num_outputs=[8, 1], use_bias=False,
        activations=[hugectr.Activation_t.Relu, hugectr.Activation_t.Non],
    )  # fmt: skip
    binary(model, "mlp2")
    return model


def test_keys_of_hybrid_embeddings_count_per_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HugeCTR adds the sizes of the slots before it; two slots with the same numbers have different rows."""
    monkeypatch.chdir(tmp_path)
    random, sizes = np.random.default_rng(5), [7, 11, 5]
    for name, count in (("train.txt", 400), ("eval.txt", 200)):
        keys = [random.integers(0, size, (count, 1)) for size in sizes]
        labels, dense = random.integers(0, 2, (count, 1)), random.integers(0, 9, (count, 2))
        parts = [part.astype(np.float32) for part in (labels, dense)]
        hugectr.tools.write_raw(tmp_path / name, *parts, keys, is_float=False)
    model = hybrid_model(tmp_path, sizes)
    model.compile()
    unused = [model.trainer.weights[i].detach().clone() for i in (-1, -3)]
    model.fit(max_iter=21, display=10, eval_interval=20, snapshot=20, snapshot_prefix="dlrm")

    stored = np.fromfile("dlrm0_sparse_20.model/key", np.int64)
    assert sorted(stored.tolist()) == list(range(sum(sizes)))
    assert [tuple(w.shape) for w in model.trainer.weights][-4:] == [(4 + 6 + 1, 8), (8,), (8, 1), (1,)]
    assert all(torch.equal(model.trainer.weights[i], bias) for i, bias in zip((-1, -3), unused, strict=True))
    model.graph_to_json("dlrm.json")
    again = hybrid_model(tmp_path, sizes)
    again.graph_to_json("again.json")
    assert Path("again.json").read_text() == Path("dlrm.json").read_text()
    rebuilt = Model(model._solver, model._reader_params, model._design.optimizer)
    rebuilt.construct_from_json("dlrm.json", include_dense_network=True)
    rebuilt.graph_to_json("rebuilt.json")
    assert Path("rebuilt.json").read_text() == Path("dlrm.json").read_text()


def test_values_of_layers_are_those_of_the_last_evaluation(small: Path) -> None:
    model = make_model(SMALL, small)
    model.start_data_reading()
    for _ in range(3):
        model.train()
    with pytest.raises(ConfigurationError, match=r"no batch was evaluated; call Model\.eval"):
        model.check_out_tensor("fc1", hugectr.Tensor_t.Evaluate)
    assert model.eval()
    tensors = model.trainer.network.translated.tensors
    for name, tensor in tensors.items():
        assert model.check_out_tensor(name, hugectr.Tensor_t.Evaluate).shape[1:] == tensor.dims, name
    (name,) = {loss.bottom_names[0] for loss in model._design.layers if loss.layer_type.value.endswith("Loss")}
    logits = model.check_out_tensor(tensor_name=name, tensor_type=hugectr.Tensor_t.Evaluate)
    assert model._last_eval is not None
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), model._last_eval[0], atol=1e-6)
    with pytest.raises(ConfigurationError, match="no tensor 'loss'; there are 'dense'"):
        model.check_out_tensor("loss", hugectr.Tensor_t.Evaluate)
    with pytest.raises(UnsupportedModelError, match=r"Tensor_t\.Train is not supported"):
        model.check_out_tensor(name, hugectr.Tensor_t.Train)
    model.train()
    np.testing.assert_array_equal(model.check_out_tensor(name, hugectr.Tensor_t.Evaluate), logits)


def test_files_to_load_may_be_named_by_a_data_source(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As release 3.4 takes them: those of HDFS are in DataSourceParams, those of this machine are given."""
    model = make_model(SMALL, small)
    model.save_params_to_files("a", 1)
    local = hugectr.DataSourceParams()
    model.load_dense_weights("a_dense_1.model", local)
    model.load_sparse_weights(["a0_sparse_1.model"], local)
    model.load_dense_optimizer_states("a_opt_dense_1.model", data_source_params=local)
    model.load_sparse_optimizer_states(["a0_opt_sparse_1.model"], data_source_params=local)

    remote = hugectr.DataSourceParams(
        True, "name", 9870, hdfs_dense_model="a_dense_1.model", hdfs_dense_opt_states="a_opt_dense_1.model",
        hdfs_sparse_model=["a0_sparse_1.model"], hdfs_sparse_opt_states=["a0_opt_sparse_1.model"],
    )  # fmt: skip
    asked = []
    monkeypatch.setattr(hugectr.DataSourceParams, "place_of", lambda self, path: asked.append((self, path)) or path)
    model.load_dense_weights("", remote)
    model.load_sparse_weights([""], remote)
    model.load_dense_optimizer_states("", remote)
    model.load_sparse_optimizer_states([""], remote)
    assert all(params is remote for params, _ in asked)
    assert {*remote.hdfs_sparse_model, "a_dense_1.model", "a_opt_dense_1.model"} <= {path for _, path in asked}


def test_misuse_of_hybrid_embeddings_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'data': HybridSparseEmbedding and RawAsync without multi_hot"):
        hybrid_model(tmp_path, [7, 11, 5], DataReaderType_t.Raw).compile()
    with pytest.raises(ConfigurationError, match="'table': 2 numbers in slot_size_array for the 3 slots of 'data'"):
        hybrid_model(tmp_path, [7, 11]).compile()
    keys = [np.zeros((4, 1), np.int64), np.array([[0], [0], [11], [0]]), np.zeros((4, 1), np.int64)]
    hugectr.tools.write_raw(
        tmp_path / "train.txt", np.zeros((4, 1), np.float32), np.zeros((4, 2), np.float32), keys, is_float=False
    )
    model = hybrid_model(tmp_path, [7, 11, 5])
    model._reader_params.num_samples = 0
    model.compile()
    reader = model.get_data_reader_train()
    reader.start()
    with pytest.raises(ModelFormatError, match=r"record 2: key 11 in column 1 of 'data'; .* allows less than 11"):
        reader.next_batch()
