"""Model files whole, split and damaged, and version directories that appear whole or not at all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from inference_session import InferenceSession
from inference_session.errors import ConfigurationError, HotrowError, ModelFormatError, UnsupportedModelError
from inference_session.importers.onnx import evaluation, import_onnx
from inference_session.version_directory.manifest import verify
from tests.testing.onnx_models import (
    KEYS,
    TWO_LOOKUPS,
    assert_same,
    check,
    import_model,
    model_of,
    redirect,
    table,
    two_lookups,
    write_split,
)


def _left(tmp_path: Path) -> list[str]:
    return sorted(p.name for p in (tmp_path / "repository").rglob("*")) if (tmp_path / "repository").exists() else []


@pytest.mark.parametrize("threshold", [0, 1024])
def test_external_data_are_read(tmp_path: Path, threshold: int) -> None:
    """Tables and small weights in a file next to the model are found."""
    path = write_split(tmp_path, threshold)

    report = import_onnx(path, tmp_path / "repository", "m")

    assert_same(report, path, {"keys": KEYS})
    assert (report.version_dir / "tables/w/emb_vector").read_bytes() == table().tobytes()


def test_the_staged_version_holds_no_more_than_it_should(tmp_path: Path) -> None:
    """No trace of the verification stays, and the manifest vouches for the rest."""
    report = import_model(tmp_path, two_lookups())

    verify(report.version_dir, checksums=True)
    files = sorted(p.relative_to(report.version_dir).as_posix() for p in report.version_dir.rglob("*") if p.is_file())
    assert files == ["MANIFEST.json", "dense.onnx", "session.json", "tables/w/emb_vector"]
    assert json.loads((report.version_dir / "session.json").read_text())["source"] == "model.onnx"


def test_networks_too_large_for_one_file_are_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond protobuf's 2 GB the dense weights lie next to dense.onnx (here the limit is lower)."""
    monkeypatch.setattr(evaluation, "MAX_INLINE_BYTES", 1000)
    graph = TWO_LOOKUPS.replace("2, 3] y", "2, 512] y")

    report = import_model(tmp_path, model_of(graph, {"w": table(), "d": table(4, 512)}))

    assert (report.version_dir / "dense.onnx.data").stat().st_size >= 4 * 512 * 4
    assert report.spec.joinable
    assert not list(report.version_dir.glob(".original*"))
    assert_same(report, tmp_path / "model.onnx", {"keys": KEYS})
    verify(report.version_dir, checksums=True)


@pytest.mark.parametrize("location", ["../model.data", "/etc/passwd", "a/../../model.data", "", "C:\\model.data"])
def test_external_data_outside_the_folder_are_refused(tmp_path: Path, location: str) -> None:
    """A model may not name files of the rest of the machine."""
    (tmp_path / "inner").mkdir()
    path = write_split(tmp_path / "inner")
    redirect(path, location=location)

    with pytest.raises(ModelFormatError, match="outside the model's folder"):
        import_onnx(path, tmp_path / "repository", "m")

    assert not _left(tmp_path)


def test_links_that_leave_the_folder_are_refused(tmp_path: Path) -> None:
    """A symbolic link must not lead out of the folder."""
    (tmp_path / "inner").mkdir()
    path = write_split(tmp_path / "inner")
    (tmp_path / "inner/model.data").rename(tmp_path / "model.data")
    (tmp_path / "inner/model.data").symlink_to(tmp_path / "model.data")

    with pytest.raises(ModelFormatError, match="outside the model's folder"):
        import_onnx(path, tmp_path / "repository", "m")


def test_missing_and_short_external_data_are_named(tmp_path: Path) -> None:
    """A data file that is cut short, and one that is not there, are refused by name."""
    path = write_split(tmp_path)
    data = tmp_path / "model.data"
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(ModelFormatError, match=r"model\.data: 100 bytes"):
        import_onnx(path, tmp_path / "repository", "m")
    data.unlink()
    with pytest.raises(ModelFormatError, match=r"model\.data: not readable"):
        import_onnx(path, tmp_path / "repository", "m")
    assert not _left(tmp_path)


@pytest.mark.parametrize("entries", [{"offset": "-1"}, {"length": "12"}, {"offset": "many"}, {"length": "99999999999"}])
def test_external_data_that_do_not_fit_the_shape_are_refused(tmp_path: Path, entries: dict[str, str]) -> None:
    """Offset and length must agree with the file and the tensor."""
    path = write_split(tmp_path)
    redirect(path, **entries)

    with pytest.raises(ModelFormatError, match=r"model\.(onnx|data)"):
        import_onnx(path, tmp_path / "repository", "m")


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x3a\xff\xff\xff\x7f", b"\x08\x08", bytes(100)])
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    """Anything but an ONNX file is refused with the file's name."""
    path = tmp_path / "model.onnx"
    path.write_bytes(content)

    with pytest.raises(ModelFormatError, match=r"model\.onnx"):
        import_onnx(path, tmp_path / "repository", "m")

    assert not _left(tmp_path)


@settings(max_examples=60)
@given(data=st.data())
def test_damaged_models_end_in_our_own_errors(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A byte changed or bytes cut off lead to an error of ours or to a working model, and never leave files behind."""
    tmp_path = tmp_path_factory.mktemp("damaged")
    content = bytearray(model_of(TWO_LOOKUPS, {"w": table(10), "d": table(4, 3)}).SerializeToString())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[at:]
    path = tmp_path / "model.onnx"
    path.write_bytes(content)

    try:
        import_onnx(path, tmp_path / "repository", "m", min_rows=5)
    except HotrowError:
        assert not _left(tmp_path)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    """The message names the missing path; so it does for a pipe, whose writer nobody waits for."""
    os.mkfifo(tmp_path / "pipe.onnx")
    for name in ("nowhere.onnx", "pipe.onnx"):
        with pytest.raises(ModelFormatError, match=re.escape(name)):
            import_onnx(tmp_path / name, tmp_path / "repository", "m")


def test_models_that_onnx_runtime_does_not_take_are_refused(tmp_path: Path) -> None:
    """An unknown operator is reported at import, not at the first request."""
    model = model_of("m (int64[b] k) => (float[b, 4] y) { v = Gather(w, k)  y = Bogus(v) }", {"w": table()})

    with pytest.raises(ModelFormatError, match=r"ONNX Runtime cannot load this model: it has no operator Bogus\."):
        import_model(tmp_path, model)

    assert not _left(tmp_path)


def test_operators_of_a_library_that_is_not_loaded_are_named(tmp_path: Path) -> None:
    """tf2onnx writes those of onnxruntime-extensions on demand; ONNX Runtime named the first one, and no way out."""
    text = "m (string[b] s) => (int64[b] y, int64[b] z) { y = hash(s, n)  z = Cast<to = 7>(s) }"
    model = model_of(text, {"n": np.array([10])})
    model.graph.node[0].op_type, model.graph.node[0].domain = "StringToHashBucketFast", "ai.onnx.contrib"
    model.opset_import.append(helper.make_opsetid("ai.onnx.contrib", 1))

    with pytest.raises(ModelFormatError, match=r"no operator ai\.onnx\.contrib\.StringToHashBucketFast\..*let clients"):
        import_model(tmp_path, model)


def test_refusals_are_one_line_and_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """ONNX Runtime's reasons have several lines; names that are not text make it print and try again."""
    path = tmp_path / "model.onnx"
    graph = "agraph (int64[N, 2] x) => (float[N, 2, 4] y) { y = Gather(W, x) }"
    onnx.save(model_of(graph, {"W": table()}), path)
    damaged = path.read_bytes().replace(b"Gather", b"Gath\xffr")
    path.write_bytes(damaged)

    with pytest.raises(HotrowError) as caught:
        import_onnx(path, tmp_path / "repository", "m")

    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().out == ""


def test_outputs_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    """Triton's tensors cannot hold a sequence."""
    model = model_of("m (int64[b] k) => (float[b, 4] v) { v = Gather(w, k) }", {"w": table()})
    model.graph.node.append(helper.make_node("SequenceConstruct", ["v"], ["s"]))
    model.graph.output.append(helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None))

    with pytest.raises(UnsupportedModelError, match=r"'s' is sequence.*zipmap=False"):
        import_model(tmp_path, model)


def test_two_outputs_of_one_name_are_named(tmp_path: Path) -> None:
    """ONNX Runtime takes them; requests name outputs."""
    model = two_lookups()
    model.graph.output.append(model.graph.output[0])
    with pytest.raises(UnsupportedModelError, match="two outputs are called 'y'; export only one"):
        import_model(tmp_path, model)


def test_an_input_that_is_called_like_another_value_is_named(tmp_path: Path) -> None:
    """PyTorch's exporter does that with a feature `cat`. The message spoke of values that depend on themselves."""
    model = model_of("m (int64[b] k, float[b, 4] x) => (float[b, 8] y) { v = Gather(w, k) }", {"w": table()})
    model.graph.input[1].name = "cat"
    model.graph.node.append(helper.make_node("Concat", ["v", "cat"], ["cat"], axis=1))
    model.graph.node.append(helper.make_node("Identity", ["cat"], ["y"]))

    with pytest.raises(ModelFormatError, match=r"'cat' is an input and also the result of an operator.*another name"):
        import_model(tmp_path, model)


@pytest.mark.parametrize("shape", ["b", "b, l"])
def test_outputs_whose_rank_depends_on_sizes_are_refused(tmp_path: Path, shape: str) -> None:
    """No shape describes them, and a client of one sample would get another rank. The message says what to change."""
    model = model_of(f"m (int64[{shape}] k) => (float[n] y) {{ v = Gather(w, k) y = Squeeze(v) }}", {"w": table()})

    with pytest.raises(UnsupportedModelError, match=r"output 'y' has \d or \d dimensions.*give Squeeze its axes"):
        import_model(tmp_path, model)


@pytest.mark.parametrize("name", ["z", "y"])
def test_types_that_numpy_lacks_are_refused(tmp_path: Path, name: str) -> None:
    """A session could neither read nor answer them."""
    types = {"z": "float", "y": "float", name: "bfloat16"}
    text = f"m (int64[b] k, {types['z']}[b, 4] z) => ({types['y']}[b, 4] y) {{ v = Gather(w, k) y = CastLike(v, z) }}"

    with pytest.raises(UnsupportedModelError, match=f"'{name}' is bfloat16, which NumPy lacks"):
        import_model(tmp_path, model_of(text, {"w": table()}))


def test_versions_count_up(tmp_path: Path) -> None:
    """Without a number the next one is taken; 1 comes first, and gaps are not filled."""
    assert import_model(tmp_path, two_lookups()).version_dir.name == "1"
    assert import_model(tmp_path, two_lookups(), version=7).version_dir.name == "7"
    assert import_model(tmp_path, two_lookups()).version_dir.name == "8"


def test_tables_that_are_called_otherwise_than_before_are_named(tmp_path: Path) -> None:
    """Exporters number tables anew at times; stores and update streams would go on under the old name."""
    graph = "m (int64[b] keys) => (float[b, 4] y) {{ y = Gather({}, keys) }}"
    versions = [import_model(tmp_path, model_of(graph.format(name), {name: table()})) for name in ("w_7", "w_7", "w_9")]

    assert [[note for note in report.notes if "stores and update" in note] for report in versions[:2]] == [[], []]
    assert "Note: version 2 has the tables w_7, in place of which this one has w_9; stores and" in str(versions[2])


@pytest.mark.parametrize("options", [{"version": 1}, {"version": 0}, {"min_rows": 0}])
def test_bad_arguments_are_refused(tmp_path: Path, options: dict[str, int]) -> None:
    """An existing version, and numbers that make no sense, change nothing."""
    before = import_model(tmp_path, two_lookups()).version_dir
    files = _left(tmp_path)

    with pytest.raises(ConfigurationError):
        import_model(tmp_path, two_lookups(), **options)

    assert _left(tmp_path) == files
    verify(before, checksums=True)


def test_sizes_that_zeros_make_smaller_are_open(tmp_path: Path) -> None:
    """A version that is imported can be opened, which asks it with zeros, also where the model declares no shape."""
    graph = """m (int64[b, 2] keys, int64[b] n) => (float y) {
        v = Gather(w, keys)  flat = Reshape(v, shape)  most = ReduceMax(n)  y = Slice(flat, begin, most, axis) }"""
    constants = {"w": table(), "shape": np.array([-1, 8]), "begin": np.array([0]), "axis": np.array([1])}
    inputs = [{"keys": np.array([[1, 2], [3, 999]]), "n": np.array(lengths)} for lengths in ([1, 3], [9, 0], [0, 0])]

    report = check(tmp_path, model_of(graph, constants), *inputs)

    assert report.spec.outputs[0].shape == (-1, -1)
    assert len(report.spec.labels) == 8


def test_an_output_whose_rank_zeros_change_is_refused(tmp_path: Path) -> None:
    """At import, by its name: no session could open it."""
    graph = """m (int64[b, 2] keys) => (float y) {
        v = Gather(w, keys)  f = Reshape(v, shape)  s = ReduceMax<keepdims = 0>(keys)
        is_flat = Cast<to = 9>(s)
        y = If(is_flat)<then_branch = t() => (float o) { o = Identity(f) },
                        else_branch = e() => (float p) { p = Identity(v) }> }"""

    with pytest.raises(UnsupportedModelError, match="output 'y' has 2 or 3 dimensions, depending on the inputs"):
        import_model(tmp_path, model_of(graph, {"w": table(), "shape": np.array([-1, 8])}))


def test_an_output_without_a_shape_of_a_model_that_takes_no_generated_inputs(tmp_path: Path) -> None:
    """ONNX Runtime infers its shape. Its rows were taken for scalars, and the version could not be loaded."""
    text = """g (int64[n] user) => (float[n, 4] y) {
        row = Sub(user, first)
        y = Gather(table, row)
    }"""
    model = model_of(text, {"table": table(), "first": np.array(10**9)})
    model.graph.output[0].type.tensor_type.ClearField("shape")

    report = import_model(tmp_path, model)

    assert report.spec.outputs[0].shape == (-1, 4)
    with InferenceSession.open(report.version_dir) as session:
        np.testing.assert_array_equal(session.run({"user": np.array([10**9 + 7])})["y"], table()[7:8])


def test_an_output_of_unknown_shape_of_a_model_that_takes_no_generated_inputs(tmp_path: Path) -> None:
    """Nobody knows what it is."""
    text = """g (int64[n] user, int64[k] shape) => (float[n, 4] y) {
        row = Sub(user, first)
        vectors = Gather(table, row)
        y = Reshape(vectors, shape)
    }"""
    model = model_of(text, {"table": table(), "first": np.array(10**9)})
    model.graph.output[0].type.tensor_type.ClearField("shape")

    with pytest.raises(UnsupportedModelError, match="output 'y' has no shape, and the model cannot be run on"):
        import_model(tmp_path, model)


def test_a_fixed_number_of_samples_is_noted(tmp_path: Path) -> None:
    """As PyTorch exports a model without dynamic_shapes; the note names the inputs and the way out."""
    model = model_of("g (int64[4] user, float[n, 4] x) => (float[4, 4] y) { y = Gather(w, user) }", {"w": table()})

    (note,) = import_model(tmp_path, model).notes

    assert note.startswith("the first dimension of 'user' has a fixed size; requests are served one by one; if it")
    assert "dynamic_shapes" in note


def test_a_file_of_pytorch_is_named(tmp_path: Path) -> None:
    """It was reported as damaged protobuf."""
    with zipfile.ZipFile(tmp_path / "model.onnx", "w") as archive:
        archive.writestr("model/data.pkl", b"")

    with pytest.raises(ModelFormatError, match=r"it is a ZIP archive, as torch\.save and Keras write"):
        import_onnx(tmp_path / "model.onnx", tmp_path / "repository", "m")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x89HDF\r\n\x1a\n" + bytes(8), "it is an HDF5 file, as Keras writes"),
        (b"\x80\x04\x95\x10\x00\x00", "it is a pickle; hotrow reads none"),
        (b"\x1c\x00\x00\x00ORTM" + bytes(8), "ONNX Runtime's own format"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "`git lfs pull` fetches it"),
    ],
)
def test_files_of_other_formats_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    """They were reported as damaged protobuf."""
    path = tmp_path / "model.onnx"
    path.write_bytes(content)

    with pytest.raises(ModelFormatError, match=message):
        import_onnx(path, tmp_path / "repository", "m")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".hidden", "a b", "a;b", "ä"])
def test_names_that_are_no_folder_are_refused(tmp_path: Path, name: str) -> None:
    """A model's name is the name of its folder, which `hotrow serve` serves."""
    onnx.save(two_lookups(), tmp_path / "model.onnx")

    with pytest.raises(ConfigurationError, match="cannot be the name of a model"):
        import_onnx(tmp_path / "model.onnx", tmp_path / "repository", name)


def test_a_leftover_of_a_killed_import_is_replaced(tmp_path: Path) -> None:
    """A stale draft folder of the same version does not get in the way."""
    stale = tmp_path / "repository/m/.tmp-1"
    stale.mkdir(parents=True)
    (stale / "half").write_text("written")

    report = import_model(tmp_path, two_lookups())

    assert not stale.exists()
    assert not (report.version_dir / "half").exists()


def test_progress_tells_the_bytes_written_and_checked(tmp_path: Path) -> None:
    """Each table is counted when it is written and when its checksum is taken."""
    seen: list[int] = []

    report = import_model(tmp_path, two_lookups(), progress=seen.append)

    listed = sum(p.stat().st_size for p in report.version_dir.rglob("*") if p.is_file() and p.name != "MANIFEST.json")
    assert sum(seen) == table().nbytes + listed


# Not ru_maxrss: that also remembers the memory of the process which started this one.
_PEAK = """
import sys
from pathlib import Path
from inference_session.importers.onnx import import_onnx, importer

def peak():
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024

before = peak()
report = import_onnx(Path(sys.argv[1]), Path(sys.argv[2]), "m")
assert len(report.tables) == 2
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("external", [True, False])
def test_tables_are_streamed(tmp_path: Path, external: bool) -> None:
    """Importing 200 MB takes less than half of the memory that the largest table would, beside Python's own."""
    names, num_rows, dim = "ab", 1_600_000, 16
    reads = " ".join(f"v{n} = Gather({n}, keys)" for n in names)
    model = model_of(f"m (int64[s] keys) => (float[s, 16] y) {{ {reads} y = Add(va, vb) }}", {})
    table_bytes = num_rows * dim * 4

    def _bytes(seed: int) -> bytes:
        return np.random.default_rng(seed).bytes(table_bytes // 200)

    for i, name in enumerate(names):
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[num_rows, dim])
        if external:
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", "w.data"), ("offset", i * table_bytes), ("length", table_bytes)):
                tensor.external_data.add(key=key, value=str(value))
        else:
            tensor.raw_data = _bytes(i) * 200
        model.graph.initializer.append(tensor)
    if external:
        with (tmp_path / "w.data").open("wb") as file:
            for i in range(len(names)):
                file.write(_bytes(i) * 200)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    del model

    arguments = [sys.executable, "-c", _PEAK, str(tmp_path / "model.onnx"), str(tmp_path / "repository")]
    grown = int(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)

    assert grown <= table_bytes / 2, f"{grown / 1e6:.0f} MB"
