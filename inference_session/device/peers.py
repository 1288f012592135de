"""GPUs of one host whose kernels read each other's memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import cupy
from cupy.cuda import runtime
from cupy_backends.cuda.api.runtime import CUDARuntimeError

from inference_session.errors import ConfigurationError

_ALREADY_ENABLED = 704
"""cudaErrorPeerAccessAlreadyEnabled."""


def check_visible(device_ids: Sequence[int], setting: str) -> None:
    """ConfigurationError unless this process sees these GPUs; it takes no memory on them, unlike a process that uses
    them.
    """
    count = runtime.getDeviceCount()
    for device_id in device_ids:
        if device_id >= count:
            raise ConfigurationError(
                f"{setting} names cuda:{device_id}, but this process sees {count} GPUs, numbered from cuda:0"
            )


def check_equal(device_ids: Sequence[int], setting: str = "device") -> None:
    """ConfigurationError unless all of the GPUs are of one kind and have the same amount of memory."""
    properties = [runtime.getDeviceProperties(device_id) for device_id in device_ids]
    kinds = [(each["name"].decode(), each["totalGlobalMem"]) for each in properties]
    if len(set(kinds)) > 1:
        found = ", ".join(
            f"cuda:{i} is {name} with {size} bytes" for i, (name, size) in zip(device_ids, kinds, strict=True)
        )
        raise ConfigurationError(f"{setting} names GPUs that are not alike: {found}; name GPUs of one kind")


def unreachable(device_ids: Sequence[int]) -> str | None:
    """Why these GPUs cannot all read each other's memory; None: they can."""
    for reader, owner in itertools.permutations(set(device_ids), 2):
        if not runtime.deviceCanAccessPeer(reader, owner):
            return f"cuda:{reader} cannot read the memory of cuda:{owner} (neither NVLink nor PCIe lets it)"
    return None


def connect(device_ids: Sequence[int]) -> None:
    """Let kernels on each of these GPUs read the memory of the others, from now until the process ends."""
    for reader, owner in itertools.permutations(set(device_ids), 2):
        with cupy.cuda.Device(reader):
            try:
                runtime.deviceEnablePeerAccess(owner)
            except CUDARuntimeError as error:
                if error.status != _ALREADY_ENABLED:
                    raise
