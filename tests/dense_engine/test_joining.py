"""Joined inputs in networks of less precision: as exact as those networks are without them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inference_session.config import SessionConfig
from inference_session.dense_engine import create_engine
from inference_session.device.host import HOST
from inference_session.execution.joined_lookups import joinable_inputs
from inference_session.model_spec import DENSE_FILE
from tests.testing import joined_model


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_joined_inputs_in_less_precision(precision: str, tmp_path: Path, bfloat16: None) -> None:
    """The engine reads the joined input, and rounds as it does the same network with inputs of its own."""
    rng = np.random.default_rng(joined_model.JOINED_SEED)
    model = joined_model.write(tmp_path / "1", rng)
    config, path = SessionConfig(device="cpu", dense_precision=precision), model.directory / DENSE_FILE
    plain = create_engine(path, config, HOST)
    joining = create_engine(path, config, HOST, (), joinable_inputs(model.spec))
    (joined,) = joining.joined
    inputs = {
        tensor.name: rng.standard_normal((7, *tensor.shape[1:])).astype(np.float32)
        for tensor in model.network.get_inputs()
    }
    matrix = np.full((7, joined.width), np.nan, np.float32)
    matrix[:, : joined.first_given] = np.concatenate([inputs[name].reshape(7, -1) for name in joined.vectors], axis=1)
    given = {each.name: inputs[each.name] for each in joined.given}

    found = joining.run({joined.name: matrix, **given}, ["out0", "out1"])

    for array, wanted in zip(found, plain.run(inputs, ["out0", "out1"]), strict=True):
        np.testing.assert_allclose(array, wanted, atol=0.02 * np.abs(wanted).max())
