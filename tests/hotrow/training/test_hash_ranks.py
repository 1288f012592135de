"""A hash embedding on several ranks answers and learns as on one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from hotrow import training  # noqa: E402
from hotrow.training.hash_embeddings import peer_memory  # noqa: E402
from hotrow.training.kernels import device_rows  # noqa: E402
from tests.testing import peer_files  # noqa: E402
from tests.testing import training_jobs as jobs  # noqa: E402

pytestmark = [pytest.mark.training, pytest.mark.filterwarnings("ignore")]

STEPS, BATCH = 4, 16
KEYS = [-(2**63), 2**63 - 1, 0, -1, 5, 6, 7, 2**40]


class Clicks(nn.Module):
    """An embedding, a bag and a dense layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        initializer = partial(nn.init.uniform_, a=-1, b=1)
        self.items = training.HashEmbedding(4, optimizer=training.Adagrad(0.1), initializer=initializer)
        self.lists = training.HashEmbeddingBag(4, optimizer=training.Adam(0.1), initializer=initializer, padding_idx=0)
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 1)

    def forward(self, items: Any, lists: Any) -> Any:
        return self.layer(torch.cat([self.items(items), self.lists(lists)], dim=1)).squeeze(1)


def _batch(step: int) -> tuple[Any, Any, Any]:
    random = torch.Generator().manual_seed(step)
    keys = torch.tensor(KEYS)[torch.randint(0, len(KEYS), (BATCH, 4), generator=random)]
    return keys[:, 0], keys[:, 1:], torch.rand(BATCH, generator=random)


def _train(model: Any, rank: int, num_ranks: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        items, lists, labels = (part[rank::num_ranks].to(_device(model)) for part in _batch(step))
        nn.functional.mse_loss(model(items, lists), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def _device(model: Any) -> Any:
    return next(model.parameters()).device


def _answers(model: Any) -> Any:
    """For known keys and an unknown one."""
    model.eval()
    keys = torch.tensor([*KEYS, 99], device=_device(model))
    with torch.no_grad():
        parts = [model(keys, keys[:, None])[:, None], model.items(keys), model.lists(keys[:, None])]
        return torch.cat(parts, dim=1).cpu()


def _job(rank: int, folder: Path, num_ranks: int, device: str) -> None:
    model = DistributedDataParallel(Clicks(0 if rank == 0 else 100 + rank).to(device))
    _train(model, rank, num_ranks)
    held = model.module.items.rows().keys
    assert torch.equal(torch.remainder(held, num_ranks), torch.full_like(held, rank))
    if num_ranks == 2:
        _add_up(rank, device)
    answers = _answers(model.module)
    if rank == 0:
        torch.save(answers, folder / "answers.pt")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_several_ranks_train_as_one(tmp_path: Path, num_ranks: int, device: str) -> None:
    """Within DistributedDataParallel, seeded differently, each with its part of the batch; on GPUs by NCCL."""
    if device != "cpu" and torch.cuda.device_count() < num_ranks:
        pytest.skip(f"PyTorch finds fewer than {num_ranks} GPUs")
    alone = Clicks(0)
    _train(alone, 0, 1)

    jobs.run_ranks(_job, tmp_path, num_ranks, device, num_ranks=num_ranks, on_gpus=device != "cpu")

    found = torch.load(tmp_path / "answers.pt")
    limit = 1e-6 if device == "cpu" else 1e-5
    torch.testing.assert_close(found, _answers(alone), atol=limit, rtol=limit)
    assert not found[-1, 1:].any()


def _hold(rank: int) -> None:
    table = training.HashEmbedding(2, training.SGD(0.1), max_rows=20)
    for first in range(0, 300, 30):
        table(torch.arange(first, first + 30)).sum().backward()
        held = torch.tensor(len(table))
        assert held > 0
        torch.distributed.all_reduce(held)
        assert held <= 20


def test_all_ranks_together_hold_no_more_rows_than_asked() -> None:
    """Also where the number is no multiple of the ranks."""
    jobs.run_ranks(_hold, num_ranks=3)


SIZES = [8, 0, 40, 1000, 40, 1, 300, 1000]
"""Samples of batches of which some have more keys for a rank than the batches before."""


def _tables(device: str) -> Any:
    """Each optimizer, and each way to pool; epsilons are large, so that rounded sums of gradients change little."""
    options: dict[str, Any] = {"initializer": partial(nn.init.uniform_, a=-1, b=1), "device": device}
    torch.manual_seed(0)
    return nn.ModuleList(
        [
            training.HashEmbedding(8, training.Adagrad(0.1, eps=0.1), padding_idx=3, **options),
            training.HashEmbeddingBag(3, training.SGD(0.001), mode="sum", max_rows=10**6, **options),
            training.HashEmbeddingBag(8, training.Adam(0.1, eps=0.1), mode="mean", **options),
            training.HashEmbeddingBag(4, training.SGD(0.001), mode="max", **options),
        ]
    )


def _keys(step: int) -> tuple[Any, Any]:
    """Skewed keys and weights, both [samples, 5]."""
    random = torch.Generator().manual_seed(step)
    keys = (torch.rand((SIZES[step], 5), generator=random) ** 3 * 2000).long() * 7919 - 500
    keys[::7] = 3
    return keys, torch.rand(keys.shape, generator=random)


def _learn_sizes(tables: Any, rank: int, num_ranks: int, device: str) -> Any:
    """Validate; learn all batches, two look-ups of a table in some; then the vectors of all keys."""
    single, weighted, mean, largest = tables
    with torch.inference_mode():
        assert not single.eval()(_keys(0)[0].to(device)).any()
    tables.train()
    for step in range(len(SIZES)):
        keys, weights = (part[rank::num_ranks].to(device) for part in _keys(step))
        weights.requires_grad_()
        parts = [single(keys) * 0.3, single(keys[:, :2]), weighted(keys, None, weights), weighted(keys[:, 2:])]
        parts += [mean(keys[:, 1:]), largest(keys)]
        torch.stack([(part**2).sum() for part in parts]).sum().backward()
    every = torch.unique(torch.cat([_keys(step)[0].reshape(-1) for step in range(len(SIZES))])).to(device)
    with torch.no_grad():
        tables.eval()
        return [single(every).cpu(), *(table(every[:, None]).cpu() for table in (weighted, mean, largest))]


def _link(folder: Path, device: str, is_linked: bool) -> None:
    """Let ranks write each other's memory, or not."""
    if not is_linked:
        peer_memory._are_linked = lambda device: False
    elif device == "cpu":
        peer_files.install(folder)


def _job_of_sizes(rank: int, folder: Path, num_ranks: int, device: str, is_linked: bool) -> None:
    _link(folder, device, is_linked)
    found = _learn_sizes(_tables(device), rank, num_ranks, device)
    torch.save(found, folder / f"{rank}.pt")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_batches_of_any_size_are_learned_as_by_one(tmp_path: Path, num_ranks: int, device: str) -> None:
    """Messages are at times too small. Ranks write the memory of others where they can, and else use collectives."""
    on_gpus = device != "cpu"
    if on_gpus and torch.cuda.device_count() < num_ranks:
        pytest.skip(f"PyTorch finds fewer than {num_ranks} GPUs")
    expected = _learn_sizes(_tables("cpu"), 0, 1, "cpu")
    for is_linked in (True, False):
        jobs.run_ranks(_job_of_sizes, tmp_path, num_ranks, device, is_linked, num_ranks=num_ranks, on_gpus=on_gpus)

        for rank in range(num_ranks):
            for found, right in zip(torch.load(tmp_path / f"{rank}.pt"), expected, strict=True):
                torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)


def _job_of_moved_rows(rank: int, folder: Path, device: str, is_linked: bool) -> None:
    """Between a look-up and its backward, rows move on one rank alone."""
    _link(folder, device, is_linked)
    options: dict[str, Any] = {"gradients": "mean", "max_age": 100, "device": device}
    table = training.HashEmbedding(2, training.SGD(0.5), nn.init.zeros_, **options)
    table(torch.arange(100))
    table.steps = 5
    vectors = table(torch.tensor([90, 91]))
    if rank == 1:
        assert table.evict(unused_for=1) == 49
    (vectors * (rank + 1)).sum().backward()
    assert table.eval()(torch.tensor([90, 91])).tolist() == [[-0.75, -0.75], [-0.75, -0.75]]


@pytest.mark.parametrize("is_linked", [True, False])
def test_rows_that_moved_on_one_rank_learn_as_those_of_others(tmp_path: Path, device: str, is_linked: bool) -> None:
    on_gpus = device != "cpu"
    if on_gpus and torch.cuda.device_count() < 2:
        pytest.skip("PyTorch finds fewer than 2 GPUs")
    jobs.run_ranks(_job_of_moved_rows, tmp_path, device, is_linked, on_gpus=on_gpus)


def _job_of_uneven_batches(rank: int, folder: Path, device: str, is_linked: bool) -> None:
    """Messages of one rank alone are too small, after all ranks have sent vectors; and two look-ups learn in turns."""
    _link(folder, device, is_linked)
    table = training.HashEmbedding(2, training.SGD(0.5), nn.init.zeros_, device=device)
    few, many = torch.arange(3), torch.arange(2000)
    for _ in range(2):
        first, second = table(many if rank == 1 else few), table(few)
        second.sum().backward()
        first.sum().backward()
    (table(few).sum() * 0).backward()
    answers = table.eval()(many if rank == 0 else few)[:, 1].cpu()
    assert answers.tolist() == [-4.0] * 3 + [-1.0] * (len(answers) - 3)


@pytest.mark.parametrize("is_linked", [True, False])
def test_ranks_repeat_a_look_up_for_which_the_messages_of_one_are_too_small(
    tmp_path: Path, device: str, is_linked: bool
) -> None:
    on_gpus = device != "cpu"
    if on_gpus and torch.cuda.device_count() < 2:
        pytest.skip("PyTorch finds fewer than 2 GPUs")
    jobs.run_ranks(_job_of_uneven_batches, tmp_path, device, is_linked, on_gpus=on_gpus)


def test_streams_take_turns_with_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that follows another waits for it."""
    streams, waits = iter([7, 7, 8, 8, 7]), list[Any]()
    monkeypatch.setattr(device_rows, "current_stream", lambda device: next(streams))
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    memory: Any = SimpleNamespace(slots=torch.zeros(1), _stream=None)
    for num_waits in (0, 0, 1, 1, 2):
        peer_memory.PeerMemory.follow(memory)
        assert len(waits) == num_waits


def _job_without_memory(rank: int) -> None:
    """One rank has no link, or cannot have memory: neither of them uses it."""
    replaced: Any = peer_memory
    replaced.device_rows = SimpleNamespace(can_run=lambda device: True)
    place = torch.device("cpu")
    assert peer_memory._timeout(place).total_seconds() == jobs.PATIENCE_S
    replaced._is_linked = lambda device: rank == 0
    assert peer_memory.peer_memory(10, 10, place) is None
    peer_memory._MEMORY.clear()
    replaced._is_linked = lambda device: True

    def made(*_: Any) -> Any:
        if rank == 1:
            raise RuntimeError("out of memory, as asked for")
        return SimpleNamespace(slots=range(10), vectors=range(10))

    waited = list[Any]()
    replaced._allocated, replaced.PeerMemory = made, waited.append
    assert peer_memory.peer_memory(10, 10, place) is None
    assert not waited, "for a rank that never comes"
    peer_memory._MEMORY.clear()
    replaced._allocated, replaced.PeerMemory = lambda *_: torch.zeros(20), made
    assert peer_memory.peer_memory(10, 10, place) is None
    assert peer_memory.peer_memory(100, 100, place) is None


def test_all_ranks_use_collectives_where_one_has_no_memory_for_others() -> None:
    jobs.run_ranks(_job_without_memory)


def _add_up(rank: int, device: str) -> None:
    """Outside of DistributedDataParallel gradients of ranks are added up; of two batches one is empty on each."""
    bag = training.HashEmbedding(2, optimizer=training.SGD(1.0), initializer=nn.init.zeros_, device=device)
    bag(torch.tensor([[7, 8, 8], []][rank], dtype=torch.int64)).sum().backward()
    bag(torch.tensor([[], [-7, 8]][rank], dtype=torch.int64)).sum().backward()
    answers = bag.eval()(torch.tensor([7, 8, -7, 9]))
    assert answers[:, 0].tolist() == [-1, -3, -1, 0]
    assert bag(torch.tensor([], dtype=torch.int64)).shape == (0, 2)
