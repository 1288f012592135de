"""The pages of reference that are written by hand, compared with the code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference_session.config import SessionConfig
from inference_session.embedding_cache.stats import CacheStats, TableStats
from inference_session.model_spec import NETWORK_FILES, ModelSpec
from inference_session.parameter_server.server import ServerStats
from inference_session.parameter_server.tier import TierStats
from inference_session.stats import LookupStats, SessionCounts
from inference_session.update_stream.stream_stats import StreamSnapshot
from inference_session.urls.store_url import OPTIONS
from tests.testing.command_line import hotrow
from tests.testing.manual import ROOT
from tests.testing.manual_models import write_versions

REFERENCE = ROOT / "docs/reference"
STATISTICS = (SessionCounts, LookupStats, CacheStats, TableStats, TierStats, ServerStats, StreamSnapshot)
CHOSEN_BY_HOTROW = {"cache_bytes"}
"""Settings whose default is computed from another setting."""


def text_of(page: str) -> str:
    return (REFERENCE / page).read_text(encoding="utf-8")


def in_first_column(text: str, header: str) -> set[str]:
    """The names between backticks in the first column of the table whose header begins with these cells."""
    rows = text.partition(f"\n| {header}")[2].partition("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])}


@pytest.mark.parametrize("setting", fields(SessionConfig), ids=lambda setting: str(setting.name))
def test_defaults_of_settings(setting: Field[Any]) -> None:
    """Each section of settings.md states the default of its setting."""
    section = text_of("settings.md").partition(f"### `{setting.name}`\n")[2].partition("\n#")[0]
    if setting.name in CHOSEN_BY_HOTROW:
        assert "Default:\nwhat" in section or "Default: what" in section
    elif isinstance(setting.default, str) and f"`{setting.default}` (default)" in section:
        return
    else:
        stated = re.search(r"Default:\s+`?([^`\s]+?)`?[.,]?\s", section + "\n")
        assert stated, section
        assert stated[1] in written(setting.default)


def written(default: object) -> set[str]:
    """The ways in which the page may write a default."""
    if default is None or default == "":
        return {"none", "empty"}
    if isinstance(default, bool):
        return {str(default).lower()}
    if isinstance(default, (int, float)):
        return {f"{default:g}", f"{default:,}", str(default)}
    return {str(default)}


@pytest.mark.parametrize("kind", STATISTICS, ids=lambda kind: str(kind.__name__))
def test_statistics(kind: type) -> None:
    """statistics.md names each counter."""
    assert is_dataclass(kind)
    named = set(re.findall(r"`([a-z_]+)`", text_of("statistics.md")))
    assert {each.name for each in fields(kind)} <= named


def test_fields_of_session_json() -> None:
    """file-formats.md has a row for each field, and none for a field that is gone."""
    documented = in_first_column(text_of("file-formats.md"), "field | meaning")
    assert documented == {"format", *(each.name for each in fields(ModelSpec))}


def test_options_of_store_urls() -> None:
    """stores.md has a row for each option, and none for an option that is gone; `db` is with the URLs."""
    documented = in_first_column(text_of("stores.md"), "option | of")
    assert documented == {option for options in OPTIONS.values() for option in options} - {"db"}


def test_schemes_of_store_urls() -> None:
    """stores.md shows a URL of each scheme."""
    shown = in_first_column(text_of("stores.md"), "URL | store")
    assert {url.partition("://")[0] for url in shown} == set(OPTIONS)


def test_report_of_size(tmp_path: Path) -> None:
    """size-report.md names each key of the JSON that `hotrow size` prints."""
    write_versions(tmp_path / "model_repository")
    np.save(tmp_path / "users.npy", np.arange(50) % 7)
    arguments = ["--cache-bytes", "100KiB", "--devices", "2", "--shard", "auto", "--json"]
    trace = ["--trace", f"user={tmp_path / 'users.npy'}"]
    report = json.loads(hotrow("size", tmp_path / "model_repository/ctr", *trace, *arguments))
    named = set(re.findall(r"`(?:trace\.)?([a-z_]+)`", text_of("size-report.md").partition("## JSON")[2]))
    by_table = {"user", "item", "trace"}
    printed = set(keys_within(report)) - by_table
    assert printed <= named
    assert {"placement", "hit_rate", "each_bytes", "sample_rate"} <= printed


def keys_within(document: object) -> Iterator[str]:
    """The names of all fields, at any depth."""
    if isinstance(document, dict):
        yield from document
    values = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    for value in values:
        yield from keys_within(value)


def test_networks_of_a_version() -> None:
    """file-formats.md lists each network that a version directory may hold."""
    layout = text_of("file-formats.md").partition("```text")[2].partition("```")[0]
    assert set(NETWORK_FILES) == set(re.findall(r"\w+\.onnx", layout))
