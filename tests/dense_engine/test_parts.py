"""Parts of networks, as far as other tests do not see them."""

from __future__ import annotations

import pytest
from onnx import helper

from inference_session.dense_engine.rewrites.parts import most_arrays


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(1, 1), (40, 1), (1, 33), (0, 0)])
def test_the_largest_node_is_found(num_inputs: int, num_outputs: int) -> None:
    """By its inputs or by its outputs, among others."""
    large = helper.make_node("Large", [f"x{i}" for i in range(num_inputs)], [f"y{i}" for i in range(num_outputs)])
    graph = helper.make_graph([helper.make_node("Exp", ["x0"], ["z"]), large], "network", [], [])
    assert most_arrays(graph) == max(1, num_inputs, num_outputs)


def test_a_network_without_nodes_has_no_arrays() -> None:
    assert most_arrays(helper.make_graph([], "network", [], [])) == 0
