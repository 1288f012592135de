"""The divided graph while it is rewritten: the facts about its values, and methods that add nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from inference_session.importers.onnx.shapes import Shape, Shapes, sized
from inference_session.importers.onnx.weights import Weight
from inference_session.model_spec import BLOCK_CONTEXT, ROW_CONTEXT
from inference_session.onnx_graphs import (
    Names,
    NodeBuilder,
    attribute,
    drop_unused,
    producers,
    reads,
    set_nodes,
    use_counts,
)

_PROBES = ((202, 2, 7, 13), (309, 3, 5, 17))
"""Candidates, blocks, contexts, and the size of whatever else is open."""


@dataclass
class Work:
    """A model, and the facts of its values as of the last `refresh`."""

    model: ModelProto
    weights: dict[str, Weight]
    names: Names
    context: tuple[str, ...]
    made_by: dict[str, NodeProto] = field(default_factory=dict)
    uses: dict[str, int] = field(default_factory=dict)
    _shapes: list[Shapes] = field(default_factory=list)
    _of_candidates: set[str] = field(default_factory=set)
    _of_context: set[str] = field(default_factory=set)
    _initializers: dict[str, TensorProto] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.refresh()

    @property
    def graph(self) -> GraphProto:
        """The main graph."""
        return self.model.graph

    def refresh(self) -> None:
        """Infer the facts about the values again."""
        self.made_by = producers(self.graph)
        self.uses = dict(use_counts(self.graph))
        self._initializers = {tensor.name: tensor for tensor in self.graph.initializer}
        self._shapes = [Shapes(self.model, self.weights, self._input_shapes(*sizes)) for sizes in _PROBES]
        inputs = {value.name for value in self.graph.input}
        self._of_context = self._reached(set(self.context))
        self._of_candidates = self._reached(inputs - set(self.context))

    def _reached(self, names: set[str]) -> set[str]:
        for node in self.graph.node:
            if names & reads(node):
                names.update(node.output)
        return names

    def _input_shapes(self, rows: int, blocks: int, contexts: int, inner: int) -> dict[str, Shape]:
        sizes: dict[str, Shape] = {ROW_CONTEXT: (rows,), BLOCK_CONTEXT: (blocks,)}
        for name in [value.name for value in self.graph.input if value.name not in sizes]:
            sizes[name] = sized(self.graph, name, contexts if name in self.context else rows, inner)
        return sizes

    # Facts

    def dims(self, name: str) -> tuple[int, ...] | None:
        """The shape of a value under the first probe."""
        return self._shapes[0].dims(name)

    @property
    def dims_of_rows(self) -> int:
        """The number of candidates under the first probe; no other size has this value."""
        return _PROBES[0][0]

    @property
    def dims_of_contexts(self) -> int:
        """The number of contexts under the first probe; no other size has this value."""
        return _PROBES[0][2]

    def has_rows(self, name: str) -> bool:
        """Whether the first dimension counts candidates."""
        return (self.dims(name) or (0,))[0] == self.dims_of_rows

    def rank(self, name: str) -> int | None:
        """The number of dimensions, where known."""
        dims = self.dims(name)
        return None if dims is None else len(dims)

    def sizes(self, name: str) -> list[int | None] | None:
        """The shape of a value: None for a size that is not always the same."""
        first, second = (shapes.dims(name) for shapes in self._shapes)
        if first is None or second is None or len(first) != len(second):
            return None
        return [one if one == other else None for one, other in zip(first, second, strict=True)]

    def all_dims(self, name: str) -> list[Shape | None]:
        """The shapes of a value under each probe."""
        return [shapes.dims(name) for shapes in self._shapes]

    def known(self, name: str) -> NDArray[Any] | None:
        """The elements of a small value that constants and shapes determine, if they are always the same."""
        first, second = (shapes.known.get(name) for shapes in self._shapes)
        return first if first is not None and second is not None and np.array_equal(first, second) else None

    def is_float(self, name: str) -> bool:
        """Whether a value is float32."""
        return self._shapes[0].elem_type(name) == TensorProto.FLOAT

    def is_contexts(self, name: str) -> bool:
        """Whether a value depends on the context, and on no candidate."""
        return name in self._of_context and name not in self._of_candidates

    def is_constant(self, name: str) -> bool:
        """Whether a value is an initializer."""
        return name in self.weights or name in self._initializers

    def constant(self, name: str) -> NDArray[Any] | None:
        """The elements of an initializer; None for any other value."""
        if name in self.weights:
            return numpy_helper.to_array(self.weights[name].tensor())
        tensor = self._initializers.get(name)
        return None if tensor is None else numpy_helper.to_array(tensor)

    def tiled(self, name: str) -> str | None:
        """The context's value that this one repeats for its candidates; None if it repeats none."""
        node = self.made_by.get(name)
        if node is None or node.op_type != "Gather" or node.input[1] != ROW_CONTEXT:
            return None
        return str(node.input[0]) if attribute(node, "axis", 0) == 0 else None

    # Changes

    def replace_each(self, write: Callable[[Work, NodeProto], Sequence[NodeProto] | None]) -> None:
        """Put the nodes that `write` returns in the place of each node; None: the node stays."""
        self.replace({i: nodes for i, node in enumerate(self.graph.node) if (nodes := write(self, node))})

    def replace(self, replaced: Mapping[int, Sequence[NodeProto]]) -> None:
        """Put nodes in the places of others, which are given by position; then refresh."""
        if not replaced:
            return
        nodes: list[NodeProto] = []
        for i, node in enumerate(self.graph.node):
            nodes += replaced.get(i, [node])
        set_nodes(self.graph, nodes)
        self.drop_unused()

    def drop_unused(self) -> None:
        """Remove the nodes and initializers that no output needs; then refresh."""
        drop_unused(self.graph)
        self.refresh()


class WorkBuilder(NodeBuilder):
    """Writes the nodes that take the place of one."""

    def __init__(self, work: Work, stem: str) -> None:
        super().__init__(work.graph, work.names, stem)
        self._work = work

    def weight(self, values: NDArray[Any]) -> str:
        """An initializer of these values, of any shape, as float32; returns its name."""
        name = self._fresh("weight")
        tensor = numpy_helper.from_array(np.asarray(values, np.float32), name)
        self._work.weights[name] = Weight(name, tensor.data_type, tuple(tensor.dims), tensor)
        return name

    def rename(self, old: str, new: str) -> None:
        """Rename a value that was added."""
        for node in self.nodes:
            node.output[:] = [new if name == old else name for name in node.output]

    def ones_beside(self, value: str) -> str:
        """Ones, [rows, 1] or as many dimensions as a value of the candidates has."""
        shape = self.list_of([self.add("Shape", [ROW_CONTEXT]), *[1] * ((self._work.rank(value) or 2) - 1)])
        return self.add("Expand", [self.weight(np.ones(1)), shape])

    def tile(self, value: str) -> str:
        """A context's value, repeated for every candidate."""
        return self.add("Gather", [value, ROW_CONTEXT], axis=0)

    def of_blocks(self, value: str) -> str:
        """A context's value, once per block."""
        return self.add("Gather", [value, BLOCK_CONTEXT], axis=0)

    def size(self, value: str, axis: int) -> int | str:
        """One size of a value: a number, or a list of one number in the graph."""
        sizes = self._work.sizes(value) or []
        if sizes and (size := sizes[axis]) is not None:
            return size
        shape = self.add("Shape", [value])
        at = axis % len(sizes) if sizes else axis
        return self.add("Slice", [shape, self.integers([at]), self.integers([at + 1])])

    def sizes(self, value: str, begin: int) -> list[int | str]:
        """The sizes of a value from one axis on."""
        sizes = self._work.sizes(value)
        if sizes is not None and None not in sizes[begin:]:
            return [size for size in sizes[begin:] if size is not None]
        shape = self.add("Shape", [value])
        return [self.add("Slice", [shape, self.integers([begin]), self.integers([1 << 31])])]

    def list_of(self, items: Sequence[int | str]) -> str:
        """Numbers and lists of numbers as one list."""
        parts: list[str] = []
        for is_number, run in groupby(items, key=lambda item: isinstance(item, int)):
            group = list(run)
            parts += [self.integers(group)] if is_number else [str(item) for item in group]
        return parts[0] if len(parts) == 1 else self.add("Concat", parts, axis=0)

    def shape(self, value: str, leading: Sequence[int | str]) -> str:
        """The list: numbers and lists of numbers, then the shape of a value without its first dimension."""
        return self.list_of([*leading, *self.sizes(value, 1)])

    def whole(self, known: str, blocks: str) -> str:
        """The shape that a value [blocks, rows of a block, …] has without blocks; `known` is its future name."""
        sizes = self._work.sizes(known)
        if sizes is not None and None not in sizes[1:]:
            return self.list_of([-1, *(size for size in sizes[1:] if size is not None)])
        shape = self.add("Shape", [blocks])
        return self.list_of([-1, self.add("Slice", [shape, self.integers([2]), self.integers([1 << 31])])])

    def num_blocks(self) -> str:
        """A list of one number."""
        return self.add("Shape", [BLOCK_CONTEXT])

    def to_blocks(self, value: str) -> str:
        """[rows, …] as [blocks, rows of a block, …]."""
        return self.add("Reshape", [value, self.shape(value, [self.num_blocks(), -1])])
