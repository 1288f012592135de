"""A version that is chosen at run time replaces a policy, which comes back when the choice is given up."""

from __future__ import annotations

from typing import Any

import pytest

from triton_backend.repository.chosen_versions import is_chosen, with_versions, without_choice

POLICIES = [
    ({}, {"latest": {"num_versions": 1}}),
    ({"version_policy": {"latest": {"num_versions": 1}}}, {"latest": {"num_versions": 1}}),
    ({"version_policy": {"latest": {"num_versions": 4}}}, {"latest": {"num_versions": 4}}),
    ({"version_policy": {"specific": {"versions": ["2"]}}}, {"specific": {"versions": [2]}}),
    ({"version_policy": {"specific": {"versions": ["20260102", "7"]}}}, {"specific": {"versions": [20260102, 7]}}),
    ({"version_policy": {"specific": {}}}, {"specific": {"versions": []}}),
    ({"version_policy": {"all": {}}}, {"all": {}}),
]


@pytest.mark.parametrize(("config", "policy"), POLICIES)
def test_a_choice_is_given_up_for_the_policy_that_it_replaced(config: dict[str, Any], policy: dict[str, Any]) -> None:
    """However often versions are chosen before; nothing else of the configuration changes."""
    config = {"name": "ctr", **config}
    chosen = with_versions(with_versions(config, [1]), [9, 3])

    assert not is_chosen(config)
    assert is_chosen(chosen)
    assert [version for version in chosen["version_policy"]["specific"]["versions"] if version > 0] == [9, 3]
    assert without_choice(chosen) == {"name": "ctr", "version_policy": policy}


def test_without_a_choice_the_policy_stays() -> None:
    """The policy in config.pbtxt is passed on unchanged."""
    config = {"version_policy": {"specific": {"versions": ["2", "5"]}}}

    assert without_choice(config) == config


def test_a_choice_of_an_earlier_release_gives_way_to_the_newest() -> None:
    """It has left no policy behind."""
    config = {"version_policy": {"specific": {"versions": ["2", "0"]}}}

    assert is_chosen(config)
    assert without_choice(config) == {"version_policy": {"latest": {"num_versions": 1}}}
