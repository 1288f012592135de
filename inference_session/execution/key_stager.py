"""The keys of a batch on their way to a look-up: joined over its requests, and put where the device reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.device.base import Device
from inference_session.errors import InvalidRequestError
from inference_session.execution.lookups import ModelLookups
from inference_session.kernels.records import KEY_BYTES, address_of
from inference_session.requests.batch import JoinedBatch, RaggedBags, StagedValues


class KeyStager:
    """Stages the keys of batches of one shape, and the weights of keys."""

    def __init__(self, lookups: ModelLookups, num_keys: NDArray[np.int64], device: Device) -> None:
        """`num_keys`: int64 [look-ups], the keys of each; 0 where bags are ragged."""
        self.num_keys = num_keys
        self._lookups, self._device = lookups, device
        self._loose_names = tuple(lookups.key_names[i] for i in lookups.loose)
        loose_keys = num_keys[lookups.loose]
        self._loose_offsets = KEY_BYTES * (np.cumsum(loose_keys) - loose_keys)
        """Where the keys of each loose look-up begin, where none of them are ragged."""

    def stage(self, segments: NDArray[np.void], batch: JoinedBatch) -> NDArray[np.int64]:
        """Put the keys of a batch where the device reads them, and enter where that is into SEGMENT records [look-ups].

        Returns the number of keys of each look-up: int64 [look-ups].
        """
        self._stage_packed(segments, batch)
        self._stage_weights(segments, batch)
        return self._stage_loose(segments, batch) if self._lookups.loose else self.num_keys

    def _stage_loose(self, segments: NDArray[np.void], batch: JoinedBatch) -> NDArray[np.int64]:
        """Concatenate the keys that are not columns, and enter where they are; returns the keys per look-up."""
        names, num_keys = self._loose_names, self.num_keys
        all_parts = [batch.parts(name) for name in names]
        if any(isinstance(parts[0], RaggedBags) for parts in all_parts):
            return self._stage_ragged(segments, batch, num_keys.copy())
        if _may_stay(all_parts):
            self._enter_in_place(segments, [parts[0] for parts in all_parts])
            return num_keys
        keys = self._device.stage_keys([part for parts in all_parts for part in parts])  # type: ignore[misc]
        addresses = self._loose_offsets + _keep_alive(batch, names, keys)
        if len(names) == len(segments):
            segments["keys_address"] = addresses
        else:
            segments["keys_address"][self._lookups.loose] = addresses
        return num_keys

    def _enter_in_place(self, segments: NDArray[np.void], arrays: Sequence[Any]) -> None:
        """Enter the addresses of keys that a caller has on the device."""
        loose, key_bytes = self._lookups.loose, np.array([array.itemsize for array in arrays])
        segments["keys_address"][loose] = [address_of(array) for array in arrays]
        segments["key_bytes"][loose] = segments["key_stride"][loose] = key_bytes
        segments["row_stride"][loose] = segments["keys_per_row"][loose] * key_bytes

    def _stage_ragged(
        self, segments: NDArray[np.void], batch: JoinedBatch, num_keys: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """As `_stage_loose`, where bags of some look-ups have different lengths."""
        numbers, ragged = _Numbers(), []
        lists_at: dict[tuple[int, ...], int] = {}
        """Where each list of keys begins. Several look-ups may have bags in the same list."""
        for i in self._lookups.loose:
            parts: list[Any] = batch.parts(self._lookups.key_names[i])
            if not isinstance(parts[0], RaggedBags):
                segments["keys_address"][i] = numbers.add(parts)
                continue
            lists = [part.values for part in parts]
            case = tuple(map(id, lists))
            if case not in lists_at:
                lists_at[case] = numbers.add(lists)
            num_keys[i], begins, ends = _joined_bags(parts)
            segments["keys_address"][i] = lists_at[case]
            segments["begins_address"][i], segments["ends_address"][i] = numbers.add([begins]), numbers.add([ends])
            ragged.append(i)
        address = _keep_alive(batch, (), self._device.stage_keys(numbers.parts))
        segments["keys_address"][self._lookups.loose] += address
        for field in ("begins_address", "ends_address"):
            segments[field][ragged] += address
        return num_keys

    def _stage_packed(self, segments: NDArray[np.void], batch: JoinedBatch) -> None:
        """Enter the addresses of keys that are columns of a matrix."""
        for name, members in self._lookups.packed.items():
            address = self._stage_array(batch, (name,), batch.array(name), by_column=self._device.reads_by_column)
            if len(members.lookups) == len(segments):
                segments["keys_address"] += address
            else:
                segments["keys_address"][members.lookups] += address

    def _stage_weights(self, segments: NDArray[np.void], batch: JoinedBatch) -> None:
        """Enter the addresses of weights."""
        for i, keys_name, weights_name in self._lookups.weighted:
            keys, weights = batch.array(keys_name), batch.array(weights_name)
            if weights.shape != keys.shape:
                raise InvalidRequestError(
                    f"keys {keys_name!r} have shape {list(keys.shape)}, but their weights, {weights_name!r}, "
                    f"have {list(weights.shape)}"
                )
            segments["weights_address"][i] = self._stage_array(
                batch, (weights_name,), weights.astype(np.float32, copy=False)
            )

    def _stage_array(
        self, batch: JoinedBatch, names: tuple[str, ...], array: NDArray[Any], *, by_column: bool = False
    ) -> int:
        """The address where the device reads an array, which is kept alive as long as the batch."""
        staged = self._device.stage(array.T).T if by_column else self._device.stage(array)
        return _keep_alive(batch, names, staged)


class _Numbers:
    """Whole numbers that are staged together, as int64."""

    def __init__(self) -> None:
        self.parts: list[NDArray[Any]] = []
        self._size = 0

    def add(self, parts: Sequence[NDArray[Any]]) -> int:
        """Add numbers; returns their offset in bytes."""
        begin = self._size * KEY_BYTES
        self.parts.extend(parts)
        self._size += sum(part.size for part in parts)
        return begin


def _may_stay(all_parts: Sequence[Sequence[Any]]) -> bool:
    """Whether look-ups can read keys where they are: of one request, on the device, of a type that kernels know."""
    return all(
        len(parts) == 1 and not isinstance(parts[0], np.ndarray) and parts[0].dtype.name in {"int32", "int64"}
        for parts in all_parts
    )


def _keep_alive(batch: JoinedBatch, names: tuple[str, ...], staged: NDArray[Any]) -> int:
    """Keep an array alive as long as the batch; returns its address."""
    batch.staged.append(StagedValues(names, staged))
    return address_of(staged)


def _joined_bags(parts: list[RaggedBags]) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
    """How many keys the bags of several requests hold, and where they begin and end once their lists are joined."""
    if len(parts) == 1:
        return parts[0].num_keys, parts[0].begins, parts[0].ends
    shifts = np.cumsum([0, *(part.values.size for part in parts[:-1])])
    begins = np.concatenate([part.begins + shift for part, shift in zip(parts, shifts, strict=True)])
    ends = np.concatenate([part.ends + shift for part, shift in zip(parts, shifts, strict=True)])
    return sum(part.num_keys for part in parts), begins, ends
