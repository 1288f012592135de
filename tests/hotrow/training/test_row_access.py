"""Rows of tensors by their numbers are read, written and added up as by torch's operators."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hotrow.training.kernels import device_rows  # noqa: E402
from hotrow.training.row_access import add_up, gather, longer, scatter  # noqa: E402
from tests.testing.mappings import HAS_LARGE_PAGES, wants_large_pages  # noqa: E402

pytestmark = [pytest.mark.training]

KINDS: list[Any] = [*[ctypes.c_int64] * 8, ctypes.c_float, ctypes.c_int64]
"""What `learn_rows` takes."""


def strided(num_rows: int, dim: int, device: str) -> Any:
    """Random vectors that are not contiguous."""
    return torch.randn(dim, num_rows, device=device).T


@pytest.mark.parametrize(("num_rows", "dim"), [(0, 3), (1, 1), (3, 5), (200, 16), (3000, 64)])
def test_rows_are_read_and_written_as_by_operators(num_rows: int, dim: int, device: str) -> None:
    """Vectors with gaps are copied first, and the copy lives until the rows are written."""
    vectors, rows = strided(num_rows, dim, device), torch.randperm(num_rows, device=device) + 1
    for _ in range(10):
        table = torch.zeros(num_rows + 1, dim, device=device)
        scatter(table, rows, vectors)

        assert torch.equal(table[rows], vectors)
        assert torch.equal(gather(table, rows), vectors)
        assert not table[0].any()


def test_vectors_are_added_up_as_by_operators(device: str) -> None:
    """Also those that are added to several rows, or with factors."""
    vectors, factors = strided(50, 7, device), torch.randn(100, device=device)[::2]
    rows, sources = torch.randint(0, 9, (50,), device=device), torch.randint(0, 50, (50,), device=device)
    expected = torch.zeros(9, 7, device=device).index_add_(0, rows, vectors[sources] * factors[:, None])

    assert torch.allclose(add_up(9, rows, vectors, sources, factors), expected, atol=1e-5)
    by_fives = add_up(9, rows, vectors, 5, factors)
    assert torch.allclose(by_fives, add_up(9, rows, vectors, torch.arange(50, device=device) // 5, factors), atol=1e-5)
    part = torch.randn(1 + 50 * 8, device=device)[1:].view(50, 8)
    assert torch.allclose(add_up(9, rows, part), torch.zeros(9, 8, device=device).index_add_(0, rows, part), atol=1e-5)
    assert torch.allclose(
        add_up(9, rows, vectors), torch.zeros(9, 7, device=device).index_add_(0, rows, vectors), atol=1e-5
    )


def test_many_vectors_of_few_rows_are_added_up(device: str) -> None:
    """Half of them are of one row; the others of rows that come often, and of rows that come once."""
    rows = torch.cat([torch.full((1500,), 7), torch.randint(0, 20, (700,)), torch.arange(20, 820)])
    rows = rows[torch.randperm(len(rows))].to(device)
    for dim in (3, 16, 200):
        vectors = torch.randn(len(rows), dim, device=device)
        expected = torch.zeros(820, dim, device=device).index_add_(0, rows, vectors)

        torch.testing.assert_close(add_up(820, rows, vectors), expected, atol=1e-3, rtol=1e-4)


def test_rows_are_in_large_pages() -> None:
    """The tables, what look-ups answer, and sums of gradients: small pages took most of the time of a look-up."""
    rows = torch.arange(1 << 16)
    table = longer(torch.ones(1, 64), len(rows))
    vectors = gather(table, rows)

    for tensor in (table, vectors, add_up(len(rows), rows, vectors)):
        assert wants_large_pages(tensor.data_ptr() + tensor.nbytes // 2) == HAS_LARGE_PAGES


def test_kernels_get_their_arguments_as_they_are_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses and whole numbers of 64 bits, fractions of 32, from any thread."""
    launched = list[tuple[Any, ...]]()

    def launch(function: int, *numbers: int) -> None:
        addresses = (ctypes.c_uint64 * len(KINDS)).from_address(numbers[-2])
        values = [kind.from_address(address).value for kind, address in zip(KINDS, addresses, strict=True)]
        launched.append((function, *values))

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(device_rows, "_cuda", lambda: SimpleNamespace(driver=SimpleNamespace(launchKernel=launch)))
    monkeypatch.setattr(device_rows, "_function", lambda name, device: 99)
    monkeypatch.setattr(device_rows, "current_stream", lambda device: 0)
    keys, vectors = torch.zeros(4, dtype=torch.int64), torch.zeros(4, 3)
    arguments = "learn_rows", vectors, keys, keys, 2, 1, keys, -0.5
    device_rows.exchange(*arguments)
    thread = threading.Thread(target=device_rows.exchange, args=arguments)
    thread.start()
    thread.join()

    table, slots = vectors.data_ptr(), keys.data_ptr()
    assert launched == [(99, table, 3, slots, slots, 2, 4, 1, slots, -0.5, 0)] * 2
    with pytest.raises(ValueError, match="without gaps"):
        device_rows.gather(vectors.T, keys, vectors)
