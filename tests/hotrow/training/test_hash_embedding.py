"""Embeddings of any keys hold and learn the same as a vocabulary of all keys, trained by torch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import autograd, nn  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from hotrow import training  # noqa: E402
from hotrow.training.hash_embeddings import backward  # noqa: E402
from hotrow.training.hash_embeddings.key_index import (  # noqa: E402
    HEADER,
    DeviceIndex,
    HashIndex,
    SortedIndex,
    distinct,
    distinct_in_common,
    most_requested,
    requested,
    requests_by_owner,
)
from hotrow.training.hash_embeddings.rows import INITIAL_ROWS, HashRows  # noqa: E402
from hotrow.training.row_access import gather  # noqa: E402
from inference_session.errors import ConfigurationError  # noqa: E402

pytestmark = [pytest.mark.training, pytest.mark.filterwarnings("ignore")]

DIM = 3
INT64 = (-(2**63), 2**63 - 1)
UNIFORM = partial(nn.init.uniform_, a=-1, b=1)
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "SGD": (lambda: training.SGD(0.3), lambda weights: torch.optim.SGD(weights, 0.3)),
    "Adagrad": (lambda: training.Adagrad(0.3), lambda weights: torch.optim.Adagrad(weights, 0.3)),
    "Adam": (lambda: training.Adam(0.3), lambda weights: torch.optim.SparseAdam(weights, 0.3)),
}
KEYS = st.one_of(st.integers(-3, 3), st.sampled_from([*INT64, -(2**32), 2**32, 0]), st.integers(*INT64))
BATCHES = st.lists(st.lists(KEYS, max_size=12), max_size=6)


@pytest.fixture(autouse=True)
def _on_device(device: str) -> Iterator[None]:
    """Embeddings, oracles and keys are on the device."""
    if device != "cpu":
        torch.set_default_device(device)
    yield
    torch.set_default_device(None)


def _int64(keys: list[int]) -> Any:
    return torch.tensor(keys, dtype=torch.int64)


class Vocabulary:
    """The oracle: a row of nn.Embedding for each key, which one of torch's optimizers trains."""

    def __init__(self, embedding: Any, keys: set[int], optimizer: Any) -> None:
        self.numbers = {key: number for number, key in enumerate(sorted(keys))}
        self.table = nn.Embedding(max(len(keys), 1), embedding.embedding_dim, sparse=True)
        with torch.no_grad():
            initial = embedding.initial_vectors(_int64(list(self.numbers)))
            self.table.weight[: len(keys)] = initial
        self.optimizer = optimizer(self.table.parameters())

    def __call__(self, keys: list[int]) -> Any:
        return self.table(_int64([self.numbers[key] for key in keys]))

    def learn(self) -> None:
        """One step, if there are gradients."""
        if self.table.weight.grad is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()


def _loss(vectors: Any) -> Any:
    """Differs for each place of a batch."""
    factors = torch.arange(1.0, vectors.numel() + 1).reshape(vectors.shape) / max(vectors.numel(), 1)
    return ((vectors - factors) ** 2).sum()


@settings(max_examples=40, deadline=None)
@given(batches=BATCHES, name=st.sampled_from(sorted(OPTIMIZERS)))
def test_rows_learn_as_those_of_a_vocabulary(device: str, batches: list[list[int]], name: str) -> None:
    """Any keys, duplicates, empty batches: the optimizer sees the sum of a row's gradients, once a batch."""
    # A GPU adds in any order. Adagrad and Adam divide by the size of a gradient: errors of small ones become large.
    limits = {"atol": 1e-6, "rtol": 1e-5} if device == "cpu" else {"atol": 1e-5, "rtol": 1e-4}
    ours, oracles = OPTIMIZERS[name]
    embedding = training.HashEmbedding(DIM, optimizer=ours(), initializer=UNIFORM)
    known = {key for batch in batches for key in batch}
    oracle = Vocabulary(embedding, known, oracles)

    for batch in batches:
        found, expected = embedding(_int64(batch)), oracle(batch)
        torch.testing.assert_close(found, expected, **limits)
        _loss(found).backward()
        _loss(expected).backward()
        oracle.learn()

    assert len(embedding) == len(known)
    embedding.eval()
    keys = sorted(known)
    torch.testing.assert_close(embedding(_int64(keys)), oracle(keys).detach(), **limits)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("weighted", [False, True, "learned"])
@settings(max_examples=15, deadline=None)
@given(
    bags=st.lists(st.lists(st.integers(-3, 3), max_size=9), max_size=5),
    padding=st.sampled_from([None, 0]),
    dim=st.sampled_from([DIM, 8]),
)
def test_bags_are_those_of_torch(
    mode: str, weighted: Any, bags: list[list[int]], padding: int | None, dim: int
) -> None:
    """Forward and backward, with offsets, empty bags, weights that learn or not, and a key that stands for none."""
    if weighted and mode != "sum":
        return
    bag = training.HashEmbeddingBag(
        dim, optimizer=training.SGD(0.3), initializer=UNIFORM, mode=mode, padding_idx=padding
    )
    twin = nn.EmbeddingBag(7, dim, mode=mode, padding_idx=None if padding is None else padding + 3)
    with torch.no_grad():
        twin.weight[:] = bag.initial_vectors(torch.arange(-3, 4))
        if padding is not None:
            twin.weight[padding + 3] = 0
    keys = _int64([key for part in bags for key in part])
    offsets = _int64([sum(map(len, bags[:number])) for number in range(len(bags))])
    weights: list[Any] = [torch.rand(len(keys), requires_grad=weighted == "learned")] if weighted else [None]
    weights.append(weights[0].detach().clone().requires_grad_() if weighted else None)

    found, expected = bag(keys, offsets, weights[0]), twin(keys + 3, offsets, weights[1])
    torch.testing.assert_close(found, expected)
    _loss(found).backward()
    _loss(expected).backward()
    with torch.no_grad():
        twin.weight -= 0.3 * twin.weight.grad
    if weighted == "learned":
        torch.testing.assert_close(weights[0].grad, weights[1].grad)

    bag.eval()
    known = _int64(sorted({*keys.tolist()} - {padding}))
    torch.testing.assert_close(bag(known[:, None]), twin.weight[known + 3].detach(), atol=1e-6, rtol=1e-5)


def test_a_matrix_of_keys_is_a_bag_for_each_row() -> None:
    """Also of no rows, and of rows without keys."""
    bag = training.HashEmbeddingBag(DIM, mode="sum")
    for shape in ((2, 3), (0, 3), (2, 0), (0, 0)):
        pooled = bag(torch.arange(shape[0] * shape[1]).reshape(shape))
        assert pooled.shape == (shape[0], DIM)
        pooled.sum().backward()
    vectors = {key: bag(_int64([[key]])) for key in range(3)}
    torch.testing.assert_close(bag(_int64([[0, 1, 2]])), vectors[0] + vectors[1] + vectors[2])


def test_evaluation_adds_no_rows_and_answers_unknown_keys_with_zeros() -> None:
    """Nothing is learned either."""
    embedding = training.HashEmbedding(DIM)
    known = embedding(_int64([5])).detach()
    embedding.eval()

    answers = embedding(_int64([[5, 6], [-1, 5]]))

    assert len(embedding) == 1
    assert not answers.requires_grad
    assert torch.equal(answers, torch.stack([torch.cat([known, 0 * known]), torch.cat([0 * known, known])]))
    assert embedding(_int64([])).shape == (0, DIM)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dim", [DIM, 136])
def test_what_is_asked_twice_for_a_batch_learns_once(name: str, dim: int) -> None:
    """As one of torch's optimizers would, which steps after backward."""
    optimizer, original = OPTIMIZERS[name]
    embedding = training.HashEmbedding(dim, optimizer=optimizer(), initializer=UNIFORM)
    oracle = Vocabulary(embedding, {1, 2, 3}, original)

    for _ in range(3):
        for model in (embedding, lambda keys: oracle(keys.tolist())):
            (_loss(model(_int64([1, 2, 2]))) + _loss(model(_int64([3, 1])))).backward()
        oracle.learn()

    assert embedding.steps == 3
    torch.testing.assert_close(embedding(_int64([1, 2, 3])), oracle([1, 2, 3]))


def test_a_backward_that_failed_leaves_nothing_behind() -> None:
    """The next one learns its own gradients only."""
    embedding = training.HashEmbedding(DIM, optimizer=training.SGD(1.0))

    class Failing(autograd.Function):
        @staticmethod
        def forward(ctx: Any, vectors: Any) -> Any:
            return vectors.clone()

        @staticmethod
        def backward(ctx: Any, gradients: Any) -> Any:
            raise RuntimeError("as asked")

    vectors = embedding(_int64([1]))
    with pytest.raises(RuntimeError, match="as asked"):
        (embedding(_int64([1])).sum() + Failing.apply(embedding(_int64([2]))).sum()).backward()
    embedding(_int64([3])).sum().backward()

    learned = embedding(_int64([1]))
    assert torch.equal(learned, vectors) or torch.equal(learned, vectors - 1)  # as far as the failed one got
    assert torch.equal(embedding(_int64([3])), embedding.initial_vectors(_int64([3])) - 1)


@settings(max_examples=60, deadline=None)
@given(batches=st.lists(st.lists(KEYS, max_size=40), max_size=8), is_plain=st.booleans(), kept=st.integers(0, 30))
def test_an_index_is_a_dictionary(device: str, batches: list[list[int]], is_plain: bool, kept: int) -> None:
    """It grows from a capacity of one key; keys that are not kept are forgotten."""
    place = torch.device(device)
    fast: Any = HashIndex(1) if device == "cpu" else DeviceIndex(place, 1)
    index, oracle = SortedIndex(place) if is_plain else fast, dict[int, int]()
    for number, batch in enumerate(batches):
        keys = _int64(batch)
        assert index.find(keys).tolist() == [oracle.get(key, 0) for key in batch]
        rows = index.find_or_add(keys).tolist()
        added = {key: row for key, row in zip(batch, rows, strict=True) if key not in oracle}
        assert sorted(added.values()) == list(range(len(oracle) + 1, len(oracle) + 1 + len(added)))
        oracle |= added
        assert rows == [oracle[key] for key in batch]
        if number == 2 and len(oracle) > kept:
            index.keep(kept + 1)
            oracle = {key: row for key, row in oracle.items() if row <= kept}
    assert index.num_rows == len(oracle) + 1
    assert {int(key): row for row, key in enumerate(index.keys[: index.num_rows]) if row} == oracle


def test_skewed_batches_of_many_keys(device: str) -> None:
    """Half of the keys are one, many come a few times, many once; some are known from batches before."""
    torch.manual_seed(0)
    index: Any = HashIndex(1) if device == "cpu" else DeviceIndex(torch.device(device), 1)
    for seed in range(3):
        rare = torch.randint(*INT64, (20_000,))
        keys = torch.cat([torch.full((50_000,), -7), torch.randint(-9000 * seed, 9000, (30_000,)), rare])
        keys = keys[torch.randperm(len(keys))]
        found, places = distinct(keys)
        assert torch.equal(found[places], keys)
        assert torch.equal(found.sort().values, torch.unique(keys))
        rows = index.find_or_add(keys)
        assert torch.equal(index.keys[rows], keys)
        assert torch.equal(index.find(keys), rows)
    assert len(torch.unique(index.keys[1 : index.num_rows])) == index.num_rows - 1
    assert int(index.find(torch.randint(*INT64, (1000,))).count_nonzero()) == 0


@settings(max_examples=60, deadline=None)
@given(batch=st.lists(KEYS, max_size=60), num_owners=st.integers(1, 5), num_slots=st.integers(1, 30))
def test_a_message_has_the_distinct_keys_of_its_owner(
    device: str, batch: list[int], num_owners: int, num_slots: int
) -> None:
    """Or some of them, where it has too few slots; their rows are those that the index has."""
    size, keys = HEADER + num_slots, _int64(batch).to(device)
    messages, places = requests_by_owner(keys, num_owners, size)
    wanted = [{key for key in batch if key % num_owners == owner} for owner in range(num_owners)]
    most = max(map(len, wanted))
    for owner, message in enumerate(messages.view(num_owners, size).tolist()):
        assert message[:HEADER] == [len(wanted[owner]), most]
        held = message[HEADER : HEADER + len(wanted[owner])]
        assert len({*held}) == len(held) == min(len(wanted[owner]), num_slots)
        assert {*held} <= wanted[owner]
    if most <= num_slots:
        assert torch.equal(messages[places], keys)
    index: Any = HashIndex(1) if device == "cpu" else DeviceIndex(torch.device(device), 1)
    rows, found = index.find_or_add_requested(messages, size)
    held = requested(messages, size)
    assert found == most
    assert torch.equal(rows[held], index.find(messages[held]))
    assert bool((rows[held] > 0).all())
    assert not rows[~held].any()
    assert index.num_rows == int(held.sum()) + 1


@pytest.mark.parametrize("padding", [None, 7])
def test_new_rows_are_there_before_they_are_counted(device: str, padding: int | None) -> None:
    """Also where they need more room, and where messages have too few slots."""
    torch.manual_seed(0)
    initial = torch.randn(INITIAL_ROWS, 5)
    rows = HashRows(initial, training.Adagrad(0.1, initial_accumulator_value=0.5), initial.device, counts_use=True)
    step_of_key = dict[int, int]()
    for step, (num_keys, num_slots) in enumerate([(5, 20), (0, 1), (300, 100), (3000, 3000), (900, 900), (900, 900)]):
        rows.steps = step
        keys = torch.randint(-num_keys, num_keys + 1, (2 * num_keys,)) * 2**40 + 7
        messages, _ = requests_by_owner(keys, 2, HEADER + num_slots)
        found, wait_for_most = rows.find_or_add_requested(messages, HEADER + num_slots, padding)
        read = gather(rows.vectors, found)
        assert wait_for_most() == most_requested(messages, HEADER + num_slots)
        held = requested(messages, HEADER + num_slots) & (messages != padding)
        assert torch.equal(read[held], rows.initial_vectors(messages[held]))
        assert not read[~held].any()
        step_of_key = {**dict.fromkeys(messages[held].tolist(), step), **step_of_key}
        in_use: Any = rows.all()
        assert dict(zip(in_use.keys.tolist(), in_use.last_used.tolist(), strict=True)) == step_of_key
        assert torch.equal(in_use.vectors, rows.initial_vectors(in_use.keys))
        assert torch.equal(in_use.states["sum"], torch.full_like(in_use.vectors, 0.5))


def test_all_processes_order_the_distinct_keys_of_a_batch_alike(device: str) -> None:
    """Two of them find the same keys in the same places, however threads took turns."""
    torch.manual_seed(0)
    keys = torch.cat([torch.randint(*INT64, (50_000,)), torch.randint(-9000, 9000, (50_000,))]).to(device)
    (found, places), (again, places_again) = distinct_in_common(keys), distinct_in_common(keys.clone())
    assert torch.equal(found, again)
    assert torch.equal(places, places_again)
    assert torch.equal(found[places], keys)
    assert len(found) == len(torch.unique(keys))


def test_many_keys_grow_the_table() -> None:
    """Rows, states and vectors stay with their keys."""
    torch.manual_seed(0)
    embedding = training.HashEmbedding(2, optimizer=training.Adagrad(0.1), initializer=UNIFORM)
    keys = torch.randint(*INT64, (20_000,))
    for part in keys.split(3000):
        embedding(part).sum().backward()

    rows = embedding.rows()
    assert sorted(rows.keys.tolist()) == sorted(set(keys.tolist()))
    assert torch.equal(rows.states["sum"], torch.ones(len(rows.keys), 2))
    torch.testing.assert_close(rows.vectors, embedding.initial_vectors(rows.keys) - 0.1)


def test_initial_vectors_follow_the_initializer() -> None:
    """By their distribution, by constants, and column by column; each key has its own."""
    embedding = training.HashEmbedding(16, initializer=partial(nn.init.normal_, mean=3.0, std=0.5))
    vectors = embedding(torch.arange(50_000) * 7919).detach()
    assert abs(float(vectors.mean()) - 3) < 0.01
    assert abs(float(vectors.std()) - 0.5) < 0.01
    assert len(torch.unique(vectors, dim=0)) == len(vectors)

    def columns(tensor: Any) -> None:
        tensor.copy_(torch.arange(4.0).expand_as(tensor))

    assert training.HashEmbedding(4, initializer=columns)(_int64([-9])).tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("given_as", [torch.uint32, torch.int64, torch.int32, torch.uint8])
def test_keys_of_other_integers_are_taken(given_as: Any) -> None:
    """As far as they fit."""
    embedding = training.HashEmbedding(DIM, key_dtype=torch.uint32)
    assert embedding(torch.tensor([1, 200], dtype=given_as)).shape == (2, DIM)
    assert torch.equal(embedding(torch.tensor([200], dtype=given_as)), embedding(_int64([200])))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: training.HashEmbedding(0), "embedding_dim is 0"),
        (lambda: training.HashEmbedding(4, key_dtype=torch.float32), "allowed: int64, uint32"),
        (lambda: training.HashEmbedding(4, optimizer=torch.optim.SGD), "not by optimizers of torch"),
        (lambda: training.HashEmbedding(4, max_rows=0), "max_rows is 0"),
        (lambda: training.HashEmbedding(True), "embedding_dim is True"),
        (lambda: training.HashEmbedding(100, 4), "no number of rows is given here: embedding_dim is the first"),
        (lambda: training.HashEmbedding(embedding_dim=4, num_embeddings=9), "num_embeddings .*: leave it out"),
        (lambda: training.HashEmbedding(4, max_norm=1.0), "HashEmbedding: max_norm of torch's .* is not supported"),
        (lambda: training.HashEmbeddingBag(4, scale_grad_by_freq=True), "HashEmbeddingBag: scale_grad_by_freq"),
        (lambda: training.HashEmbedding(4, dtype=torch.float64), r"dtype .* `\.to\(dtype\)` of the module"),
        (lambda: training.HashEmbedding(4, _weight=torch.ones(2, 4)), "_weight .* give rows with their keys to `put`"),
        (lambda: training.HashEmbedding(4, padding_idx="x"), "padding_idx is 'x'; allowed: None, keys"),
        (lambda: training.HashEmbedding(4, key_dtype="uint32", padding_idx=-1), "padding_idx is -1; .* from 0 to"),
        (lambda: training.HashEmbedding(4).to("meta"), "cannot be on the device 'meta'"),
        (lambda: training.HashEmbedding(4, device="meta"), "cannot be on the device 'meta'; create it on the CPU"),
        (
            lambda: torch.export.export(nn.Sequential(training.HashEmbedding(4)), (_int64([1]),)),
            "torch.export cannot trace .* training.export exports the whole model",
        ),
        (lambda: training.HashEmbedding(4)._replicate_for_data_parallel(), "DataParallel .* DistributedDataParallel"),
        (
            lambda: nn.Sequential(training.HashEmbedding(4)).to("cpu").share_memory(),
            "share_memory: processes would train copies .* DistributedDataParallel",
        ),
        (lambda: training.HashEmbeddingBag(4)(_int64([1]), [0]), "offsets are a tensor of one dimension, int64 or"),
        (lambda: training.HashEmbeddingBag(4)(_int64([1]), torch.zeros(1)), "offsets are a tensor of one dimension"),
        (lambda: training.HashEmbeddingBag(4)(_int64([1]), _int64([[0]])), "offsets are a tensor of one dimension"),
        (
            lambda: training.HashEmbeddingBag(4, include_last_offset=True)(_int64([1, 2]), _int64([0, 1])),
            "exceed 2, the number of keys, with which they end as include_last_offset",
        ),
        (lambda: training.HashEmbedding(4).evict(unused_for=1), "only with max_rows or max_age"),
        (lambda: training.Adagrad(-1), "lr is -1"),
        (lambda: training.HashEmbedding(4)(torch.ones(2)), "keys are torch.float32"),
        (lambda: training.HashEmbedding(4)(torch.tensor([1j])), "keys are torch.complex64"),
        (lambda: training.HashEmbedding(4)([1]), "keys are list"),
        (lambda: training.HashEmbedding(4, initializer=torch.ones_like), "initializer left elements"),
        (lambda: setattr(training.HashEmbedding(4), "steps", -1), "steps is -1"),
        (
            lambda: training.HashEmbedding(4).put(training.Rows(torch.ones(1), torch.ones(1, 4))),
            r"keys are torch.float32 of shape \[1\], expected torch.int64",
        ),
        (lambda: training.HashEmbedding(4, key_dtype="uint32")(_int64([-1])), "are not uint32"),
        (lambda: training.HashEmbedding(4, key_dtype="uint32")(_int64([2**32])), "are not uint32"),
        (lambda: training.HashEmbeddingBag(4, mode="most"), "mode is 'most'"),
        (lambda: training.HashEmbeddingBag(4)(_int64([1])), "with offsets"),
        (lambda: training.HashEmbeddingBag(4)(_int64([1]), _int64([1])), "offsets must begin with 0"),
        (lambda: training.HashEmbeddingBag(4)(_int64([1, 2]), _int64([0, 3])), "offsets must begin with 0"),
        (lambda: training.HashEmbeddingBag(4)(_int64([[1]]), _int64([0])), "bags already"),
        (lambda: training.HashEmbeddingBag(4)(_int64([[1]]), None, torch.ones(1, 1)), "are for sums"),
        (
            lambda: training.HashEmbeddingBag(4, mode="sum")(_int64([[1]]), None, torch.ones(1)),
            r"have shape \[1\], the keys \[1, 1\]",
        ),
        (
            lambda: training.HashEmbedding(4).put(training.Rows(_int64([1]), torch.ones(1, 3))),
            r"vectors have shape \[1, 3\]",
        ),
        (
            lambda: training.HashEmbedding(4, key_dtype="uint32").put(training.Rows(_int64([-1]), torch.ones(1, 4))),
            "keys from -1 to -1 are not uint32",
        ),
        (
            lambda: training.HashEmbedding(4, optimizer=training.SGD()).put(
                training.Rows(_int64([1]), torch.ones(1, 4), {"sum": torch.ones(1, 4)})
            ),
            "SGD has no state sum",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, message: str) -> None:
    """By what was given and what is allowed."""
    with pytest.raises(ConfigurationError, match=message):
        call()


def test_rows_are_read_and_written_in_bulk() -> None:
    """Also over existing rows, with and without optimizer states."""
    embedding = training.HashEmbedding(2, optimizer=training.Adagrad(0.1, initial_accumulator_value=0.5))
    embedding(_int64([7, 8])).sum().backward()
    embedding.put(training.Rows(_int64([8, -9]), torch.tensor([[1.0, 2], [3, 4]])))
    embedding.put(training.Rows(_int64([7]), torch.tensor([[5.0, 6]]), {"sum": torch.tensor([[9.0, 9]])}))

    rows = embedding.rows()
    found = {int(key): (rows.vectors[i].tolist(), rows.states["sum"][i].tolist()) for i, key in enumerate(rows.keys)}
    assert found == {8: ([1, 2], [0.5, 0.5]), -9: ([3, 4], [0.5, 0.5]), 7: ([5, 6], [9, 9])}
    embedding.clear()
    assert len(embedding) == 0
    assert torch.equal(embedding.eval()(_int64([7, 0])), torch.zeros(2, 2))


@pytest.mark.parametrize("kind", [training.HashEmbedding, partial(training.HashEmbeddingBag, mode="sum")])
def test_a_key_that_became_padding_is_zeros(kind: Any) -> None:
    """Rows of a model that was trained without `padding_idx`, by `put` and by a state, answer as in training."""
    trained = kind(2)
    trained(_int64([[7, 8]])).sum().backward()
    for load in (lambda again: again.put(trained.rows()), lambda again: again.load_state_dict(trained.state_dict())):
        again = kind(2, padding_idx=8)
        load(again)
        expected = again(_int64([[7, 8]])).detach()
        assert len(again) == 1
        assert torch.equal(again.eval()(_int64([[7, 8]])), expected)
        assert not again(_int64([[8]])).any()


def test_an_optimizer_of_ones_own() -> None:
    """Momentum, with a state that begins elsewhere than at zero."""

    class Momentum(training.RowOptimizer):
        lr = 0.5

        def states(self) -> dict[str, float]:
            return {"velocity": 1.0}

        def update(self, vectors: Any, gradients: Any, states: Any, step: int) -> None:
            vectors.sub_(states["velocity"].mul_(0.5).add_(gradients), alpha=self.lr)

    embedding = training.HashEmbedding(1, optimizer=Momentum(), initializer=nn.init.zeros_)
    for _ in range(2):
        embedding(_int64([3])).sum().backward()

    assert embedding(_int64([3])).tolist() == [[-0.5 * (1.5 + 1.75)]]


def test_a_learning_rate_that_changes() -> None:
    """As a schedule sets it."""
    embedding = training.HashEmbedding(1, optimizer=training.SGD(1.0), initializer=nn.init.zeros_)
    embedding(_int64([3])).sum().backward()
    embedding.optimizer.lr = 0.25
    embedding(_int64([3])).sum().backward()
    assert embedding(_int64([3])).tolist() == [[-1.25]]


def test_the_state_of_a_model_comes_back() -> None:
    """Rows, states, steps and what new rows begin with; a state of another kind is refused."""

    def model(seed: int) -> Any:
        torch.manual_seed(seed)
        return nn.Sequential(training.HashEmbedding(DIM, optimizer=training.Adam(0.1)), nn.Linear(DIM, 1))

    one, other = model(0), model(1)
    for keys in ([1, 2, 2], [2, 3]):
        one(_int64(keys)).sum().backward()
    other(_int64([4])).sum().backward()
    state = copy.deepcopy(one.state_dict())
    other.load_state_dict(state)

    for keys in ([2, 9], [1]):
        for trained in (one, other):
            trained(_int64(keys)).sum().backward()
    for trained in (one, other):
        trained.eval()
    assert len(other[0]) == 4
    assert torch.equal(one(_int64([1, 2, 3, 4, 9])), other(_int64([1, 2, 3, 4, 9])))
    assert torch.equal(copy.deepcopy(one)(_int64([1, 9])), one(_int64([1, 9])))
    with pytest.raises(RuntimeError, match="exp_avg"):
        nn.Sequential(training.HashEmbedding(DIM), nn.Linear(DIM, 1)).load_state_dict(state)
    with pytest.raises(RuntimeError, match="vectors have 3 elements"):
        training.HashEmbedding(2, optimizer=training.Adam()).load_state_dict(one[0].state_dict())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("keys", torch.ones(2), "keys are torch.float32"),
        ("keys", torch.tensor([[1], [2]]), r"keys are torch.int64 of shape \[2, 1\]"),
        ("vectors", torch.ones(3, DIM), r"keys are torch.int64 of shape \[2\]"),
        ("last_used", torch.tensor([1]), r"last_used are torch.int64 of shape \[1\]"),
        ("optimizer.sum", torch.ones(2, 1), r"sum have shape \[2, 1\]"),
        ("steps", torch.tensor(-1), "steps in the state"),
        ("lr", torch.tensor(torch.nan), "lr in the state"),
        ("lr", 0.1, "lr in the state"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(name: str, value: Any, message: str) -> None:
    """The rows that were there stay."""
    one, other = (training.HashEmbedding(DIM, max_age=9) for _ in range(2))
    one(_int64([1, 2])).sum().backward()
    other(_int64([7])).sum().backward()
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(RuntimeError, match=message):
        other.load_state_dict({**one.state_dict(), name: value})
    for key, tensor in other.state_dict().items():
        assert torch.equal(tensor, before[key])


@pytest.mark.parametrize("look_up", ["embedding", "sum", "max"])
def test_a_graph_goes_backward_once_unless_it_is_retained(look_up: str) -> None:
    """As those of torch: nothing is learned from a graph that is gone."""
    if look_up == "embedding":
        table: Any = training.HashEmbedding(DIM)
    else:
        table = training.HashEmbeddingBag(DIM, mode=look_up)
    loss = table(_int64([[1, 2]])).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert table.steps == 2
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
    assert table.steps == 2


def test_rows_go_by_age() -> None:
    """Rows that training last read more than `max_age` steps ago."""
    embedding = training.HashEmbedding(1, optimizer=training.SGD(1.0), initializer=nn.init.zeros_, max_age=2)
    for step, keys in enumerate(([1, 2, 3], [2], [2], [2, 4], [2])):
        embedding(_int64(keys)).sum().backward()
        assert sorted(embedding.rows().keys.tolist()) == ([1, 2, 3], [1, 2, 3], [1, 2, 3], [2, 4], [2, 4])[step]
    assert embedding(_int64([2, 4])).flatten().tolist() == [-5, -1]
    assert embedding(_int64([1])).flatten().tolist() == [0]


def test_no_more_rows_than_asked_stay() -> None:
    """Those read last, or most often; gradients of rows evicted meanwhile are dropped."""
    by_age = training.HashEmbedding(1, optimizer=training.SGD(1.0), initializer=nn.init.zeros_, max_rows=3)
    by_count = training.HashEmbedding(1, max_rows=3, evict_by="count")
    early = by_age(_int64([1]))
    for embedding in (by_age, by_count):
        for keys in ([1, 2], [1, 2], [1, 3], [4, 5]):
            embedding(_int64(keys)).sum().backward()
    assert sorted(by_age.rows().keys.tolist()) == [3, 4, 5] or sorted(by_age.rows().keys.tolist()) == [1, 4, 5]
    assert {1, 2} <= {*by_count.rows().keys.tolist()}
    by_age.evict(unused_for=0)
    early.sum().backward()
    assert len(by_age) == 2
    by_age.put(training.Rows(_int64([1]), torch.zeros(1, 1)))
    assert by_age.evict(used_less_than=1) == 1


def test_evicted_rows_leave_the_others_as_they_are() -> None:
    """Against a dictionary, over many steps."""
    torch.manual_seed(0)
    embedding = training.HashEmbedding(1, optimizer=training.SGD(1.0), initializer=nn.init.zeros_, max_rows=50)
    oracle: dict[int, float] = {}
    for _ in range(60):
        keys = torch.randint(-40, 40, (30,))
        embedding(keys).sum().backward()
        for key in keys.tolist():
            oracle[key] = oracle.get(key, 0) - 1
        rows = embedding.rows()
        assert len(rows.keys) <= 50
        oracle = {key: value for key, value in oracle.items() if key in set(rows.keys.tolist())}
        assert dict(zip(rows.keys.tolist(), rows.vectors.flatten().tolist(), strict=True)) == oracle


def test_autocast_and_scaled_losses(device: str) -> None:
    """Vectors stay float32; scaled gradients are unscaled, and a row with infinite gradients does not change."""

    class Scaler:
        def is_enabled(self) -> bool:
            return True

        def get_scale(self) -> float:
            return 1024.0

    embedding = training.HashEmbedding(2, optimizer=training.SGD(1.0), initializer=nn.init.zeros_, grad_scaler=Scaler())
    layer = nn.Linear(2, 1, bias=False)
    nn.init.ones_(layer.weight)
    with torch.autocast(device, dtype=torch.bfloat16):
        vectors = embedding(_int64([1, 2]))
        assert vectors.dtype == torch.float32
        loss = layer(vectors).float()
    (loss * torch.tensor([[1024.0], [torch.inf]])).sum().backward()
    assert embedding(_int64([1, 2])).tolist() == [[-1, -1], [0, 0]]


def test_training_without_gradients_adds_rows_and_learns_nothing() -> None:
    """As nn.Embedding answers with its initial vectors."""
    embedding = training.HashEmbedding(DIM)
    with torch.no_grad():
        vectors = embedding(_int64([1]))
    assert len(embedding) == 1
    assert torch.equal(vectors, embedding.eval()(_int64([1])))


def test_arguments_of_torch_that_change_nothing_are_taken() -> None:
    """As scripts give them to nn.Embedding and nn.EmbeddingBag."""
    assert training.HashEmbedding(4, sparse=True, max_norm=None, dtype=torch.float32).embedding_dim == 4
    assert training.HashEmbeddingBag(4, scale_grad_by_freq=False, sparse=False).embedding_dim == 4
    with pytest.raises(TypeError, match="HashEmbedding has no argument 'vocabulary'"):
        training.HashEmbedding(4, vocabulary=9)


@pytest.mark.parametrize("kind", [training.HashEmbedding, training.HashEmbeddingBag])
def test_frozen_rows_do_not_learn(kind: Any) -> None:
    """And learn again when they are told to."""
    embedding = kind(2, optimizer=training.SGD(1.0), initializer=nn.init.zeros_)
    layer = nn.Linear(2, 1)
    keys = _int64([[1, 2]])
    for learns in (False, True):
        embedding.requires_grad_(learns)
        layer(embedding(keys)).sum().backward()
        assert embedding.rows().vectors.any() == learns
        assert embedding.steps == learns


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [training.HashEmbedding, training.HashEmbeddingBag])
def test_vectors_have_the_type_of_the_module(kind: Any, dtype: Any) -> None:
    """As those of torch's embeddings; rows stay float32, and learn."""
    embedding = kind(2, optimizer=training.SGD(1.0), initializer=nn.init.zeros_)
    model = nn.Sequential(embedding, nn.Linear(2, 1)).to(dtype)
    nn.init.ones_(model[1].weight)
    answers = model(_int64([[7]]))
    assert answers.dtype == dtype
    answers.sum().backward()
    assert embedding.rows().vectors.tolist() == [[-1, -1]]
    assert copy.deepcopy(model)(_int64([[7]])).dtype == dtype


def test_rows_made_in_inference_mode_learn_later() -> None:
    """There torch makes tensors that nothing may change."""
    embedding = training.HashEmbedding(2, optimizer=training.Adagrad(0.1), max_rows=9000)
    keys = torch.arange(6000)
    with torch.inference_mode():
        before = embedding(keys[:5000])
    embedding(keys).sum().backward()
    torch.testing.assert_close(embedding(keys[:5000]), before - 0.1)


@pytest.mark.parametrize("kind", [training.HashEmbedding, training.HashEmbeddingBag])
def test_a_look_up_asks_no_mode_of_torch(kind: Any) -> None:
    """As that of a default device, which takes longer than the functions that it is asked about."""
    asked: list[Any] = []

    class Asked(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            asked.append(function)
            return function(*arguments, **(options or {}))

    embedding, keys = kind(DIM), _int64([[1, 2], [2, 3]])
    with Asked():
        embedding(keys)

    assert asked == []
    assert len(embedding) == 3


def test_the_module_moves_and_shows_itself(device: str) -> None:
    """`to` keeps rows float32."""
    embedding = training.HashEmbedding(2, optimizer=training.SGD(0.5))
    vectors = embedding(_int64([1, 2])).detach()
    assert torch.equal(embedding.half().double().to(device)(_int64([1, 2])), vectors.double())
    assert torch.equal(embedding.float()(_int64([1, 2])), vectors)
    assert torch.equal(embedding.to("cpu")(_int64([1, 2])), vectors.cpu())
    assert torch.equal(embedding.to(device)(_int64([1, 2])), vectors)
    assert repr(embedding) == "HashEmbedding(2, rows=2, optimizer=SGD(lr=0.5), key_dtype=torch.int64)"


def test_several_threads_train_one_table() -> None:
    """Each of their steps counts, also while the table grows."""
    embedding = training.HashEmbedding(DIM, optimizer=training.SGD(1.0), initializer=nn.init.zeros_)
    batches = [[torch.randint(0, 50_000, (500,)) for _ in range(60)] for _ in range(4)]

    def train(batches: list[Any]) -> None:
        for keys in batches:
            embedding(keys).sum().backward()

    threads = [threading.Thread(target=train, args=(own,)) for own in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    keys, counts = torch.cat([keys for own in batches for keys in own]).unique(return_counts=True)
    assert embedding.steps == 240
    assert len(embedding) == len(keys)
    assert torch.equal(embedding.eval()(keys), -counts[:, None].expand(-1, DIM).float())


def test_a_failed_backward_leaves_nothing_to_learn() -> None:
    """Of its gradients none is learned by the next one, and none stays in memory."""
    embedding = training.HashEmbedding(DIM, optimizer=training.SGD(1.0), initializer=nn.init.zeros_)

    def fail(_gradient: Any) -> None:
        raise ValueError("no gradient")

    failing, learning = embedding(_int64([1])), embedding(_int64([2]))
    failing.register_hook(fail)
    with pytest.raises(ValueError, match="no gradient"):
        (failing.sum() + learning.sum()).backward()
    assert not backward._UNDER_WAY
    embedding(_int64([3])).sum().backward()
    assert embedding.eval()(_int64([1, 2, 3]))[:, 0].tolist() == [0, 0, -1]


@pytest.mark.parametrize("is_reentrant", [True, False])
@pytest.mark.parametrize("kind", [training.HashEmbedding, partial(training.HashEmbeddingBag, mode="sum")])
def test_a_table_that_two_checkpoints_read_learns_once(kind: Any, is_reentrant: bool) -> None:
    """A reentrant checkpoint goes backward by itself: the table learned in it, and the other one read new rows."""
    tables = [kind(DIM, training.Adam(0.1), nn.init.ones_) for _ in range(2)]
    part = _int64([[1, 2], [2, 3]])
    scale = torch.ones(1, requires_grad=True)
    for _ in range(3):
        for table, is_repeated in zip(tables, (False, True), strict=True):

            def tower(keys: Any, scale: Any, table: Any = table) -> Any:
                return torch.tanh(table(keys)).sum() * scale

            user, item = (
                checkpoint(tower, keys, scale, use_reentrant=is_reentrant) if is_repeated else tower(keys, scale)
                for keys in (part, part + 1)
            )
            (user * item).backward()
    assert [table.steps for table in tables] == [3, 3]
    everything = torch.arange(6)[:, None]
    assert torch.equal(*(table.eval()(everything) for table in tables))


@pytest.mark.parametrize("kind", [training.HashEmbedding, partial(training.HashEmbeddingBag, mode="sum")])
def test_a_compiled_model_learns_as_one_that_is_not(kind: Any) -> None:
    """What is around the look-up is compiled; the look-up is not traced, so batches of all sizes need no new code."""
    torch._dynamo.reset()
    models = [nn.Sequential(kind(DIM, training.SGD(0.1), nn.init.ones_), nn.Linear(DIM, 2)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    compiled = torch.compile(models[1], backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=False, recompile_limit=3, fail_on_recompile_limit_hit=True):
        for size in (5, 9, 3, 20, 7, 31, 12, 40, 2):
            keys = torch.randint(0, 60, (size, 4))
            for model in (models[0], compiled):
                model(keys).pow(2).sum().backward()
    everything = torch.arange(60)[:, None]
    # A GPU adds the gradients of one row in any order.
    torch.testing.assert_close(models[0].eval()[0](everything), models[1].eval()[0](everything))
