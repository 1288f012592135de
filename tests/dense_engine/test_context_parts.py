"""A network that ranks candidates, divided into what reads the context alone and the rest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from inference_session.dense_engine.onnx import OnnxEngine
from inference_session.dense_engine.rewrites.context_parts import divide


@pytest.mark.parametrize(
    "dtype",
    ["float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"],
)
def test_rows_of_any_type_pass_from_one_part_to_the_other(tmp_path: Path, dtype: str) -> None:
    """Both parts one after the other answer as the whole network."""
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [
        helper.make_node("Cast", ["user"], ["rows"], to=element),
        helper.make_node("Gather", ["rows", "row"], ["repeated"]),
        helper.make_node("Cast", ["repeated"], ["score"], to=TensorProto.FLOAT),
    ]
    inputs = [
        helper.make_tensor_value_info("user", TensorProto.FLOAT, ["contexts", 2]),
        helper.make_tensor_value_info("row", TensorProto.INT64, ["candidates"]),
    ]
    outputs = [helper.make_tensor_value_info("score", TensorProto.FLOAT, ["candidates", 2])]
    graph = helper.make_graph(nodes, "ranking", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "r.onnx")
    user, row = np.array([[1, 0], [0, 1]], np.float32), np.array([0, 1, 1])

    parts = divide(tmp_path / "r.onnx", ["user"])

    context = OnnxEngine(parts.context, num_threads=1)
    candidates = OnnxEngine(parts.candidates, num_threads=1)
    (rows,) = context.run({"user": user}, ["rows"])
    (score,) = candidates.run({"rows": rows, "row": row}, ["score"])
    assert rows.dtype == dtype
    np.testing.assert_array_equal(score, user[row])
