"""Makes graphs with weights for the tests: the oracle runs while a graph is written, so every shape is known."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from inference_session.importers.hugectr.graph import read_graph
from inference_session.importers.hugectr.onnx_graph import DenseNetwork, build_dense_network
from tests.testing.hugectr_oracle import LOSSES, Array, SameWeights, Weights, run_layer


class GraphMaker:
    """Writes layers one by one, and keeps the output of each for a few samples."""

    def __init__(
        self,
        seed: int,
        *,
        dense_dim: int = 0,
        embeddings: Sequence[tuple[str, int, int]] = (),
        labels: Sequence[tuple[str, int]] = (("label", 1),),
        num_samples: int = 5,
    ) -> None:
        """`embeddings`: name, slots, embedding_dim; `labels`: name, columns."""
        self._random = np.random.default_rng(seed)
        self.weights = Weights(self._random)
        self.inputs: dict[str, NDArray[np.float32]] = {}
        self.tensors: dict[str, Array] = {}
        self.predictions: dict[str, Array] = {}
        self.num_samples = num_samples
        several = len(labels) > 1
        self.layers: list[dict[str, Any]] = [
            {
                "type": "Data",
                "dense": {"top": "dense", "dense_dim": dense_dim},
                "label": {
                    "top": [name for name, _ in labels] if several else labels[0][0],
                    "label_dim": [dim for _, dim in labels] if several else labels[0][1],
                },
                "sparse": [
                    {"top": f"data_{name}", "slot_num": slots, "nnz_per_slot": 1, "is_fixed_length": True}
                    for name, slots, _ in embeddings
                ],
            }
        ]
        for name, _, dim in embeddings:
            self.layers.append(
                {
                    "type": "DistributedSlotSparseEmbeddingHash",
                    "bottom": f"data_{name}",
                    "top": name,
                    "sparse_embedding_hparam": {"embedding_vec_size": dim, "combiner": "sum"},
                }
            )
        if dense_dim:
            self._add_input("dense", dense_dim)
        for name, slots, dim in embeddings:
            self._add_input(name, slots, dim)

    def _add_input(self, name: str, *shape: int) -> None:
        array = self._random.normal(size=(self.num_samples, *shape), scale=0.7).astype(np.float32)
        self.inputs[name] = array
        self.tensors[name] = array.astype(np.float64)

    def add(self, kind: str, bottoms: str | list[str], tops: str | list[str] = "", **parameters: Any) -> str:
        """Add a layer; the name of its (first) top."""
        tops = tops or f"{kind.lower()}{len(self.layers)}"
        layer = {"type": kind, "bottom": bottoms, "top": tops, **parameters}
        names = [bottoms] if isinstance(bottoms, str) else bottoms
        made = run_layer(layer, [self.tensors[name] for name in names], self.weights)
        top_names = [tops] if isinstance(tops, str) else tops
        self.tensors.update(zip(top_names, made, strict=True))
        self.layers.append(layer)
        return top_names[0]

    def loss(self, tensor: str, kind: str = "BinaryCrossEntropyLoss", label: str = "label") -> None:
        """Add a loss, which makes the tensor a prediction."""
        self.layers.append({"type": kind, "bottom": [tensor, label], "top": f"loss_{label}"})
        self.predictions[label] = LOSSES[kind](self.tensors[tensor])

    def answers(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, Array]:
        """The predictions for other inputs, by label: those of `inputs` with any number of samples."""
        weights = SameWeights(self.weights)
        tensors = {name: array.astype(np.float64) for name, array in inputs.items()}
        predictions: dict[str, Array] = {}
        for layer in self.layers:
            names = [layer["bottom"]] if isinstance(layer.get("bottom"), str) else layer.get("bottom", [])
            if layer["type"] in LOSSES:
                predictions[names[1]] = LOSSES[layer["type"]](tensors[names[0]])
            elif names and "sparse_embedding_hparam" not in layer:
                made = run_layer(layer, [tensors[name] for name in names], weights)
                tops = [layer["top"]] if isinstance(layer["top"], str) else layer["top"]
                tensors.update(zip(tops, made, strict=True))
        return predictions

    def width(self, tensor: str) -> int:
        """The tensor's last dimension."""
        return int(self.tensors[tensor].shape[-1])

    def write(self, folder: Path) -> tuple[Path, Path, Path | None]:
        """Graph, dense file, statistics."""
        graph, dense, statistics = folder / "graph.json", folder / "dense.model", folder / "statistics.json"
        graph.write_text(json.dumps({"layers": self.layers}), encoding="utf-8")
        dense.write_bytes(self.weights.file())
        statistics.write_text(json.dumps({"layers": self.weights.statistics}), encoding="utf-8")
        return graph, dense, statistics if self.weights.statistics else None

    def network(self, folder: Path) -> DenseNetwork:
        """The graph as the importer builds it."""
        graph, dense, statistics = self.write(folder)
        return build_dense_network(read_graph(graph), dense, statistics)


def run(network: DenseNetwork, inputs: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """Run the ONNX model on those of the inputs that it needs."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(network.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    arrays = session.run(None, {item.name: inputs[item.name] for item in session.get_inputs()})
    return dict(zip(names, arrays, strict=True))


def assert_agrees(maker: GraphMaker, folder: Path) -> DenseNetwork:
    """The network's predictions are the oracle's."""
    network = maker.network(folder)
    found = run(network, maker.inputs)

    assert set(found) == set(maker.predictions)
    for label, expected in maker.predictions.items():
        np.testing.assert_allclose(found[label], expected, rtol=0, atol=1e-5)
    return network
