"""Versions chosen at run time, by the version policy of the configuration that a load carries.

Version 0 says that a policy is ours and not config.pbtxt's: no model has it, and Triton skips it. After it comes the
policy that the choice replaced, encoded as numbers that no version has either. A client that cancels the choice reads
it from there, as config.pbtxt may be on another machine.

    specific { versions: [7, 0, -5] }            version 7 is chosen; before, latest { num_versions: 2 }
    specific { versions: [7, 0, -2, -6, -8] }                       before, specific { versions: [3, 5] }
    specific { versions: [7, 0, -1] }                               before, all { }

No number occurs twice: Triton believes that a version which it has just skipped exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_POLICY_FOLLOWS = 0
"""Is no version of a model."""
_ALL, _SPECIFIC = -1, -2
_OFFSET = 3
"""Offset between a number and its code, which is negative."""
_NEWEST = {"latest": {"num_versions": 1}}


def with_versions(config: Mapping[str, Any], versions: Sequence[int]) -> dict[str, Any]:
    """A model's configuration that chooses these versions, and remembers the policy that they replace."""
    policy = without_choice(config)["version_policy"]
    return {**config, "version_policy": {"specific": {"versions": [*versions, _POLICY_FOLLOWS, *_encoded(policy)]}}}


def without_choice(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model's configuration that chooses no version: with its original policy."""
    policy = config.get("version_policy") or _NEWEST
    return {**config, "version_policy": _decoded(_named(config)) if is_chosen(config) else policy}


def is_chosen(config: Mapping[str, Any]) -> bool:
    """Whether a model's configuration, as Triton's JSON, is one of `with_versions`."""
    return _POLICY_FOLLOWS in _named(config)


def _named(config: Mapping[str, Any]) -> list[int]:
    """The versions that a configuration names."""
    policy = config.get("version_policy", {})
    return list(map(int, policy.get("specific", {}).get("versions", [])))


def _encoded(policy: Mapping[str, Any]) -> list[int]:
    if "all" in policy:
        return [_ALL]
    if "specific" in policy:
        versions = dict.fromkeys(map(int, policy["specific"].get("versions", [])))
        return [_SPECIFIC, *(-version - _OFFSET for version in versions)]
    return [-int(policy.get("latest", {}).get("num_versions", 1)) - _OFFSET]


def _decoded(versions: Sequence[int]) -> dict[str, Any]:
    """The policy behind the 0; Triton's default if an earlier hotrow has recorded none."""
    left = versions[versions.index(_POLICY_FOLLOWS) + 1 :]
    if not left:
        return dict(_NEWEST)
    if left[0] == _ALL:
        return {"all": {}}
    if left[0] == _SPECIFIC:
        return {"specific": {"versions": [-number - _OFFSET for number in left[1:]]}}
    return {"latest": {"num_versions": -left[0] - _OFFSET}}
