"""Random graphs over all supported layers agree with the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from tests.testing.hugectr_graphs import GraphMaker, assert_agrees

NUM_GRAPHS = 100

Item = TypeVar("Item")


class RandomGraph:
    """Grows a graph by layers that fit the tensors it has."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng([seed, 6])
        num_labels = int(self._random.integers(1, 3))
        self.maker = GraphMaker(
            seed,
            dense_dim=int(self._random.integers(1, 9)),
            embeddings=[
                (f"emb{i}", int(self._random.integers(1, 5)), int(self._random.integers(1, 7))) for i in range(3)
            ],
            labels=[(f"label{i}", int(self._random.integers(1, 3))) for i in range(num_labels)],
            num_samples=int(self._random.integers(1, 7)),
        )

    def grow(self, num_layers: int) -> None:
        """Add layers, then one loss per label over the resulting tensors."""
        for _ in range(num_layers):
            self._tame(self._pick(_GROWTHS)(self))
        for label in self.maker.layers[0]["label"]["top"] if self._is_multi_task() else ["label0"]:
            self._predict(label)

    def _is_multi_task(self) -> bool:
        return isinstance(self.maker.layers[0]["label"]["top"], list)

    def _predict(self, label: str) -> None:
        data = self.maker.layers[0]["label"]
        dim = (
            dict(zip(data["top"], data["label_dim"], strict=True))[label]
            if self._is_multi_task()
            else data["label_dim"]
        )
        flat = [self.flat(name) for name in self._some(list(self.maker.tensors), 4)]
        wide = self.maker.add("Concat", flat)
        kinds = ["BinaryCrossEntropyLoss", "MultiCrossEntropyLoss", "CrossEntropyLoss"]
        logits = self.maker.add("InnerProduct", wide, fc_param={"num_output": dim})
        self.maker.loss(logits, self._pick(kinds), label)

    def _tame(self, name: str) -> None:
        """Keep values small, so that float32 has digits left for the comparison."""
        if np.abs(self.maker.tensors[name]).max(initial=0) > 4:
            self.maker.add("Sigmoid", name)

    def _pick(self, items: Sequence[Item]) -> Item:
        return items[int(self._random.integers(len(items)))]

    def _some(self, names: list[str], most: int) -> list[str]:
        count = int(self._random.integers(1, min(most, len(names)) + 1))
        return [names[i] for i in self._random.choice(len(names), count, replace=False)]

    def of_rank(self, rank: int) -> str:
        """A tensor of that many dimensions."""
        return self._pick([name for name, x in self.maker.tensors.items() if x.ndim == rank])

    def any(self) -> str:
        """Any tensor."""
        return self._pick(list(self.maker.tensors))

    def like(self, name: str) -> list[str]:
        """Tensors of the same shape, itself among them."""
        shape = self.maker.tensors[name].shape
        return [other for other, x in self.maker.tensors.items() if x.shape == shape]

    def flat(self, name: str) -> str:
        """The tensor with one row per sample."""
        elements = self.maker.tensors[name].size // self.maker.num_samples
        return self.maker.add("Reshape", name, leading_dim=elements)

    def number(self, low: int, high: int) -> int:
        """A whole number from low to high."""
        return int(self._random.integers(low, high + 1))

    def reshape(self) -> str:
        """Any division of one sample's elements into two or three dimensions."""
        name = self.any()
        elements = self.maker.tensors[name].size // self.maker.num_samples
        leading = self._pick([n for n in range(1, elements + 1) if elements % n == 0])
        steps = self._pick([n for n in range(elements // leading + 1) if n == 0 or (elements // leading) % n == 0])
        return self.maker.add("Reshape", name, leading_dim=leading, time_step=steps)

    def select(self) -> str:
        """Some slots of a tensor."""
        name = self.of_rank(3)
        slots = self.maker.tensors[name].shape[1]
        return self.maker.add("Reshape", name, selected=[self.number(0, slots - 1) for _ in range(self.number(1, 4))])

    def slice(self) -> str:
        """Two ranges that may overlap."""
        name = self.any()
        width = self.maker.width(name)
        ranges = []
        for _ in range(2):
            begin = self.number(0, width - 1)
            ranges.append([begin, self.number(begin + 1, width)])
        tops = [f"slice{len(self.maker.layers)}_{i}" for i in range(2)]
        return self.maker.add("Slice", name, tops, ranges=ranges)

    def concat(self) -> str:
        """Tensors that are alike but for their last dimension."""
        name = self.any()
        leading = self.maker.tensors[name].shape[:-1]
        alike = [other for other, x in self.maker.tensors.items() if x.shape[:-1] == leading]
        return self.maker.add("Concat", [name, *self._some(alike, 3)], axis=len(leading))

    def interaction(self) -> str:
        """A dense vector made to fit the slots of an embedding."""
        slots = f"emb{self.number(0, 2)}"
        dense = self.maker.add("InnerProduct", "dense", fc_param={"num_output": self.maker.width(slots)})
        return self.maker.add("Interaction", [dense, slots])

    def matrix_multiply(self) -> str:
        """An embedding's slots weighed by each other."""
        name = f"emb{self.number(0, 2)}"
        _, slots, width = self.maker.tensors[name].shape
        turned = self.maker.add("Reshape", name, leading_dim=slots, time_step=width)
        return self.maker.add("MatrixMultiply", [name, turned])

    def fused_reshape_concat(self) -> str:
        """The history and the item of an embedding, twice over."""
        names = [name for name in ("emb0", "emb1", "emb2") if self.maker.tensors[name].shape[1] > 1]
        if not names:
            return self.maker.add("FusedReshapeConcatGeneral", ["emb0", "emb0"])
        tops = [f"{part}{len(self.maker.layers)}" for part in ("history", "item")]
        return self.maker.add("FusedReshapeConcat", [names[0], names[0]], tops)

    def fm_order2(self) -> str:
        """Any division of a tensor's width into slots."""
        name = self.of_rank(2)
        width = self.maker.width(name)
        return self.maker.add("FmOrder2", name, out_dim=self._pick([n for n in range(1, width + 1) if width % n == 0]))


def _small(graph: RandomGraph, name: str, limit: int = 64) -> str:
    """A narrow tensor in its place, so that graphs do not grow without bound."""
    if graph.maker.width(name) <= limit:
        return name
    return graph.maker.add("Slice", name, [f"narrow{len(graph.maker.layers)}"], ranges=[[0, limit]])


_GROWTHS: list[Callable[[RandomGraph], str]] = [
    lambda g: g.maker.add("Add", g.like(g.any()) * 2),
    lambda g: g.maker.add("BatchNorm", g.of_rank(2), bn_param={"factor": 1.0, "eps": 1e-4}),
    lambda g: g.maker.add("Cast", g.any()),
    lambda g: g.concat(),
    lambda g: g.maker.add("Dropout", g.any(), rate=0.5),
    lambda g: g.maker.add("ELU", g.any(), elu_param={"alpha": g.number(1, 3) / 2}),
    lambda g: g.maker.add("ElementwiseMultiply", (g.like(g.any()) * 2)[:2]),
    lambda g: g.fm_order2(),
    lambda g: g.maker.add("MLP", g.of_rank(2), mlp_param={"num_outputs": [g.number(1, 8), g.number(1, 8)]}),
    lambda g: g.maker.add("FusedInnerProduct", g.any(), fc_param={"num_output": g.number(1, 8)}),
    lambda g: g.fused_reshape_concat(),
    lambda g: g.maker.add("FusedReshapeConcatGeneral", ["emb1", "emb1"]),
    lambda g: g.maker.add("InnerProduct", g.any(), fc_param={"num_output": g.number(1, 8)}),
    lambda g: g.interaction(),
    lambda g: g.matrix_multiply(),
    lambda g: g.maker.add("MultiCross", g.of_rank(2), mc_param={"num_layers": g.number(1, 3)}),
    lambda g: g.maker.add("MultiCross", g.of_rank(2), mc_param={"num_layers": 2, "projection_dim": g.number(1, 3)}),
    lambda g: g.maker.add("LayerNorm", g.any(), ln_param={"eps": 1e-2}),
    lambda g: g.maker.add("PReLU_Dice", g.of_rank(2), prelu_dice_param={"alpha": 0.3, "eps": 1e-2}),
    lambda g: g.maker.add("ReLU", g.any()),
    lambda g: g.maker.add("ReduceMean", g.of_rank(3), axis=g.number(1, 2)),
    lambda g: g.maker.add("ReduceSum", g.of_rank(2), axis=1),
    lambda g: g.reshape(),
    lambda g: g.select(),
    lambda g: g.maker.add("Scale", _small(g, g.of_rank(2)), scale_param={"axis": g.number(0, 1), "factor": 2}),
    lambda g: g.maker.add("Sigmoid", g.any()),
    lambda g: g.slice(),
    lambda g: g.maker.add("Softmax", g.any()),
    lambda g: g.maker.add("Sub", (g.like(g.any()) * 2)[:2]),
    lambda g: _weight_multiply(g, _small(g, g.of_rank(2))),
]


def _weight_multiply(graph: RandomGraph, name: str) -> str:
    return graph.maker.add("WeightMultiply", name, weight_dims=[graph.maker.width(name), graph.number(1, 3)])


@pytest.mark.parametrize("seed", range(NUM_GRAPHS))
def test_a_random_graph_agrees_with_the_oracle(seed: int, tmp_path: Path) -> None:
    """However the layers are put together, the ONNX network answers what their formulas say."""
    graph = RandomGraph(seed)
    graph.grow(num_layers=15)

    network = assert_agrees(graph.maker, tmp_path)

    assert network.joinable == all(layer["type"] != "PReLU_Dice" for layer in graph.maker.layers)
