"""How many instances of a model Triton runs: each is a process."""

from __future__ import annotations

import os

from triton_backend.repository import text_format

PROCESSORS_PER_INSTANCE = 4
"""Triton's own threads, and the clients' where they are on the same machine, need most of them."""
_MAX_INSTANCES = 8


def suitable_instances(*, has_gpu: bool) -> int:
    """A number of instances that suits this machine: one for every four processors, at most 8; one where there is a
    GPU, whose cache only one process may hold.
    """
    if has_gpu:
        return 1
    return min(max(len(os.sched_getaffinity(0)) // PROCESSORS_PER_INSTANCE, 1), _MAX_INSTANCES)


def instances_in(config: text_format.Message) -> int:
    """The instances that the `instance_group`s of a config.pbtxt ask for; 1 where there is none.

    Raises:
        ValueError: a count is no number.
    """
    groups = [group for group in config.get("instance_group", []) if isinstance(group, dict)]
    return sum(_count(group) * max(len(group.get("gpus", [])), 1) for group in groups) or 1


def _count(group: text_format.Message) -> int:
    return text_format.integer("count", (group.get("count") or ["1"])[-1])
