"""session.json is written, read back and checked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_session.errors import ModelFormatError, TableNotFoundError
from inference_session.model_spec import (
    SESSION_FILE,
    LookupSpec,
    ModelSpec,
    RankingSpec,
    TableSpec,
    TensorSpec,
    folder_names,
    is_folder_name,
)

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
    SPEC.write(tmp_path)

    assert ModelSpec.read(tmp_path) == replace(SPEC, layout_options={"slots": [1, 2]})


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

    def change(document: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        place: Any = document
        for part in parents:
            place = place[int(part)] if part.isdigit() else place[part]
        place[last] = value

    return change


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
        (_set("tables.0.surprise", 1), "unknown field 'surprise'"),
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
        (_set("lookups.1.dense_input", "vectors"), "several lookups fill 'vectors': all of them must be joined"),
        (_set("lookups", [_COLUMNS]), "columns of 'größe/π' are float32, not int64 or int32"),
        (_set("lookups.0.weights", "factors"), "weights 'factors' need pooling 'sum' or 'mean', found 'none'"),
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
        (_set("tables.1.default_vector", [float("nan"), 0]), "default_vector .* not a finite float32"),
        (_set("tables.1.default_vector", float("inf")), "default_vector .* not a finite float32"),
        (_set("tables.1.default_vector", 1e39), "default_vector .* not a finite float32"),
        (_set("lookups.0.keys", 3), "must be strings"),
        (_set("settings", []), "settings"),
        (_set("settings", {"state_dir": "/"}), "'settings': 'state_dir' names a path on the server"),
        (_set("settings", {"record_keys": "/keys"}), "'settings': 'record_keys' names a path"),
        (_set("settings", {"canary_requests": "a.npz"}), "'settings': 'canary_requests' names a path"),
        (_set("equal_sizes", [[["user", 0]]]), "expected a list of .input, axis. pairs"),
        (_set("equal_sizes", [[["user", 0], ["nowhere", 0]]]), "field 'equal_sizes': no input 'nowhere' has an axis 0"),
        (_set("equal_sizes", [[["user", 0], ["user", True]]]), "field 'equal_sizes': no input 'user' has an axis True"),
    ],
)
def test_a_bad_field_is_named(tmp_path: Path, change: Any, message: str) -> None:
    """The error names the file and what is wrong in it."""
    SPEC.write(tmp_path)
    document = json.loads((tmp_path / SESSION_FILE).read_text())
    change(document)
    (tmp_path / SESSION_FILE).write_text(json.dumps(document))

    with pytest.raises(ModelFormatError, match=rf"session\.json: .*{message}"):
        ModelSpec.read(tmp_path)


def test_contexts_and_candidates_fill_inputs_of_their_own(tmp_path: Path) -> None:
    """One has a row per context, the other a row per candidate: memory would be made for one of them."""
    user, size = SPEC.inputs
    lookups = tuple(LookupSpec("item", tensor.name, "vectors", joined=True) for tensor in SPEC.inputs)
    mixed = replace(SPEC, inputs=(replace(user, context=True), size), ranking=RankingSpec(lookups))
    mixed.write(tmp_path)

    with pytest.raises(ModelFormatError, match="lookups of the context and of candidates fill one input"):
        ModelSpec.read(tmp_path)


@pytest.mark.parametrize("text", ["", "nonsense", "[1]", "null", "\udcff", "[" * 100_000])
def test_foreign_bytes_are_refused(tmp_path: Path, text: str) -> None:
    """Any other content is refused with the file's name, never with a crash."""
    (tmp_path / SESSION_FILE).write_bytes(text.encode("utf-8", "surrogateescape"))

    with pytest.raises(ModelFormatError, match=r"session\.json"):
        ModelSpec.read(tmp_path)


def test_no_session_file_is_said_plainly(tmp_path: Path) -> None:
    """An empty folder is not a version directory."""
    with pytest.raises(ModelFormatError, match=r"session\.json: no such file"):
        ModelSpec.read(tmp_path)


@given(st.lists(st.text(max_size=200), max_size=20))
def test_folder_names_are_valid_and_distinct(names: list[str]) -> None:
    """Any table names become folder names that never clash."""
    folders = folder_names(names)

    assert len(set(folders)) == len(names)
    assert all(is_folder_name(folder) for folder in folders)


def test_a_clash_of_folder_names_gets_a_number() -> None:
    """Different names that look alike once cleaned are told apart."""
    assert folder_names(["a.b", "a:b", "a_b", "c"]) == ["a_b", "a_b_2", "a_b_3", "c"]
