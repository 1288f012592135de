"""session.json is written, read back and checked."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_session.errors import HotrowError, ModelFormatError, TableNotFoundError
from inference_session.model_spec import (
    SESSION_FILE,
    LookupSpec,
    ModelSpec,
    RankingSpec,
    TableSpec,
    TensorSpec,
    folder_names,
    is_folder_name,
    label_names,
)
from inference_session.version_directory.manifest import read_manifest
from inference_session.version_directory.session_file import read_spec, write_spec
from tests.testing.json_places import places, setting
from triton_backend.repository.model_config import ModelConfig

SPEC = ModelSpec(
    inputs=(TensorSpec("user", "int64", (-1, 1)), TensorSpec("größe/π", "float32", (-1, 6))),
    outputs=(TensorSpec("click", "float32", (-1, 1)),),
    tables=(
        TableSpec("emb.user/weight:0", "emb_user_weight_0", 10, 4, keys="row_number", row_shape=(2, 2)),
        TableSpec("item", "item", 0, 2, dtype="int8", default_vector=(0.5, -1.0)),
    ),
    lookups=(LookupSpec("emb_user_weight_0", "user", "vectors"), LookupSpec("item", "keys", "pooled", pooling="mean")),
    labels=("click",),
    label_outputs=("click",),
    settings={"unknown_keys": "reject"},
    layout_options={"slots": [1, 2]},
)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """Nothing is lost or changed by session.json."""
    write_spec(SPEC, tmp_path)

    assert read_spec(tmp_path) == replace(SPEC, layout_options={"slots": [1, 2]})


def test_a_table_is_found_by_name_and_by_folder() -> None:
    """Both names work; an unknown one lists those that exist."""
    assert SPEC.table("emb.user/weight:0") is SPEC.table("emb_user_weight_0")
    with pytest.raises(TableNotFoundError, match=r"no table 'x'; its tables: 'emb\.user/weight:0', 'item'"):
        SPEC.table("x")


def test_names_of_tables_come_before_folders() -> None:
    """A name that is also another table's folder means the table of that name."""
    clash = replace(SPEC, tables=(TableSpec("a.b", "a_b", 1, 1), TableSpec("a_b", "a_b_2", 1, 1)))

    assert clash.table("a_b").folder == clash.table("a_b_2").folder == "a_b_2"
    assert clash.table("a.b").folder == "a_b"


def test_a_table_is_found_by_its_folder_alone() -> None:
    """Whatever other tables are called; an unknown folder lists those that exist."""
    clash = replace(SPEC, tables=(TableSpec("a.b", "a_b", 1, 1), TableSpec("a_b", "a_b_2", 1, 1)))

    assert [clash.table_in(folder).name for folder in ("a_b", "a_b_2")] == ["a.b", "a_b"]
    with pytest.raises(TableNotFoundError, match=r"no table in folder 'a\.b'; its table folders: 'a_b', 'a_b_2'"):
        clash.table_in("a.b")


def _set(path: str, value: Any) -> Any:
    """A change of one place in the document."""
    return setting(*(int(part) if part.isdigit() else part for part in path.split(".")), value=value)


_COLUMNS = {
    "table": "item",
    "keys": "größe/π",
    "dense_input": "vectors",
    "columns": [0, 1],
    "joined": True,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("format", 99), "format"),
        (_set("inputs", 3), "inputs"),
        (_set("inputs", ["x"]), "expected an object"),
        (_set("surprise", 1), "unknown field 'surprise'"),
        (_set("tables.0.surprise", 1), r"unknown field 'tables\[0\]\.surprise'"),
        (_set("tables.0.folder", "../escape"), "folder"),
        (_set("tables.0.folder", "item"), "two tables"),
        (_set("tables.0.num_rows", -1), "num_rows"),
        (_set("tables.0.num_rows", "10"), "num_rows"),
        (_set("tables.0.embedding_dim", 0), "embedding_dim"),
        (_set("tables.0.dtype", "float64"), "dtype"),
        (_set("tables.0.keys", "hashed"), "keys"),
        (_set("tables.0.row_shape", [3, 2]), "row_shape"),
        (_set("tables.1.default_vector", [1.0]), "default_vector"),
        (_set("lookups.0.table", "nowhere"), "nowhere"),
        (_set("lookups.0.pooling", "median"), "median"),
        (_set("lookups.1.dense_input", "vectors"), "several lookups have the 'dense_input' 'vectors'"),
        (_set("lookups", [_COLUMNS]), "columns': 'größe/π' is float32, not int64 or int32"),
        (_set("lookups.0.weights", "factors"), "weights': 'factors' needs 'pooling' 'sum' or 'mean', found 'none'"),
        (_set("inputs.0.shape", [-2]), "shape"),
        (_set("inputs.0.name", 5), "name"),
        (_set("inputs.0.dtype", "word"), "'word' is not a NumPy dtype"),
        (_set("inputs.0.dtype", "(2 3)f4,f4"), "is not a NumPy dtype"),
        (_set("inputs.0.shape", []), "batched"),
        (_set("inputs.0.shape", [True]), "shape"),
        (
            _set("outputs", 2 * [{"name": "twice", "dtype": "float32", "shape": [-1]}]),
            "two outputs have the name 'twice'",
        ),
        (_set("tables.1.default_vector", "zero"), "default_vector"),
        (
            _set("tables.1.default_vector", [float("nan"), 0]),
            r"default_vector\[0\]': expected a finite number, found nan",
        ),
        (_set("tables.1.default_vector", float("inf")), "default_vector': expected a finite number, found inf"),
        (_set("tables.1.default_vector", 1e39), "default_vector': 1e[+]39 has an element that is not a finite float32"),
        (_set("lookups.0.keys", 3), r"'lookups\[0\]\.keys': expected a string, found 3"),
        (_set("settings", []), "settings"),
        (_set("settings", {"state_dir": "/"}), "'settings': 'state_dir' names a path on the server"),
        (_set("settings", {"record_keys": "/keys"}), "'settings': 'record_keys' names a path"),
        (_set("settings", {"canary_requests": "a.npz"}), "'settings': 'canary_requests' names a path"),
        (_set("tables.0.num_rows", 2**62), r"tables\[0\]\.num_rows"),
        (_set("tables.0.embedding_dim", 2**40), r"tables\[0\]\.num_rows' and 'embedding_dim'"),
        (_set("tables.0.row_shape", [-2, -2]), "row_shape"),
        (_set("inputs.1.shape", [-1, 2**40, 2**40]), r"inputs\[1\]\.shape"),
        (_set("label_outputs", ["nowhere"]), "'label_outputs': the model has no output 'nowhere'"),
        (_set("equal_sizes", [[["user", 0]]]), "'equal_sizes': a group needs two .input, axis. pairs"),
        (_set("equal_sizes", [[["user", 0], ["nowhere", 0]]]), "field 'equal_sizes': no input 'nowhere' has an axis 0"),
        (
            _set("equal_sizes", [[["user", 0], ["user", True]]]),
            r"field 'equal_sizes\[0\]\[1\]\[1\]': expected a whole number",
        ),
    ],
)
def test_a_bad_field_is_named(tmp_path: Path, change: Any, message: str) -> None:
    """The error names the file and what is wrong in it."""
    write_spec(SPEC, tmp_path)
    document = json.loads((tmp_path / SESSION_FILE).read_text())
    change(document)
    (tmp_path / SESSION_FILE).write_text(json.dumps(document))

    with pytest.raises(ModelFormatError, match=rf"session\.json: .*{message}"):
        read_spec(tmp_path)


def test_contexts_and_candidates_fill_inputs_of_their_own(tmp_path: Path) -> None:
    """One has a row per context, the other a row per candidate: memory would be made for one of them."""
    user, size = SPEC.inputs
    lookups = tuple(LookupSpec("item", tensor.name, "vectors", joined=True) for tensor in SPEC.inputs)
    mixed = replace(SPEC, inputs=(replace(user, context=True), size), ranking=RankingSpec(lookups))
    write_spec(mixed, tmp_path)

    with pytest.raises(ModelFormatError, match="lookups of the context and of candidates fill one input"):
        read_spec(tmp_path)


@pytest.mark.parametrize("text", ["", "nonsense", "[1]", "null", "\udcff", "[" * 100_000])
def test_foreign_bytes_are_refused(tmp_path: Path, text: str) -> None:
    """Any other content is refused with the file's name, never with a crash."""
    (tmp_path / SESSION_FILE).write_bytes(text.encode("utf-8", "surrogateescape"))

    with pytest.raises(ModelFormatError, match=r"session\.json"):
        read_spec(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    """Its reader would never end."""
    if kind == "pipe":
        os.mkfifo(tmp_path / SESSION_FILE)
    else:
        (tmp_path / SESSION_FILE).symlink_to("/dev/zero")

    with pytest.raises(ModelFormatError, match=r"session\.json: not readable as JSON: .*not a regular file"):
        read_spec(tmp_path)


def test_a_file_that_cannot_be_opened_is_named_once(tmp_path: Path) -> None:
    """With the reason in words."""
    for name in (SESSION_FILE, "MANIFEST.json", "config.pbtxt"):
        (tmp_path / name).symlink_to(name)

    for read, name, kind in (
        (lambda: read_spec(tmp_path), SESSION_FILE, " as JSON"),
        (lambda: read_manifest(tmp_path), "MANIFEST.json", ""),
        (lambda: ModelConfig.read(tmp_path / "config.pbtxt"), "config.pbtxt", " as a Triton model configuration"),
    ):
        with pytest.raises(HotrowError) as raised:
            read()
        assert str(raised.value) == f"{tmp_path / name}: not readable{kind}: Too many levels of symbolic links"


def test_no_session_file_is_said_plainly(tmp_path: Path) -> None:
    """An empty folder is not a version directory."""
    with pytest.raises(ModelFormatError, match=r"session\.json: no such file"):
        read_spec(tmp_path)


def test_a_folder_above_a_version_names_one(tmp_path: Path) -> None:
    """A model's folder, or a repository, given as a version directory: the error names the newest version in it."""
    for version in ("9", "10"):
        (tmp_path / "ctr" / version).mkdir(parents=True)
        (tmp_path / "ctr" / version / "session.json").touch()

    for folder, kind in ((tmp_path / "ctr", "the folder of a model"), (tmp_path, "a model repository")):
        with pytest.raises(ModelFormatError, match=f"is {kind}; give .*, such as {tmp_path / 'ctr' / '10'}"):
            read_spec(folder)


def _written(spec: ModelSpec) -> dict[str, Any]:
    return {"format": 1, **json.loads(json.dumps(asdict(spec)))}


_FULL = replace(
    SPEC,
    inputs=(*SPEC.inputs, TensorSpec("bag", "int64", (-1, 4), context=True)),
    lookups=(
        *SPEC.lookups,
        LookupSpec("item", "bag", "bags", pooling="sum", weights="w", bags=("begins", "ends")),
        LookupSpec("item", "bag", "columns", columns=(0, 2), joined=True),
    ),
    equal_sizes=((("user", 0), ("bag", 0)),),
    ranking=RankingSpec((LookupSpec("item", "bag", "vectors"),), tiled=("why",), largest_input=3.0),
    source="a test",
)
_OPTIONAL = ("weights", "bags", "columns", "row_shape", "largest_input")
_OF_ANY_TYPE = ("layout_options", "settings")
_NAN, _INFINITY = float("nan"), float("inf")
_OTHERS: dict[type, tuple[Any, ...]] = {
    str: (None, True, 1, [], {}, "\ud800"),
    bool: (None, 0, 1.0, "true", []),
    int: (None, True, 1.5, "1", [[]], 10**30, -(10**30), _NAN),
    float: (None, True, "1", {}, [None], 10**30, _NAN, _INFINITY),
    list: (None, True, "text", {}, [None], [[[]]]),
    dict: (1, "text", [], [{}]),
    type(None): (True, {"a": 1}),
}
"""By the type of a field's value, what is not allowed there."""


@pytest.mark.parametrize("place", [pytest.param(p, id=".".join(map(str, p))) for p in places(_written(_FULL))])
def test_a_value_of_another_type_is_refused_in_every_field(tmp_path: Path, place: tuple[Any, ...]) -> None:
    """The error names the field; no such value is taken for one of the field's own type."""
    if len(place) > 1 and place[0] in _OF_ANY_TYPE:
        place = place[:1]
    field = next(name for name in reversed(place) if isinstance(name, str))
    for value in _OTHERS[type(reduce(getitem, place, _written(_FULL)))]:
        if value is None and field in _OPTIONAL:
            continue
        document = _written(_FULL)
        setting(*place, value=value)(document)
        (tmp_path / SESSION_FILE).write_text(json.dumps(document))
        with pytest.raises(ModelFormatError, match=rf"session\.json: .*{field}"):
            read_spec(tmp_path)


@pytest.mark.parametrize("field", ["source", "folder", "may_pad", "unknown_keys"])
def test_a_field_that_comes_twice_is_refused(tmp_path: Path, field: str) -> None:
    """Other readers of JSON take the last one and say nothing."""
    text = json.dumps(_written(_FULL)).replace(f'"{field}":', f'"{field}": "", "{field}":', 1)
    (tmp_path / SESSION_FILE).write_text(text)

    with pytest.raises(ModelFormatError, match=f"two fields of the name '{field}'"):
        read_spec(tmp_path)


@pytest.mark.parametrize("field", ["name", "folder", "num_rows", "embedding_dim"])
def test_a_field_that_is_missing_is_named(tmp_path: Path, field: str) -> None:
    """By its place."""
    document = _written(_FULL)
    del document["tables"][1][field]
    (tmp_path / SESSION_FILE).write_text(json.dumps(document))

    with pytest.raises(ModelFormatError, match=rf"field 'tables\[1\]\.{field}' is missing"):
        read_spec(tmp_path)


@given(st.lists(st.text(max_size=200), max_size=20))
def test_folder_names_are_valid_and_distinct(names: list[str]) -> None:
    """Any table names become folder names that never clash."""
    folders = folder_names(names)

    assert len(set(folders)) == len(names)
    assert all(is_folder_name(folder) for folder in folders)


def test_a_clash_of_folder_names_gets_a_number() -> None:
    """Different names that look alike once cleaned are told apart."""
    assert folder_names(["a.b", "a:b", "a_b", "c"]) == ["a_b", "a_b_2", "a_b_3", "c"]


def test_labels_of_several_columns_are_numbered() -> None:
    """A prediction of one column keeps its output's name."""
    assert label_names({"ctr": 1, "next": 2}) == {"ctr": ["ctr"], "next": ["next_0", "next_1"]}


def test_labels_are_distinct() -> None:
    """PyTorch and Keras number outputs as columns are numbered: no label may stand for two columns."""
    outputs = {"softmax": 2, "softmax_1": 1, "softmax_": 1, "softmax__0": 1}

    assert label_names(outputs) == {
        "softmax": ["softmax___0", "softmax___1"],
        "softmax_1": ["softmax_1"],
        "softmax_": ["softmax_"],
        "softmax__0": ["softmax__0"],
    }


def test_a_file_in_place_of_a_version_directory_is_told_what_makes_one(tmp_path: Path) -> None:
    """A model's file, as a trainer exported it."""
    (tmp_path / "model.onnx").touch()
    with pytest.raises(ModelFormatError, match=r"model\.onnx: a file, not a version directory; `hotrow import` makes"):
        read_spec(tmp_path / "model.onnx")
