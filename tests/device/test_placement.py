"""Where tables lie on several GPUs: small ones copied, large ones sharded, the largest in host memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_session.device.placement import Place, bytes_on_each, places_of
from inference_session.errors import ConfigurationError
from inference_session.model_spec import TableSpec


def tables_of(*num_rows: int, keys: str = "row_number") -> list[TableSpec]:
    """Rows of 16 bytes."""
    return [TableSpec(f"t{i}", f"t{i}", n, 4, keys=keys) for i, n in enumerate(num_rows)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("budget_rows", "num_devices", "shard", "places"),
    [
        (1110, 2, "auto", ["device", "device", "device"]),
        (360, 8, "auto", ["device", "device", "shards"]),
        (360, 9, "auto", ["device", "device", "host"]),
        (1109, 2, "auto", ["device", "device", "shards"]),
        (610, 2, "auto", ["device", "device", "shards"]),
        (609, 2, "auto", ["device", "shards", "shards"]),
        (555, 2, "auto", ["shards", "shards", "shards"]),
        (554, 2, "auto", ["device", "device", "host"]),
        (360, 4, "auto", ["device", "device", "shards"]),
        (554, 2, "rows", ["shards", "shards", "shards"]),
        (1109, 2, "none", ["device", "device", "host"]),
        (1109, 1, "auto", ["device", "device", "host"]),
        (9, 2, "none", ["host", "host", "host"]),
        (0, 2, "auto", ["host", "host", "host"]),
    ],
)
def test_tables_of_10_100_and_1000_rows(budget_rows: int, num_devices: int, shard: str, places: list[str]) -> None:
    """With room for this many rows on each GPU."""
    found = places_of(tables_of(10, 100, 1000), 16 * budget_rows, num_devices, shard)  # type: ignore[arg-type]
    assert found == places


def test_rows_are_divided_among_few_devices() -> None:
    """As many as records have room for; the error says how many those are."""
    assert places_of(tables_of(10), 0, 8, "rows") == ["shards"]
    with pytest.raises(ConfigurationError, match="among 8 GPUs at most, not 9"):
        places_of(tables_of(10), 0, 9, "rows")


@given(
    num_rows=st.lists(st.integers(0, 10**6), max_size=6),
    budget=st.integers(0, 10**8),
    num_devices=st.integers(1, 8),
    keys=st.sampled_from(["row_number", "stored"]),
)
def test_what_is_placed_fits(num_rows: list[int], budget: int, num_devices: int, keys: str) -> None:
    """Unless the indexes alone are too large; and of the tables on the host, the smallest would not fit as shards."""
    tables = tables_of(*num_rows, keys=keys)
    places = places_of(tables, budget, num_devices)
    indexes = bytes_on_each(tables, ["host"] * len(tables), num_devices)
    assert bytes_on_each(tables, places, num_devices) <= max(budget, indexes)
    hosted = [t for t, place in enumerate(places) if place == "host"]
    if hosted:
        smallest = min(hosted, key=lambda t: num_rows[t])
        trial: list[Place] = ["host" if t in hosted and t != smallest else "shards" for t in range(len(tables))]
        assert bytes_on_each(tables, trial, num_devices) > budget
