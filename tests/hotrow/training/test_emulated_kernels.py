"""The kernels of hash embeddings, on a processor (tests/testing/emulated_gpu.py): they do what its own code does."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.testing.emulated_gpu import COMPILER, EmulatedKernels

torch = pytest.importorskip("torch")

from hotrow.training.hash_embeddings import key_index  # noqa: E402
from hotrow.training.hash_embeddings.look_up import Bags, LookupResult  # noqa: E402
from hotrow.training.hash_embeddings.optimizers import SGD, Adagrad, Adam  # noqa: E402
from hotrow.training.hash_embeddings.rows import INITIAL_ROWS, HashRows  # noqa: E402
from hotrow.training.kernels import device_rows  # noqa: E402
from hotrow.training.row_access import add_up, longer  # noqa: E402

pytestmark = [pytest.mark.training, pytest.mark.skipif(COMPILER is None, reason="needs Linux and a C++ compiler")]
HERE = torch.device("cpu")
DIMS = (1, 2, 3, 4, 12, 16, 64, 68, 128, 132, 260)
LOWEST, HIGHEST = -(2**63), 2**63 - 1
_BITS = (1 << 64) - 1


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> EmulatedKernels:
    """All kernels of the file."""
    kernels = device_rows.source()
    names = re.findall(r'^extern "C" __global__ void (\w+)\(|^(?:EXCHANGE|OPTIMIZER)\((\w+),', kernels, re.MULTILINE)
    return EmulatedKernels(tmp_path_factory.mktemp("kernels"), kernels, ["".join(name) for name in names])


@pytest.fixture(autouse=True)
def on_processor(compiled: EmulatedKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of `device_rows` take tensors of the processor, and pack arguments for kernels as for a GPU."""

    def run(name: str, num_blocks: int, block: tuple[int, int], *arguments: Any) -> None:
        if num_blocks:
            values = [device_rows._value(argument) for argument in arguments]
            device_rows._packer(tuple(map(type, values)))(device_rows._ARGUMENTS.buffer, 0, *values)
            compiled.launch(name, num_blocks, block, ctypes.c_void_p(device_rows._ARGUMENTS.addresses))

    def numbers_on_their_way(numbers: Any) -> Callable[[], list[int]]:
        values: list[int] = numbers.tolist()
        return lambda: values

    monkeypatch.setattr(device_rows, "_run", run)
    monkeypatch.setattr(device_rows, "numbers_on_their_way", numbers_on_their_way)


def key_of_hash(hashed: int) -> int:
    """The key that has this hash: the finaliser of MurmurHash3 backwards."""
    for factor in (0xC4CEB9FE1A85EC53, 0xFF51AFD7ED558CCD):
        hashed = (hashed ^ hashed >> 33) * pow(factor, -1, 1 << 64) & _BITS
    hashed ^= hashed >> 33
    return hashed - (1 << 64) if hashed >> 63 else hashed


TWINS = [key_of_hash(0xABCDEF01 << 32 | low) for low in range(7)] + [key_of_hash(low << 32 | 5) for low in range(1, 9)]
"""Keys with the same tag and neighbouring places, and keys that belong to the same place."""


def drawn_keys(rng: np.random.Generator, count: int) -> Any:
    """Many come more than once; extremes, negative ones and `TWINS` among them."""
    some = [*rng.integers(LOWEST, HIGHEST, 40).tolist(), *range(-9, 9), *TWINS, LOWEST, HIGHEST]
    return torch.tensor(rng.choice(np.array(some, np.int64), count))


def device_index(capacity: int) -> Any:
    return key_index.DeviceIndex(HERE, capacity)


def check_rows(index: Any, keys: Any, rows: Any, known: dict[int, int]) -> None:
    """The same row as before for known keys, the next ones for new ones; they are noted in `known`."""
    first = len(known) + 1
    for key, row in zip(keys.tolist(), rows.tolist(), strict=True):
        assert known.setdefault(key, row) == row
        assert int(index.keys[row]) == key
    assert sorted(known.values())[first - 1 :] == list(range(first, index.num_rows))


@pytest.mark.parametrize("capacity", [0, 3, 300])
def test_keys_get_rows(capacity: int) -> None:
    """Whatever their order, and however often one comes; the index grows, and forgets what it is told to."""
    rng, index, known = np.random.default_rng(capacity), device_index(capacity), dict[int, int]()
    for count in (0, 1, 5, 33, 300, 1000):
        keys = drawn_keys(rng, count)
        check_rows(index, keys, index.find_or_add(keys), known)
        asked = torch.cat([keys, torch.tensor([*TWINS, LOWEST, HIGHEST, 77777])])
        assert index.find(asked).tolist() == [known.get(key, 0) for key in asked.tolist()]

    index.keep(20)
    kept = {key: row for key, row in known.items() if row < 20}
    assert index.find(torch.tensor(list(known))).tolist() == [kept.get(key, 0) for key in known]
    keys = drawn_keys(rng, 500)
    check_rows(index, keys, index.find_or_add(keys), kept)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("is_too_small", [False, True])
def test_distinct_keys_by_owner(num_ranks: int, *, is_too_small: bool) -> None:
    """Each once, with its owner; in messages too, which have some of them if there is not enough room."""
    for count in (0, 1, 40, 700):
        keys = drawn_keys(np.random.default_rng(count), count)
        expected = key_index.distinct_by_owner(keys, num_ranks)
        found = key_index.number_by_owner(keys, torch.empty_like(keys), num_ranks)
        num_found = len(expected.keys)
        assert found.counts.tolist() == expected.counts.tolist()
        assert torch.equal(found.keys[found.places], keys)
        for part, other in zip(
            *(each.keys[:num_found].split(found.counts.tolist()) for each in (found, expected)), strict=True
        ):
            assert sorted(part.tolist()) == sorted(other.tolist())

        most = int(expected.counts.max())
        size = key_index.HEADER + (max(1, most // 2) if is_too_small else most + 3)
        messages = torch.full((num_ranks * size,), -1)
        places = key_index.number_by_owner(keys, messages, num_ranks, size).places
        shaped = messages.view(num_ranks, size)
        assert shaped[:, 0].tolist() == expected.counts.tolist()
        assert shaped[:, 1].tolist() == [most] * num_ranks
        for owner, part in enumerate(expected.keys.split(expected.counts.tolist())):
            sent = shaped[owner, key_index.HEADER :][: len(part)].tolist()
            assert len({*sent}) == len(sent)
            assert {*sent} <= {*part.tolist()}
        if not is_too_small:
            assert torch.equal(messages[places], keys)


def received(rng: np.random.Generator, num_ranks: int, size: int) -> Any:
    """Messages of some ranks to one: none of them has a key twice, and some have more keys than slots."""
    messages = torch.full((num_ranks, size), 123456)
    for rank in range(num_ranks):
        keys = drawn_keys(rng, int(rng.integers(0, 200))).unique()
        keys = keys[torch.randperm(len(keys))]
        messages[rank, :2] = torch.tensor([len(keys), len(keys) + rank])
        messages[rank, 2 : 2 + len(keys)] = keys[: size - 2]
    return messages.reshape(-1)


@pytest.mark.parametrize("has_room", [False, True])
def test_requested_keys_get_rows(*, has_room: bool) -> None:
    """What is no key gets row 0. With room, first vectors are made at once: those that follow from the keys."""
    rng, num_ranks, dim = np.random.default_rng(1), 3, 68
    index, known = device_index(5), dict[int, int]()
    rows_of = HashRows(torch.randn(INITIAL_ROWS, dim), SGD(), HERE)
    for size in (2, 3, 40, 90):
        messages = received(rng, num_ranks, size)
        is_key = key_index.requested(messages, size)
        before = index.num_rows
        if has_room:
            vectors = torch.zeros(before + len(messages), dim)
            index.keys = longer(index.keys, len(vectors), 0)
            rows, finish = index.start_to_add(messages, size, rows_of.initial, vectors)
            most = finish()
            made = slice(before, index.num_rows)
            assert torch.equal(vectors[made], rows_of.initial_vectors(index.keys[made]))
            assert not vectors[:before].any()
            assert not vectors[index.num_rows :].any()
        else:
            rows, most = index.find_or_add_requested(messages, size)
        assert most == int(messages[1::size].max())
        assert not rows[~is_key].any()
        check_rows(index, messages[is_key], rows[is_key], known)


@pytest.mark.parametrize("dim", DIMS)
def test_rows_are_gathered_and_added_up(dim: int) -> None:
    """Also with sources, factors, by threes, and where a few rows come most often; nothing else is written."""
    torch.manual_seed(dim)
    for count in (0, 1, 255, 256, 900):
        rows = torch.cat([torch.full((count // 2,), 7), torch.randint(0, 40, (count - count // 2,))])
        rows = rows[torch.randperm(count)]
        table, output = torch.randn(41, dim), torch.full((count + 1, dim), 5.0)
        device_rows.gather(table, rows, output[:count])
        assert torch.equal(output, torch.cat([table[rows], torch.full((1, dim), 5.0)]))

        factors, given = torch.randn(count), torch.randint(0, 41, (count,))
        for sources, vectors in ((1, output[:count]), (3, table.repeat(8, 1)), (given, table)):
            for factor in (None, factors):
                sums = torch.zeros(41, dim)
                device_rows.add_up(sums, rows, vectors, sources, factor)
                torch.testing.assert_close(sums, add_up(41, rows, vectors, sources, factor), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_are_pooled(mode: str, dim: int) -> None:
    """As by torch, of even and uneven bags, empty ones, a key that takes no part, and factors."""
    torch.manual_seed(dim)
    table, rows = torch.randn(30, dim), torch.randperm(29)[:20] + 1
    uneven = torch.tensor([0, 0, 1, 6, 6, 59, 60, 60])
    for begins, num_bags in ((uneven, 7), (4, 15), (1, 60), (torch.zeros(1, dtype=torch.int64), 0)):
        count = 60 if num_bags else 0
        places = torch.randint(0, 20, (count,))
        for padding in (None, 3):
            for weights in (None, torch.randn(count)) if mode == "sum" else (None,):
                for numbers in (rows, None):
                    bags = Bags(begins, num_bags, count, mode, padding)
                    look_up = LookupResult(table, numbers, 20, places, lambda _: None)
                    pooled = bags.pool_by_kernel(look_up, weights)
                    expected = bags.pool(places, look_up.vectors(), weights)
                    torch.testing.assert_close(pooled, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("optimizer", [SGD(0.1), Adagrad(0.1, 0.5), Adam(0.1)], ids=lambda kind: type(kind).__name__)
@pytest.mark.parametrize("are_distinct", [True, False])
def test_rows_learn(dim: int, optimizer: Any, *, are_distinct: bool) -> None:
    """As by torch's operators, from the sum of the gradients of each row; row 0 and other rows stay as they are."""
    torch.manual_seed(dim)
    for count in (0, 1, 90):
        vectors = torch.randn(100, dim)
        states = {name: torch.rand(100, dim) for name in optimizer.states()}
        rows = torch.randperm(100)[:count] if are_distinct else torch.randint(0, 12, (count,))
        gradients = torch.randn(count, dim)
        twin = HashRows(torch.zeros(INITIAL_ROWS, dim), optimizer, HERE)
        twin.vectors, twin.states = vectors.clone(), {name: state.clone() for name, state in states.items()}
        twin.steps = 3
        twin.learn(rows, gradients.clone(), are_distinct=are_distinct)

        name, settings = optimizer.kernel(twin.steps)
        device_rows.learn(name, vectors, [*states.values()], rows, gradients, *settings, are_distinct=are_distinct)
        torch.testing.assert_close(vectors, twin.vectors, rtol=1e-4, atol=1e-5)
        for state, expected in zip(states.values(), twin.states.values(), strict=True):
            torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dim", [1, 3, 4, 64, 130, 132])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_exchange_rows(num_ranks: int, dim: int) -> None:
    """Vectors go to the slots of their keys on the ranks that sent these, and gradients come from there."""
    rng, size, rank = np.random.default_rng(dim), 21, num_ranks - 1
    messages = received(rng, num_ranks, size)
    is_key, num_slots = key_index.requested(messages, size), num_ranks * size
    rows = torch.where(is_key, torch.randint(0, 9, (num_slots,)), 0)
    table, there = torch.randn(10, dim), [torch.randn(num_slots, dim) for _ in range(num_ranks)]
    peers = torch.tensor([memory.data_ptr() for memory in there])
    slots = slice(rank * size, (rank + 1) * size)

    expected = torch.cat([memory[slots] for memory in there])
    fetched = torch.zeros(num_slots, dim)
    device_rows.exchange("fetch_rows", fetched, rows, messages, size, rank, peers)
    assert torch.equal(fetched, torch.where(is_key[:, None], expected, 0))

    learned = table.clone()
    device_rows.exchange("learn_rows", learned, rows, messages, size, rank, peers, -0.5)
    counted = is_key & (rows != 0)
    torch.testing.assert_close(learned, table.index_add(0, rows[counted], expected[counted], alpha=-0.5))

    before, zeros = [memory.clone() for memory in there], torch.ones(num_slots + 1, dim)
    device_rows.exchange("send_rows", table, rows, messages, size, rank, peers, zeros=zeros[:num_slots])
    sent = torch.where(is_key[:, None], table[rows], expected).split(size)
    for memory, old, part in zip(there, before, sent, strict=True):
        old[slots] = part
        assert torch.equal(memory, old)
    assert not zeros[:num_slots].any()
    assert zeros[num_slots].all()
