"""Which metrics of versions that are gone are deleted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from triton_backend.backend import metric_records
from triton_backend.backend.heartbeat import FOLDER_VARIABLE
from triton_backend.backend.metric_records import NUM_KEPT, MetricKey, claim, delete_old, locked, write


def key(version: str, name: str = "hotrow_requests_total") -> MetricKey:
    """A metric of a version."""
    return MetricKey(name, "Requests", "counter", (("model", "ctr"), ("version", version)))


def write_as_another(records: Path, version: str, *keys: MetricKey, model: str = "ctr") -> None:
    """The files that an ended process leaves."""
    code = (
        "import json, sys; from pathlib import Path; from triton_backend.backend import metric_records as m\n"
        "keys = [m.MetricKey(*k[:3], tuple(map(tuple, k[3]))) for k in json.loads(sys.argv[4])]\n"
        "m.write(Path(sys.argv[1]), sys.argv[2], sys.argv[3], keys)"
    )
    arguments = [str(records), model, version, json.dumps(keys or (key(version),))]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Path]:
    """A folder for records, locked."""
    with locked(tmp_path / "metrics"):
        yield tmp_path / "metrics"


def deleted(records: Path, model: str = "ctr") -> list[MetricKey]:
    """What would be deleted now."""
    found: list[MetricKey] = []
    delete_old(records, model, found.append)
    return found


def test_the_last_versions_that_are_gone_are_kept(records: Path) -> None:
    """The others' metrics are deleted once; those of another model stay."""
    versions = [str(number) for number in range(1, NUM_KEPT + 3)]
    write_as_another(records, "1", model="other")
    for version in versions:
        write_as_another(records, version)
    write(records, "ctr", "99", [key("99")])

    assert sorted(deleted(records)) == [key(version) for version in versions[:2]]
    assert deleted(records) == []
    assert deleted(records, "other") == []


def test_a_version_that_is_served_again_is_kept(records: Path) -> None:
    """Its metrics are in use, whatever an earlier process of it left; later both are deleted together."""
    write_as_another(records, "1", key("1", "hotrow_tier_up"))
    for version in ("2", "3", "4", "5"):
        write_as_another(records, version)

    write(records, "ctr", "1", [key("1")])

    assert deleted(records) == [key("2")]
    end_of_this_process(records)
    for version in ("7", "8", "9"):
        write_as_another(records, version)
    assert set(deleted(records)) == {key("1"), key("1", "hotrow_tier_up"), key("3"), key("4"), key("5")}


def test_a_version_is_protected_before_its_metrics_are_known(records: Path) -> None:
    """What an earlier process of it has left is not deleted, also where the record cannot be written any more."""
    for version in ("1", "2", "3", "4", "5"):
        write_as_another(records, version)

    claim(records, "ctr", "1")

    assert deleted(records) == [key("2")]
    write(records, "ctr", "1", [key("1", "hotrow_tier_up")])
    assert {path.name for path in records.iterdir()} >= {f"{os.getpid()}.json"}
    end_of_this_process(records)
    for version in ("7", "8", "9"):
        write_as_another(records, version)
    assert set(deleted(records)) == {key("1"), key("1", "hotrow_tier_up"), key("3"), key("4"), key("5")}


def end_of_this_process(records: Path) -> None:
    """Let the record of this process be that of one before it with the same number."""
    own = records / f"{os.getpid()}.json"
    record = json.loads(own.read_text(encoding="utf-8"))
    own.rename(records / "before.json").write_text(json.dumps({**record, "started": "1"}), encoding="utf-8")
    os.utime(records / "before.json", ns=(0, 0))


def test_a_record_that_was_half_written_is_passed_over(records: Path) -> None:
    """A process was killed as it wrote."""
    (records / "1.json").write_text('{"model": "ctr", "vers', encoding="utf-8")

    assert deleted(records) == []


def test_nothing_is_recorded_under_a_server_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no folder for it."""
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)

    assert metric_records.folder() is None
