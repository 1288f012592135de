"""Moves row reads out of the bodies of Loop, Scan and If, one level at a time, until all are in the main graph.

Where a body selects its keys from keys outside, rows are read for all outer keys and the body selects
among the vectors. Where the body computes its keys, a copy of the control flow that computes nothing but the keys is
put in front, and the body picks its vectors by iteration. In both cases the meaning of the graph stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper

from inference_session.importers.onnx.lookups.graph_lookups import EditedModel, casts_keys
from inference_session.importers.onnx.lookups.vector_values import values_of_vectors
from inference_session.importers.onnx.tables import StaysDenseError, is_row_read
from inference_session.onnx_graphs import (
    NodeBuilder,
    attribute,
    bodies,
    constants,
    defined,
    insert_before,
    integers,
    make_node,
    needed_nodes,
    producers,
    reads,
    rename_inner,
    replace_node,
)

_MIN_OPSET = 10
_ALLOW_ZERO_OPSET = 14


@dataclass
class Hoister:
    """Moves row reads of some tables up to the main graph."""

    edited: EditedModel

    def run(self) -> None:
        """Change the main graph.

        Raises:
            StaysDenseError: a row read cannot be moved.
        """
        self._raise_from_bodies_of(self.edited.graph)

    def _raise_from_bodies_of(self, graph: GraphProto) -> None:
        for node in list(graph.node):
            for body in bodies(node):
                self._raise_from_bodies_of(body)
                for gather in [n for n in body.node if self._reads_table(n)]:
                    self._raise(graph, node, body, gather)

    def _reads_table(self, node: NodeProto) -> bool:
        return is_row_read(node) and node.input[0] in self.edited.tables

    def _raise(self, graph: GraphProto, node: NodeProto, body: GraphProto, gather: NodeProto) -> None:
        if self.edited.opset < _MIN_OPSET:
            reason = f"is read inside {node.op_type}, in opset {self.edited.opset}; this needs opset {_MIN_OPSET}"
            raise StaysDenseError(gather.input[0], reason)
        selection = self._selection(body, gather.input[1])
        if selection is not None and (node.op_type != "If" or self._vector_values().intersection(node.input)):
            self._select_vectors(graph, node, body, gather, selection)
        elif node.op_type == "If":
            self._raise_from_branch(graph, node, body, gather)
        elif node.op_type == "Loop":
            self._raise_from_loop(graph, node, body, gather)
        elif node.op_type == "Scan":
            self._raise_from_scan(graph, node, body, gather)
        else:
            raise StaysDenseError(gather.input[0], f"is read inside {node.op_type} {node.name!r}")

    # Keys selected from outside

    def _selection(self, body: GraphProto, keys: str) -> list[NodeProto] | None:
        """The nodes of the body that select keys from a value of the outer graph, first to last; None if none do."""
        inner, made_by = defined(body), producers(body)
        steps: list[NodeProto] = []
        while keys in inner:
            node = made_by.get(keys)
            if node is None or not self._selects(node):
                return None
            steps.insert(0, node)
            keys = node.input[0]
        return steps

    def _selects(self, node: NodeProto) -> bool:
        if node.op_type == "Cast":
            return casts_keys(node)
        if node.op_type == "Slice":
            return len(node.input) < 4 or not node.input[3] or self._axes(node) is not None
        if node.op_type == "Gather":
            return attribute(node, "axis", 0) >= 0
        return node.op_type in ("Identity", "Reshape", "Squeeze", "Unsqueeze")

    def _axes(self, node: NodeProto) -> list[int] | None:
        """The axes of a Slice, counted from the front; None where that cannot be known."""
        axes = integers(constants(self.edited.graph).get(node.input[3]))
        if axes is None or min(axes, default=0) >= 0:
            return axes
        rank = self.edited.types.rank(node.input[0])
        return None if rank is None else [axis % rank for axis in axes]

    def _select_vectors(
        self, graph: GraphProto, node: NodeProto, body: GraphProto, gather: NodeProto, selection: list[NodeProto]
    ) -> None:
        keys = selection[0].input[0] if selection else gather.input[1]
        vectors = self._vectors_before(graph, node, gather.input[0], keys)
        builder = self.edited.builder(gather.output[0])
        for step in selection:
            vectors = self._select(builder, step, vectors, gather.input[0])
        self._replace_read(body, gather, builder, vectors)

    def _select(self, builder: NodeBuilder, step: NodeProto, vectors: str, table: str) -> str:
        """Apply to vectors what a step does to keys."""
        if step.op_type in ("Identity", "Cast"):
            return vectors
        if step.op_type not in ("Slice", "Gather"):
            return self._shaped_as_keys(builder, vectors, step.output[0], table)
        inputs = [vectors, *step.input[1:]]
        if step.op_type == "Slice" and len(step.input) > 3 and step.input[3]:
            is_narrow = constants(self.edited.graph)[step.input[3]].data_type == TensorProto.INT32
            dtype = np.int32 if is_narrow else np.int64  # ONNX requires the type of the other indices
            inputs[3] = builder.constant(np.array(self._axes(step) or [], dtype))
        return builder.copy(step, inputs)

    def _shaped_as_keys(self, builder: NodeBuilder, vectors: str, keys: str, table: str) -> str:
        """Reshape vectors to the shape of the keys followed by that of a row."""
        shape, row_shape = builder.add("Shape", [keys]), self.edited.tables[table].dims[1:]
        if row_shape:
            shape = builder.add("Concat", [shape, builder.integers(row_shape)], axis=0)
        # Keys without elements: a 0 in their shape is a size, and must not be copied from the vectors.
        if self.edited.opset >= _ALLOW_ZERO_OPSET:
            return builder.add("Reshape", [vectors, shape], allowzero=1)
        return builder.add("Reshape", [vectors, shape])

    def _replace_read(self, body: GraphProto, gather: NodeProto, builder: NodeBuilder, vectors: str) -> None:
        """Put new nodes, of which one makes the vectors, in the place of a row read."""
        rank, row_shape = self.edited.types.rank(gather.input[1]), self.edited.tables[gather.input[0]].dims[1:]
        if rank is None:
            builder.add("Identity", [vectors], gather.output[0])
        else:  # for a Loop of no iterations only inference knows that the last dimensions are a row's
            builder.add("Reshape", [vectors, builder.integers([0] * rank + list(row_shape))], gather.output[0])
        replace_node(body, gather, builder.nodes)

    # Keys computed inside

    def _raise_from_branch(self, graph: GraphProto, node: NodeProto, body: GraphProto, gather: NodeProto) -> None:
        table, keys, output = gather.input[0], gather.input[1], gather.output[0]
        branch = self._keys_only(body, gather, [keys], inputs=set())
        flat = self._append_flat_keys(branch, branch.output.pop().name)
        branch.output.append(_int64(flat))
        empty = self.edited.builder(output).integers([])
        other_keys = self.edited.names.fresh(f"{output}_no_keys_out")
        other = helper.make_graph([make_node("Identity", [empty], other_keys)], "no_keys", [], [_int64(other_keys)])
        is_then = any(a.name == "then_branch" and a.g.output == body.output for a in node.attribute)
        then_branch, else_branch = (branch, other) if is_then else (other, branch)
        all_keys = self.edited.names.fresh(f"{output}_keys")
        condition = make_node("If", [node.input[0]], all_keys, then_branch=then_branch, else_branch=else_branch)
        self._refuse_vectors(table, condition)
        insert_before(graph, node, [condition])
        vectors, builder = self._vectors_before(graph, node, table, all_keys), self.edited.builder(output)
        self._replace_read(body, gather, builder, self._shaped_as_keys(builder, vectors, keys, table))

    def _raise_from_loop(self, graph: GraphProto, loop: NodeProto, body: GraphProto, gather: NodeProto) -> None:
        table, keys, output = gather.input[0], gather.input[1], gather.output[0]
        inputs = [value.name for value in body.input]
        results = [value.name for value in body.output]
        carried = self._carried(body, [keys, results[0]], inputs[2:], results[1:])
        kept = [i for i in range(len(inputs) - 2) if inputs[2 + i] in carried]
        targets = [keys, results[0], *(results[1 + i] for i in kept)]
        copy = self._keys_only(body, gather, targets, inputs=carried | set(inputs[:2]))
        all_keys, begins = self._append_collected_keys(copy, output)
        empty = self.edited.builder(output).integers([])
        finals = [self.edited.names.fresh(f"{output}_unread") for _ in kept]
        node = helper.make_node(
            "Loop",
            [*loop.input[:2], *(loop.input[2 + i] for i in kept), empty],
            [*finals, all_keys, begins],
            name=f"hotrow_{all_keys}",
            body=copy,
        )
        self._refuse_vectors(table, node)
        insert_before(graph, loop, [node])
        vectors, builder = self._vectors_before(graph, loop, table, all_keys), self.edited.builder(output)
        picked = self._pick(builder, vectors, begins, inputs[0], keys)
        self._replace_read(body, gather, builder, self._shaped_as_keys(builder, picked, keys, table))

    def _append_collected_keys(self, body: GraphProto, stem: str) -> tuple[str, str]:
        """Let a keys-only Loop body append its keys (its first output) to earlier ones, and note where they begin.

        Appending works for any number of keys per iteration; stacked outputs need the same number.
        """
        so_far, builder = self.edited.names.fresh(f"{stem}_so_far"), self.edited.builder(stem)
        flat = self._append_flat_keys(body, body.output.pop(0).name)
        joined = builder.add("Concat", [so_far, flat], axis=0)
        begin = builder.add("Reshape", [builder.add("Size", [so_far]), builder.integers([1])])
        body.node.extend(builder.nodes)
        body.input.append(_int64(so_far))
        body.output.extend([_int64(joined), _int64(begin)])
        return self.edited.names.fresh(f"{stem}_keys"), self.edited.names.fresh(f"{stem}_begins")

    def _append_flat_keys(self, body: GraphProto, keys: str) -> str:
        builder = self.edited.builder(keys)
        wide = builder.add("Cast", [keys], to=TensorProto.INT64)
        flat = builder.add("Reshape", [wide, builder.integers([-1])])
        body.node.extend(builder.nodes)
        return flat

    def _pick(self, builder: NodeBuilder, vectors: str, begins: str, iteration: str, keys: str) -> str:
        """The rows of one iteration, as many as it has keys."""
        begin = builder.add("Gather", [begins, iteration], axis=0)
        length = builder.add("Reshape", [builder.add("Size", [keys]), builder.integers([1])])
        return builder.add("Slice", [vectors, begin, builder.add("Add", [begin, length]), builder.integers([0])])

    def _raise_from_scan(self, graph: GraphProto, scan: NodeProto, body: GraphProto, gather: NodeProto) -> None:
        table, keys, output = gather.input[0], gather.input[1], gather.output[0]
        num_scanned = attribute(scan, "num_scan_inputs", 0)
        num_states = len(scan.input) - num_scanned
        inputs = [value.name for value in body.input]
        results = [value.name for value in body.output]
        carried = self._carried(body, [keys], inputs[:num_states], results)
        kept = [i for i in range(num_states) if inputs[i] in carried]
        scanned = set(inputs[num_states:])
        copy = self._keys_only(body, gather, [keys, *(results[i] for i in kept)], inputs=carried | scanned)
        wide = self.edited.names.fresh(f"{output}_int64")
        copy.node.append(make_node("Cast", [copy.output.pop(0).name], wide, to=TensorProto.INT64))
        copy.output.append(_int64(wide))
        all_keys = self.edited.names.fresh(f"{output}_keys")
        finals = [self.edited.names.fresh(f"{output}_unread") for _ in kept]
        attributes: dict[str, Any] = {a.name: list(a.ints) for a in scan.attribute if a.name.startswith("scan_input_")}
        node = helper.make_node(
            "Scan",
            [*(scan.input[i] for i in kept), *scan.input[num_states:]],
            [*finals, all_keys],
            name=f"hotrow_{all_keys}",
            body=copy,
            num_scan_inputs=num_scanned,
            **attributes,
        )
        self._refuse_vectors(table, node)
        insert_before(graph, scan, [node])
        vectors = self._vectors_before(graph, scan, table, all_keys)
        self._scan_also(scan, body, vectors, gather)

    def _scan_also(self, scan: NodeProto, body: GraphProto, vectors: str, gather: NodeProto) -> None:
        """Hand vectors to a Scan, one iteration's at a time."""
        scan.input.append(vectors)
        step = self.edited.names.fresh(f"{vectors}_step")
        body.input.append(ValueInfoProto(name=step))
        replace_node(body, gather, [make_node("Identity", [step], gather.output[0])])
        for item in scan.attribute:
            if item.name == "num_scan_inputs":
                item.i += 1
            elif item.name in ("scan_input_axes", "scan_input_directions"):
                item.ints.append(0)

    # Shared by both

    def _carried(self, body: GraphProto, targets: list[str], inputs: list[str], results: list[str]) -> set[str]:
        """The values carried between iterations that the targets depend on."""
        carried: set[str] = set()
        while True:
            needed = set(targets)
            for node in needed_nodes(body.node, targets):
                needed |= reads(node)
            new = [i for i, name in enumerate(inputs) if name in needed and name not in carried]
            if not new:
                return carried
            carried.update(inputs[i] for i in new)
            targets = [*targets, *(results[i] for i in new)]

    def _keys_only(self, body: GraphProto, gather: NodeProto, targets: list[str], *, inputs: set[str]) -> GraphProto:
        """A copy of a body, under fresh names, that computes the targets alone and gives them out."""
        from_vectors = self._vector_values()
        nodes = needed_nodes(body.node, targets)
        if from_vectors.intersection(targets) or any(from_vectors & reads(node) for node in nodes):
            reason = f"is read inside a loop or branch with keys that depend on looked-up vectors ({gather.input[1]!r})"
            raise StaysDenseError(gather.input[0], reason)
        copy = GraphProto(name=f"{body.name}_keys", node=nodes)
        copy.input.extend(value for value in body.input if value.name in inputs)
        for target in targets:
            # An output must be made by a node of the body, and be an output only once.
            relay = self.edited.names.fresh(target)
            copy.node.append(make_node("Identity", [target], relay))
            copy.output.append(ValueInfoProto(name=relay))
        rename_inner(copy, self.edited.names)
        return copy

    def _vector_values(self) -> set[str]:
        return values_of_vectors(self.edited.graph, set(self.edited.tables))

    def _refuse_vectors(self, table: str, node: NodeProto) -> None:
        if self._vector_values() & reads(node):
            raise StaysDenseError(table, "is read inside a loop or branch whose condition depends on looked-up vectors")

    def _vectors_before(self, graph: GraphProto, node: NodeProto, table: str, keys: str) -> str:
        vectors = self.edited.names.fresh(f"{keys}_vectors")
        insert_before(graph, node, [make_node("Gather", [table, keys], vectors, axis=0)])
        return vectors


def _int64(name: str) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.INT64, None)
