"""HugeCTR's requests that compiled code stages get the same answers as on the general path."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference_session import InferenceSession, Request
from inference_session.errors import HotrowError, InvalidRequestError, ModelFormatError
from inference_session.version_directory import manifest
from tests.testing import bag_model

Inputs = dict[str, NDArray[Any]]


@pytest.fixture(scope="module", params=["int64", "uint32"])
def key_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory, key_type: str) -> Iterator[InferenceSession]:
    version = tmp_path_factory.mktemp(key_type) / "bags" / "1"
    bag_model.write(version, key_type)
    with InferenceSession.open(version) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain(session: InferenceSession) -> Iterator[InferenceSession]:
    """The same model in a session that stages nothing: the oracle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inference_session.execution.staging.create.stage_on_host", lambda *_: None)
        opened = InferenceSession.open(session.directory)
    with opened:
        yield opened


def arrays_of(requests: list[Inputs]) -> list[NDArray[Any]]:
    return [array for request in requests for array in request.values()]


def assert_same(found: Any, expected: Any) -> None:
    """Equal to the last bit."""
    assert isinstance(expected, dict), expected
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@settings(max_examples=60)
@given(
    sizes=st.lists(st.tuples(st.integers(0, bag_model.MAX_SAMPLES), st.integers(0, 5)), min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
    is_flat=st.booleans(),
)
def test_staged_requests_are_answered_as_any_others(  # noqa: PLR0917
    session: InferenceSession, plain: InferenceSession, key_type: str, sizes: Any, seed: int, is_flat: bool
) -> None:
    """Joined or alone, with empty bags and long ones, as [n] and as [1, n]; what is counted is the same too."""
    rng = np.random.default_rng(seed)
    requests = [bag_model.inputs(n, rng, key_type, longest) for n, longest in sizes]
    if is_flat:
        requests = [{name: array[0] for name, array in request.items()} for request in requests]
    before = session.stats()["tables"], plain.stats()["tables"]

    found = session.fast_path.run(arrays_of(requests), len(requests))

    expected = plain.run_many([Request(request) for request in requests])
    if not any(n for n, _ in sizes):
        assert found is None
        return
    assert found is not None
    for answer, wanted in zip(found.split(), expected, strict=True):
        assert_same(answer, wanted)
    counted = [
        {(t, k): each.stats()["tables"][t][k] - old[t][k] for t in old for k in ("lookup_keys", "default_vectors")}
        for each, old in zip((session, plain), before, strict=True)
    ]
    assert counted[0] == counted[1]


def with_array(name: str, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Callable[[Inputs], Inputs]:
    return lambda inputs: {**inputs, name: change(inputs[name])}


def changed(at: int, value: int) -> Callable[[NDArray[Any]], NDArray[Any]]:
    def change(array: NDArray[Any]) -> NDArray[Any]:
        copy = array.copy()
        copy[0, at] = value
        return copy

    return change


_MALFORMED = {
    "offsets begin above 0": with_array("ROWINDEX", changed(0, 1)),
    "offsets fall": with_array("ROWINDEX", changed(2, -5)),
    "offsets beyond the keys": with_array("ROWINDEX", changed(-1, 2**31 - 1)),
    "an offset less": with_array("ROWINDEX", lambda array: array[:, :-1].copy()),
    "no offsets": with_array("ROWINDEX", lambda array: array[:, :0].copy()),
    "a key more": with_array("CATCOLUMN", lambda array: np.append(array, array[:, :1], axis=1)),
    "no keys": with_array("CATCOLUMN", lambda array: array[:, :0].copy()),
    "a feature less": with_array("DES", lambda array: array[:, 1:].copy()),
    "two rows": with_array("DES", lambda array: array.reshape(2, -1)),
    "no dimension": with_array("DES", lambda _: np.array(1, np.float32)),
    "three dimensions": with_array("DES", lambda array: array[None]),
    "doubles": with_array("DES", lambda array: array.astype(np.float64)),
    "short keys": with_array("CATCOLUMN", lambda array: array.astype(np.int16)),
    "long offsets": with_array("ROWINDEX", lambda array: array.astype(np.int64)),
    "swapped bytes": with_array("ROWINDEX", lambda array: array.astype(">i4")),
    "strides": with_array("CATCOLUMN", lambda array: np.repeat(array, 2, axis=1)[:, ::2]),
    "a list": with_array("DES", lambda array: array.tolist()),
}


@pytest.mark.parametrize("case", _MALFORMED)
def test_malformed_requests_are_answered_as_before(
    session: InferenceSession, plain: InferenceSession, key_type: str, case: str
) -> None:
    """They get the messages of the general path, alone and next to a good one, which gets its answer."""
    rng = np.random.default_rng(0)
    good = bag_model.inputs(3, rng, key_type)
    bad = _MALFORMED[case](bag_model.inputs(4, rng, key_type, longest=4))
    assert session.fast_path.run(arrays_of([good, bad]), 2) is None
    outcomes = [outcome(each, bad) for each in (session, plain)]
    if isinstance(outcomes[1], HotrowError):
        assert isinstance(outcomes[0], type(outcomes[1]))
        assert str(outcomes[0]) == str(outcomes[1])
    else:
        assert_same(*outcomes)
    assert_same(session.run(good), plain.run(good))


def outcome(session: InferenceSession, inputs: Inputs) -> Any:
    try:
        return session.run(inputs)
    except HotrowError as error:
        return error


def test_more_samples_than_a_request_may_have(session: InferenceSession, key_type: str) -> None:
    large = bag_model.inputs(bag_model.MAX_SAMPLES + 1, np.random.default_rng(0), key_type)
    with pytest.raises(InvalidRequestError, match="max_batch_size"):
        session.run(large)


def test_many_requests_at_once(session: InferenceSession, plain: InferenceSession, key_type: str) -> None:
    """More than there is room for at first, so that the memory of keys and bags grows."""
    rng = np.random.default_rng(0)
    requests = [bag_model.inputs(20, rng, key_type, longest=30) for _ in range(40)]
    found = session.fast_path.run(arrays_of(requests), len(requests))
    assert found is not None
    for answer, expected in zip(found.split(), plain.run_many([Request(request) for request in requests]), strict=True):
        assert_same(answer, expected)


def _with_small_offsets(document: dict[str, Any]) -> None:
    document["inputs"][2]["dtype"] = "int8"


def _with_other_order(document: dict[str, Any]) -> None:
    document["inputs"].reverse()


def _with(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["layout_options"].update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with_small_offsets, "has inputs"),
        (_with_other_order, "has inputs"),
        (_with("key_type", "uint32"), "has inputs"),
        (_with("key_type", "int16"), "'key_type': expected one of"),
        (_with("slots", [5, -3, 2]), "must be whole numbers"),
        (_with("slots", [0, 0, 0]), "must be whole numbers"),
        (_with("slots", [1.5, 1, 1]), r"'slots\[0\]': expected a whole number"),
        (_with("dense_dim", -1), "must be whole numbers"),
        (_with("max_samples", 0), "must be whole numbers"),
    ],
)
def test_descriptions_of_no_request_are_refused(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    """Compiled code would read and write beyond the arrays of requests, and beyond the memory of bags."""
    bag_model.write(tmp_path, "int64")
    path = tmp_path / "session.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")
    (tmp_path / "MANIFEST.json").unlink()
    manifest.write_manifest(tmp_path)

    with pytest.raises(ModelFormatError, match=message):
        InferenceSession.open(tmp_path)
