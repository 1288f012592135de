"""Computes keys that are columns of one matrix by operators over the whole matrix, where each has the same ones.

ONNX Runtime takes a fifth to a half of a microsecond for an operator, however few elements it has. A modulo, a limit or
a shift of each of 26 columns is 26 such operators, and 26 more pick the columns. Here the numbers that differ by column
become a vector, and one Split gives each look-up its column.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np
from onnx import ModelProto, NodeProto, numpy_helper

from inference_session.importers.onnx.lookups.columns import columns_of
from inference_session.importers.onnx.lookups.graph_lookups import EditedModel, GraphLookup
from inference_session.onnx_graphs import UNARY, NodeBuilder, constants, drop_unused, producers, set_nodes, sort_nodes

_MIN_COLUMNS = 4
"""For fewer, the Split takes as long as what it saves."""
_OPERATORS = frozenset({
    "Abs", "Add", "And", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "Clip", "Div",
    "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Sign",
    "Sub", "Where", "Xor",
})  # fmt: skip
"""Of single elements, and exact: results do not depend on where in an array the elements are."""
_SPLIT_BY_INPUT = 13
"""The first opset in which Split takes its sizes as an input."""


def stack_columns(edited: EditedModel, network: ModelProto, lookups: Sequence[GraphLookup]) -> None:
    """Change the network that computes keys, of these look-ups. Keys [samples] may become [samples, 1].

    Only those of look-ups that share a matrix of vectors, for which either is one key for each sample.
    """
    stacker = _Stacker(edited, network)
    for outputs in stacker.alike(_loose_keys(lookups)):
        stacker.stack(outputs)
    stacker.finish()


def _loose_keys(lookups: Sequence[GraphLookup]) -> set[str]:
    """Keys whose dimensions no look-up needs."""
    loose = [lookup.matrix and lookup.pooling == "none" and not lookup.weights for lookup in lookups]
    needed = {name for lookup, is_loose in zip(lookups, loose, strict=True) if not is_loose for name in lookup.reads}
    return {lookup.keys for lookup in lookups} - needed


class _Stacker:
    """Finds outputs of a network that are computed alike, and computes them together."""

    def __init__(self, edited: EditedModel, network: ModelProto) -> None:
        self._edited, self._graph = edited, network.graph
        self._made_by, self._constants = producers(network.graph), constants(network.graph)
        self._nodes = list(network.graph.node)
        self._numbers: dict[Hashable, int] = {}
        """A number for each form, by what it consists of."""
        self._columns: dict[int, frozenset[int]] = {}
        """The forms of columns that a form is made of, by its number."""
        self._forms: dict[str, int] = {}
        """How values are made, equal for values that can be stacked; without those made of anything else."""
        self._picked: dict[str, tuple[str, int]] = {}
        """Columns: their matrix, and their number in it."""
        for name, tensor in self._constants.items():
            if len(tensor.dims) <= 1 and np.prod(tensor.dims) == 1:
                self._enter(name, ("number", tensor.data_type))
        for node in self._nodes:
            self._enter_outputs(node)

    def alike(self, names: set[str]) -> list[list[str]]:
        """Groups of outputs among these names that the same operators make of columns of the same matrix."""
        groups: defaultdict[int, list[str]] = defaultdict(list)
        for output in [value.name for value in self._graph.output if value.name in names]:
            form = self._forms.get(output)
            if form is not None and len(self._columns[form]) == 1:  # of one matrix, and of equal dimensions
                groups[form].append(output)
        return [outputs for outputs in groups.values() if len(outputs) >= _MIN_COLUMNS]

    def stack(self, outputs: list[str]) -> None:
        """Compute these outputs together."""
        builder = NodeBuilder(self._graph, self._edited.names, f"{outputs[0]}_stacked")
        stacked = self._stacked(tuple(outputs), builder)
        sizes = [1] * len(outputs)
        split = NodeProto(op_type="Split", input=[stacked], output=outputs, name=f"hotrow_{stacked}_split")
        split.attribute.add(name="axis", type="INT", i=1)
        if self._edited.opset >= _SPLIT_BY_INPUT:
            split.input.append(builder.integers(sizes))
        else:
            split.attribute.add(name="split", type="INTS", ints=sizes)
        replaced = {*outputs}
        kept = [node for node in self._nodes if replaced.isdisjoint(node.output)]
        self._nodes = [*kept, *builder.nodes, split]

    def finish(self) -> None:
        """Leave out what nothing needs any more."""
        set_nodes(self._graph, self._nodes)
        sort_nodes(self._graph)
        drop_unused(self._graph)

    def _enter(self, name: str, form: Hashable, operands: Sequence[int] = ()) -> None:
        self._forms[name] = number = self._numbers.setdefault(form, len(self._numbers))
        self._columns[number] = frozenset[int]().union(*(self._columns[each] for each in operands))

    def _enter_outputs(self, node: NodeProto) -> None:
        """Enter the forms of what a node makes of columns and numbers, or where it picks columns."""
        for name in node.output:
            rank = self._edited.types.rank(name)
            if rank is not None and (column := self._column(name)) is not None:
                self._picked[name] = column
                self._enter(name, ("column", column[0], rank))
                self._columns[self._forms[name]] = frozenset([self._forms[name]])
        operands = [self._forms.get(name) for name in node.input]
        known = [operand for operand in operands if operand is not None]
        if node.op_type not in _OPERATORS or node.domain or len(node.output) != 1 or len(known) < len(operands):
            return
        varying: Sequence[Hashable] = known
        if node.op_type in UNARY:  # the other operands are the same for all elements
            rest = [self._constants.get(name) for name in node.input[1:]]
            varying = [known[0], *(each and numpy_helper.to_array(each).tobytes() for each in rest)]
            if None in varying:
                return
        attributes = sorted(each.SerializeToString() for each in node.attribute)
        self._enter(node.output[0], (node.op_type, *attributes, *varying), known)

    def _column(self, name: str) -> tuple[str, int] | None:
        """The matrix, and the number of its column, that a value is."""
        node = self._made_by[name]
        dims = self._edited.types.dims(node.input[0]) if node.input else None
        if dims is None or len(dims) != 2 or not isinstance(dims[1], int) or node.domain:
            return None
        columns = columns_of(self._graph, node, name, dims[1])
        if columns is None or columns[1] - columns[0] != 1:
            return None
        return node.input[0], columns[0]

    def _stacked(self, outputs: tuple[str, ...], builder: NodeBuilder) -> str:
        """Values of one form side by side. Chains may be longer than Python's recursion."""
        made: dict[tuple[str, ...], str] = {}
        pending = [outputs]
        while pending:
            names = pending[-1]
            if missing := [operand for operand in self._operands(names) if operand not in made]:
                pending += missing
            else:
                pending.pop()
                if names not in made:
                    made[names] = self._stack_values(names, builder, made)
        return made[outputs]

    def _operands(self, names: tuple[str, ...]) -> list[tuple[str, ...]]:
        """What values of one form are made of, operand by operand, where that varies by column."""
        if names[0] in self._constants or names[0] in self._picked:
            return []
        nodes = [self._made_by[name] for name in names]
        operands = [tuple(operand) for operand in zip(*(node.input for node in nodes), strict=True)]
        return operands[:1] if nodes[0].op_type in UNARY else operands

    def _stack_values(self, names: tuple[str, ...], builder: NodeBuilder, made: dict[tuple[str, ...], str]) -> str:
        """Numbers that are all the same stay one."""
        if names[0] in self._constants:
            values = np.concatenate([numpy_helper.to_array(self._constants[name]).reshape(1) for name in names])
            is_same = len({value.tobytes() for value in values}) == 1
            return names[0] if is_same else builder.constant(values)
        if names[0] in self._picked:
            matrix, picked = self._picked[names[0]][0], [self._picked[name][1] for name in names]
            dims = self._edited.types.dims(matrix) or ()
            is_whole = picked == list(range(dims[1])) if isinstance(dims[1], int) else False
            return matrix if is_whole else builder.add("Gather", [matrix, builder.integers(picked)], axis=1)
        node, operands = self._made_by[names[0]], self._operands(names)
        return builder.copy(node, [*(made[each] for each in operands), *node.input[len(operands) :]])
