"""Versions chosen at run time, by the version policy of the configuration that a load brings with it.

A policy of ours is told from one of config.pbtxt by version 0, which no model has, and which Triton passes over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MARK = 0


def with_versions(config: Mapping[str, Any], versions: Sequence[int]) -> dict[str, Any]:
    """A model's configuration that chooses these versions."""
    return {**config, "version_policy": {"specific": {"versions": [*versions, _MARK]}}}


def without_choice(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model's configuration that chooses no version: the policy of its own, else the newest."""
    newest = {"latest": {"num_versions": 1}}
    return {**config, "version_policy": newest if is_chosen(config) else config.get("version_policy", {})}


def is_chosen(config: Mapping[str, Any]) -> bool:
    """Whether a model's configuration, as Triton's JSON, is one of `with_versions`."""
    policy = config.get("version_policy", {})
    return _MARK in map(int, policy.get("specific", {}).get("versions", []))
