"""Hash embeddings in training reach the servers: exported, published, and saved with their model."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from hotrow import training  # noqa: E402
from hotrow.training.model_notes import PUBLISHERS, RESTORED  # noqa: E402
from hotrow.training.row_updates.outbox import Outbox  # noqa: E402
from inference_session import InferenceSession  # noqa: E402
from inference_session.errors import ConfigurationError, UnsupportedModelError  # noqa: E402
from tests.testing import training_jobs as jobs  # noqa: E402
from tests.testing import training_models as models  # noqa: E402
from tests.testing.broker import Broker  # noqa: E402
from tests.testing.servers import wait_until  # noqa: E402

pytestmark = [pytest.mark.training, pytest.mark.filterwarnings("ignore")]

KEYS = [-(2**63), 2**63 - 1, 0, -1, 5, 6, 7, 2**40]
EXACT = 1e-6


class Clicks(nn.Module):
    """An embedding, bags and a dense layer."""

    def __init__(self, mode: str = "sum", **options: Any) -> None:
        super().__init__()
        initializer = partial(nn.init.uniform_, a=-1, b=1)
        optimizer = training.Adagrad(0.1)
        self.items = training.HashEmbedding(4, optimizer, initializer, **options)
        self.lists = training.HashEmbeddingBag(4, training.Adam(0.1), initializer, mode=mode, padding_idx=-1, **options)
        self.layer = nn.Linear(8, 1)

    def forward(self, item: Any, lists: Any) -> Any:
        return torch.sigmoid(self.layer(torch.cat([self.items(item), self.lists(lists)], dim=1)))


def _batch(seed: int, num_samples: int = 6, keys: Any = KEYS) -> tuple[Any, Any]:
    chosen = torch.randint(0, len(keys), (num_samples, 4), generator=torch.Generator().manual_seed(seed))
    batch = torch.tensor(keys)[chosen]
    return batch[:, 0], batch[:, 1:]


def _train(model: Any, optimizer: Any, seed: int, **options: Any) -> None:
    model(*_batch(seed, **options)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _rows(table: Any) -> dict[int, Any]:
    rows = table.rows()
    return dict(zip(rows.keys.tolist(), rows.vectors.cpu().numpy().copy(), strict=True))


def _serves(session: InferenceSession, model: Any, others: tuple[int, ...] = (99,)) -> bool:
    """Whether all rows are served as they are, and other keys as zeros."""
    for name, table in (("items", model.items), ("lists", model.lists)):
        rows = _rows(table)
        keys = np.array([*rows, *others], np.int64)
        expected = np.stack([rows.get(key, np.zeros(4, np.float32)) for key in keys.tolist()])
        if not np.array_equal(session.lookup(name, keys), expected):
            return False
    return True


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_what_is_served_is_what_was_trained(tmp_path: Path, mode: str, device: str) -> None:
    """Rows bit-equal under their keys, unknown keys and padding answered as in evaluation."""
    torch.manual_seed(0)
    model = Clicks(mode).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        _train(model, optimizer, seed)

    directory = models.export(model, tmp_path, example=tuple(keys.to(device) for keys in _batch(0)))

    with InferenceSession.open(directory, device="cpu") as session:
        assert _serves(session, model)
    for seed, size in enumerate((1, 6, 17)):
        item, lists = _batch(seed, size, keys=[*KEYS, 98, 99])
        (found,) = models.answers(directory, {"item": item.numpy(), "lists": lists.numpy()})
        np.testing.assert_allclose(found, models.live(model, item, lists), atol=EXACT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("kind", [training.HashEmbedding, training.HashEmbeddingBag])
def test_a_model_of_another_type_is_served_as_it_answers(tmp_path: Path, kind: Any, dtype: Any) -> None:
    """Its vectors are converted, its rows are float32."""
    torch.manual_seed(0)
    model = nn.Sequential(kind(4, training.SGD(0.1)), nn.Linear(4, 1)).to(dtype)
    keys = torch.tensor(KEYS) if kind is training.HashEmbedding else torch.tensor([KEYS, KEYS[::-1]])
    model(keys).sum().backward()

    directory = models.export(model, tmp_path, example=keys)

    (found,) = models.answers(directory, {"input": keys.numpy()})
    np.testing.assert_allclose(found, models.live(model, keys), atol=2e-3 if dtype is torch.float16 else EXACT)


def test_an_embedding_without_rows_is_served_and_gets_its_first_rows_later(tmp_path: Path, broker: Broker) -> None:
    """All its keys are unknown until training has read some, as in the live model."""
    torch.manual_seed(0)
    model = Clicks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    directory = models.export(model, tmp_path, example=_batch(0))

    item, lists = _batch(1)
    (found,) = models.answers(directory, {"item": item.numpy(), "lists": lists.numpy()})
    np.testing.assert_allclose(found, models.live(model, item, lists), atol=EXACT)
    with InferenceSession.open(directory, device="cpu", update_stream=broker.url) as session:
        assert [table.num_rows for table in session.spec.tables] == [0, 0]
        with training.UpdatePublisher(model, broker.url, "ctr") as updates:
            _train(model, optimizer, 0)
            updates.step()
        wait_until(lambda: _serves(session, model), "the first rows to be served")


def test_a_subclass_with_a_forward_of_its_own_is_named(tmp_path: Path) -> None:
    """With its path."""

    class Doubled(training.HashEmbedding):
        def forward(self, input: Any) -> Any:  # noqa: A002
            return 2 * super().forward(input)

    with pytest.raises(UnsupportedModelError, match=r"0 \(Doubled\) is not supported"):
        models.export(nn.Sequential(Doubled(4)), tmp_path, example=torch.tensor([1]))


def test_touched_rows_and_evictions_are_published(tmp_path: Path, broker: Broker, device: str) -> None:
    """New keys appear, evicted ones are deleted."""
    torch.manual_seed(0)
    model = Clicks(max_age=3).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _train(model, optimizer, 0)
    directory = models.export(model, tmp_path, example=tuple(keys.to(device) for keys in _batch(0)))

    with (
        InferenceSession.open(directory, device="cpu", update_stream=broker.url) as session,
        training.UpdatePublisher(model, broker.url, "ctr", every_steps=2) as updates,
    ):
        for seed in range(5):
            _train(model, optimizer, seed, keys=range(10 * seed, 10 * seed + 10))
            updates.step()
        updates.close()
        wait_until(lambda: _serves(session, model, (*KEYS, *range(20))), "all rows to be served, and no other")
        assert updates.stats.num_deleted >= len({0, 5, 6, 7})
    assert not model.items._rows.listeners


def test_a_restored_model_takes_back_what_was_published(tmp_path: Path, broker: Broker, device: str) -> None:
    """Rows of lost steps return to their earlier values, and rows that are new in them are deleted."""
    torch.manual_seed(0)
    model = Clicks().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _train(model, optimizer, 0)
    directory = models.export(model, tmp_path, example=tuple(keys.to(device) for keys in _batch(0)))
    checkpoint = training.Checkpoint(model, optimizer, tmp_path / "checkpoints")
    checkpoint.save(3)

    with (
        InferenceSession.open(directory, device="cpu", update_stream=broker.url) as session,
        training.UpdatePublisher(model, broker.url, "ctr") as updates,
    ):
        _train(model, optimizer, 1, keys=[5, 6, 1000])
        updates.step()
        wait_until(lambda: _serves(session, model), "the lost steps to be served")
        assert 1000 in {*_rows(model.items), *_rows(model.lists)}
        assert checkpoint.restore() == 4
        updates.step()
        wait_until(lambda: _serves(session, model, (1000,)), "the restored rows to be served")


def test_rows_of_lost_steps_are_taken_back_after_a_save_in_between(tmp_path: Path, broker: Broker) -> None:
    """A process may restore, save and end before it publishes. Others may know the model as a wrapper has it."""
    torch.manual_seed(0)
    first, second, third = (Clicks() for _ in range(3))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second, third)]
    places = [
        training.Checkpoint(model, optimizer, tmp_path / "checkpoints")
        for model, optimizer in zip((first, second, third), optimizers, strict=True)
    ]
    _train(first, optimizers[0], 0)
    directory = models.export(first, tmp_path, example=_batch(0))
    places[0].save(3)
    with InferenceSession.open(directory, device="cpu", update_stream=broker.url) as session:
        with training.UpdatePublisher(first, broker.url, "ctr") as updates:
            _train(first, optimizers[0], 1, keys=[5, 6, 1000])
            updates.step()
        wait_until(lambda: _serves(session, first), "the lost steps to be served")
        assert places[1].restore() == 4
        places[1].save(4)
        assert places[2].restore() == 5
        with training.UpdatePublisher(torch.compile(third), broker.url, "ctr") as updates:
            updates.step()
        wait_until(lambda: _serves(session, third, (1000,)), "the restored rows to be served")


def test_a_table_may_have_the_name_of_an_argument_of_numpys(tmp_path: Path) -> None:
    """The keys that the brokers have not confirmed are saved by table."""
    model = Clicks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint = training.Checkpoint(model, optimizer, tmp_path)
    unconfirmed = {"file": np.array([7]), "items": np.array([-1, 5])}
    PUBLISHERS[model] = SimpleNamespace(unconfirmed=lambda: unconfirmed)
    checkpoint.save(1)
    checkpoint.restore()
    found = RESTORED[model].unconfirmed
    assert {name: keys.tolist() for name, keys in found.items()} == {"file": [7], "items": [-1, 5]}


def test_rows_of_lost_steps_that_are_on_their_way_are_taken_back(
    tmp_path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The brokers do not know them yet when they are asked."""
    torch.manual_seed(0)
    model = Clicks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _train(model, optimizer, 0)
    directory = models.export(model, tmp_path, example=_batch(0))
    checkpoint = training.Checkpoint(model, optimizer, tmp_path / "checkpoints")
    checkpoint.save(3)
    may_send, send = threading.Event(), Outbox._send
    with (
        InferenceSession.open(directory, device="cpu", update_stream=broker.url) as session,
        training.UpdatePublisher(model, broker.url, "ctr") as updates,
    ):
        monkeypatch.setattr(Outbox, "_send", lambda *args: (may_send.wait(), send(*args)))
        _train(model, optimizer, 1, keys=[5, 6, 1000])
        updates.step()
        checkpoint.restore()
        updates.step()
        may_send.set()
        updates.close()
        assert updates.stats.num_deleted
        wait_until(lambda: _serves(session, model, (1000,)), "the restored rows to be served")


@pytest.mark.parametrize(
    ("optimizer", "dim", "message"),
    [
        (training.Adagrad(0.1), 4, r"rows\.0 has the optimizer states \['exp_avg', 'exp_avg_sq'\], but Adagrad has"),
        (training.SGD(0.1), 4, r"but SGD has \[\]; restore with the optimizer that it was saved with"),
        (training.Adam(0.1), 3, r"rows\.0 has 4 elements in a vector, expected 3"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_anything_changes(
    tmp_path: Path, optimizer: Any, dim: int, message: str
) -> None:
    """The rows of the model stay, and so do its other weights."""

    def model(row_optimizer: Any, dim: int) -> Any:
        return nn.ModuleList([training.HashEmbedding(dim, row_optimizer), nn.Linear(2, 1)])

    saved, other = model(training.Adam(0.1), 4), model(optimizer, dim)
    for each in (saved, other):
        each[0](torch.arange(5)).sum().backward()
    training.Checkpoint(saved, torch.optim.SGD(saved.parameters(), 0.1), tmp_path).save(1)
    weight = other[1].weight.detach().clone()

    with pytest.raises(ConfigurationError, match=message):
        training.Checkpoint(other, torch.optim.SGD(other.parameters(), 0.1), tmp_path).restore()
    assert len(other[0]) == 5
    assert torch.equal(other[1].weight, weight)


def test_a_checkpoint_brings_rows_and_their_optimizer_back(tmp_path: Path, device: str) -> None:
    """Training goes on as if nothing had happened; a model without the embedding is refused."""
    torch.manual_seed(0)
    model, other = Clicks().to(device), Clicks().to(device)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model, other)]
    _train(model, optimizers[0], 0)
    model.items.optimizer.lr = 0.5
    training.Checkpoint(model, optimizers[0], tmp_path / "checkpoints").save(0)
    _train(other, optimizers[1], 7, keys=[77])

    assert training.Checkpoint(other, optimizers[1], tmp_path / "checkpoints").restore() == 1

    for seed in (1, 2):
        for part, optimizer in zip((model, other), optimizers, strict=True):
            _train(part, optimizer, seed, keys=[5, 6, 1234])
    assert _rows(model.items).keys() == _rows(other.items).keys()
    assert np.array_equal(models.live(model, *_batch(3)), models.live(other, *_batch(3)))
    assert json.loads((tmp_path / "checkpoints" / "0" / "checkpoint.json").read_text())["step"] == 0
    unlike = training.Checkpoint(nn.Sequential(training.HashEmbedding(4)), [], tmp_path / "checkpoints")
    with pytest.raises(ConfigurationError, match=r"holds 'model\."):
        unlike.restore()


def _ranks(rank: int, folder: Path, num_ranks: int, first: int) -> None:
    """Train two steps, from a checkpoint unless they are the first; export after the last two."""
    torch.manual_seed(rank)
    model: Any = Clicks() if num_ranks == 1 else DistributedDataParallel(Clicks())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    checkpoint = training.Checkpoint(model, optimizer, folder / "checkpoints")
    assert checkpoint.restore() == first
    for step in range(first, first + 2):
        item, lists = (part[rank::num_ranks] for part in _batch(step, 16))
        model(item, lists).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(first + 1)
    if first:
        training.export(model, example=_batch(50), outputs=["click"], repository=folder, name="ctr")


@pytest.mark.parametrize("counts", [(2, 1), (1, 4)])
def test_ranks_of_another_number_go_on(tmp_path: Path, counts: tuple[int, int]) -> None:
    """Some ranks save, others restore: same result as one uninterrupted rank; and all rows are exported."""
    alone = tmp_path / "alone"
    for first, num_ranks in zip((0, 2), counts, strict=True):
        _ranks(0, alone, 1, first)
        if num_ranks == 1:
            _ranks(0, tmp_path, 1, first)
        else:
            jobs.run_ranks(_ranks, tmp_path, num_ranks, first, num_ranks=num_ranks)

    item, lists = _batch(60, keys=[*KEYS, 99])
    sent = {"item": item.numpy(), "lists": lists.numpy()}
    (found,) = models.answers(tmp_path / "ctr" / "1", sent)
    (expected,) = models.answers(alone / "ctr" / "1", sent)
    np.testing.assert_allclose(found, expected, atol=EXACT)
