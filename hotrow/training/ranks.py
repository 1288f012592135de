"""Agreement among the processes of a training job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

from inference_session.errors import HotrowError, UnavailableError

Result = TypeVar("Result")

_GROUPS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""By the default group: a group of all ranks that takes objects in host memory, whatever the backend of the former.

Neither is held longer than `destroy_process_group` lets them last: the threads of a group that is still there when the
interpreter ends may abort the process.
"""


class Place(NamedTuple):
    """A process among those that train one model."""

    rank: int
    size: int


def place_in_group() -> Place:
    """The place in the default process group; alone where there is none."""
    has_group = dist.is_available() and dist.is_initialized()
    return Place(dist.get_rank(), dist.get_world_size()) if has_group else Place(0, 1)


class Ranks:
    """The processes that train one model: one alone, or all of the default process group."""

    def __init__(self) -> None:
        self.rank, self.size = place_in_group()
        if self.size > 1 and dist.group.WORLD not in _GROUPS:
            _GROUPS[dist.group.WORLD] = dist.new_group(backend="gloo")

    @property
    def group(self) -> Any:
        """The group of all ranks, for objects in host memory; None if there is only one rank."""
        return _GROUPS[dist.group.WORLD] if self.size > 1 and dist.is_initialized() else None

    @property
    def is_first(self) -> bool:
        """Whether this process does the work that only one process may do."""
        return self.rank == 0

    def gather(self, value: Result) -> list[Result]:
        """The values of all ranks, in their order. All ranks call it."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, work: Callable[[], Result]) -> Result:
        """Run `work` on every rank; returns the result of this rank, and raises on all ranks if one failed.

        Raises:
            what `work` raised here; UnavailableError where it failed on another rank alone.
        """
        result, failure = _attempt(work)
        messages = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, message in enumerate(messages):
            if message is not None:
                raise UnavailableError(f"rank {rank} failed: {message}")
        return cast("Result", result)

    def first(self, work: Callable[[], Result]) -> Result:
        """Run `work` on rank 0; returns its result on all ranks, and raises on all ranks if it failed.

        Raises:
            what `work` raised, on all ranks, where it is an error of hotrow's; UnavailableError elsewhere.
        """
        result, failure = _attempt(work) if self.is_first else (None, None)
        known = isinstance(failure, HotrowError)
        found = self.gather((None if failure is None else (type(failure) if known else None, str(failure)), result))
        if failure is not None:
            raise failure
        told, value = found[0]
        if told is not None:
            kind, message = told
            raise (kind or UnavailableError)(message if kind else f"rank 0 failed: {message}")
        return cast("Result", value)


def _attempt(work: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """What `work` returned, or what it raised: the other ranks hear of a failure before this one raises it."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001  see above
        return None, error
