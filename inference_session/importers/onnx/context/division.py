"""Computes what depends on the context alone at one row per context, and tiles it wherever a candidate meets it.

The result is correct for any graph; the rewrites then remove the tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from onnx import GraphProto, NodeProto

from inference_session.importers.onnx.samples.axis import SampleAxis
from inference_session.importers.onnx.samples.step import is_constant
from inference_session.model_spec import ROW_CONTEXT
from inference_session.onnx_graphs import Names, NodeBuilder, bodies, copied, producers, reads, rename, set_nodes

CONTEXT, CANDIDATES = "context", "candidates"
_FAR = 1 << 31


@dataclass
class ContextDivision:
    """Which nodes run once per context, and the graph that does so.

    Args:
        context: the inputs that are given once per context.
    """

    graph: GraphProto
    samples: SampleAxis
    names: Names
    context: Sequence[str]
    _content: dict[str, frozenset[str]] = field(default_factory=dict)
    _side: dict[str, str | None] = field(default_factory=dict)
    """Whether each value has rows of contexts or of candidates: CONTEXT, CANDIDATES; None: of neither, made wherever it
    is needed."""
    _made_by: dict[str, NodeProto] = field(default_factory=dict)
    _tiles: dict[str, str] = field(default_factory=dict)
    _copies: dict[tuple[str, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._builder = NodeBuilder(self.graph, self.names, "context")

    def divide(self) -> None:
        """Compute the context's values once per context, and tile them where candidates read them."""
        self._made_by = producers(self.graph)
        self._find_content()
        self._assign()
        for node in list(self.graph.node):
            self._emit(node)
        self._relay_outputs()
        set_nodes(self.graph, self._builder.nodes)

    def is_contexts(self, name: str) -> bool:
        """Whether a value has one row per context."""
        return self._side.get(name) == CONTEXT

    # Dependencies

    def _find_content(self) -> None:
        for value in self.graph.input:
            side = CONTEXT if value.name in self.context else CANDIDATES
            self._content[value.name] = frozenset({side})
        for node in self.graph.node:
            sources = () if node.op_type in ("Shape", "Size") and not node.domain else reads(node)
            found = frozenset[str]().union(*(self._content.get(name, frozenset()) for name in sources))
            self._content.update(dict.fromkeys(filter(None, node.output), found))

    def _assign(self) -> None:
        """Assign as much as possible to the context: values whose samples share an axis with others cannot be tiled."""
        demoted: set[str] = set()
        while True:
            self._assign_without(demoted)
            wrong = [name for name in self._met() if not self._can_be_tiled(name)]
            if not wrong:
                return
            demoted.update(output for name in wrong for output in self._made_by[name].output)

    def _assign_without(self, demoted: set[str]) -> None:
        self._side = {value.name: next(iter(self._content[value.name])) for value in self.graph.input}
        for node in self.graph.node:
            side = self._side_of(node, demoted)
            self._side.update(dict.fromkeys(filter(None, node.output), side))

    def _side_of(self, node: NodeProto, demoted: set[str]) -> str | None:
        outputs = [name for name in node.output if name]
        if any(self.samples.kind(name) is None for name in outputs) or demoted.intersection(outputs):
            return CANDIDATES
        content = self._content[outputs[0]]
        if not content:
            return None
        if content != {CONTEXT} or any(self._side.get(name) == CANDIDATES for name in reads(node)):
            return CANDIDATES
        return CONTEXT if all(self._is_available(name) for name in reads(node)) else CANDIDATES

    def _is_available(self, name: str) -> bool:
        """Whether a value can be computed once per context."""
        if self._side.get(name) is not None or self._is_constant(name):
            return self._side.get(name) != CANDIDATES
        node = self._made_by[name]
        if node.op_type in ("Shape", "Size"):
            source = node.input[0]
            return self._side.get(source) == CONTEXT or (node.op_type == "Shape" and self._can_be_tiled(source))
        return all(self._is_available(source) for source in node.input if source)

    def _can_be_tiled(self, name: str) -> bool:
        found = self.samples.axis(name)
        return found is not None and found.is_whole

    def _is_constant(self, name: str) -> bool:
        return is_constant(self.samples.kind(name))

    def _met(self) -> set[str]:
        """The context's values that candidates, or outputs, read."""
        found = {value.name for value in self.graph.output}
        for node in self.graph.node:
            if self._side.get(next(filter(None, node.output))) == CANDIDATES:
                found |= reads(node)
        sizes = [name for name in found if self._is_neutral(name)]
        while sizes:
            node = self._made_by[sizes.pop()]
            new = reads(node) - found
            found |= new
            sizes += [name for name in new if self._is_neutral(name)]
        return {name for name in found if self._side.get(name) == CONTEXT}

    def _is_neutral(self, name: str) -> bool:
        return name in self._made_by and self._side.get(name) is None and not self._is_constant(name)

    # The new graph

    def _emit(self, node: NodeProto) -> None:
        output = next(filter(None, node.output))
        side = self._side.get(output)
        if side is not None:
            self._builder.nodes.append(self._rewired(node, side))
        elif self._is_constant(output):
            self._builder.nodes.append(self._rewired(node, None))

    def _rewired(self, node: NodeProto, side: str | None) -> NodeProto:
        """The node with inputs of that side; None: of the side that has them."""
        here = {name: self._on_side(name, side) for name in sorted(reads(node))}
        copy = copied(node)
        copy.input[:] = [here.get(name, name) for name in node.input]
        for body in bodies(copy):
            rename(body, lambda name: here.get(name, name))
        return copy

    def _on_side(self, name: str, side: str | None) -> str:
        found = self._side.get(name)
        if self._is_neutral(name):
            return self._neutral(name, side or self._native_side(name))
        if found is None or side in (None, found):
            return name
        return self._tile(name)

    def _native_side(self, name: str) -> str:
        """The side on which the sizes that a value depends on are known."""
        node = self._made_by[name]
        if node.op_type in ("Shape", "Size") and not self._is_neutral(node.input[0]):
            return self._side.get(node.input[0]) or CANDIDATES
        found = {self._native_side(source) for source in node.input if self._is_neutral(source)}
        return CONTEXT if found == {CONTEXT} else CANDIDATES

    def _tile(self, name: str) -> str:
        if name not in self._tiles:
            self._tiles[name] = self.names.fresh(f"{name}_tiled")
            self._add_tile(name, self._tiles[name], self._axis(name))
        return self._tiles[name]

    def _add_tile(self, name: str, output: str, axis: int) -> None:
        self._builder.add("Gather", [name, ROW_CONTEXT], output, axis=axis)

    def _axis(self, name: str) -> int:
        found = self.samples.axis(name)
        return 0 if found is None else found.axis

    def _neutral(self, name: str, side: str) -> str:
        """A value that depends on sizes, or is filled by them, made for the number of rows of that side."""
        if (name, side) not in self._copies:
            node = self._made_by[name]
            for output in filter(None, node.output):
                copy = output if side == CANDIDATES else self.names.fresh(f"{output}_{side}")
                self._copies[output, side] = copy
            if node.op_type == "Shape" and self._side.get(node.input[0]) not in (None, side):
                self._foreign_shape(node, side, self._copies[name, side])
            else:
                copy = self._rewired(node, side)
                copy.output[:] = [output and self._copies[output, side] for output in node.output]
                copy.name = f"hotrow_{copy.output[0]}"
                self._builder.nodes.append(copy)
        return self._copies[name, side]

    def _foreign_shape(self, node: NodeProto, side: str, output: str) -> None:
        """The shape that a value of the other side would have in this one."""
        whole = self._shape_with(node.input[0], self._axis(node.input[0]), self._num_rows(side))
        limits = {item.name: int(item.i) for item in node.attribute}
        begin, end = limits.get("start", 0), limits.get("end", _FAR)
        self._builder.add("Slice", [whole, *map(self._builder.integers, ([begin], [end]))], output)

    def _shape_with(self, source: str, axis: int, num_rows: str) -> str:
        """The shape of a value, but for the number of rows."""
        add, shape = self._builder.add, self._builder.add("Shape", [source])
        zero, at, beyond, far = (self._builder.integers([i]) for i in (0, axis, axis + 1, _FAR))
        return add("Concat", [add("Slice", [shape, zero, at]), num_rows, add("Slice", [shape, beyond, far])], axis=0)

    def _num_rows(self, side: str) -> str:
        """A list of one number: how many rows a side has."""
        if side == CANDIDATES:
            return self._builder.add("Shape", [ROW_CONTEXT])
        shape = self._builder.add("Shape", [self.context[0]])
        return self._builder.add("Slice", [shape, *map(self._builder.integers, ([0], [1]))])

    def _relay_outputs(self) -> None:
        """Give outputs a row for each candidate, under their original names."""
        for value in self.graph.output:
            if self._side.get(value.name) == CONTEXT:
                self._rename(value.name, inner := self.names.fresh(f"{value.name}_context"))
                self._add_tile(inner, value.name, self._axis(value.name))
            elif self._is_neutral(value.name):
                self._on_side(value.name, CANDIDATES)

    def _rename(self, old: str, new: str) -> None:
        piece = GraphProto(node=self._builder.nodes)
        rename(piece, lambda name: new if name == old else name)
        self._builder.nodes = list(piece.node)
