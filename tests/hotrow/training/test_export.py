"""A live model becomes a version that answers as it does."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchrec")

from torch import nn  # noqa: E402

from hotrow import training  # noqa: E402
from inference_session import InferenceSession  # noqa: E402
from inference_session.errors import ConfigurationError, UnsupportedModelError  # noqa: E402
from tests.testing import training_models as models  # noqa: E402
from tests.testing.training_models import managed_collisions  # noqa: E402

# Exporters and TorchRec raise deprecation warnings that hotrow cannot fix.
pytestmark = [pytest.mark.training, pytest.mark.filterwarnings("ignore")]

RANDOM = np.random.default_rng(0)
EXACT = 1e-6


def _bags(**options: Any) -> Any:
    from torchrec import EmbeddingBagCollection

    return EmbeddingBagCollection(models.bag_configs(**options))


def _batch(num_samples: int, seed: int = 0, rows: int = 40) -> tuple[Any, dict[str, list[list[int]]]]:
    random = np.random.default_rng(seed)
    lists = {f"f{i}": models.random_lists(random, num_samples, rows) for i in range(2)}
    return torch.from_numpy(random.random((num_samples, 3)).astype(np.float32)), lists


def _as_padded(dense: Any, lists: dict[str, list[list[int]]]) -> dict[str, Any]:
    return {"dense": dense.numpy(), **{name: models.padded_matrix(ids) for name, ids in lists.items()}}


def _as_lengths(dense: Any, lists: dict[str, list[list[int]]]) -> dict[str, Any]:
    sent: dict[str, Any] = {"dense": dense.numpy()}
    for name, ids in lists.items():
        sent[name] = np.array([key for part in ids for key in part], np.int64)
        sent[f"{name}_lengths"] = np.array([len(part) for part in ids], np.int64)
    return sent


FORMS: dict[str, tuple[Any, Callable[..., dict[str, Any]]]] = {
    "padded": (training.padded(max_len=5), _as_padded),
    "lengths": (training.lengths(), _as_lengths),
}


@pytest.mark.parametrize("form", list(FORMS))
def test_bags_of_torchrec_are_answered_as_by_the_live_model(tmp_path: Path, form: str) -> None:
    """Sums and means, of other lists and batches than the example's, empty lists and one sample among them."""
    torch.manual_seed(0)
    model = models.Clicks(_bags(), 16)
    dense, lists = _batch(6)
    inputs, sent_as = FORMS[form]

    directory = models.export(model, tmp_path, example=(dense, models.features(lists)), inputs=inputs)

    for seed, num_samples in enumerate((6, 1, 17)):
        dense, lists = _batch(num_samples, seed)
        (found,) = models.answers(directory, sent_as(dense, lists))
        np.testing.assert_allclose(found, models.live(model, dense, models.features(lists)), atol=EXACT)


def test_tables_are_bit_equal_and_called_as_their_configs(tmp_path: Path) -> None:
    """Also small ones, and without a word of the example's rows."""
    model = models.Clicks(_bags(), 16)
    dense, lists = _batch(2)

    directory = models.export(
        model, tmp_path, example=(dense, models.features(lists)), inputs=training.padded(max_len=5)
    )

    with InferenceSession.open(directory, device="cpu") as session:
        assert [table.name for table in session.spec.tables] == ["t0", "t1"]
        for name, bag in model.bags.embedding_bags.items():
            expected = bag.weight.detach().numpy()
            assert np.array_equal(session.lookup(name, np.arange(len(expected))), expected)


def test_the_live_model_is_left_as_it_was(tmp_path: Path) -> None:
    """Its mode, module by module, its modules, and what it answers."""
    model = models.Clicks(_bags(), 16).train()
    model.layers[0].eval()
    modules, modes = dict(model.named_modules()), [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    dense, lists = _batch(2)

    models.export(model, tmp_path, example=(dense, models.features(lists)), inputs=training.padded(max_len=5))

    assert dict(model.named_modules()) == modules
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_versions_count_up_and_say_since_when_updates_concern_them(tmp_path: Path) -> None:
    """`update_since` lies between the call and its return."""
    model = models.Clicks(_bags(), 16)
    dense, lists = _batch(2)
    example = (dense, models.features(lists))
    begin = datetime.now(timezone.utc)

    directories = [models.export(model, tmp_path, example=example, inputs=training.padded(max_len=5)) for _ in range(2)]

    assert [path.name for path in directories] == ["1", "2"]
    since = json.loads((directories[0] / "session.json").read_text())["settings"]["update_since"]
    assert begin <= datetime.fromisoformat(since) <= datetime.now(timezone.utc)
    assert (tmp_path / "ctr" / "config.pbtxt").exists()


@pytest.mark.parametrize("form", list(FORMS))
def test_weighted_bags(tmp_path: Path, form: str) -> None:
    """Weights arrive as `<feature>_weights`, shaped as the ids."""
    from torchrec import EmbeddingBagCollection

    torch.manual_seed(0)
    model = models.Clicks(EmbeddingBagCollection(models.bag_configs(means=()), is_weighted=True), 16)
    dense, lists = _batch(6)
    weights = {name: [RANDOM.random(len(ids)).tolist() for ids in part] for name, part in lists.items()}
    example = (dense, models.features(lists, weights))
    inputs, sent_as = FORMS[form]

    directory = models.export(model, tmp_path, example=example, inputs=inputs)

    sent = sent_as(dense, lists)
    for name, part in weights.items():
        width = max(1, *map(len, part))
        rows = [[*factors, *[0.0] * (width - len(factors))] for factors in part]
        flat = [factor for factors in part for factor in factors]
        sent[f"{name}_weights"] = np.array(rows if form == "padded" else flat, np.float32)
    (found,) = models.answers(directory, sent)
    np.testing.assert_allclose(found, models.live(model, *example), atol=EXACT)


class _Sequence(nn.Module):
    """Vectors of lists, each list as a matrix of fixed length and by its lengths."""

    def __init__(self) -> None:
        from torchrec import EmbeddingCollection, EmbeddingConfig

        super().__init__()
        config = EmbeddingConfig(name="item", embedding_dim=8, num_embeddings=40, feature_names=["clicked", "bought"])
        self.items = EmbeddingCollection([config])
        self.last = nn.Linear(8, 1)

    def forward(self, history: Any) -> Any:
        vectors = self.items(history)
        clicked = vectors["clicked"].to_padded_dense(4)
        bought = vectors["bought"]
        mean = bought.to_padded_dense(3).sum(1) / bought.lengths().clamp(min=1)[:, None]
        return torch.sigmoid(self.last(torch.tanh(clicked).sum(1) + mean)).squeeze(1)


@pytest.mark.parametrize("form", list(FORMS))
def test_a_collection_that_gives_a_vector_for_each_id(tmp_path: Path, form: str) -> None:
    """EmbeddingCollection: lists that are longer and shorter than what the model takes of them."""
    torch.manual_seed(0)
    model = _Sequence()
    inputs, sent_as = FORMS[form]

    def batch(seed: int, num_samples: int) -> dict[str, list[list[int]]]:
        random = np.random.default_rng(seed)
        return {name: models.random_lists(random, num_samples, 40) for name in ("clicked", "bought")}

    directory = models.export(model, tmp_path, example=models.features(batch(0, 5)), inputs=inputs)

    for seed, num_samples in enumerate((5, 1, 9)):
        lists = batch(seed, num_samples)
        sent = sent_as(torch.zeros(0), lists)
        del sent["dense"]
        (found,) = models.answers(directory, sent)
        np.testing.assert_allclose(found, models.live(model, models.features(lists)), atol=EXACT)


def test_a_batch_in_a_dataclass_and_a_model_that_gives_out_its_loss(tmp_path: Path) -> None:
    """DLRMTrain: losses and labels are not served, and neither is what only they need."""
    from torchrec.datasets.utils import Batch
    from torchrec.models.dlrm import DLRM, DLRMTrain

    torch.manual_seed(0)
    model = DLRMTrain(DLRM(_bags(), 3, [16, 8], [8, 1]))
    dense, lists = _batch(6)
    batch = Batch(dense, models.features(lists), torch.zeros(6))

    directory = models.export(model, tmp_path, example=batch, inputs=training.padded(max_len=5))

    sent = _as_padded(dense, lists)
    sent["dense_features"] = sent.pop("dense")
    with InferenceSession.open(directory, device="cpu") as session:
        assert [tensor.name for tensor in session.spec.inputs] == ["dense_features", "f0", "f1"]
    (found,) = models.answers(directory, sent)
    expected = model.model.eval()(dense, models.features(lists)).squeeze(-1).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=EXACT)


class _Plain(nn.Module):
    """torch.nn alone: keys that are computed, a table that is read twice, positions, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(50, 8)
        self.ages = nn.Embedding(20, 8)
        self.places = nn.Embedding(4, 8)
        self.words = nn.EmbeddingBag(30, 8, mode="mean", padding_idx=0)
        self.first, self.second = nn.Linear(8, 1), nn.Linear(8, 2)

    def forward(self, user: Any, *, friends: Any, age: Any, words: Any) -> dict[str, Any]:
        places = self.places(torch.arange(friends.shape[1]))
        friends = (self.users(friends) + places).sum(1)
        mixed = self.users(user) * friends + self.ages((age // 5).clamp(0, 19)) + self.words(words)
        return {"click": torch.sigmoid(self.first(mixed)), "like": self.second(mixed)}


def test_plain_modules_of_torch(tmp_path: Path) -> None:
    """Served inputs are called as forward's parameters, tables by the paths of their modules."""
    torch.manual_seed(0)
    model = _Plain()
    sent = {
        "user": RANDOM.integers(0, 50, 5),
        "friends": RANDOM.integers(0, 50, (5, 4)),
        "age": RANDOM.integers(0, 120, 5),
        "words": RANDOM.integers(0, 3, (5, 6)),
    }
    example = {name: torch.from_numpy(array) for name, array in sent.items()}

    directory = models.export(model, tmp_path, example=example, outputs=["click", "like"])

    found = models.answers(directory, sent, ["click", "like"])
    with torch.no_grad():
        expected = model.eval()(**example)
    for array, tensor in zip(found, expected.values(), strict=True):
        np.testing.assert_allclose(array, tensor.numpy(), atol=EXACT)
    with InferenceSession.open(directory, device="cpu") as session:
        assert {table.name for table in session.spec.tables} == {"users", "ages", "words"}


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("steps", [0, 3])
def test_managed_collisions_answer_raw_ids(tmp_path: Path, form: str, steps: int) -> None:
    """Mapped ids, evicted ids and unseen ids are answered as by the live model."""
    torch.manual_seed(0)
    model = models.Clicks(managed_collisions(), 16).train()
    extremes = [0, 2**62 + 7, 2**63 - 2, 2**63 - 1]

    def batch(seed: int, num_samples: int) -> tuple[Any, dict[str, list[list[int]]]]:
        dense, lists = _batch(num_samples, seed, rows=100)
        return dense, {
            name: [[key * 1_000_003 if key % 7 else extremes[key % 4] for key in ids] for ids in part]
            for name, part in lists.items()
        }

    for seed in range(steps):
        dense, lists = batch(seed, 20)
        model(dense, models.features(lists))
    dense, lists = batch(0, 6)
    inputs, sent_as = FORMS[form]

    directory = models.export(model, tmp_path, example=(dense, models.features(lists)), inputs=inputs)

    for seed in range(5):
        dense, lists = batch(seed, 9)
        (found,) = models.answers(directory, sent_as(dense, lists))
        np.testing.assert_allclose(found, models.live(model, dense, models.features(lists)), atol=EXACT)


# What is refused


def _refused(model: Any, tmp_path: Path, error: type[Exception], text: str, **options: Any) -> None:
    with pytest.raises(error, match=text):
        models.export(model, tmp_path, **options)
    assert not [path for path in tmp_path.rglob("*") if path.name.isdigit() or path.name.startswith(".tmp")]


def test_what_cannot_be_cut_is_named_by_its_path(tmp_path: Path) -> None:
    """max_norm, a table that is used otherwise than by rows, a overrides forward."""

    class Own(nn.Embedding):  # type: ignore[misc]
        def forward(self, input: Any) -> Any:  # noqa: A002
            return super().forward(input) * 2

    class Network(nn.Module):  # type: ignore[misc]
        def __init__(self, table: nn.Module, *, tied: bool = False) -> None:
            super().__init__()
            self.tower = nn.ModuleDict({"item": table})
            self.tied = tied

        def forward(self, item: Any) -> Any:
            vectors = self.tower["item"](item)
            return vectors @ self.tower["item"].weight.T if self.tied else vectors.sum(1)

    item = torch.tensor([1, 2, 3])
    for network, text in (
        (Network(nn.Embedding(9, 4, max_norm=1.0)), "tower.item .*max_norm"),
        (Network(Own(9, 4)), "tower.item .*overrides forward"),
        (Network(nn.Embedding(9, 4), tied=True), "tower.item: .*read completely"),
        (nn.Linear(3, 1), "no embedding table"),
    ):
        _refused(network, tmp_path, UnsupportedModelError, text, example=item)


def test_examples_and_names_that_do_not_fit(tmp_path: Path) -> None:
    """Each is refused before anything is written."""
    model = models.Clicks(_bags(), 16)
    dense, lists = _batch(3)
    example = (dense, models.features(lists))
    padded = training.padded(max_len=5)
    long = models.features({"f0": [[1] * 9] * 3, "f1": [[]] * 3})
    for options, text in (
        ({"example": example}, "feature 'f0'.*training.padded"),
        ({"example": dense, "inputs": padded}, "does not match forward"),
        ({"example": (dense, long), "inputs": padded}, "a list of 9 ids"),
        (
            {"example": example, "inputs": training.padded(max_len=5, pad=lists["f0"][0][0] if lists["f0"][0] else 1)},
            "pad",
        ),
        ({"example": example, "inputs": padded, "outputs": ["click", "like"]}, "names 2 tensors .*returns 1"),
        ({"example": example, "inputs": padded, "outputs": []}, "at least one"),
        ({"example": example, "inputs": {"f0": padded, "f1": padded, "f9": padded}}, "'f9'"),
    ):
        _refused(model, tmp_path, ConfigurationError, text, **options)


def test_an_example_that_the_model_cannot_compute_is_an_error_of_its_own(tmp_path: Path) -> None:
    """With what the model raised: samples of dense and jagged inputs differ, a feature is missing."""
    model = models.Clicks(_bags(), 16)
    dense, lists = _batch(3)
    for example, text in (
        ((dense[:2], models.features(lists)), "cannot compute the example: RuntimeError"),
        ((dense, models.features({"f0": lists["f0"]})), "cannot compute the example: KeyError: 'f1'"),
    ):
        _refused(model, tmp_path, ConfigurationError, text, example=example, inputs=training.padded(max_len=5))


def test_managed_collisions_by_probing_are_refused_by_name(tmp_path: Path) -> None:
    """TorchRec's MPZCH: what it answers for unknown ids depends on its own hash function."""
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

    def probing(rows: int) -> Any:
        return HashZchManagedCollisionModule(
            zch_size=rows, device=torch.device("cpu"), total_num_buckets=1, input_hash_size=0
        )

    model = models.Clicks(managed_collisions(), 16)
    collisions = model.bags._managed_collision_collection._managed_collision_modules
    collisions["t1"] = probing(50)
    dense, lists = _batch(3)
    text = r"bags\._managed_collision_collection: 't1': a HashZchManagedCollisionModule is not supported.*Train with"
    _refused(
        model,
        tmp_path,
        UnsupportedModelError,
        text,
        example=(dense, models.features(lists)),
        inputs=training.padded(max_len=5),
    )


def test_a_version_that_exists_is_refused(tmp_path: Path) -> None:
    """And does not change."""
    model = models.Clicks(_bags(), 16)
    dense, lists = _batch(3)
    options: dict[str, Any] = {"example": (dense, models.features(lists)), "inputs": training.padded(max_len=5)}
    directory = models.export(model, tmp_path, version=3, **options)
    before = (directory / "MANIFEST.json").read_bytes()

    with pytest.raises(ConfigurationError, match="already exists"):
        models.export(model, tmp_path, version=3, **options)

    assert (directory / "MANIFEST.json").read_bytes() == before


def test_a_model_that_answers_otherwise_than_it_was_traced_never_appears(tmp_path: Path) -> None:
    """A Python number that changes from call to call becomes a constant of the network."""

    class Drifting(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.items, self.calls = nn.Embedding(9, 4), [0]

        def forward(self, item: Any) -> Any:
            self.calls[0] += 1
            return self.items(item).sum(1) + self.calls[0]

    _refused(Drifting(), tmp_path, UnsupportedModelError, "differs from the live model", example=torch.tensor([1, 2]))
