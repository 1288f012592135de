"""The kernels of hash_rows.cu as functions of torch's tensors: compiled on first use, kept by CuPy in its kernel cache.

All run on torch's current stream and return at once.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import inference_session.kernels

_Result = TypeVar("_Result")
_THREADS = 256
_VECTOR_BYTES = 16
"""The kernels read four elements at once."""
_LINEAR = "learn_sgd"
"""The optimizer that may be applied to the gradients of a row one by one."""
_AT_ONCE = 4
"""Vectors that a thread of `gather_rows` copies."""
_MOST_ARGUMENTS, _MOST_NUMBERS = 16, 2
_SHARED = ("layout.cuh", "index.cuh")


def can_run(device: torch.device) -> bool:
    """Whether there are kernels for tensors of this device."""
    return device.type == "cuda" and _has_cupy()


@cache
def _has_cupy() -> bool:
    return find_spec("cupy") is not None


def current_stream(device: int) -> int:
    """The address in torch.cuda.current_stream(), without an object."""
    return torch._C._cuda_getCurrentRawStream(device)


def find_rows(entries: Tensor, table_keys: Tensor, keys: Tensor, rows: Tensor) -> None:
    """Write the row of each key to `rows`, 0 where it has none.

    Args:
        entries: int64 [a power of two], the index; see hash_rows.cu.
        table_keys: int64 [capacity], the key of each row.
        keys: int64 [n].
        rows: int64 [n].
    """
    _run_flat("find_rows", keys.numel(), entries, _mask(entries), table_keys, keys, keys.numel(), rows)


def claim(
    entries: Tensor,
    table_keys: Tensor,
    keys: Tensor,
    counts: Tensor,
    places: Tensor,
    rows: Tensor,
    message_size: int = 0,
    most: Tensor | None = None,
) -> None:
    """Claim an entry for each key that has none, and a row; `write_claimed` or `number_by_owner` has to follow.

    Args:
        entries: as in `find_rows`; at least half of them stay free.
        keys: int64 [n], all of them keys if `message_size` is 0; else messages of that size.
        counts: int64 [owners], rows in use of each owner, which this counts up; key % owners owns a key.
        places: int32 [n], where to write the entry of each key.
        rows: int64 [n], where to write the rows that are new, counted for each owner on its own.
        most: int64 [1], for the most keys of all messages that their senders have sent.
    """
    arguments = table_keys, keys, keys.numel(), message_size, most, counts, counts.numel(), places, rows
    _run_flat("claim", keys.numel(), entries, _mask(entries), *arguments)


def write_claimed(
    entries: Tensor,
    table_keys: Tensor,
    keys: Tensor,
    places: Tensor,
    rows: Tensor,
    message_size: int = 0,
    initial: Tensor | None = None,
    vectors: Tensor | None = None,
) -> None:
    """Write claimed rows to their entries, their keys to `table_keys`, and the row of each key to `rows`.

    Args:
        rows: int64 [n], with the rows that `claim` wrote; 0 is written for what is no key of a message.
        initial: float32 [INITIAL_ROWS, dim], what vectors of new rows are made of, as `HashRows.initial_vectors` says.
        vectors: float32 [capacity, dim], to write them to; None where they are written elsewhere.
    """
    dim = 0 if vectors is None else vectors.shape[1]
    arguments = table_keys, keys, keys.numel(), message_size, places, rows, rows, initial, vectors, dim
    _run_flat("write_claimed", keys.numel(), entries, *arguments)


def number_by_owner(
    entries: Tensor,
    found: Tensor,
    keys: Tensor,
    places: Tensor,
    claimed: Tensor,
    counts: Tensor,
    numbers: Tensor,
    message_size: int = 0,
    outputs: Tensor | None = None,
    rank: int = 0,
) -> None:
    """Write each distinct key to `found`, int64, and where each of the keys stands there to `numbers`, int64 [n].

    Args:
        claimed: int64 [n], the rows that `claim` wrote.
        counts: int64 [owners], as `claim` left them.
        message_size: 0 for keys that follow each other; else each owner's are in a message of that size, as far as it
            has slots.
        outputs: int64 [owners], where each owner has the messages of all ranks; the keys then go there.
        rank: that of this process.
    """
    num_threads = max(keys.numel(), counts.numel())  # also without keys, messages say how many they have
    arguments = found, outputs, rank, message_size, keys, keys.numel(), places, claimed, counts, counts.numel(), numbers
    _run_flat("number_by_owner", num_threads, entries, *arguments)


def index_rows(entries: Tensor, table_keys: Tensor, num_rows: int) -> None:
    """Put rows from 1 to num_rows - 1 of table_keys, int64 [any], into an index that has none of them."""
    _run_flat("index_rows", num_rows - 1, entries, _mask(entries), table_keys, num_rows)


def gather(table: Tensor, rows: Tensor, output: Tensor) -> None:
    """Write rows, int64 [n], of a table, float32 [any, dim], to output, float32 [n, dim]."""
    dim = table.shape[1]
    _run_rows("gather_rows", -(-len(rows) // _AT_ONCE), dim, table, dim, rows, len(rows), output)


def exchange(
    way: str,
    table: Tensor,
    rows: Tensor,
    messages: Tensor,
    message_size: int,
    rank: int,
    peers: Tensor,
    rate: float = 0.0,
    zeros: Tensor | None = None,
) -> None:
    """Write vectors of the keys in messages to the memory of the ranks that sent these, or read them there.

    Args:
        way: "send_rows" writes rows of the table there; "fetch_rows" writes to the table, [n, dim], what is there, by
            slots; "learn_rows" adds that to rows of the table, but to row 0, times `rate`.
        table: float32 [any, dim].
        rows: int64 [n], of the slots of messages. Slots without a key are left out.
        messages: int64 [n], in the order of ranks.
        rank: that of this process.
        peers: int64 [ranks], where each rank has the vectors of its slots, [n, dim].
        zeros: float32 [n, dim], which "send_rows" fills with zeros.
    """
    dim = table.shape[1]
    arguments = table, dim, rows, messages, message_size, peers.numel(), rank, peers, rate, zeros
    _run_rows(way, -(-messages.numel() // _AT_ONCE), dim, *arguments)


def add_up(sums: Tensor, rows: Tensor, vectors: Tensor, sources: Tensor | int, factors: Tensor | None) -> None:
    """Add vectors to the rows of `sums` that `rows` names; as `row_access.add_up`."""
    if vectors.data_ptr() % _VECTOR_BYTES:  # a part of another tensor
        vectors = vectors.clone()
    dim = sums.shape[1]
    given, width = (None, sources) if isinstance(sources, int) else (sources, 0)
    arguments = sums, dim, rows, rows.numel(), vectors, given, width, factors
    _run("add_up", -(-rows.numel() // _THREADS), _shape(dim), *arguments)


def pool(
    sums: Tensor,
    begins: Tensor | int,
    places: Tensor,
    factors: Tensor | None,
    table: Tensor,
    rows: Tensor | None,
    *,
    is_mean: bool,
) -> None:
    """Write the sums or means of bags, float32 [bags, dim].

    Args:
        begins: int64 [bags + 1], of the keys of each bag; or how many keys each has.
        places: int64 [n], the number of each key among the distinct keys.
        factors: float32 [n], of each key's vector; None where all are 1. Means are divided by their sum in the bag.
        table: float32 [any, dim].
        rows: int64, the row in `table` of each distinct key; None where that is its number.
    """
    num_bags, dim = sums.shape
    given, width = (None, begins) if isinstance(begins, int) else (begins, 0)
    arguments = sums, dim, given, width, num_bags, places, factors, table, rows, int(is_mean)
    _run_rows("pool", num_bags, dim, *arguments)


def join(rows: Tensor, gradients: Tensor, num_rows: int) -> Tensor:
    """Add up the gradients of each row, in place; returns rows, int64 [n], with each but 0 named once.

    Args:
        rows: int64 [n], below `num_rows`.
        gradients: float32 [n, dim]; those of a row that is returned are summed, others keep their values.
    """
    place_of_row = torch.empty(num_rows, dtype=torch.int32, device=rows.device)
    once = torch.empty_like(rows)
    _run_flat("note_places", len(rows), rows, len(rows), place_of_row)
    dim = gradients.shape[1]
    _run_rows("join", len(rows), dim, rows, len(rows), place_of_row, gradients, dim, once)
    return once


def learn(
    name: str,
    vectors: Tensor,
    states: list[Tensor],
    rows: Tensor,
    gradients: Tensor,
    *settings: float,
    are_distinct: bool,
) -> None:
    """Apply an optimizer once to the sum of the gradients of each row.

    Args:
        name: of the kernel.
        vectors: float32 [capacity, dim].
        states: of the same shape, two at most.
        rows: int64 [n]; 0 stands for none.
        gradients: float32 [n, dim]; may be overwritten.
        settings: of `RowOptimizer.kernel`.
        are_distinct: whether no row but 0 is named more than once.
    """
    if not are_distinct and name != _LINEAR:
        rows = join(rows, gradients, len(vectors))
    dim = vectors.shape[1]
    kept = [*states, None, None][:2]
    _run_rows(name, len(rows), dim, vectors, *kept, dim, rows, len(rows), gradients, *map(float, settings))


class _Arrival:
    """Where a few numbers of a GPU, the current one, come to in the host's memory."""

    def __init__(self) -> None:
        import cupy

        self.numbers = torch.empty(_MOST_NUMBERS, dtype=torch.int64, device="cpu", pin_memory=True)
        self.address = self.numbers.data_ptr()
        self.event = cupy.cuda.Event(disable_timing=True)


_ARRIVALS: dict[int, list[_Arrival]] = {}
"""By device, those that are free. To make one takes longer than to use it."""


def numbers_on_their_way(numbers: Tensor) -> Callable[[], list[int]]:
    """Waits for a few numbers, int64 [n], as they are now, but for nothing that is launched after this call.

    What is returned has to be called once.
    """
    return _on_device(numbers.get_device(), _numbers_on_their_way, numbers)


def _numbers_on_their_way(device: int, numbers: Tensor) -> Callable[[], list[int]]:
    free, stream, runtime = _ARRIVALS.setdefault(device, []), current_stream(device), _cuda().runtime
    try:
        arrival = free.pop()
    except IndexError:
        arrival = _Arrival()
    count = numbers.numel()
    runtime.memcpyAsync(arrival.address, numbers.data_ptr(), 8 * count, runtime.memcpyDeviceToHost, stream)
    runtime.eventRecord(arrival.event.ptr, stream)

    def wait() -> list[int]:
        arrival.event.synchronize()
        values: list[int] = arrival.numbers[:count].tolist()
        free.append(arrival)
        return values

    return wait


def source() -> str:
    """The kernels' whole source: one translation unit, so that CuPy's cache sees every change."""
    shared = Path(inference_session.kernels.__file__).parent / "cuda"
    files = [*(shared / name for name in _SHARED), Path(__file__).parent / "hash_rows.cu"]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@cache
def _kernel(name: str) -> Any:
    return _module().get_function(name)


@cache
def _function(name: str, device: int) -> int:
    """The address of a kernel on the current device. Its module lives as long as `_kernel` keeps it."""
    return int(_kernel(name).kernel.ptr)


@cache
def _module() -> Any:
    import cupy

    return cupy.RawModule(code=source(), options=("-std=c++17",))


def _mask(entries: Tensor) -> int:
    return entries.shape[0] - 1


def _run_flat(name: str, num_threads: int, *arguments: Any) -> None:
    """One thread for each key."""
    _run(name, -(-num_threads // _THREADS), (_THREADS, 1), *arguments)


def _run_rows(name: str, num_rows: int, dim: int, *arguments: Any) -> None:
    """Some threads for each row; four elements to each of them."""
    lanes, rows_of_block = _shape(dim)
    _run(name, -(-num_rows // rows_of_block), (lanes, rows_of_block), *arguments)


def _shape(dim: int) -> tuple[int, int]:
    """Of a block: threads of each row, and rows."""
    lanes = min(32, 1 << max(0, (dim - 1) // 4).bit_length())
    return lanes, _THREADS // lanes


def _run(name: str, num_blocks: int, block: tuple[int, int], *arguments: Any) -> None:
    if not num_blocks:
        return
    with torch._C.DisableTorchFunction():  # a mode, such as a default device, would be asked about each argument
        # All kernels begin with a tensor.
        _on_device(arguments[0].get_device(), _launch, name, num_blocks, block, arguments)


def _on_device(device: int, work: Callable[..., _Result], *arguments: Any) -> _Result:
    """Do work(device, *arguments) where this device is the current one."""
    if device == torch._C._cuda_getDevice():  # to change it takes as long as the launch
        return work(device, *arguments)
    with torch.cuda.device(device):
        return work(device, *arguments)


def _launch(device: int, name: str, num_blocks: int, block: tuple[int, int], arguments: Sequence[Any]) -> None:
    """As CuPy calls a kernel, in half the time, and on a stream that is not its own. The device is the current one."""
    values = [_value(argument) for argument in arguments]
    _packer(tuple(map(type, values)))(_ARGUMENTS.buffer, 0, *values)
    addresses, stream = _ARGUMENTS.addresses, current_stream(device)
    _cuda().driver.launchKernel(_function(name, device), num_blocks, 1, 1, *block, 1, 0, stream, addresses, 0)


class _Arguments(threading.local):
    """Where each thread puts the arguments of a kernel, 8 bytes for each."""

    def __init__(self) -> None:
        self.buffer = (ctypes.c_uint64 * _MOST_ARGUMENTS)()
        begin = ctypes.addressof(self.buffer)
        self._places = (ctypes.c_uint64 * _MOST_ARGUMENTS)(*range(begin, begin + 8 * _MOST_ARGUMENTS, 8))
        self.addresses = ctypes.addressof(self._places)
        """Of an array that has the address of each argument."""


_ARGUMENTS = _Arguments()


@cache
def _cuda() -> Any:
    from cupy import cuda

    return cuda


@cache
def _packer(types: tuple[type, ...]) -> Callable[..., None]:
    """Writes values of these types into a buffer: fractions as float32, others as int64."""
    return struct.Struct("=" + "".join("f4x" if issubclass(kind, float) else "q" for kind in types)).pack_into


def _value(argument: Any) -> Any:
    """The address of a tensor, 0 of None."""
    if not isinstance(argument, Tensor):
        return 0 if argument is None else argument
    if not argument.is_contiguous():
        raise ValueError("the kernels take tensors without gaps; call contiguous() first")
    return argument.data_ptr()
