"""Concat inputs in networks of less precision: as exact as those networks are without them. And in damaged networks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper

from inference_session.config import SessionConfig
from inference_session.dense_engine.base import ConcatOperands
from inference_session.dense_engine.create import create_engine
from inference_session.device.host import HOST
from inference_session.errors import ModelFormatError
from inference_session.execution.concat_operands import concat_operands
from inference_session.model_spec import DENSE_FILE
from tests.testing import concat_model
from tests.testing.onnx_models import model_of


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_concat_inputs_in_less_precision(precision: str, tmp_path: Path, bfloat16: None) -> None:
    """The engine reads the concat input, and rounds as it does the same network with inputs of its own."""
    rng = np.random.default_rng(concat_model.CONCAT_SEED)
    model = concat_model.write(tmp_path / "1", rng)
    config, path = SessionConfig(device="cpu", dense_precision=precision), model.directory / DENSE_FILE
    plain = create_engine(path, config, HOST)
    engine = create_engine(path, config, HOST, (), concat_operands(model.spec, on_gpu=False))
    (concat,) = engine.concat_inputs
    inputs = {
        tensor.name: rng.standard_normal((7, *tensor.shape[1:])).astype(np.float32)
        for tensor in model.network.get_inputs()
    }
    matrix = np.full((7, concat.width), np.nan, np.float32)
    matrix[:, : concat.first_given] = np.concatenate([inputs[name].reshape(7, -1) for name in concat.vectors], axis=1)
    given = {each.name: inputs[each.name] for each in concat.given}

    found = engine.run({concat.name: matrix, **given}, ["out0", "out1"])

    for array, wanted in zip(found, plain.run(inputs, ["out0", "out1"]), strict=True):
        np.testing.assert_allclose(array, wanted, atol=0.02 * np.abs(wanted).max())


def _shorten(model: ModelProto) -> None:
    model.graph.initializer[0].raw_data = model.graph.initializer[0].raw_data[:-5]


def _turn_in_circles(model: ModelProto) -> None:
    model.graph.node.append(helper.make_node("Concat", ["circle", "dense"], ["circle"], axis=1))


@pytest.mark.parametrize(
    "damage",
    [
        lambda model: model.graph.node[0].ClearField("attribute"),
        lambda model: model.graph.node[1].input.pop(),
        _shorten,
        _turn_in_circles,
    ],
)
def test_a_damaged_network_is_refused_as_ever(damage: Callable[[ModelProto], Any], tmp_path: Path) -> None:
    """The engine says what is wrong with it, not what would give it concat inputs."""
    text = "g (float[n, 4] v, float[n, 3] dense) => (float[n, 2] y) { x = Concat<axis = 1>(v, dense) y = MatMul(x, w) }"
    model, inputs = model_of(text, {"w": np.ones((7, 2), np.float32)}), ConcatOperands({"v": 4}, {"dense": 3})
    onnx.save(model, tmp_path / "whole.onnx")
    assert create_engine(tmp_path / "whole.onnx", SessionConfig(device="cpu"), HOST, (), inputs).concat_inputs
    damage(model)
    (tmp_path / "damaged.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelFormatError, match=r"damaged\.onnx"):
        create_engine(tmp_path / "damaged.onnx", SessionConfig(device="cpu"), HOST, (), inputs)


def test_a_network_without_concats_is_not_read_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the process loads no ONNX, which would take a tenth of its start."""
    model = model_of("g (float[n, 4] v, float[n, 4] dense) => (float[n, 4] y) { y = Add(v, dense) }", {})
    onnx.save(model, tmp_path / "sum.onnx")
    monkeypatch.setitem(sys.modules, "inference_session.dense_engine.rewrites.concat_inputs", None)

    operands = ConcatOperands({"v": 4}, {"dense": 4})
    engine = create_engine(tmp_path / "sum.onnx", SessionConfig(device="cpu"), HOST, (), operands)

    assert not engine.concat_inputs
