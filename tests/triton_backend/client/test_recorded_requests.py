"""Requests recorded in a file, and how two answers differ."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference_session.errors import ModelFormatError
from tests.testing.command_line import run_main
from triton_backend.client.recorded_requests import largest_difference, read_requests


def tensor(**fields: Any) -> dict[str, Any]:
    """An input of two keys, with other fields."""
    return {"name": "ids", "shape": [2, 1], "datatype": "INT64", "data": [1, 2], **fields}


def write(folder: Path, *inputs: dict[str, Any]) -> Path:
    """A file with one request."""
    path = folder / "requests.jsonl"
    path.write_text(json.dumps({"inputs": inputs}) + "\n\n", encoding="utf-8")
    return path


def test_a_request_of_each_type(tmp_path: Path) -> None:
    """Values are as in JSON, nested or not."""
    path = write(
        tmp_path,
        tensor(data=[[1], [-2]]),
        tensor(name="big", datatype="UINT64", data=[2**64 - 1, 0]),
        tensor(name="dense", datatype="FP32", data=[1, 0.5]),
        tensor(name="flags", datatype="BOOL", data=[True, False]),
        tensor(name="names", datatype="BYTES", data=["a", "\u00fc"]),
        tensor(name="none", shape=[0, 1], data=[]),
    )

    (request,) = read_requests(path)

    found = {name: array.ravel().tolist() for name, array in request.inputs.items()}
    texts = [b"a", "\u00fc".encode()]
    assert found == {
        "ids": [1, -2],
        "big": [2**64 - 1, 0],
        "dense": [1, 0.5],
        "flags": [True, False],
        "names": texts,
        "none": [],
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"data": [1.5, 2]},
        {"data": [True, False]},
        {"data": ["1", "2"]},
        {"data": [2**70, 0]},
        {"datatype": "INT8", "data": [300, 0]},
        {"datatype": "UINT64", "data": [-1, 0]},
        {"data": [[1], [2, 3]]},
        {"datatype": "FP32", "data": ["1", "2"]},
        {"name": 5},
        {"datatype": "INT99"},
    ],
)
def test_what_a_server_would_refuse_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    """It is not changed into a request that was not recorded."""
    with pytest.raises(ModelFormatError, match="line 1: not a request in JSON"):
        read_requests(write(tmp_path, tensor(**fields)))


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    """In words, not as Python's error."""
    (tmp_path / "sample.jsonl").write_text("import numpy\n", encoding="utf-8")
    with pytest.raises(ModelFormatError, match=r"sample.jsonl, line 1: not JSON: Expecting value"):
        read_requests(tmp_path / "sample.jsonl")


def test_an_input_that_comes_twice_is_refused(tmp_path: Path) -> None:
    """Either of its values could be meant."""
    with pytest.raises(ModelFormatError, match="an input comes twice"):
        read_requests(write(tmp_path, tensor(), tensor(data=[3, 4])))


def test_a_test_without_requests_fails(tmp_path: Path) -> None:
    """Nobody would know that nothing was tested."""
    path = tmp_path / "requests.jsonl"
    path.write_text("\n", encoding="utf-8")

    ended = run_main("smoke-test", "ctr", "--version", 2, "--requests", path)

    assert (ended.code, ended.err) == (1, f"hotrow: {path}: holds no request\n")


def test_a_tolerance_needs_answers_to_compare(tmp_path: Path) -> None:
    """Nothing would be compared."""
    path = write(tmp_path, tensor())

    ended = run_main("smoke-test", "ctr", "--version", 2, "--requests", path, "--tolerance", 0.1)

    assert ended.code == 1
    assert "--tolerance needs --compare-with" in ended.err


def test_differences_of_numbers() -> None:
    """Whole numbers count even where float64 cannot tell them apart, and NaN in any output is not hidden by others."""
    ids = np.array([2**60, 5])

    assert largest_difference({"id": ids}, {"id": ids.copy()}) == 0
    assert largest_difference({"id": ids}, {"id": ids + 1}) == 1
    assert largest_difference({"name": np.array(["a"])}, {"name": np.array(["b"])}) == math.inf
    for names in (("p", "q"), ("q", "p")):
        answers = [
            {name: np.array([value]) for name, value in zip(names, (0.0, other), strict=True)}
            for other in (0.1, np.nan)
        ]
        assert math.isnan(largest_difference(*answers))
