"""Settings: where they come from, what they may be, and that each is documented."""

from __future__ import annotations

from dataclasses import fields

import pytest

from inference_session.config import SessionConfig
from inference_session.errors import ConfigurationError
from tests.testing import ROOT


def test_the_first_source_wins() -> None:
    """config.pbtxt comes before session.json, which comes before the defaults."""
    config = SessionConfig.resolve({"dense_threads": "3"}, {"dense_threads": 2, "unknown_keys": "reject"})

    assert (config.dense_threads, config.unknown_keys, config.verify) == (3, "reject", "sizes")


def test_the_gpus_of_other_processes_include_ones_own() -> None:
    """Otherwise rows would lie where no process answers from."""
    config = SessionConfig.resolve({"device": "cuda:1", "shard": "rows", "shard_devices": "cuda:0,1"})
    assert config.shard_device_ids == [0, 1]
    config.check_devices(1)
    for device in ("cuda:2", "auto", "cpu", "cuda:0,1"):
        with pytest.raises(ConfigurationError, match=f"'cuda:0,1' lacks the GPU of this process, device '{device}'"):
            SessionConfig.resolve({"device": device, "shard_devices": "cuda:0,1"}).check_devices(1)
    assert SessionConfig.resolve({"device": "cpu", "shard_devices": "cuda:0"}).shard_device_ids == []
    for value in ("cuda:all", "0,1", "cuda:", "cuda:0,0"):
        with pytest.raises(ConfigurationError, match="shard_devices"):
            SessionConfig.resolve({"shard_devices": value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "gpu"),
        ("device", "cuda:"),
        ("device", "cuda:-1"),
        ("device", "cuda:0,"),
        ("device", "cuda:0,0"),
        ("device", "cuda:٣"),
        ("device", "cuda:0, 1"),
        ("device", "cuda:all,0"),
        ("shard", "columns"),
        ("verify", "maybe"),
        ("unknown_keys", ""),
        ("dense_threads", "-1"),
        ("dense_threads", "two"),
        ("dense_threads", 1.5),
        ("dense_threads", 100_000),
        ("lookup_threads", "99999999999999999999"),
        ("max_keys_per_request", 0),
        ("refresh_interval_s", "inf"),
        ("watch_interval_s", 1e300),
        ("catch_up_s", "nan"),
        ("store_timeout_ms", 10**30),
        ("cache_bytes", 2**63),
        ("cache_bytes", "1_000"),
        ("cache_bytes", "٣"),
        ("cache_bytes", "1" * 5000),
        ("cache_fraction", "0_1"),
        ("state_dir", None),
        ("state_dir", ["/a"]),
        ("canary_requests", "a\0b"),
        ("record_keys", "/\ud800"),
        ("update_filter", None),
    ],
)
def test_a_bad_value_is_explained(name: str, value: object) -> None:
    """The error names the setting, the value and what is allowed."""
    with pytest.raises(ConfigurationError, match=f"'{name}' cannot be .*; allowed: "):
        SessionConfig.resolve({name: value})


@pytest.mark.parametrize("url", ["rocksdb:///a\0b", "redis://u:secret\ud800@h"])
def test_a_url_is_text(url: str) -> None:
    """A path with a zero character, or half a character, would fail deep inside a store."""
    with pytest.raises(ConfigurationError, match="'persistent_store': the URL must be text") as caught:
        SessionConfig.resolve({"persistent_store": url})
    assert "secret" not in str(caught.value)


def test_an_unknown_setting_lists_the_known_ones() -> None:
    """A typing error is not ignored."""
    with pytest.raises(ConfigurationError, match=r"unknown setting 'devise'; did you mean 'device'\?"):
        SessionConfig.resolve({"devise": "cpu"})


@pytest.mark.parametrize(
    ("device", "several"), [("cpu", False), ("auto", False), ("cuda:3", False), ("cuda:3,1", True), ("cuda:all", True)]
)
def test_several_gpus_can_be_named(device: str, several: bool) -> None:
    """By their numbers, each once, or all of them."""
    assert SessionConfig.resolve({"device": device}).names_several_gpus == several


def test_threads_are_resolved_for_the_machine() -> None:
    """Zero means that hotrow chooses the number, at least one thread."""
    assert SessionConfig().num_dense_threads >= 1
    assert SessionConfig(dense_threads=5).num_lookup_threads == 5


def test_every_setting_is_documented() -> None:
    """docs/reference/settings.md has a heading for each field, and none for a field that is gone."""
    text = (ROOT / "docs" / "reference" / "settings.md").read_text()
    headings = {line.strip("# `") for line in text.splitlines() if line.startswith("### `")}

    assert headings == {f.name for f in fields(SessionConfig)}
