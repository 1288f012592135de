"""InferenceSession against plain NumPy, and against callers' mistakes."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_session import InferenceSession, Request
from inference_session.errors import (
    ConfigurationError,
    HotrowError,
    InvalidRequestError,
    ModelFormatError,
    SessionClosedError,
    TableNotFoundError,
    UnknownKeyError,
)
from inference_session.model_spec import ModelSpec, TensorSpec
from inference_session.version_directory.manifest import describe_version, write_manifest
from inference_session.version_directory.session_file import read_spec
from tests.testing import onnx_models, small_model
from tests.testing.triton_models import write_ctr, write_types


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, small_model.Arrays]:
    """The small model's version directory and its tables."""
    directory = tmp_path_factory.mktemp("repository") / "small" / "1"
    return directory, small_model.write(directory)


@pytest.fixture(scope="module")
def tables(version: tuple[Path, small_model.Arrays]) -> small_model.Arrays:
    return version[1]


@pytest.fixture(scope="module")
def session(version: tuple[Path, small_model.Arrays]) -> Iterator[InferenceSession]:
    with InferenceSession.open(version[0]) as opened:
        yield opened


def assert_answers(answer: Any, expected: small_model.Arrays) -> None:
    """Every output agrees with the oracle, in shape as well."""
    for name, array in answer.items():
        assert array.shape == expected[name].shape, name
        np.testing.assert_allclose(array, expected[name], atol=1e-5, rtol=1e-5, err_msg=name)


def describe(directory: Path, spec: ModelSpec) -> None:
    """Write another session.json, with a manifest that it agrees with."""
    describe_version(spec, directory)


@pytest.mark.parametrize("num_samples", [1, 2, 7, 64])
def test_all_outputs_agree_with_numpy(session: InferenceSession, tables: small_model.Arrays, num_samples: int) -> None:
    """run() without names gives every output and the predictions."""
    inputs = small_model.random_inputs(num_samples, np.random.default_rng(num_samples))

    answer = session.run(inputs)

    assert list(answer) == ["click", "stay", "wide", "user_vector", "OUTPUT0"]
    assert_answers(answer, small_model.expected(tables, inputs))


def test_predictions_stand_side_by_side(session: InferenceSession, tables: small_model.Arrays) -> None:
    """predict() gives (batch, label_dim) float32, its columns named by label_names."""
    inputs = small_model.random_inputs(5, np.random.default_rng(0))

    predictions = session.predict(inputs)

    assert predictions.dtype == np.float32
    assert session.label_names == ("click", "stay")
    np.testing.assert_allclose(predictions, small_model.expected(tables, inputs)["OUTPUT0"], atol=1e-5)


def test_lists_are_taken_as_well(session: InferenceSession) -> None:
    """A Python caller may pass what NumPy converts without loss."""
    lists = {"user": [[1]], "codes": [[0, 1]], "items": [[1, 2]], "dense": [[0.0, 1.0, 2.0]]}
    arrays = {
        "user": np.array([[1]], np.int32),
        "codes": np.array([[0, 1]], np.uint8),
        "items": np.array([[1, 2]], np.int16),
        "dense": np.array([[0, 1, 2]], np.float16),
    }

    np.testing.assert_array_equal(session.predict(lists), session.predict(arrays))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("user", [[1.5]], "has type float64, expected int64"),
        ("user", [[2**70]], "has type object, expected int64"),
        ("user", [["1"]], "has type <U1, expected int64"),
        ("user", [[None]], "has type object, expected int64"),
        ("items", [[1, 2**31]], "has type int64, expected int32"),
        ("codes", [[1], [1, 2]], "inhomogeneous"),
    ],
)
def test_lists_that_would_lose_something_are_refused(
    session: InferenceSession, name: str, value: object, message: str
) -> None:
    """NumPy would cut 1.5 to 1 and read text as a number, which are not the keys that the caller meant."""
    inputs = {**small_model.random_inputs(1, np.random.default_rng(0)), name: value}

    with pytest.raises(InvalidRequestError, match=f"input '{name}' .*{message}"):
        session.predict(inputs)


def test_no_outputs_are_none(session: InferenceSession) -> None:
    """An empty list of outputs is not all of them."""
    assert session.run(small_model.random_inputs(2, np.random.default_rng(0)), []) == {}


def test_outputs_come_in_the_order_asked(session: InferenceSession) -> None:
    """Only requested outputs are computed and returned."""
    inputs = small_model.random_inputs(2, np.random.default_rng(0))

    assert list(session.run(inputs, ["stay", "click"])) == ["stay", "click"]
    assert list(session.run(inputs, iter(["stay", "click"]))) == ["stay", "click"]
    slower = {name: array.tolist() for name, array in inputs.items()}  # no fast path takes lists
    assert list(session.run(slower, iter(["stay", "click"]))) == ["stay", "click"]


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    lengths=st.lists(st.integers(0, 6), min_size=8, max_size=8),
)
def test_joined_requests_are_answered_as_if_alone(
    session: InferenceSession, tables: small_model.Arrays, sizes: list[int], lengths: list[int]
) -> None:
    """Requests of any sizes, also empty ones and bags of different lengths, are joined with no effect on answers."""
    rng = np.random.default_rng(len(sizes))
    requests = [small_model.random_inputs(n, rng, num_items=k) for n, k in zip(sizes, lengths, strict=False)]

    answers = session.run_many([Request(inputs) for inputs in requests])

    for inputs, answer in zip(requests, answers, strict=True):
        assert_answers(answer, small_model.expected(tables, inputs))


def test_requests_are_joined_into_one_batch(version: tuple[Path, small_model.Arrays]) -> None:
    """Different sizes and different bag lengths still cost one look-up and one run of the network."""
    rng = np.random.default_rng(0)
    with InferenceSession.open(version[0]) as session:
        session.run_many([Request(small_model.random_inputs(n, rng, num_items=n)) for n in (1, 3, 2)])

        stats = session.stats()

    assert (stats["requests"], stats["batches"], stats["samples"]) == (3, 1, 6)


def _without(name: str) -> Any:
    return lambda inputs: {k: v for k, v in inputs.items() if k != name}


def _with(name: str, value: Any) -> Any:
    return lambda inputs: {**inputs, name: value}


MALFORMED = {
    "missing": (_without("user"), "input 'user' is missing; .*'user', 'codes', 'items', 'dense'"),
    "unknown": (_with("usr", np.zeros((2, 1), np.int64)), "no input 'usr'"),
    "type": (_with("user", np.zeros((2, 1), np.float32)), "input 'user' has type float32, expected int64"),
    "unsigned": (_with("user", np.zeros((2, 1), np.uint64)), "'user' has type uint64, expected int64"),
    "rank": (_with("user", np.zeros(2, np.int64)), "'user' has shape \\[2\\], expected 2 dimensions"),
    "scalar": (_with("user", np.int64(3)), "'user' has shape \\[\\], expected 2 dimensions"),
    "width": (_with("codes", np.zeros((2, 3), np.int64)), "'codes' has shape \\[2, 3\\], expected \\[-1, 2\\]"),
    "list": (_with("user", [[1], [2]]), "'user' is of type list, expected an array of NumPy"),
    "none": (_with("user", None), "input 'user' is missing"),
    "unnamed": (lambda inputs: [*inputs.values()], "inputs are of type list, expected a dict of arrays by name"),
    "samples": (_with("dense", np.zeros((3, 3), np.float32)), "'dense' has 3 samples, but 'user' has 2"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_request_harms_no_other(session: InferenceSession, tables: small_model.Arrays, kind: str) -> None:
    """It gets an error that names the input, what was found and what is expected; its neighbours get their answers."""
    spoil, message = MALFORMED[kind]
    good = small_model.random_inputs(2, np.random.default_rng(1))
    bad = spoil(small_model.random_inputs(2, np.random.default_rng(2)))

    answers = session.run_many([Request(good), Request(bad), Request(good)])

    assert isinstance(answers[1], InvalidRequestError)
    with pytest.raises(InvalidRequestError, match=message):
        raise answers[1]
    assert_answers(answers[0], small_model.expected(tables, good))
    assert_answers(answers[2], small_model.expected(tables, good))


def test_masked_elements_fail_their_request_alone(session: InferenceSession, tables: small_model.Arrays) -> None:
    """What lies below a mask is no value."""
    inputs = small_model.random_inputs(2, np.random.default_rng(1))
    masked = {name: np.ma.masked_array(array, mask=True) for name, array in inputs.items()}

    answer, error = session.run_many([Request(inputs), Request(masked)])

    assert isinstance(error, InvalidRequestError)
    assert "has masked elements" in str(error)
    assert not isinstance(answer, HotrowError)
    assert_answers(answer, small_model.expected(tables, inputs))


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_a_matrix_is_answered_as_an_array(session: InferenceSession, tables: small_model.Arrays) -> None:
    """NumPy's matrix, which has two dimensions in any shape, harms no other request."""
    inputs = small_model.random_inputs(2, np.random.default_rng(1))
    matrices = {name: np.asmatrix(array) if array.ndim == 2 else array for name, array in inputs.items()}

    answers = session.run_many([Request(inputs), Request(matrices)])

    for answer in answers:
        assert not isinstance(answer, HotrowError)
        assert_answers(answer, small_model.expected(tables, inputs))


@pytest.mark.parametrize("inputs", [None, 5, "user", [1, 2, 3, 4], np.zeros(4), np.zeros(4, [("a", np.int64)])])
def test_inputs_are_given_by_name(session: InferenceSession, inputs: Any) -> None:
    """Anything else is a request's error, as a wrong array is."""
    with pytest.raises(InvalidRequestError, match="expected a dict of arrays by name"):
        session.predict(inputs)


@pytest.mark.parametrize("outputs", ["click", 5])
def test_outputs_are_a_list_of_names(session: InferenceSession, outputs: Any) -> None:
    """A single name would be taken for a list of letters."""
    with pytest.raises(InvalidRequestError, match="expected a list of names"):
        session.run(small_model.random_inputs(1, np.random.default_rng(0)), outputs)


def test_an_unknown_output_is_refused(session: InferenceSession) -> None:
    """The error lists the outputs there are."""
    inputs = small_model.random_inputs(1, np.random.default_rng(0))

    with pytest.raises(InvalidRequestError, match=r"no output 'clack'; its outputs: 'click', .*'OUTPUT0'"):
        session.run(inputs, ["clack"])


def test_nan_stays_in_its_row(session: InferenceSession) -> None:
    """A sample with NaN spoils its own answer only."""
    inputs = small_model.random_inputs(3, np.random.default_rng(0))
    clean = session.predict(inputs)
    inputs["dense"][1, 0] = np.nan

    spoiled = session.predict(inputs)

    assert np.isnan(spoiled[1, 1])
    np.testing.assert_array_equal(spoiled[[0, 2]], clean[[0, 2]])


def test_unknown_keys_get_the_default_vector_and_are_counted(version: tuple[Path, small_model.Arrays]) -> None:
    """Row numbers outside the table, and keys that are not stored."""
    inputs = small_model.random_inputs(2, np.random.default_rng(0), num_items=1)
    inputs["user"][:] = [[50], [-51]]
    inputs["items"][:] = [[3], [77]]
    with InferenceSession.open(version[0]) as session:
        answer = session.run(inputs, ["wide", "user_vector"])
        stats = session.stats()["tables"]

    assert not answer["wide"][:, :4].any()
    assert not answer["user_vector"].any()
    assert stats["user_weight"] == {"name": "user.weight", "lookup_keys": 4, "default_vectors": 4}
    assert stats["hashed"] == {"name": "hashed", "lookup_keys": 2, "default_vectors": 1}
    assert stats["code"]["default_vectors"] == 0


def test_unknown_keys_are_rejected_alone_where_asked(version: tuple[Path, small_model.Arrays]) -> None:
    """With unknown_keys=reject, only the request that holds one gets an error."""
    good = small_model.random_inputs(2, np.random.default_rng(0))
    good["items"][:] = 3
    bad = {**good, "user": np.array([[1], [50]])}
    with InferenceSession.open(version[0], unknown_keys="reject") as session:
        answers = session.run_many([Request(good), Request(bad)])

    assert isinstance(answers[0], dict)
    assert isinstance(answers[1], UnknownKeyError)
    assert "'user.weight', which has 50 rows" in str(answers[1])


def test_a_damaged_index_is_built_anew_by_full_verification(tmp_path: Path) -> None:
    """`verify="full"` reads index files as well, which no manifest lists, and answers what is in the table."""
    tables = small_model.write(tmp_path / "1")
    keys = tables["hashed/key"]
    InferenceSession.open(tmp_path / "1").close()
    path = tmp_path / "1" / "tables" / "hashed" / "index"
    whole = path.read_bytes()
    for position in range(64, len(whole), 16):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        with InferenceSession.open(tmp_path / "1", verify="full") as session:
            np.testing.assert_array_equal(session.lookup("hashed", keys), tables["hashed"])


@pytest.mark.parametrize("position", range(30))
def test_an_index_of_other_keys_is_built_anew(position: int, tmp_path: Path) -> None:
    """Also where sizes alone are verified, an index does not hide a key that has come since it was built."""
    tables = small_model.write(tmp_path / "1")
    InferenceSession.open(tmp_path / "1").close()
    keys = tables["hashed/key"].copy()
    keys[position] = 777_000
    keys.tofile(tmp_path / "1" / "tables" / "hashed" / "key")
    write_manifest(tmp_path / "1")

    with InferenceSession.open(tmp_path / "1", verify="sizes") as session:
        np.testing.assert_array_equal(session.lookup("hashed", keys), tables["hashed"])


def test_no_samples_give_no_rows(session: InferenceSession) -> None:
    """A request of 0 samples is answered by 0 rows of the right shape and type."""
    answer = session.run(small_model.random_inputs(0, np.random.default_rng(0)))

    assert {name: array.shape for name, array in answer.items()} == {
        "click": (0, 1),
        "stay": (0,),
        "wide": (0, 10),
        "user_vector": (0, 1, 4),
        "OUTPUT0": (0, 2),
    }


def test_vectors_of_one_table(session: InferenceSession, tables: small_model.Arrays) -> None:
    """lookup() takes a table's name or folder; float16 rows come as float32."""
    np.testing.assert_array_equal(session.lookup("user.weight", [1, -1, 99])[:2], tables["user_weight"][[1, -1]])
    np.testing.assert_array_equal(session.lookup("code", np.array([5])), tables["code"][[5]].astype(np.float32))
    keys = tables["hashed/key"]
    np.testing.assert_array_equal(session.lookup("hashed", keys), tables["hashed"])
    np.testing.assert_array_equal(session.lookup("hashed", [77]), [[0.5, -0.5]])
    assert session.lookup("hashed", []).shape == (0, 2)
    assert session.tables == ("user.weight", "code", "hashed")


def test_lookup_refuses_what_is_no_key(session: InferenceSession) -> None:
    """Wrong tables, shapes and types are named."""
    with pytest.raises(TableNotFoundError, match="no table 'nope'"):
        session.lookup("nope", [1])
    with pytest.raises(InvalidRequestError, match=r"float64 \[1\], expected int64 \[n\]"):
        session.lookup("code", [1.5])
    with pytest.raises(InvalidRequestError, match=r"\[1, 1\], expected int64 \[n\]"):
        session.lookup("code", [[1]])
    with pytest.raises(InvalidRequestError, match="a list of keys cannot be converted to an array:"):
        session.lookup("code", [[1], [2, 3]])


def test_many_threads_get_their_own_answers(session: InferenceSession, tables: small_model.Arrays) -> None:
    """Requests from several threads at once do not mix."""

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(50):
            inputs = small_model.random_inputs(int(rng.integers(1, 20)), rng)
            assert_answers(session.run(inputs), small_model.expected(tables, inputs))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


@pytest.mark.parametrize("word", [b"\xff", "\ud800", None, 7])
def test_what_is_no_text_is_refused(tmp_path: Path, word: object) -> None:
    """No text such as 'None' replaces it; texts and their UTF-8 come back unchanged."""
    write_types(tmp_path / "1", strings=True)
    known = {"flag": [[True]] * 2, "half": np.zeros((2, 1), np.float16)}
    with InferenceSession.open(tmp_path / "1") as session:
        texts = np.array([["né"], ["né".encode()]], object)
        assert session.run({**known, "word": texts})["echo"].tolist() == [["né"], ["né"]]

        with pytest.raises(InvalidRequestError, match="input 'word' holds a value that is not a UTF-8 string:"):
            session.run({**known, "word": np.array([["né"], [word]], object)})


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_session_is_not_copied(version: tuple[Path, small_model.Arrays], copied: Callable[[Any], Any]) -> None:
    """Neither for another process nor in this one; the error says what to do."""
    with InferenceSession.open(version[0]) as session, pytest.raises(TypeError, match="open '"):
        copied(session)


def test_a_closed_session_says_so(version: tuple[Path, small_model.Arrays]) -> None:
    """close() may be called twice; requests after it get a clear error, and repr tells."""
    session = InferenceSession.open(version[0])
    assert "[3 tables, open]" in repr(session)
    session.close()
    session.close()

    assert "[3 tables, closed]" in repr(session)
    for ask in (
        lambda: session.run(small_model.random_inputs(1, np.random.default_rng(0))),
        lambda: session.lookup("code", [1]),
        lambda: session.update("code", [1], np.zeros((1, 3))),
        lambda: session.erase("code", [1]),
        session.refresh,
    ):
        with pytest.raises(SessionClosedError, match="has been closed"):
            ask()


def test_a_network_refused_without_a_word_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime has errors without a text."""
    small_model.write(tmp_path / "1")
    wordless = onnxruntime.capi.onnxruntime_pybind11_state.Fail("")
    monkeypatch.setattr(onnxruntime, "InferenceSession", Mock(side_effect=wordless))

    with pytest.raises(ModelFormatError, match=r"dense\.onnx: ONNX Runtime cannot load it: Fail$"):
        InferenceSession.open(tmp_path / "1")


def test_a_forgotten_close_is_a_warning(version: tuple[Path, small_model.Arrays]) -> None:
    """As for files, Python reports it."""
    session = InferenceSession.open(version[0])

    with pytest.warns(ResourceWarning, match="was not closed"):
        session.__del__()
    session.close()


@pytest.mark.parametrize("name", ["session.json", "MANIFEST.json", "dense.onnx", "keys.onnx", "tables/hashed/key"])
def test_a_missing_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """A half-copied version does not open."""
    small_model.write(tmp_path / "1")
    (tmp_path / "1" / name).unlink()

    with pytest.raises(ModelFormatError, match=Path(name).name):
        InferenceSession.open(tmp_path / "1")


@pytest.mark.parametrize("name", ["dense.onnx", "keys.onnx", "tables/hashed/key", "tables/code/emb_vector"])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """Sizes are checked on every open."""
    small_model.write(tmp_path / "1")
    path = tmp_path / "1" / name
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(ModelFormatError, match=path.name):
        InferenceSession.open(tmp_path / "1")


def test_a_changed_byte_is_refused_where_checksums_are_asked(tmp_path: Path) -> None:
    """verify="full" reads everything."""
    small_model.write(tmp_path / "1")
    path = tmp_path / "1" / "tables" / "code" / "emb_vector"
    data = bytearray(path.read_bytes())
    data[17] ^= 4
    path.write_bytes(data)

    InferenceSession.open(tmp_path / "1").close()
    with pytest.raises(ModelFormatError, match="emb_vector: damaged"):
        InferenceSession.open(tmp_path / "1", verify="full")


@pytest.mark.parametrize(
    ("lookup", "message"),
    [
        ({"keys": "nowhere"}, "a lookup reads 'nowhere'"),
        ({"weights": "nowhere"}, "a lookup reads 'nowhere'"),
        ({"dense_input": "nowhere"}, "dense.onnx reads 'pooled'"),
    ],
)
def test_networks_that_do_not_fit_session_json_are_refused(
    tmp_path: Path, lookup: dict[str, Any], message: str
) -> None:
    """A condition that no request can satisfy is found when the version is opened."""
    small_model.write(tmp_path / "1")
    pooled = dataclasses.replace(small_model.SPEC.lookups[2], **lookup)
    lookups = (*small_model.SPEC.lookups[:2], pooled, *small_model.SPEC.lookups[3:])
    describe_version(dataclasses.replace(small_model.SPEC, lookups=lookups), tmp_path / "1")

    with pytest.raises(ModelFormatError, match=rf"session\.json: {message}, which no input, look-up or graph provides"):
        InferenceSession.open(tmp_path / "1")


def test_an_output_that_no_network_makes_is_refused(tmp_path: Path) -> None:
    """When the version is opened, not when a client asks for it."""
    small_model.write(tmp_path / "1")
    outputs = (*small_model.SPEC.outputs, TensorSpec("nowhere", "float32", (-1, 1)))
    describe_version(dataclasses.replace(small_model.SPEC, outputs=outputs), tmp_path / "1")

    with pytest.raises(ModelFormatError, match=r"session\.json: output 'nowhere' is not an output of dense\.onnx"):
        InferenceSession.open(tmp_path / "1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float64"}, r"output 'like' is float64 \[-1, 1\], but the network computes float32 \[1, 1\]"),
        ({"shape": (-1, 2)}, r"output 'like' is float32 \[-1, 2\], but the network computes float32 \[1, 1\]"),
        ({"shape": (-1,)}, r"output 'like' is float32 \[-1\], but the network computes float32 \[1, 1\]"),
    ],
    ids=["type", "size", "rank"],
)
def test_outputs_other_than_described_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """Triton tells clients the type and shape in session.json; an empty request is answered with them."""
    write_ctr(tmp_path / "ctr" / "1")
    spec = read_spec(tmp_path / "ctr" / "1")
    like = dataclasses.replace(spec.outputs[1], **change)
    describe(tmp_path / "ctr" / "1", dataclasses.replace(spec, outputs=(spec.outputs[0], like)))

    with pytest.raises(ModelFormatError, match=rf"session\.json: {message}$"):
        InferenceSession.open(tmp_path / "ctr" / "1", warm_up_s=0)


@pytest.mark.parametrize("labels", [("click",), ("click", "like", "share")])
def test_labels_other_than_the_columns_of_predictions_are_refused(tmp_path: Path, labels: tuple[str, ...]) -> None:
    """A client that reads a column by its name would read another, or none."""
    write_ctr(tmp_path / "ctr" / "1")
    describe(tmp_path / "ctr" / "1", dataclasses.replace(read_spec(tmp_path / "ctr" / "1"), labels=labels))

    message = rf"field 'labels' has {len(labels)} names, but the predictions have 2 columns"
    with pytest.raises(ModelFormatError, match=rf"session\.json: {message}$"):
        InferenceSession.open(tmp_path / "ctr" / "1")


def test_predictions_may_have_fewer_columns_where_their_number_is_open(tmp_path: Path) -> None:
    """Of a model that cuts scores to the longest list of a batch, zeros, which warm it up, are no evidence."""
    text = """m (int64[b] k, int64[b] n) => (float[b, longest] y)
        { v = Gather(w, k) most = ReduceMax <keepdims = 1> (n) y = Slice(v, begin, most, axis) }"""
    weights = {"w": onnx_models.table(), "begin": np.array([0]), "axis": np.array([1])}
    directory = onnx_models.import_model(tmp_path, onnx_models.model_of(text, weights)).version_dir

    with InferenceSession.open(directory) as session:
        found = session.run({"k": np.array([3, 5]), "n": np.array([1, 2])})

    np.testing.assert_array_equal(found["y"], weights["w"][[3, 5], :2])


def test_inputs_that_the_network_reads_as_another_type_are_refused(tmp_path: Path) -> None:
    """Not every request, as if its client had made a mistake."""
    write_ctr(tmp_path / "ctr" / "1")
    spec = read_spec(tmp_path / "ctr" / "1")
    dense = dataclasses.replace(spec.inputs[1], dtype="float64")
    describe(tmp_path / "ctr" / "1", dataclasses.replace(spec, inputs=(spec.inputs[0], dense)))

    with pytest.raises(ModelFormatError, match=r"session\.json: 'dense' is float64, but dense\.onnx reads float32$"):
        InferenceSession.open(tmp_path / "ctr" / "1")


def test_a_gpu_that_is_not_there_is_refused(version: tuple[Path, small_model.Arrays]) -> None:
    """`cuda:N` fails rather than use the CPU without a message; a typing error fails, too."""
    with pytest.raises(ConfigurationError, match="cuda:99"):
        InferenceSession.open(version[0], device="cuda:99")
    with pytest.raises(ConfigurationError, match="device cannot be 'cuda:98,99'"):
        InferenceSession.open(version[0], device="cuda:98,99")
    with pytest.raises(ConfigurationError, match="devise"):
        InferenceSession.open(version[0], devise="cpu")


def test_one_device_has_no_shards(version: tuple[Path, small_model.Arrays]) -> None:
    """Requesting them is an error that names the device and says what to do."""
    with pytest.raises(ConfigurationError, match=r"device 'cpu' is one device: name several \(cuda:0,1\)"):
        InferenceSession.open(version[0], device="cpu", shard="rows")


def test_every_error_is_of_our_tree() -> None:
    """Callers can catch HotrowError, or the builtin they expect."""
    assert issubclass(InvalidRequestError, HotrowError)
    assert issubclass(InvalidRequestError, ValueError)
    assert issubclass(TableNotFoundError, KeyError)
    assert str(TableNotFoundError("no table")) == "no table"


def test_nobody_is_told_of_what_is_served(tmp_path: Path) -> None:
    """ONNX Runtime's telemetry is off: it stores no files for it in the user's home."""
    small_model.write(tmp_path / "1")
    code = "import sys; from inference_session import InferenceSession; InferenceSession.open(sys.argv[1]).close()"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "ORT_"))}
    home = tmp_path / "home"
    home.mkdir()
    subprocess.run([sys.executable, "-c", code, tmp_path / "1"], env={**environment, "HOME": str(home)}, check=True)

    assert [path for path in home.rglob("*") if "Microsoft" in str(path) or "onnxruntime" in path.name] == []


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("inputs", 0, "dtype"), "float32", "field 'keys' of a lookup of 'user_weight': 'user' is float32"),
        (("lookups", 0, "keys"), "dense", "field 'keys' of a lookup of 'user_weight': 'dense' is float32"),
        (("lookups", 2, "weights"), "user", "field 'weights' of a lookup of 'hashed': 'user' is int64"),
        (("inputs", 0, "shape"), [-1, 2**40], "one sample of input 'user' has 1099511627776 elements"),
        (("settings",), {"verify": "maybe"}, r"session\.json: field 'settings': setting 'verify' cannot be 'maybe'"),
    ],
)
def test_a_description_of_another_model_is_refused(tmp_path: Path, place: Any, value: Any, message: str) -> None:
    """Such a session.json fits its own rules, but not the networks, or no machine."""
    small_model.write(tmp_path / "1")
    document = json.loads((tmp_path / "1" / "session.json").read_text())
    *parents, last = place
    reduce(getitem, parents, document)[last] = value
    (tmp_path / "1" / "session.json").write_text(json.dumps(document))
    write_manifest(tmp_path / "1")

    with pytest.raises((ModelFormatError, ConfigurationError), match=message):
        InferenceSession.open(tmp_path / "1")


_FORKS = """
import os, sys
import numpy as np
from inference_session import InferenceSession
from inference_session.errors import SessionClosedError
from tests.testing import small_model

directory = sys.argv[1]
inputs = small_model.random_inputs(3, np.random.default_rng(0))
session = InferenceSession.open(directory, dense_threads=4)
expected = session.predict(inputs)
child = os.fork()
if not child:
    for use in (lambda: session.predict(inputs), lambda: session.run(inputs), lambda: session.lookup("hashed", [1])):
        try:
            use()
        except SessionClosedError as error:
            assert f"opened by process {os.getppid()}, of which this one is a fork" in str(error), error
        else:
            raise AssertionError("a session of the parent answers")
    session.close()
    with InferenceSession.open(directory) as own:
        assert np.array_equal(own.predict(inputs), expected)
    sys.exit(3)  # frees what is left
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
assert np.array_equal(session.predict(inputs), expected)
session.close()
"""


def test_a_forked_process_opens_its_own_session(version: tuple[Path, small_model.Arrays]) -> None:
    """It shares connections with its parent: answers of a store went to the wrong process. At its end it crashed."""
    done = subprocess.run([sys.executable, "-c", _FORKS, version[0]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
