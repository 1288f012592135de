"""Exports of models of torch alone: bags in every form, and arguments that do not fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from hotrow import training  # noqa: E402
from hotrow.training.tables import create_file  # noqa: E402
from inference_session import InferenceSession  # noqa: E402
from inference_session.errors import ConfigurationError, UnsupportedModelError  # noqa: E402
from tests.testing import training_models as models  # noqa: E402

pytestmark = [pytest.mark.training, pytest.mark.filterwarnings("ignore")]

EXACT = 1e-6


class _Bags(nn.Module):
    """Bags of concatenated ids, given by offsets, in each form that is supported."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sums = nn.EmbeddingBag(30, 4, mode="sum")
        self.means = nn.EmbeddingBag(30, 4, mode="mean")
        self.weighted = nn.EmbeddingBag(30, 4, mode="sum", padding_idx=1)
        self.present = nn.EmbeddingBag(30, 4, mode="mean", padding_idx=2)
        self.last = nn.EmbeddingBag(30, 4, mode="sum", include_last_offset=True)

    def forward(self, ids: Any, offsets: Any, weights: Any) -> Any:
        ends = torch.cat([offsets, torch.full((1,), 1, dtype=offsets.dtype) * ids.shape[0]])
        parts = [self.sums(ids, offsets), self.means(ids, offsets), self.weighted(ids, offsets, weights)]
        return torch.cat([*parts, self.present(ids, offsets), self.last(ids, ends)], dim=1)


def _bags(seed: int, num_bags: int) -> tuple[Any, Any, Any]:
    """Ids with duplicates and padding; empty bags among them."""
    random = np.random.default_rng(seed)
    counts = random.integers(0, 5, num_bags)
    ids = torch.from_numpy(random.integers(0, 4, counts.sum()))
    offsets = torch.from_numpy(np.cumsum(counts) - counts)
    return ids, offsets, torch.from_numpy(random.random(len(ids)).astype(np.float32))


def test_a_tables_file_has_its_room_from_the_beginning(tmp_path: Path) -> None:
    """Else a full disk would end the process where a shard of columns is written through a mapping."""
    create_file(tmp_path / "tables" / "vectors", 1 << 20)

    stat = (tmp_path / "tables" / "vectors").stat()
    assert stat.st_size == 1 << 20
    assert stat.st_blocks * 512 >= 1 << 20


def test_bags_with_offsets_of_any_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the number of ids nor that of bags is the example's; requests are not joined, as offsets would shift.

    The export says so, and what to do.
    """
    model = _Bags()

    directory = models.export(model, tmp_path, example=_bags(0, 6), outputs=["vectors"])

    for seed, num_bags in enumerate((6, 1, 17, 3)):
        ids, offsets, weights = _bags(seed + 10, num_bags)
        sent = {"ids": ids.numpy(), "offsets": offsets.numpy(), "weights": weights.numpy()}
        (found,) = models.answers(directory, sent, ["vectors"])
        np.testing.assert_allclose(found, models.live(model, ids, offsets, weights), atol=EXACT)
    with InferenceSession.open(directory, device="cpu") as session:
        assert not session.spec.joins_requests
    assert "requests are served one by one; where ids come with offsets or lengths, give each sample" in caplog.text


def test_numbers_that_are_nearly_0_or_1_are_kept(tmp_path: Path) -> None:
    """PyTorch's optimizer takes them for 0 and 1: the mean of an empty history was NaN."""
    model, histories = models.MaskedMean(), torch.from_numpy(models.HISTORIES)

    directory = models.export(model, tmp_path, example=(histories[:3],), outputs=["features"])

    (found,) = models.answers(directory, {"history": models.HISTORIES}, ["features"])
    np.testing.assert_allclose(found, models.live(model, histories), rtol=EXACT)


class _Dlrm(nn.Module):
    """As DLRM reads its features: dense ones, and for each table a list of ids and the offsets of its bags."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.ModuleList(nn.EmbeddingBag(30, 4, mode="sum") for _ in range(2))
        self.bottom, self.top = nn.Linear(3, 4), nn.Linear(12, 1)

    def forward(self, dense: Any, ids: Any, offsets: Any, others: Any, other_offsets: Any) -> Any:
        first, second = self.bags
        return self.top(torch.cat([self.bottom(dense), first(ids, offsets), second(others, other_offsets)], dim=1))


def test_bags_with_offsets_next_to_dense_features(tmp_path: Path) -> None:
    """There is a bag for each sample, of which there may be one, or two."""
    model = _Dlrm()

    def batch(seed: int, num_samples: int) -> tuple[Any, ...]:
        dense = np.random.default_rng(seed).random((num_samples, 3)).astype(np.float32)
        return torch.from_numpy(dense), *_bags(seed, num_samples)[:2], *_bags(seed + 1, num_samples)[:2]

    directory = models.export(model, tmp_path, example=batch(0, 7), outputs=["click"])

    for seed, num_samples in enumerate((7, 1, 2, 17)):
        given = batch(seed + 10, num_samples)
        names = ("dense", "ids", "offsets", "others", "other_offsets")
        sent = {name: tensor.numpy() for name, tensor in zip(names, given, strict=True)}
        (found,) = models.answers(directory, sent)
        np.testing.assert_allclose(found, models.live(model, *given), atol=EXACT)


def test_maxima_of_bags_with_offsets_are_refused_by_name(tmp_path: Path) -> None:
    class Network(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.ModuleDict({"words": nn.EmbeddingBag(30, 4, mode="max")})

        def forward(self, ids: Any, offsets: Any) -> Any:
            return self.tower["words"](ids, offsets)

    with pytest.raises(UnsupportedModelError, match=r"tower\.words: the maximum over lists with offsets"):
        models.export(Network(), tmp_path, example=_bags(0, 4)[:2], outputs=["vectors"])


class _Hashed(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.items = training.HashEmbedding(4, training.SGD(0.1), nn.init.normal_, **options)

    def forward(self, item: Any) -> Any:
        return self.items(item).sum(-1)


@pytest.mark.parametrize(("dtype", "key_dtype"), [("int8", "int64"), ("int32", "int64"), ("uint32", "uint32")])
def test_keys_of_a_hash_embedding_keep_their_type(tmp_path: Path, dtype: str, key_dtype: str) -> None:
    """As it takes every type of integers in training; unknown keys are zeros."""
    model = _Hashed(key_dtype=key_dtype)
    known = torch.arange(6).to(getattr(torch, dtype))
    model(known).sum().backward()

    directory = models.export(model, tmp_path, example=known.reshape(3, 2), outputs=["score"])

    keys = torch.tensor([[1, 5], [99, 0]]).to(getattr(torch, dtype))
    (found,) = models.answers(directory, {"item": keys.numpy()}, ["score"])
    np.testing.assert_allclose(found, models.live(model, keys), atol=EXACT)


def test_types_that_are_not_served_are_refused_by_name(tmp_path: Path) -> None:
    for model, text in (
        (_Clicks().double(), "table 'items' is float64"),
        (_Clicks().bfloat16(), "output 'score' is bfloat16"),
    ):
        with pytest.raises(UnsupportedModelError, match=text):
            models.export(model, tmp_path, example=torch.tensor([1, 2]), outputs=["score"])


def test_an_example_that_does_not_tell_sizes_apart_is_refused_with_the_reason(tmp_path: Path) -> None:
    """As many ids as bags: which of them may differ cannot be seen."""
    with pytest.raises(UnsupportedModelError, match="sums: the example has as many ids as offsets; give one with two"):
        models.export(_Bags(), tmp_path, example=_equal_sizes(), outputs=["vectors"])


def _equal_sizes() -> tuple[Any, Any, Any]:
    return torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2]), torch.ones(3)


class _Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(20, 4)

    def forward(self, item: Any, click: Any = None) -> Any:
        return self.items(item).sum(-1)


def test_arguments_of_another_kind_are_refused(tmp_path: Path) -> None:
    """Each with what was found, and before anything is written."""
    ids = torch.tensor([1, 2, 3])
    given: dict[str, Any] = {"example": ids, "outputs": ["score"], "repository": tmp_path, "name": "ctr"}
    for options, text in (
        ({"name": None}, "name is None"),
        ({"name": "a/b"}, "'a/b' cannot be the name of a model"),
        ({"name": "a b"}, "'a b' cannot be the name of a model"),
        ({"repository": "hdfs://namenode/models"}, "a URL is no folder of this machine"),
        ({"version": "1"}, "version is '1'"),
        ({"version": True}, "version is True"),
        ({"outputs": None}, "outputs are"),
        ({"outputs": ["item"]}, "'item' is the name of a served input as well"),
        ({"inputs": "padded"}, "inputs is 'padded'"),
        ({"example": np.arange(3)}, "holds no tensor"),
        ({"example": torch.zeros(0, dtype=torch.int64)}, "holds no samples"),
        ({"example": torch.tensor([1, 20])}, "cannot compute the example: IndexError"),
        ({"example": torch.tensor([0.5])}, "cannot compute the example: RuntimeError"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            training.export(_Clicks(), **{**given, **options})
    for pad in ("x", None, 0.5):
        with pytest.raises(ConfigurationError, match=r"pad is .*; allowed: whole numbers"):
            training.padded(3, pad)  # type: ignore[arg-type]
    assert not list(tmp_path.rglob("session.json"))
    assert not list(tmp_path.rglob(".tmp-*"))


class _Both(NamedTuple):
    click: Any
    buy: Any
    loss: Any


@dataclass
class _BothAsFields:
    click: Any
    buy: Any
    loss: Any


class _NamedOutputs(nn.Module):
    """Two outputs and a loss, each with a key or field."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.items, self.kind = nn.Embedding(20, 4), kind

    def forward(self, item: Any) -> Any:
        vectors = self.items(item)
        return self.kind(click=vectors[:, :1], buy=vectors[:, 1:2], loss=vectors.sum())


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_what_trains_a_model_faster_does_not_name_its_inputs(tmp_path: Path, wrap: Any) -> None:
    """Inputs and tables are called as in the model itself."""
    directory = models.export(wrap(_Bags()), tmp_path, example=_bags(0, 6), outputs=["vectors"])

    with InferenceSession.open(directory, device="cpu") as session:
        assert [tensor.name for tensor in session.spec.inputs] == ["ids", "offsets", "weights"]
        assert "sums" in session.tables


def test_a_form_of_lists_that_the_example_does_not_have_is_refused(tmp_path: Path) -> None:
    """Else ids with offsets would be served as they are, where the caller means rows that are filled up."""
    with pytest.raises(ConfigurationError, match=r"Padded\(max_len=5, pad=-1\), which is for a KeyedJaggedTensor"):
        models.export(_Bags(), tmp_path, example=_bags(0, 6), outputs=["vectors"], inputs=training.padded(max_len=5))


def test_weights_without_their_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"model.*OrderedDict.*torch\.nn\.Module"):
        models.export(_Bags().state_dict(), tmp_path, example=_bags(0, 6), outputs=["vectors"])


@pytest.mark.parametrize("kind", [dict, _Both, _BothAsFields])
def test_outputs_are_found_by_their_keys(tmp_path: Path, kind: Any) -> None:
    """They were taken in the order of forward, so that each was served under the other's name."""
    model, ids = _NamedOutputs(kind), torch.tensor([1, 2, 3])
    rows = model.items.weight.detach()[ids].numpy()

    for number, names in enumerate((["buy", "click"], ["buy"], ["clicked", "bought"])):
        directory = models.export(model, tmp_path / str(number), example=ids, outputs=names)

        column = {"click": 0, "clicked": 0, "buy": 1, "bought": 1}
        for name, found in zip(names, models.answers(directory, {"item": ids.numpy()}, names), strict=True):
            np.testing.assert_array_equal(found[:, 0], rows[:, column[name]])


def test_a_key_in_the_place_of_another_output_is_refused(tmp_path: Path) -> None:
    """Some keys and some new names: in the order of forward, unless that contradicts a key."""
    model, ids = _NamedOutputs(dict), torch.tensor([1, 2, 3])
    with pytest.raises(ConfigurationError, match=r"names 'buy' in the place of 'click'; give keys .*click, buy, loss"):
        models.export(model, tmp_path, example=ids, outputs=["buy", "clicked"])
    models.export(model, tmp_path, example=ids, outputs=["clicked", "buy"])


def test_an_output_may_have_the_name_of_a_label_that_is_not_served(tmp_path: Path) -> None:
    ids = torch.tensor([1, 2, 3])
    directory = models.export(_Clicks(), tmp_path, example=(ids, torch.ones(3)), outputs=["click"])
    (found,) = models.answers(directory, {"item": np.array([4, 5])})
    assert found.shape == (2,)


class _Layers(nn.Module):
    """A table and layers; the output is float32 in any case."""

    def __init__(self, precision: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 16)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        self.precision = precision

    def forward(self, ids: Any) -> Any:
        with torch.autocast("cpu", self.precision or torch.bfloat16, enabled=self.precision is not None):
            return self.layers(self.table(ids)).float()


def test_a_network_of_float16_is_served_within_its_precision(tmp_path: Path) -> None:
    """Sums in another order differ by more than those of float32."""
    model = _Layers().half()
    ids = torch.arange(20)

    directory = models.export(model, tmp_path, example=ids)

    (found,) = models.answers(directory, {"ids": ids.numpy()})
    np.testing.assert_allclose(found, models.live(model, ids), atol=4e-3)


@pytest.mark.parametrize("model", [_Layers().bfloat16(), _Layers(torch.bfloat16)], ids=["converted", "autocast"])
def test_a_network_of_bfloat16_is_refused_with_what_to_do(tmp_path: Path, model: Any) -> None:
    """ONNX Runtime lacks its operators."""
    with pytest.raises(UnsupportedModelError, match=r"computes in bfloat16, .* convert it with \.float\(\), and leave"):
        models.export(model, tmp_path, example=torch.arange(20))
    assert not list(tmp_path.rglob("session.json"))
