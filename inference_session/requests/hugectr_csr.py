"""How a HugeCTR or HPS request carries its keys, checked before any key is read.

hugectr backend                                               hps backend
    DES        float32  [samples * dense_dim], by sample          KEYS     int64  all keys of table 0, then table 1 …
    CATCOLUMN  keys by sample; in a sample, by table              NUMKEYS  int32  [tables] how many
    ROWINDEX   int32, per table a block of offsets from 0,
               samples * slots + 1 of them, by sample and slot

As clients send them, tensors are [1, n]; [n] is taken as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from inference_session.errors import InvalidRequestError
from inference_session.kernels.cpu.requests.bags import have_one_key_each, place_bags
from inference_session.kernels.records import address_of
from inference_session.model_spec import PREDICTIONS, LookupSpec, ModelSpec, NamedArrays, TableSpec, TensorSpec

DENSE = "DES"
KEYS = "CATCOLUMN"
OFFSETS = "ROWINDEX"
HPS_KEYS = "KEYS"
HPS_COUNTS = "NUMKEYS"

_FLOAT32 = np.dtype(np.float32)
_INT32 = np.dtype(np.int32)
_KEY_TYPES: dict[str, np.dtype[Any]] = {"int64": np.dtype(np.int64), "uint32": np.dtype(np.uint32)}


@dataclass(frozen=True)
class RequestFormat:
    """The properties of a model that its requests must match."""

    dense_dim: int
    """Dense features per sample."""
    slots: tuple[int, ...]
    """Slots per table: bags of keys in one sample."""
    key_type: Literal["int64", "uint32"] = "int64"
    max_samples: int | None = None
    """Samples of one request; None: no limit."""

    def __post_init__(self) -> None:
        """Refuse what no model has: ValueError. Compiled code counts on it."""
        numbers = (self.dense_dim, *self.slots, 0 if self.max_samples is None else self.max_samples - 1)
        if not all(type(number) is int and number >= 0 for number in numbers) or not any(self.slots):
            raise ValueError(
                f"dense_dim {self.dense_dim!r}, slots {self.slots!r} and max_samples {self.max_samples!r} must be whole"
                " numbers of at least 0, some slots and max_samples above 0"
            )
        if self.key_type not in _KEY_TYPES:
            raise ValueError(f"key_type {self.key_type!r} is not one of {', '.join(_KEY_TYPES)}")


class Bags(NamedTuple):
    """Bag i of a table is `keys[begins[i]:ends[i]]`; int64 [samples * slots], by sample, then slot."""

    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    num_keys: int
    """Keys in all of them."""


class DecodedRequest(NamedTuple):
    """One request of the hugectr backend."""

    num_samples: int
    dense: npt.NDArray[np.float32]
    """[samples, dense_dim]"""
    keys: npt.NDArray[np.int64]
    """All keys as they came; uint32 keys as their value."""
    offsets: npt.NDArray[np.int32]
    """ROWINDEX, checked."""
    slots: tuple[int, ...]
    """Per table."""
    ragged: tuple[Bags, ...] | None
    """Bags per table; None: each slot of each sample has one key, and the keys are a matrix [samples, all slots]."""

    @property
    def bags(self) -> tuple[Bags, ...]:
        """The bags per table, even where each has one key."""
        return self.ragged or _bags(self.offsets, self.keys.size, self.slots, self.num_samples)


class DecodedKeys(NamedTuple):
    """One request of the hps backend: the keys of table t are `keys[offsets[t]:offsets[t + 1]]`."""

    keys: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]


def decode_request(inputs: NamedArrays, form: RequestFormat) -> DecodedRequest:
    """Decode DES, CATCOLUMN and ROWINDEX; InvalidRequestError names the input, what was found and what is expected.

    The number of samples follows from ROWINDEX (the rule of HugeCTR 3.4.1), so that bags may be of any size.
    """
    _check_names(inputs, (DENSE, KEYS, OFFSETS))
    dense = _flat(inputs, DENSE, _FLOAT32)
    keys = _flat(inputs, KEYS, _KEY_TYPES[form.key_type])
    # A copy: in memory shared with a client they could change between the check and the use.
    offsets = _flat(inputs, OFFSETS, _INT32).copy()
    num_samples = _num_samples(offsets.size, form)
    if dense.size != num_samples * form.dense_dim:
        raise InvalidRequestError(
            f"input {DENSE!r}: {dense.size} values, expected {num_samples * form.dense_dim} "
            f"({num_samples} samples according to {OFFSETS!r}, of {form.dense_dim} dense features)"
        )
    is_even = keys.size == num_samples * sum(form.slots)
    is_even = is_even and have_one_key_each(address_of(offsets), as_array(form.slots), num_samples)
    ragged = None if is_even else _bags(offsets, keys.size, form.slots, num_samples)
    dense = dense.reshape(num_samples, form.dense_dim)
    return DecodedRequest(num_samples, dense, keys.astype(np.int64, copy=False), offsets, form.slots, ragged)


def decode_keys(inputs: NamedArrays, num_tables: int) -> DecodedKeys:
    """Decode KEYS and NUMKEYS; InvalidRequestError names the input, what was found and what is expected."""
    _check_names(inputs, (HPS_KEYS, HPS_COUNTS))
    keys = _flat(inputs, HPS_KEYS, _KEY_TYPES["int64"])
    counts = _flat(inputs, HPS_COUNTS, _INT32).astype(np.int64)
    if counts.size != num_tables:
        raise InvalidRequestError(f"input {HPS_COUNTS!r}: {counts.size} counts, expected {num_tables}, one per table")
    if counts.min(initial=0) < 0:
        table = int(counts.argmin())
        raise InvalidRequestError(f"input {HPS_COUNTS!r}: the count of table {table} is {counts[table]}, below 0")
    offsets = np.zeros(num_tables + 1, np.int64)
    counts.cumsum(out=offsets[1:])
    if offsets[-1] != keys.size:
        raise InvalidRequestError(
            f"input {HPS_KEYS!r}: {keys.size} keys, expected {offsets[-1]}, the sum of {HPS_COUNTS!r}"
        )
    return DecodedKeys(keys, offsets)


def tables_alone(tables: Sequence[TableSpec], *, source: str, settings: Mapping[str, str] | None = None) -> ModelSpec:
    """A model without a network, as HPS serves it: its answer is the vectors themselves."""
    numbered = list(enumerate(tables))
    return ModelSpec(
        inputs=(TensorSpec(HPS_KEYS, "int64", (-1,)), TensorSpec(HPS_COUNTS, "int32", (-1,))),
        outputs=(TensorSpec(PREDICTIONS, "float32", (-1,)),),
        tables=tuple(tables),
        lookups=tuple(LookupSpec(table.folder, f"{HPS_KEYS}/{i}", f"{PREDICTIONS}/{i}") for i, table in numbered),
        batched=False,
        layout="hps",
        settings=settings or {},
        source=source,
    )


def _check_names(inputs: NamedArrays, names: Sequence[str]) -> None:
    for name in names:
        if name not in inputs:
            raise InvalidRequestError(f"input {name!r} is missing; a request holds {', '.join(map(repr, names))}")
    for name in inputs:
        if name not in names:
            raise InvalidRequestError(f"input {name!r} is unknown; a request holds {', '.join(map(repr, names))}")


def _flat(inputs: NamedArrays, name: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The input as [n]."""
    array = inputs[name]
    if array.dtype != dtype:
        raise InvalidRequestError(f"input {name!r}: data type {array.dtype}, expected {dtype}")
    if array.ndim == 0 or array.ndim > 2 or (array.ndim == 2 and array.shape[0] != 1):
        raise InvalidRequestError(f"input {name!r}: shape {list(array.shape)}, expected [1, n]")
    return np.ascontiguousarray(array).reshape(-1)


def _num_samples(num_offsets: int, form: RequestFormat) -> int:
    num_tables, slots = len(form.slots), sum(form.slots)
    num_samples, rest = divmod(num_offsets - num_tables, slots)
    if num_samples < 0 or rest:
        raise InvalidRequestError(
            f"input {OFFSETS!r}: {num_offsets} offsets, expected samples * {slots} + {num_tables} "
            f"({num_tables} tables with {', '.join(map(str, form.slots))} slots)"
        )
    if form.max_samples is not None and num_samples > form.max_samples:
        raise InvalidRequestError(
            f"input {OFFSETS!r}: {num_samples} samples, more than the model's max_batch_size {form.max_samples}"
        )
    return num_samples


def _bags(offsets: npt.NDArray[np.int32], num_keys: int, slots: tuple[int, ...], num_samples: int) -> tuple[Bags, ...]:
    """Positions in CATCOLUMN, after a check that the offsets begin with 0, never decrease, and cover all keys."""
    begins = np.empty(num_samples * sum(slots), np.int64)
    ends = np.empty_like(begins)
    addresses = [address_of(array) for array in (offsets, begins, ends)]
    if not place_bags(addresses[0], as_array(slots), num_samples, num_keys, *addresses[1:]):
        _explain_offsets(offsets.astype(np.int64), num_keys, slots, num_samples)
    bags = []
    first = 0
    for table, width in enumerate(slots):
        last = first + num_samples * width
        # A block of offsets holds one more than the table has bags.
        bags.append(Bags(begins[first:last], ends[first:last], int(offsets[last + table])))
        first = last
    return tuple(bags)


@lru_cache(maxsize=32)
def as_array(slots: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """The slots of each table, int64 [tables]."""
    return np.array(slots, np.int64)


def _explain_offsets(
    offsets: npt.NDArray[np.int64], num_keys: int, slots: tuple[int, ...], num_samples: int
) -> NoReturn:
    begin = total = 0
    for table, width in enumerate(slots):
        block = offsets[begin : begin + num_samples * width + 1]
        if block[0] != 0:
            raise InvalidRequestError(f"input {OFFSETS!r}: the offsets of table {table} start with {block[0]}, not 0")
        falls = np.flatnonzero(block[1:] < block[:-1])
        if falls.size:
            at = int(falls[0]) + 1
            raise InvalidRequestError(
                f"input {OFFSETS!r}: offset {at} of table {table} is {block[at]}, less than {block[at - 1]}, the "
                "offset before it"
            )
        begin += block.size
        total += int(block[-1])
    raise InvalidRequestError(
        f"input {KEYS!r}: {num_keys} keys, expected {total}, the sum of each table's last offset in {OFFSETS!r}"
    )
