"""Multiplies candidates by their context's matrices block by block, with no matrix repeated for a candidate.

The candidates of a block, one below the other, are one matrix: attention over a context's history is then one product
per block. MatMul, from either side, and Einsum are rewritten this way. Sums of products become MatMul first:
ReduceSum(h * t) over the last axis is t times the transposed h, and ReduceSum(h * scores) over the history is the
scores times h.
"""

from __future__ import annotations

import string

from onnx import NodeProto

from inference_session.importers.onnx.context.work import Work, WorkBuilder
from inference_session.onnx_graphs import attribute, axes_of, text_attribute

_SWAPPED = [0, 2, 1]


def contract_sum(work: Work, node: NodeProto) -> list[NodeProto] | None:
    """Write a sum of products of two values as MatMul."""
    if node.op_type != "ReduceSum" or node.domain:
        return None
    product = work.made_by.get(node.input[0])
    if product is None or product.op_type != "Mul" or product.domain or work.uses.get(product.output[0]) != 1:
        return None
    axes = axes_of(work.graph, node) or []
    axis = axes[0] % 3 if len(axes) == 1 and work.rank(product.output[0]) == 3 else None
    for name, other in (product.input, reversed(product.input)):
        source = work.tiled(name)
        if source is not None and work.all_dims(name) == work.all_dims(product.output[0]) and axis:
            return _as_product(work, node, source, other, axis)
    return None


def _as_product(work: Work, node: NodeProto, source: str, other: str, axis: int) -> list[NodeProto] | None:
    """The product of a candidate's row and its context's matrix; None where the other factor is no such row."""
    sizes = work.sizes(other)
    if sizes is None or len(sizes) != 3 or sizes[3 - axis] != 1 or sizes[axis] == 1:
        return None
    builder, keeps = WorkBuilder(work, node.output[0]), attribute(node, "keepdims", 1)
    if axis == 1:
        row = builder.add("Transpose", [other], perm=_SWAPPED)
        matrix = builder.tile(source)
        output = node.output[0] if keeps else None
        total = builder.add("MatMul", [row, matrix], output)
    else:
        matrix = builder.tile(builder.add("Transpose", [source], perm=_SWAPPED))
        total = builder.add("MatMul", [other, matrix])
        if keeps:
            builder.add("Transpose", [total], node.output[0], perm=_SWAPPED)
    if not keeps:
        builder.add("Flatten", [total], node.output[0], axis=1)
    return builder.nodes


def multiply_blocks(work: Work, node: NodeProto) -> list[NodeProto] | None:
    """Multiply the candidates of each block by their context's matrix."""
    if node.op_type == "Einsum" and not node.domain:
        return _einsum(work, node)
    if node.op_type != "MatMul" or node.domain or not _are_batches(work, node):
        return None
    left, right = node.input
    if (source := work.tiled(right)) is not None and work.has_rows(left):
        return _multiply(work, left, source, node.output[0])
    if (source := work.tiled(left)) is not None and work.has_rows(right):
        return _multiply_turned(work, source, right, node.output[0])
    return None


def _are_batches(work: Work, node: NodeProto) -> bool:
    """Whether each sample has its matrices, and the dimensions before those, as heads, are equal: none is stretched."""
    dims = [work.dims(name) or () for name in node.input]
    return len(dims[0]) == len(dims[1]) > 2 and dims[0][1:-2] == dims[1][1:-2]


class _Sizes:
    """Sizes of a product: numbers, or lists of one number in the graph.

    Args:
        axes: of `left` and `right`, the axes that become the product's last two.
    """

    def __init__(self, work: Work, left: str, right: str, axes: tuple[int, int]) -> None:
        self._places = [(left, axes[0]), (right, axes[1])]
        self._summed = (left, -3 - axes[0])
        self._between = [(left, axis) for axis in range(1, (work.rank(left) or 0) - 2)]

    def whole(self, builder: WorkBuilder) -> str:
        """The product's shape, [rows, between, left, right]."""
        return builder.list_of([-1, *(builder.size(*place) for place in (*self._between, *self._places))])

    def of_left(self, builder: WorkBuilder) -> list[int | str]:
        """[between, left, summed]."""
        return [builder.size(*place) for place in (*self._between, self._places[0], self._summed)]

    def of_tall(self, builder: WorkBuilder) -> str:
        """[blocks, between, rows of a block times left, summed]."""
        *between, _, summed = self.of_left(builder)
        return builder.list_of([builder.num_blocks(), *between, -1, summed])

    def of_blocks(self, builder: WorkBuilder) -> str:
        """[blocks, between, rows of a block, left, right]."""
        between = [builder.size(*place) for place in self._between]
        return builder.list_of([builder.num_blocks(), *between, -1, *(builder.size(*place) for place in self._places)])


def _multiply(work: Work, left: str, right: str, output: str) -> list[NodeProto]:
    """A candidate's matrix times its context's."""
    builder, sizes = WorkBuilder(work, output), _Sizes(work, left, right, (-2, -1))
    product = _product(builder, left, right, work.rank(left) or 0, sizes)
    builder.add("Reshape", [product, sizes.whole(builder)], output)
    return builder.nodes


def _multiply_turned(work: Work, left: str, right: str, output: str) -> list[NodeProto]:
    """A context's matrix times a candidate's: the product of the transposed ones, transposed."""
    builder, rank, sizes = WorkBuilder(work, output), work.rank(right) or 0, _Sizes(work, right, left, (-1, -2))
    turned = [*range(rank - 2), rank - 1, rank - 2]
    row, matrix = (builder.add("Transpose", [name], perm=turned) for name in (right, left))
    product = builder.add("Reshape", [_product(builder, row, matrix, rank, sizes), sizes.whole(builder)])
    builder.add("Transpose", [product], output, perm=turned)
    return builder.nodes


def _product(builder: WorkBuilder, left: str, right: str, rank: int, sizes: _Sizes) -> str:
    """[blocks, rows of a block, left, right], or what is as long; `left` has rows, `right` contexts."""
    matrix = builder.of_blocks(right)
    if rank == 3:
        tall = builder.add("Reshape", [left, sizes.of_tall(builder)])
        return builder.add("MatMul", [tall, matrix])
    # The rows of a block go behind the heads.
    order = [0, *range(2, rank - 1), 1, rank - 1, rank]
    apart = builder.add("Reshape", [left, builder.list_of([builder.num_blocks(), -1, *sizes.of_left(builder)])])
    inner = builder.add("Transpose", [apart], perm=order)
    tall = builder.add("Reshape", [inner, sizes.of_tall(builder)])
    product = builder.add("Reshape", [builder.add("MatMul", [tall, matrix]), sizes.of_blocks(builder)])
    back = [0, rank - 2, *range(1, rank - 2), rank - 1, rank]
    return builder.add("Transpose", [product], perm=back)


def _einsum(work: Work, node: NodeProto) -> list[NodeProto] | None:
    """The same equation with a letter for blocks and one for the rows of a block."""
    equation = text_attribute(node, "equation")
    left, arrow, right = equation.partition("->")
    operands = left.split(",")
    sources = [work.tiled(name) for name in node.input]
    letters = {axes[:1] for axes, source in zip(operands, sources, strict=True) if source}
    if len(letters) != 1 or not arrow or "." in equation or not right.startswith(letter := letters.pop()):
        return None
    inner = next(c for c in string.ascii_letters if c not in equation)
    builder, inputs, axes_of = WorkBuilder(work, node.output[0]), list[str](), list[str]()
    for name, axes, source in zip(node.input, operands, sources, strict=True):
        has_rows = not source and letter in axes
        if has_rows and not axes.startswith(letter):
            return None
        inputs.append(builder.of_blocks(source) if source else builder.to_blocks(name) if has_rows else name)
        axes_of.append(f"{letter}{inner}{axes[1:]}" if has_rows else axes)
    text = f"{','.join(axes_of)}->{letter}{inner}{right[1:]}"
    result = builder.add("Einsum", inputs, equation=text)
    builder.add("Reshape", [result, builder.whole(node.output[0], result)], node.output[0])
    return builder.nodes
