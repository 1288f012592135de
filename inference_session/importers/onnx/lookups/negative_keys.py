"""Removes what exporters write to count negative keys from the end, because Gather itself counts them so.

Keras writes `Where(keys < 0, keys + rows, keys)`, and so do JAX and those who write it out in PyTorch. Keys from -rows
up to rows - 1 mean the same rows with and without it. A key below -rows is unknown without it; with it, ONNX Runtime
adds the number of rows twice, and answers the row of another key.
"""

from __future__ import annotations

from onnx import NodeProto

from inference_session.importers.onnx.lookups.graph_lookups import SHAPE_OPS, EditedModel, casts_keys
from inference_session.importers.onnx.tables import is_row_read
from inference_session.onnx_graphs import all_graphs, constants, copied, integers, producers, replace_node

_MIRRORED = {"Less": "Greater", "Greater": "Less", "LessOrEqual": "GreaterOrEqual", "GreaterOrEqual": "LessOrEqual"}
_MEANS_NEGATIVE = {("Less", 0): True, ("LessOrEqual", -1): True, ("GreaterOrEqual", 0): False, ("Greater", -1): False}


def read_negative_keys(edited: EditedModel) -> None:
    """Let row reads of tables take the keys that such a Where reads, in place of its output.

    Casts and changes of shape between the two are repeated for these keys: others may read their outputs.
    """
    search = _Search(edited)
    for scope in all_graphs(edited.graph):
        for gather in [node for node in scope.node if is_row_read(node) and node.input[0] in edited.tables]:
            steps = search.steps_behind(gather.input[1])
            keys = search.wrapped_keys(steps.pop(0), edited.tables[gather.input[0]].dims[0]) if steps else None
            if keys is None:
                continue
            new = [copied(step) for step in (*steps, gather)]
            for step in new[:-1]:
                step.input[0], step.output[0] = keys, edited.names.fresh(f"{step.output[0]}_given")
                keys, step.name = step.output[0], f"hotrow_{step.output[0]}"
            new[-1].input[1] = keys
            replace_node(scope, gather, new)


class _Search:
    """Finds such nodes in a graph and its bodies."""

    def __init__(self, edited: EditedModel) -> None:
        scopes = all_graphs(edited.graph)
        self._made_by = {name: node for scope in scopes for name, node in producers(scope).items()}
        self._constants = constants(edited.graph)
        self._types = edited.types

    def steps_behind(self, keys: str) -> list[NodeProto]:
        """The Where that keys come from, then what changes their shape or type; nothing where there is no Where."""
        steps: list[NodeProto] = []
        while (node := self._made_by.get(keys)) and not node.domain:
            steps.insert(0, node)
            if node.op_type == "Where":
                return steps
            if not casts_keys(node) and node.op_type not in SHAPE_OPS:
                break
            keys = node.input[0]
        return []

    def wrapped_keys(self, where: NodeProto, num_rows: int) -> str | None:
        """The keys to which a Where adds the number of rows if they are negative; None: it does something else."""
        condition, added, keys = where.input
        tested = self._tests_negative(condition)
        if tested is None:
            return None
        if not tested[1]:
            added, keys = keys, added
        addition = self._made_by.get(added)
        if tested[0] != keys or addition is None or addition.op_type != "Add" or addition.domain:
            return None
        terms = list(addition.input)
        if keys not in terms:
            return None
        terms.remove(keys)
        return keys if self._number(terms[0], keys) == num_rows else None

    def _tests_negative(self, condition: str) -> tuple[str, bool] | None:
        """The keys that a condition compares with zero, and whether it holds for negative ones."""
        test, holds = self._made_by.get(condition), True
        while test is not None and test.op_type == "Not":
            test, holds = self._made_by.get(test.input[0]), not holds
        if test is None or test.op_type not in _MIRRORED or test.domain:
            return None
        (keys, limit), relation = test.input, test.op_type
        if keys in self._constants:
            keys, limit, relation = limit, keys, _MIRRORED[relation]
        number = self._number(limit, keys)
        means_negative = None if number is None else _MEANS_NEGATIVE.get((relation, number))
        return None if means_negative is None else (keys, means_negative == holds)

    def _number(self, name: str, keys: str) -> int | None:
        """The number that a constant adds to keys or compares them with; None: several, or a change of their shape."""
        tensor = self._constants.get(name)
        found = integers(tensor)
        if tensor is None or not found or len(found) > 1:
            return None
        keeps_shape = not tensor.dims or len(tensor.dims) <= (self._types.rank(keys) or 0)
        return found[0] if keeps_shape else None
