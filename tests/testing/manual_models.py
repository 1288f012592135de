"""The models that the how-to guides expect their reader to have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser

from tests.testing.command_line import hotrow

NUM_USERS, NUM_ITEMS, DIM = 2000, 1000, 16
_GRAPH = """
<ir_version: 9, opset_import: ["": 17]>
ctr (int64[batch, 1] user_id, int64[batch, 1] item_id) => (float[batch, 1] click) {
  users = Gather(user, user_id)
  items = Gather(item, item_id)
  products = Mul(users, items)
  sum = ReduceSum <keepdims: int = 0> (products, axis)
  click = Sigmoid(sum)
}
"""


def write_onnx(path: Path, *, seed: int = 0) -> None:
    """A model with the tables `user` and `item`."""
    model = parser.parse_model(_GRAPH)
    random = np.random.default_rng(seed)
    for name, rows in {"user": NUM_USERS, "item": NUM_ITEMS}.items():
        table = random.standard_normal((rows, DIM), np.float32) / 4
        model.graph.initializer.append(numpy_helper.from_array(table, name))
    model.graph.initializer.append(numpy_helper.from_array(np.array([2]), "axis"))
    onnx.save(model, path)


def write_versions(repository: Path, *, num_versions: int = 1) -> None:
    """The model `ctr` in a repository; versions differ by their tables."""
    for version in range(1, num_versions + 1):
        path = repository.parent / f"{repository.name}-{version}.onnx"
        write_onnx(path, seed=version)
        hotrow("import", "onnx", path, "--name", "ctr", "--repository", repository)


def inputs(num_samples: int = 8) -> dict[str, np.ndarray]:
    """A request to it."""
    random = np.random.default_rng(0)
    rows = {"user_id": NUM_USERS, "item_id": NUM_ITEMS}
    return {name: random.integers(0, most, (num_samples, 1)) for name, most in rows.items()}
