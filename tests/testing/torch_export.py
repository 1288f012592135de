"""Writes PyTorch modules as ONNX by either of PyTorch's exporters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def export_torch(path: Path, module: Any, inputs: dict[str, Any], dims: dict[str, Any], *, dynamo: bool) -> None:
    """Write a module that takes these arrays, in their order.

    Args:
        dims: the symbol of the first dimension of each input.
    """
    torch = pytest.importorskip("torch")
    arguments = tuple(torch.from_numpy(array) for array in inputs.values())
    if dynamo:
        pytest.importorskip("onnxscript")
        known = {symbol: torch.export.Dim(symbol) for symbol in dims.values()}
        shapes = tuple({0: known[dims[name]]} for name in inputs)
        options: dict[str, Any] = {"dynamic_shapes": (shapes,), "external_data": False, "verbose": False}
    else:
        options = {"dynamic_axes": {name: {0: symbol} for name, symbol in dims.items()}, "opset_version": 17}
    torch.onnx.export(module.eval(), arguments, str(path), input_names=list(inputs), dynamo=dynamo, **options)
