"""External data of a version's networks: inside its folder, listed, and never what a link leads to elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from inference_session import InferenceSession
from inference_session.errors import ModelFormatError
from inference_session.version_directory import manifest
from inference_session.version_directory.external_data import external_files
from inference_session.version_directory.publishing import publish_version
from tests.testing import small_model


def external(location: str, name: str = "factor") -> TensorProto:
    """Ten float32 at the beginning of a file."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[10], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "0"), ("length", "40")):
        tensor.external_data.add(key=key, value=value)
    return tensor


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A version directory two folders below the file `secret.bin`, which is no part of it."""
    (tmp_path / "secret.bin").write_bytes(np.arange(10, dtype=np.float32).tobytes())
    small_model.write(tmp_path / "ctr" / "1")
    return tmp_path / "ctr" / "1"


def scale_by(version: Path, network: str, location: str) -> None:
    """Let a network multiply its first output by external data, and rewrite the manifest."""
    model = onnx.load(version / network)
    last = next(node for node in model.graph.node if node.output[0] in ("wide", "doubled"))
    result = last.output[0]
    last.output[0] = "unscaled"
    model.graph.node.append(helper.make_node("Cast", ["factor"], ["cast"], to=7 if network == "keys.onnx" else 1))
    model.graph.node.append(helper.make_node("Mul", ["unscaled", "cast"], [result]))
    model.graph.initializer.append(external(location))
    (version / network).write_bytes(model.SerializeToString())
    manifest.write_manifest(version)


def opened(version: Path, repository: Path) -> None:
    InferenceSession.open(version).close()


def published(version: Path, repository: Path) -> None:
    publish_version(version, repository, "ctr")


@pytest.mark.parametrize("act", [opened, published])
@pytest.mark.parametrize("network", ["dense.onnx", "keys.onnx"])
@pytest.mark.parametrize(
    "location", ["../../secret.bin", "tables/../../../secret.bin", "{absolute}", "link.bin", "far/x"]
)
def test_external_data_outside_the_version_are_refused(
    location: str, network: str, act: Callable[[Path, Path], None], version: Path, tmp_path: Path
) -> None:
    """Even if ONNX Runtime accepts it, and however the path leads there."""
    (version / "link.bin").symlink_to(tmp_path / "secret.bin")
    (version / "far").symlink_to(tmp_path)
    scale_by(version, network, location.format(absolute=tmp_path / "secret.bin"))

    with pytest.raises(ModelFormatError, match="outside its"):
        act(version, tmp_path / "repository")
    assert not (tmp_path / "repository").exists()


def test_external_data_inside_the_version_are_read_and_published(version: Path, tmp_path: Path) -> None:
    """A network of more than 2 GB lies in two files."""
    (tmp_path / "secret.bin").rename(version / "dense.onnx.data")
    scale_by(version, "dense.onnx", "dense.onnx.data")

    report = publish_version(version, tmp_path / "repository", "ctr")

    request = small_model.random_inputs(3, np.random.default_rng(0))
    with InferenceSession.open(report.version_dir) as session:
        wide = session.run(request, ["wide"])["wide"]
    expected = small_model.expected(small_model.random_tables(0), request)["wide"] * np.arange(10)
    np.testing.assert_allclose(wide, expected, rtol=1e-5)


def test_external_data_that_the_manifest_leaves_out_are_refused(version: Path, tmp_path: Path) -> None:
    """Damage of them would not be noticed."""
    scale_by(version, "dense.onnx", "dense.onnx.data")
    (tmp_path / "secret.bin").rename(version / "dense.onnx.data")

    with pytest.raises(ModelFormatError, match=r"does not list dense\.onnx\.data"):
        InferenceSession.open(version)


def placed_in_constant(tensor: TensorProto) -> onnx.GraphProto:
    node = helper.make_node("Constant", [], ["c"], value=tensor)
    return helper.make_graph([node], "g", [], [])


def placed_in_branch(tensor: TensorProto) -> onnx.GraphProto:
    inner = helper.make_graph([], "inner", [], [], [tensor])
    return helper.make_graph([helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner)], "g", [], [])


def placed_in_sparse(tensor: TensorProto) -> onnx.GraphProto:
    graph = helper.make_graph([], "g", [], [])
    indices = numpy_helper.from_array(np.array([0]), "i")
    graph.sparse_initializer.append(helper.make_sparse_tensor(tensor, indices, [10]))
    return graph


@pytest.mark.parametrize("place", [placed_in_constant, placed_in_branch, placed_in_sparse])
def test_tensors_are_found_wherever_they_are(place: Callable[[TensorProto], onnx.GraphProto], tmp_path: Path) -> None:
    """In attributes, in the graphs of control flow, in sparse tensors."""
    onnx.save(helper.make_model(place(external("weights"))), tmp_path / "network.onnx")

    assert external_files(tmp_path / "network.onnx") == [PurePosixPath("weights")]


def test_tensors_in_functions_are_found(tmp_path: Path) -> None:
    """A function's body is a separate list of nodes."""
    node = helper.make_node("Constant", [], ["c"], value=external("weights"))
    function = helper.make_function("own", "f", [], ["c"], [node], [helper.make_opsetid("", 17)])
    model = helper.make_model(helper.make_graph([], "g", [], []), functions=[function])
    onnx.save(model, tmp_path / "network.onnx")

    assert external_files(tmp_path / "network.onnx") == [PurePosixPath("weights")]


@pytest.mark.parametrize(
    "location", ["", ".", "..", "/etc/passwd", "C:\\x", "a\\..\\b", "a\0b", "*/_ORT_MEM_ADDR_/*", "a/../../b"]
)
def test_odd_locations_are_refused(location: str, tmp_path: Path) -> None:
    """No path at all, other systems' paths, and ONNX Runtime's way of naming its own memory."""
    onnx.save(helper.make_model(placed_in_constant(external(location))), tmp_path / "network.onnx")

    with pytest.raises(ModelFormatError, match="outside its own folder"):
        external_files(tmp_path / "network.onnx")


@pytest.mark.parametrize("content", [b"", b"\x08", b"\x3a\x7f", b"\x0b\x0c"])
def test_a_file_that_is_no_network_is_refused(content: bytes, tmp_path: Path) -> None:
    """By its name."""
    (tmp_path / "network.onnx").write_bytes(content)

    with pytest.raises(ModelFormatError, match=r"network\.onnx: not readable"):
        external_files(tmp_path / "network.onnx")


def test_graphs_in_each_other_without_end_are_refused(tmp_path: Path) -> None:
    """Hundreds of nested graphs do not overflow the stack."""
    content = b""
    for _ in range(500):
        for tag in (b"\x32", b"\x2a", b"\x0a"):  # a graph in an attribute, in a node, in a graph
            content = tag + _varint(len(content)) + content
    (tmp_path / "network.onnx").write_bytes(b"\x3a" + _varint(len(content)) + content)

    with pytest.raises(ModelFormatError, match="messages are nested more than"):
        external_files(tmp_path / "network.onnx")


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + _varint(value >> 7)
