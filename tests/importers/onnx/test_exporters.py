"""Models written by the real exporters of PyTorch (both), JAX and Keras."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference_session import InferenceSession
from inference_session.importers.onnx import import_onnx
from inference_session.importers.report import ImportReport
from tests.testing.manual import ROOT
from tests.testing.onnx_evaluation import run_network
from tests.testing.onnx_models import assert_same
from tests.testing.torch_export import export_torch
from tests.testing.walkthrough import Walkthrough

# Exporters warn of their own future changes, which we cannot fix.
pytestmark = [pytest.mark.exporters, pytest.mark.filterwarnings("ignore")]

NUM_ROWS, DIM = 1200, 8
RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(0, NUM_ROWS, (4, 3))
FLAT, OFFSETS = RANDOM.integers(1, NUM_ROWS, 10), np.array([0, 3, 4, 8])
FACTORS = RANDOM.random((4, 3)).astype(np.float32)

Export = Callable[..., ImportReport]


@pytest.fixture(params=["dynamo", "legacy"])
def export(request: pytest.FixtureRequest, tmp_path: Path) -> Export:
    """Export a PyTorch module by one of its exporters, import it, and compare on other batch sizes too."""

    def run(module: Any, inputs: dict[str, Any], *more: dict[str, Any], **dims: str) -> ImportReport:
        path = tmp_path / "model.onnx"
        dims = dims or dict.fromkeys(inputs, "batch")
        export_torch(path, module, inputs, dims, dynamo=request.param == "dynamo")
        report = import_onnx(path, tmp_path / "repository", "m")
        for arrays in (inputs, *more):
            assert_same(report, path, arrays)
        return report

    return run


def _network(embed: Any, forward: Callable[..., Any]) -> Any:
    """A module of an embedding, a linear layer, and what happens between them."""
    torch = pytest.importorskip("torch")

    class Network(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embed = embed
            self.linear = torch.nn.LazyLinear(2)

        def forward(self, *inputs: Any) -> Any:
            return torch.sigmoid(self.linear(forward(self.embed, *inputs)))

    torch.manual_seed(0)
    return Network()


def _prepared(network: Any, inputs: dict[str, Any]) -> Any:
    torch = pytest.importorskip("torch")
    network(*(torch.from_numpy(array) for array in inputs.values()))
    return network


def _embedding(kind: str = "Embedding", **options: Any) -> Any:
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)
    return getattr(torch.nn, kind)(NUM_ROWS, DIM, **options)


@pytest.mark.parametrize("how", ["flatten", "mean", "sum", "max", "index", "mask"])
def test_embeddings(export: Export, how: str) -> None:
    """nn.Embedding with what usually follows it."""
    forward: Callable[[Any, Any], Any] = {
        "flatten": lambda e, x: e(x).flatten(1),
        "mean": lambda e, x: e(x).mean(1),
        "sum": lambda e, x: e(x).sum(dim=1),
        "max": lambda e, x: e(x).amax(1),
        "index": lambda e, x: e.weight[x].mean(1),
        "mask": lambda e, x: (e(x) * (x != 0).float().unsqueeze(-1)).sum(1),
    }[how]
    inputs = {"x": IDS}

    report = export(_prepared(_network(_embedding(), forward), inputs), inputs, {"x": IDS[:1]})

    assert len(report.tables) == 1
    assert report.spec.batched
    assert report.spec.joinable
    expected = {"mean": "mean", "sum": "sum", "max": "max", "index": "mean", "mask": "sum"}.get(how, "none")
    assert report.spec.lookups[0].pooling == expected


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("how", ["item", "items", "gathered", "put"])
def test_an_item_of_each_history(tmp_path: Path, how: str, *, dynamo: bool) -> None:
    """Requests are joined, unless the older exporter numbers all items: too large a number is another sample's."""
    torch = pytest.importorskip("torch")

    def put(keys: Any, k: Any) -> Any:
        keys = keys.clone()
        keys[torch.arange(keys.shape[0]), k] = 7
        return keys

    forward: Callable[[Any, Any, Any], Any] = {
        "item": lambda e, x, k: e(x)[torch.arange(x.shape[0]), k],
        "items": lambda e, x, k: e(x)[torch.arange(x.shape[0]).unsqueeze(1), torch.stack([k, 2 - k], 1)].flatten(1),
        "gathered": lambda e, x, k: e(x).gather(1, k.view(-1, 1, 1).expand(-1, -1, DIM)).squeeze(1),
        "put": lambda e, x, k: e(put(x, k)).sum(1),
    }[how]
    inputs = {"x": IDS, "k": np.array([0, 2, 1, 2])}
    path = tmp_path / "model.onnx"
    network = _prepared(_network(_embedding(), forward), inputs)
    export_torch(path, network, inputs, dict.fromkeys(inputs, "batch"), dynamo=dynamo)
    report = import_onnx(path, tmp_path / "repository", "m")
    for arrays in (inputs, {name: array[1:2] for name, array in inputs.items()}):
        assert_same(report, path, arrays)
    assert len(report.tables) == 1
    assert report.spec.joinable == (dynamo or how in ("gathered", "put"))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_fixed_size(export: Export, mode: str) -> None:
    """EmbeddingBag over a matrix of keys, exported as a Loop, is a pooled look-up, and requests are joined."""
    inputs = {"x": IDS}

    report = export(_prepared(_network(_embedding("EmbeddingBag", mode=mode), lambda e, x: e(x)), inputs), inputs)

    assert len(report.tables) == 1
    assert report.spec.joinable
    assert [lookup.pooling for lookup in report.spec.lookups] == [mode]


def test_bags_with_factors(export: Export) -> None:
    """EmbeddingBag with per_sample_weights."""
    inputs = {"x": IDS, "f": FACTORS}
    bag = _embedding("EmbeddingBag", mode="sum")

    report = export(_prepared(_network(bag, lambda e, x, f: e(x, per_sample_weights=f)), inputs), inputs)

    assert report.spec.joinable
    assert report.spec.lookups[0].weights is not None


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [0, 5, -1])
def test_bags_of_fixed_size_with_padding(tmp_path: Path, mode: str, padding: int) -> None:
    """EmbeddingBag over a matrix of keys with padding_idx, which only the dynamo exporter writes, as nested Loops."""
    inputs = {"x": IDS.copy()}
    inputs["x"][0, :2] = inputs["x"][1] = padding % NUM_ROWS
    bag = _embedding("EmbeddingBag", mode=mode, padding_idx=padding)
    network = _prepared(_network(bag, lambda e, x: e(x)), inputs)
    export_torch(tmp_path / "m.onnx", network, inputs, {"x": "batch"}, dynamo=True)

    report = import_onnx(tmp_path / "m.onnx", tmp_path / "repository", "m")

    assert_same(report, tmp_path / "m.onnx", inputs)
    assert report.spec.joinable


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [False, True])
def test_bags_by_offsets(export: Export, mode: str, last: bool) -> None:
    """EmbeddingBag over one list of keys, cut by offsets."""
    offsets = np.append(OFFSETS, len(FLAT)) if last else OFFSETS
    inputs = {"x": FLAT, "o": offsets}
    bag = _embedding("EmbeddingBag", mode=mode, include_last_offset=last)

    report = export(_prepared(_network(bag, lambda e, x, o: e(x, o)), inputs), inputs, x="keys", o="bags")

    assert len(report.tables) == 1
    assert not report.spec.batched
    if mode == "sum" or (mode == "mean" and not last):
        assert [lookup.pooling for lookup in report.spec.lookups] == [mode]


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_with_padding(tmp_path: Path, mode: str) -> None:
    """EmbeddingBag with padding_idx, which only the dynamo exporter writes."""
    inputs = {"x": FLAT % 5, "o": OFFSETS}
    bag = _embedding("EmbeddingBag", mode=mode, padding_idx=0)
    network = _prepared(_network(bag, lambda e, x, o: e(x, o)), inputs)
    export_torch(tmp_path / "m.onnx", network, inputs, {"x": "keys", "o": "bags"}, dynamo=True)

    report = import_onnx(tmp_path / "m.onnx", tmp_path / "repository", "m")

    assert_same(report, tmp_path / "m.onnx", inputs)
    assert len(report.tables) == 1


def test_stacked_tables(export: Export) -> None:
    """Several features in one table, each shifted by a constant."""
    torch = pytest.importorskip("torch")
    shifts = torch.tensor([0, 400, 800])
    inputs = {"x": IDS % 400}

    report = export(_prepared(_network(_embedding(), lambda e, x: e(x + shifts).flatten(1)), inputs), inputs)

    assert [table.num_rows for table in report.tables] == [NUM_ROWS]


def test_half_precision_tables(export: Export) -> None:
    """A float16 table, widened after the look-up."""
    inputs = {"x": IDS}

    report = export(_prepared(_network(_embedding().half(), lambda e, x: e(x).float().sum(1)), inputs), inputs)

    assert report.tables[0].dtype == "float16"


def test_tied_weights(export: Export) -> None:
    """A table that also scores all items stays dense, unless the exporter wrote a transposed copy of it."""
    inputs = {"x": IDS}

    report = export(_prepared(_network(_embedding(), lambda e, x: e(x).sum(1) @ e.weight.T), inputs), inputs)

    assert len(report.tables) + len(report.stays_dense) == 1


def test_several_lookups_of_one_table(export: Export) -> None:
    """Item and history share a table."""
    inputs = {"x": IDS[:, 0], "h": IDS}
    torch = pytest.importorskip("torch")

    def forward(embed: Any, x: Any, h: Any) -> Any:
        return torch.cat([embed(x), embed(h).mean(1)], 1)

    report = export(_prepared(_network(_embedding(), forward), inputs), inputs)

    assert len(report.tables) == 1
    assert len(report.spec.lookups) == 2
    assert all(lookup.joined for lookup in report.spec.lookups)


def _export_jax(tmp_path: Path, function: Callable[..., Any], shape: tuple[Any, ...]) -> Path:
    jax = pytest.importorskip("jax")
    jax2onnx = pytest.importorskip("jax2onnx")
    import onnx

    dims = jax.export.symbolic_shape(",".join(map(str, shape))) if "B" in shape else shape
    model = jax2onnx.to_onnx(function, [jax.ShapeDtypeStruct(dims, np.int32)])
    onnx.save(model, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.mark.parametrize("how", ["take", "index", "clip", "sum", "scan", "recurrent"])
def test_jax(tmp_path: Path, how: str) -> None:
    """jnp.take, indexing, clipping, look-ups in lax.scan, and lax.scan over vectors that were looked up."""
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    weights = jnp.asarray(np.random.default_rng(0).standard_normal((NUM_ROWS, DIM)), jnp.float32)

    def scan(x: Any) -> Any:
        return jax.lax.scan(lambda state, key: (state + weights[key], weights[key].sum()), jnp.zeros(DIM), x)

    square = jnp.asarray(np.random.default_rng(1).standard_normal((DIM, DIM)), jnp.float32)

    def recurrent(x: Any) -> Any:
        def step(state: Any, vectors: Any) -> Any:
            state = jnp.tanh(state @ square + vectors)
            return state, state[:, :2]

        state, parts = jax.lax.scan(step, jnp.zeros((x.shape[0], DIM)), weights[x].transpose(1, 0, 2))
        return state.sum(-1, keepdims=True) + parts.sum(0)

    functions: dict[str, Callable[[Any], Any]] = {
        "take": lambda x: jax.nn.sigmoid(jnp.take(weights, x, axis=0).sum(-1)),
        "index": lambda x: weights[x].mean(1),
        "clip": lambda x: jnp.take(weights, x, axis=0, mode="clip").sum(-1),
        "sum": lambda x: weights[x].sum(1),
        "scan": scan,
        "recurrent": recurrent,
    }
    path = _export_jax(tmp_path, functions[how], (5,) if how == "scan" else ("B", 3))
    keys = (IDS.ravel()[:5] if how == "scan" else IDS).astype(np.int32)

    report = import_onnx(path, tmp_path / "repository", "m")

    assert_same(report, path, {report.spec.inputs[0].name: keys})
    assert len(report.tables) == 1
    assert report.spec.joinable == (how != "scan")


@pytest.mark.parametrize(
    ("layer", "options", "masked"),
    [
        ("GlobalAveragePooling1D", {}, False),
        ("GRU", {"units": DIM}, False),
        ("GRU", {"units": DIM, "reset_after": False}, True),
        ("LSTM", {"units": DIM}, True),
    ],
)
def test_keras(layer: str, options: dict[str, Any], masked: bool, tmp_path: Path) -> None:
    """A functional Keras model on the PyTorch backend, whose exporter unrolls recurrent layers."""
    pytest.importorskip("torch")
    os.environ["KERAS_BACKEND"] = "torch"
    keras = pytest.importorskip("keras")
    layers = keras.layers
    ids, numbers = keras.Input((3,), dtype="int32", name="ids"), keras.Input((4,), name="numbers")
    pooled = getattr(layers, layer)(**options)(layers.Embedding(NUM_ROWS, DIM, mask_zero=masked)(ids))
    click = layers.Dense(1, activation="sigmoid", name="click")(layers.Concatenate()([pooled, numbers]))
    model = keras.Model([ids, numbers], click)
    arrays = [IDS.astype(np.int32), np.ones((4, 4), np.float32)]
    model.predict(arrays, verbose=0)
    path = tmp_path / "model.onnx"
    model.export(str(path), format="onnx", verbose=False)

    report = import_onnx(path, tmp_path / "repository", "m")

    assert_same(report, path, dict(zip((i.name for i in report.spec.inputs), arrays, strict=True)))
    assert len(report.tables) == 1
    assert report.spec.joinable
    assert report.spec.labels


@pytest.mark.parametrize("keras_backend", ["torch", "jax"])
def test_the_page_on_exports(keras_backend: str, tmp_path: Path) -> None:
    """docs/how-to/export-to-onnx.md, as it is written; its block for TensorFlow makes no model of hotrow."""
    os.environ["KERAS_BACKEND"] = "torch"
    for name in ("torch", "keras", "jax", "jax2onnx"):
        pytest.importorskip(name)
    page = Walkthrough(ROOT / "docs/how-to/export-to-onnx.md", tmp_path, environment={"KERAS_BACKEND": keras_backend})

    page.run()

    for name in ("ranker", "keras_ranker", "jax_ranker"):
        with InferenceSession.open(tmp_path / f"model_repository/{name}/1") as session:
            inputs = {i.name: np.resize(IDS, (4, *i.shape[1:])).astype(i.dtype) for i in session.spec.inputs}
            found = session.predict(inputs)
        (expected,) = run_network(tmp_path / f"{name}.onnx", inputs).values()
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    history = np.resize(IDS, (3, 20))
    users = {"ranker": {"user_id": np.array([1, 99_999, 0])}}
    users["ranker_by_name"] = {"user": np.array(["user-1", "user-99999", "nobody"], object)}
    answers = []
    for name, user in users.items():
        with InferenceSession.open(tmp_path / f"model_repository/{name}/1") as session:
            answers.append(session.predict({**user, "history": history}))
    np.testing.assert_array_equal(*answers)
