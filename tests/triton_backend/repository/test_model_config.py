"""config.pbtxt of imported models."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import pytest

from inference_session.errors import ConfigurationError, UnsupportedModelError
from inference_session.importers.onnx import import_onnx
from inference_session.model_spec import ModelSpec, TensorSpec
from tests.testing.onnx_models import two_lookups
from triton_backend.repository.config_checks import check_config, may_be_empty
from triton_backend.repository.config_writer import write_model_config
from triton_backend.repository.model_config import ModelConfig, TensorConfig, configured_instances, suitable_instances
from triton_backend.repository.model_description import describe


def spec_of(inputs: list[TensorSpec], outputs: list[TensorSpec], **fields: object) -> ModelSpec:
    """A model without tables."""
    return ModelSpec(tuple(inputs), tuple(outputs), tables=(), lookups=(), **fields)  # type: ignore[arg-type]


IDS = TensorSpec("ids", "int64", (-1, 26))
CLICK = TensorSpec("click", "float32", (-1, 1))
LIKE = TensorSpec("like", "float32", (-1,))


@pytest.fixture
def version_dir(tmp_path: Path) -> Path:
    """A draft of a version."""
    directory = tmp_path / "ctr" / ".tmp-1"
    directory.mkdir(parents=True)
    return directory


def test_dims_leave_out_the_samples(version_dir: Path) -> None:
    """A batched model is described per sample, with the predictions behind its own outputs."""
    spec = spec_of([IDS], [CLICK], labels=("click",), label_outputs=("click",))

    config = ModelConfig.read(write_model_config(version_dir, spec, "ctr", max_batch_size=64))

    assert config == ModelConfig(
        name="ctr",
        backend="hotrow",
        max_batch_size=64,
        inputs=(TensorConfig("ids", "TYPE_INT64", (26,)),),
        outputs=(TensorConfig("click", "TYPE_FP32", (1,)), TensorConfig("OUTPUT0", "TYPE_FP32", (1,))),
        default_model_filename="",
    )


def test_instances_are_written_and_read(version_dir: Path) -> None:
    """A new file has as many as asked for; of groups on GPUs each GPU has that many."""
    spec = spec_of([IDS], [CLICK])
    path = write_model_config(version_dir, spec, "ctr", num_instances=3)
    version_dir.rename(version_dir.with_name("1"))
    version = version_dir.with_name("1")
    assert configured_instances(version) == 3
    text = path.read_text(encoding="utf-8")

    for groups, expected in (
        ("instance_group [ { count: 2 kind: KIND_GPU gpus: [ 0, 1 ] }, { kind: KIND_CPU } ]", 5),
        ("", 1),
    ):
        path.write_text(text.replace("instance_group [ { count: 3 kind: KIND_CPU } ]", groups), encoding="utf-8")
        assert configured_instances(version) == expected
    path.unlink()
    assert configured_instances(version) == 1


def test_an_import_that_is_killed_while_it_writes_the_file_leaves_nothing_for_good(tmp_path: Path) -> None:
    """What it has written is in the draft, which the next import removes."""
    killed = """
import os, sys
from pathlib import Path
from hotrow.command_line import cli

Path.replace = lambda *_: os._exit(9)
cli(["import", "onnx", sys.argv[1], "--name", "ctr", "--repository", sys.argv[2]])
"""
    onnx.save(two_lookups(), tmp_path / "model.onnx")
    arguments = [str(tmp_path / "model.onnx"), str(tmp_path / "repository")]
    assert subprocess.run([sys.executable, "-c", killed, *arguments], check=False).returncode == 9
    folder = tmp_path / "repository/ctr"
    assert [path.name for path in folder.iterdir()] == [".tmp-1"]
    assert list((folder / ".tmp-1").glob(".tmp-*-config.pbtxt"))

    import_onnx(*map(Path, arguments), "ctr", complete=partial(write_model_config, name="ctr"))

    assert sorted(path.name for path in folder.iterdir()) == ["1", "config.pbtxt"]
    assert not list(folder.rglob(".tmp-*"))


@pytest.mark.parametrize(("num_processors", "expected"), [(1, 1), (2, 1), (7, 1), (8, 2), (16, 4), (96, 8)])
def test_suitable_instances_follow_the_processors(
    monkeypatch: pytest.MonkeyPatch, num_processors: int, expected: int
) -> None:
    """One for every four that this process may use; one alone has a GPU's cache."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(num_processors)))

    assert suitable_instances(has_gpu=False) == expected
    assert suitable_instances(has_gpu=True) == 1


def test_a_batched_model_is_batched_by_triton(version_dir: Path) -> None:
    """Dynamic batching is on, for ragged inputs too, in one process."""
    spec = spec_of([TensorSpec("bag", "int64", (-1, -1)), IDS], [CLICK])

    text = write_model_config(version_dir, spec, "ctr").read_text(encoding="utf-8")

    assert "dynamic_batching { }" in text
    assert text.count("allow_ragged_batch: true") == 1
    assert "count: 1" in text


@pytest.mark.parametrize(
    "spec",
    [
        spec_of([IDS], [LIKE], labels=("like",), label_outputs=("like",)),
        spec_of([IDS], [CLICK], batched=False, labels=("click",), label_outputs=("click",)),
    ],
    ids=["1-D output", "not batched"],
)
def test_full_dims_where_triton_cannot_count_samples(spec: ModelSpec) -> None:
    """A model with a 1-D tensor, or one that is not batched, gets max_batch_size 0 and whole shapes."""
    config = describe(spec, "ctr")

    assert config.max_batch_size == 0
    assert config.inputs == (TensorConfig("ids", "TYPE_INT64", (-1, 26)),)
    assert config.outputs[-1] == TensorConfig("OUTPUT0", "TYPE_FP32", (-1, 1))


def test_a_models_own_output0_is_kept() -> None:
    """A model that has an output called OUTPUT0 gets no second one."""
    spec = spec_of([IDS], [TensorSpec("OUTPUT0", "float32", (-1, 2))], labels=("a", "b"), label_outputs=("OUTPUT0",))

    assert [tensor.name for tensor in describe(spec, "ctr").outputs] == ["OUTPUT0"]


def test_a_models_own_candidates_are_no_context() -> None:
    """An output of that name was described as optional, which Triton refuses to read; an input must be given."""
    inputs = [IDS, TensorSpec("CANDIDATES", "int64", (-1, 2))]
    assert [each.optional for each in describe(spec_of(inputs, [CLICK]), "ctr").inputs] == [False, False]
    outputs = [TensorSpec("CANDIDATES", "float32", (-1, 1))]
    assert [each.optional for each in describe(spec_of([IDS], outputs), "ctr").outputs] == [False]


def test_names_with_any_characters_are_escaped(version_dir: Path) -> None:
    """Quotes, backslashes and line ends in names survive."""
    name = 'a "b"\\c\né'
    spec = spec_of([TensorSpec(name, "object", (-1, 1)), IDS], [CLICK])

    config = ModelConfig.read(write_model_config(version_dir, spec, "ctr"))

    assert config.inputs[0] == TensorConfig(name, "TYPE_STRING", (1,))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (TensorSpec("z", "complex64", (-1, 1)), "'z' has type complex64"),
        (TensorSpec("z", "float32", (-1, 0)), "'z' has shape \\[-1, 0\\]"),
    ],
)
def test_what_triton_cannot_carry_is_refused(tensor: TensorSpec, message: str) -> None:
    """A tensor of a type or rank that Triton lacks is an error that names it."""
    with pytest.raises(UnsupportedModelError, match=message):
        describe(spec_of([tensor], [CLICK]), "ctr")


def test_scalars_are_served_in_shape_1() -> None:
    """Triton has none."""
    spec = spec_of([TensorSpec("temperature", "float32", ())], [TensorSpec("largest", "float32", ())], batched=False)

    config = describe(spec, "ctr")

    assert config.max_batch_size == 0
    assert config.inputs == (TensorConfig("temperature", "TYPE_FP32", (1,)),)
    assert config.outputs == (TensorConfig("largest", "TYPE_FP32", (1,)),)
    as_json = _json({"temperature": ("TYPE_FP32", [1])}, {"largest": ("TYPE_FP32", [1])})
    check_config({**as_json, "max_batch_size": 0}, spec)


def test_the_version_may_come_later(version_dir: Path) -> None:
    """As where a benchmark or a user prepares a model's folder."""
    version_dir.rmdir()

    path = write_model_config(version_dir, spec_of([IDS], [CLICK]), "ctr")

    assert [*version_dir.parent.iterdir()] == [path]


def test_a_users_config_is_kept_for_the_next_version(version_dir: Path) -> None:
    """An existing file that describes the same tensors stays unchanged."""
    spec = spec_of([IDS], [CLICK])
    path = write_model_config(version_dir, spec, "ctr")
    edited = path.read_text(encoding="utf-8").replace("max_batch_size: 1024", "max_batch_size: 8 # ours")
    path.write_text(edited, encoding="utf-8")

    write_model_config(version_dir, spec, "ctr")

    assert path.read_text(encoding="utf-8") == edited


def test_a_config_that_the_disk_does_not_take_leaves_nothing(
    version_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the file."""

    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    before = sorted(version_dir.parent.iterdir())

    with pytest.raises(OSError, match=r"No space left on device: '.*/config\.pbtxt'"):
        write_model_config(version_dir, spec_of([IDS], [CLICK]), "ctr")

    assert sorted(version_dir.parent.iterdir()) == before


def test_a_config_of_other_tensors_is_an_error(version_dir: Path) -> None:
    """A next version with other inputs is refused, naming what differs, and nothing is overwritten."""
    path = write_model_config(version_dir, spec_of([IDS], [CLICK]), "ctr")
    before = path.read_text(encoding="utf-8")
    wider = TensorSpec("ids", "int64", (-1, 27))

    with pytest.raises(ConfigurationError, match=r"'ids' TYPE_INT64 \[26\], but 'ids' TYPE_INT64 \[27\] in the"):
        write_model_config(version_dir, spec_of([wider], [CLICK]), "ctr")

    assert path.read_text(encoding="utf-8") == before


def test_what_differs_is_named_where_triton_counts_samples_no_more(version_dir: Path) -> None:
    """An output of one dimension changes how all tensors are described, and is the only one that is new."""
    write_model_config(version_dir, spec_of([IDS], [CLICK]), "ctr")

    with pytest.raises(ConfigurationError, match=r"output is absent, but 'like' TYPE_FP32 \[-1\] in the"):
        write_model_config(version_dir, spec_of([IDS], [CLICK, LIKE]), "ctr")


def test_a_users_config_may_count_samples_itself(version_dir: Path) -> None:
    """Full dims, without a limit of Triton's, describe the same tensors."""
    path = write_model_config(version_dir, spec_of([IDS], [CLICK]), "ctr")
    edited = path.read_text(encoding="utf-8").replace("max_batch_size: 1024", "max_batch_size: 0")
    edited = edited.replace("dynamic_batching { }", "").replace("dims: [ 26 ]", "dims: [ -1, 26 ]")
    path.write_text(edited.replace("dims: [ 1 ]", "dims: [ -1, 1 ]"), encoding="utf-8")

    write_model_config(version_dir, spec_of([IDS], [CLICK]), "ctr")


@pytest.mark.parametrize("sizes", [(-1, 16), (16, -1)])
def test_sizes_of_outputs_that_one_version_knows(version_dir: Path, sizes: tuple[int, int]) -> None:
    """The same network by another exporter, which declares more or less about its outputs, is the next version."""
    first, second = (TensorSpec("vector", "float32", (-1, size)) for size in sizes)
    path = write_model_config(version_dir, spec_of([IDS], [first]), "ctr")
    before = path.read_text(encoding="utf-8")

    write_model_config(version_dir, spec_of([IDS], [second]), "ctr")

    assert path.read_text(encoding="utf-8") == before


def test_an_input_that_takes_more_than_the_config_says_is_an_error(version_dir: Path) -> None:
    """The server would refuse the requests that the next version is made for."""
    write_model_config(version_dir, spec_of([IDS], [CLICK]), "ctr")

    with pytest.raises(
        ConfigurationError, match=r"'ids' TYPE_INT64 \[-1, 26\], but 'ids' TYPE_INT64 \[-1, -1\] in the"
    ):
        write_model_config(version_dir, spec_of([TensorSpec("ids", "int64", (-1, -1))], [CLICK]), "ctr")


def test_a_broken_config_is_an_error(version_dir: Path) -> None:
    """A file that cannot be read as a configuration is named, with the line."""
    path = version_dir.parent / "config.pbtxt"
    path.write_text('name: "ctr"\ninput {', encoding="utf-8")

    with pytest.raises(ConfigurationError, match=r"config\.pbtxt: not readable .* line 2"):
        write_model_config(version_dir, spec_of([IDS], [CLICK]), "ctr")


@pytest.mark.parametrize("named", ["", 'platform: "onnxruntime_onnx"'])
def test_a_model_of_tritons_own_backends_is_not_written_over(version_dir: Path, named: str) -> None:
    """As a model of ONNX Runtime that is imported into its own repository: the error says where else it can go.

    Triton may find the backend by the name of the model's file.
    """
    path = version_dir.parent / "config.pbtxt"
    path.write_text(f"{named}\nmax_batch_size: 8\n", encoding="utf-8")

    with pytest.raises(ConfigurationError, match=r"names no backend, but .* needs 'hotrow'.* into another repository"):
        write_model_config(version_dir, spec_of([IDS], [CLICK]), "ctr")


def test_standalone_versions_bring_one_line_of_code(version_dir: Path) -> None:
    """For a Triton whose backend folder is not ours: its python backend and a model.py that imports."""
    config = ModelConfig.read(write_model_config(version_dir, spec_of([IDS], [CLICK]), "ctr", standalone=True))

    assert config.backend == "python"
    assert "from triton_backend.model import TritonPythonModel" in (version_dir / "model.py").read_text(
        encoding="utf-8"
    )
    with pytest.raises(ConfigurationError, match="--standalone` imports for 'python'"):
        write_model_config(version_dir, spec_of([IDS], [CLICK]), "ctr")


@pytest.mark.parametrize("dtype", ["int64", "float32", "object"])
def test_no_request_may_be_empty_in_all_inputs_where_triton_batches(dtype: str) -> None:
    """Triton refuses no samples by an input of fixed size, and never answers where there is none."""
    bag, fixed = TensorSpec("bag", dtype, (-1, -1)), TensorSpec("ids", dtype, (-1, 26))

    assert describe(spec_of([bag], [CLICK]), "ctr").max_batch_size == 0
    assert describe(spec_of([bag, fixed], [CLICK]), "ctr").max_batch_size == (0 if dtype == "object" else 1024)


@pytest.mark.parametrize(
    "text",
    [
        "input { dims: [ { } ] }",
        "input { name { } }",
        "backend { }",
        'parameters { key: "a" value { string_value { } } }',
    ],
)
def test_a_message_in_a_values_place_is_an_error_that_names_the_file(text: str, tmp_path: Path) -> None:
    """Like any other invalid config.pbtxt."""
    path = tmp_path / "config.pbtxt"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ConfigurationError, match=r"config\.pbtxt: not readable .* (has|found) a message"):
        ModelConfig.read(path)


def test_a_field_with_an_empty_list_is_as_one_that_is_absent(tmp_path: Path) -> None:
    """Protobuf's text format allows such lists."""
    path = tmp_path / "config.pbtxt"
    path.write_text('name: [] parameters { key: "a" value: [] }', encoding="utf-8")

    assert ModelConfig.read(path).name == ""
    assert ModelConfig.read(path).parameters == {"a": ""}


def _json(inputs: dict[str, tuple[str, list[int]]], outputs: dict[str, tuple[str, list[int]]]) -> dict[str, object]:
    """What Triton tells a backend of a config.pbtxt for batches."""
    tensors = [
        [{"name": name, "data_type": kind, "dims": dims} for name, (kind, dims) in described.items()]
        for described in (inputs, outputs)
    ]
    return {"max_batch_size": 8, "input": tensors[0], "output": tensors[1]}


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ({"ids": ("TYPE_INT64", [26])}, {"click": ("TYPE_FP32", [1]), "OUTPUT0": ("TYPE_FP32", [1])}),
        ({"ids": ("TYPE_INT64", [-1])}, {"OUTPUT0": ("TYPE_FP32", [-1])}),
    ],
    ids=["as written", "open sizes, fewer outputs"],
)
def test_a_version_that_config_pbtxt_describes_is_served(inputs: Any, outputs: Any) -> None:
    """Users may leave outputs out, and sizes open."""
    check_config(_json(inputs, outputs), spec_of([IDS], [CLICK], labels=("click",), label_outputs=("click",)))


@pytest.mark.parametrize(
    ("inputs", "outputs", "difference"),
    [
        (
            {"ids": ("TYPE_INT64", [25])},
            {},
            r"input is 'ids' TYPE_INT64 \[-1, 25\], but 'ids' TYPE_INT64 \[-1, 26\] in the",
        ),
        ({"ids": ("TYPE_INT64", [26, 1])}, {}, "input is 'ids'"),
        ({"ids": ("TYPE_INT32", [26])}, {}, "input is 'ids' TYPE_INT32"),
        ({"keys": ("TYPE_INT64", [26])}, {}, "input is 'keys' .*, but absent in the"),
        ({}, {}, "input is absent, but 'ids'"),
        ({"ids": ("TYPE_INT64", [26])}, {"like": ("TYPE_FP32", [1])}, "output is 'like' .*, but absent in the"),
        ({"ids": ("TYPE_INT64", [26])}, {"click": ("TYPE_FP32", [2])}, r"output is 'click' TYPE_FP32 \[-1, 2\]"),
    ],
)
def test_a_version_that_config_pbtxt_does_not_describe_is_refused(inputs: Any, outputs: Any, difference: str) -> None:
    """It would go live and refuse all requests of its clients."""
    with pytest.raises(ConfigurationError, match=difference):
        check_config(_json(inputs, outputs), spec_of([IDS], [CLICK]))


def test_a_decoupled_model_is_refused() -> None:
    """It would go live and fail all requests."""
    config = _json({"ids": ("TYPE_INT64", [26])}, {})
    check_config({**config, "model_transaction_policy": {"decoupled": False}}, spec_of([IDS], [CLICK]))
    with pytest.raises(ConfigurationError, match="`decoupled: true`, but hotrow answers"):
        check_config({**config, "model_transaction_policy": {"decoupled": True}}, spec_of([IDS], [CLICK]))


def test_a_reshape_in_config_pbtxt_counts() -> None:
    """If Triton reshapes a tensor, the model gets the new shape."""
    config = {
        "max_batch_size": 8,
        "input": [{"name": "id", "data_type": "TYPE_INT64", "dims": [1], "reshape": {"shape": []}}],
        "output": [{"name": "like", "data_type": "TYPE_FP32", "dims": [1], "reshape": {"shape": []}}],
    }
    check_config(config, spec_of([TensorSpec("id", "int64", (-1,))], [LIKE]))


@pytest.mark.parametrize(
    ("batching", "name"),
    [
        ({"control_input": [{"name": "START", "control": [{"kind": "CONTROL_SEQUENCE_START"}]}]}, "START"),
        ({"state": [{"input_name": "before", "output_name": "after"}]}, "before"),
    ],
    ids=["control", "state"],
)
def test_inputs_that_triton_adds_are_refused(batching: dict[str, Any], name: str) -> None:
    """The version would go live and refuse every request of a sequence."""
    config = {**_json({"ids": ("TYPE_INT64", [26])}, {}), "sequence_batching": {"direct": {}, **batching}}

    with pytest.raises(ConfigurationError, match=f"lets Triton add the input '{name}' to the requests"):
        check_config(config, spec_of([IDS], [CLICK]))


def test_requests_may_come_in_sequences() -> None:
    """Triton then sends those of one sequence to one instance, which changes no answer."""
    config = {**_json({"ids": ("TYPE_INT64", [26])}, {}), "sequence_batching": {"direct": {}, "control_input": []}}

    check_config(config, spec_of([IDS], [CLICK]))


def _inputs(*tensors: dict[str, Any], max_batch_size: int = 8) -> dict[str, Any]:
    return {"max_batch_size": max_batch_size, "input": [{"data_type": "TYPE_INT64", **tensor} for tensor in tensors]}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (_inputs({"dims": [1], "reshape": {"shape": []}}), True),
        (_inputs({"dims": [1], "reshape": {}}, {"dims": [-1]}), True),
        (_inputs({"dims": [1], "data_type": "TYPE_STRING"}), True),
        (_inputs({"dims": [1], "reshape": {"shape": []}}, {"dims": [4, 4], "reshape": {"shape": [16]}}), False),
        (_inputs({"dims": [-1]}, {"dims": [3]}), False),
        (_inputs({"dims": [-1]}, max_batch_size=0), False),
    ],
    ids=["no dimension", "open", "strings", "a fixed one, reshaped", "a fixed one", "samples are not counted"],
)
def test_a_model_may_get_requests_that_triton_does_not_withstand(config: dict[str, Any], expected: bool) -> None:
    """Those of no samples, which Triton refuses only if an input of fixed size lacks its bytes."""
    assert may_be_empty(config, spec_of([IDS], [CLICK])) == expected
    assert not may_be_empty(config, spec_of([IDS], [CLICK], layout="hugectr"))  # these always have a max_batch_size
