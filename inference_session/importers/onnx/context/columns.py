"""Cuts products with weights by columns: the context's contribution is computed once per context.

A matrix that is multiplied by weights is taken apart into a sum of terms, each a value times a matrix of constants:
Concat(h, t, h - t, h * t) W = h (W1 + W3) + t (W2 - W3) + (h * t) W4. Terms of the context are multiplied at one row
per context. A product of a context's and a candidate's value makes the weights the context's own: for every row of h,
(h * t) W4 = t diag(h) W4, so that only one product remains, of t with a matrix that is made once per context.

Sums, (h - t) W, are taken apart only where that leaves fewer columns to the candidates, and where the values are known
to be so small that h W and t W round no worse than (h - t) W (bounds.py). Numbers near 4,096 that differ by one are
not that small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from inference_session.importers.onnx.context.bounds import Bounds
from inference_session.importers.onnx.context.linear_layer import Matrix, linear_layer
from inference_session.importers.onnx.context.work import Work, WorkBuilder
from inference_session.onnx_graphs import attribute


class Term(NamedTuple):
    """`value`, or its elementwise product with `factor`, times `matrix`, [columns of the value, columns of the sum]."""

    value: str
    matrix: Matrix
    is_contexts: bool
    factor: str = ""
    """A value of the context that a candidate's one is multiplied by, stretched over what it has more dimensions."""
    left: Matrix | None = None
    """What the value is multiplied by before `factor` is: [columns of the value, columns of the factor]."""


class Sum(NamedTuple):
    """A value as a sum of terms and a constant row."""

    terms: list[Term]
    constant: Matrix


@dataclass
class _Product:
    """A MatMul or Gemm with a matrix of weights."""

    matrix: str
    weights: Matrix
    bias: Matrix
    output: str


def cut_products(work: Work, *, sums: bool) -> None:
    """Cut products into the columns of the context and those of the candidate.

    Args:
        sums: take sums in front of a product apart as well, where their rounding allows it.
    """
    bounds = Bounds(work) if sums else None
    positions = {node.output[0]: i for i, node in enumerate(work.graph.node)}
    replaced: dict[int, list[NodeProto]] = {}
    for i, node in enumerate(work.graph.node):
        product = _product(work, node)
        nodes = None if product is None else _cut(work, product, bounds)
        if product is not None and nodes:
            replaced[i] = []
            replaced[positions[product.output]] = nodes
    work.replace(replaced)


def _product(work: Work, node: NodeProto) -> _Product | None:
    """A product with weights, and the sum with a constant row behind it; None for anything else."""
    found = linear_layer(work, node)
    if found is None:
        return None
    bias, output = _bias_behind(work, node.output[0], len(found.bias))
    return _Product(found.matrix, found.weights, found.bias + bias, output)


def _bias_behind(work: Work, name: str, width: int) -> tuple[Matrix, str]:
    """The row that the only reader of a product adds to it, and the sum; zeros and the product itself without one."""
    readers = [node for node in work.graph.node if name in node.input]
    if len(readers) == 1 and work.uses.get(name) == 1 and readers[0].op_type == "Add" and not readers[0].domain:
        other = next(item for item in readers[0].input if item != name)
        row = _row(work.constant(other), width)
        if row is not None and work.all_dims(readers[0].output[0]) == work.all_dims(name):
            return row, str(readers[0].output[0])
    return np.zeros(width), name


def _cut(work: Work, product: _Product, bounds: Bounds | None) -> list[NodeProto] | None:
    """The nodes that take the place of a product; None where no part of it depends on the context alone."""
    found = _apart(work, product.matrix, None)
    if bounds is not None:
        further = _apart(work, product.matrix, _Limit(bounds, product.weights))
        found = min(found, further, key=lambda item: _num_columns(work, item))
    if not any(term.is_contexts or term.factor for term in found.terms) or not _covers(work, found, product.matrix):
        return None
    return _Writer(work, product, found.constant @ product.weights + product.bias).write(found)


def _covers(work: Work, found: Sum, name: str) -> bool:
    """Whether the sum of the terms has the value's shape: in each dimension one term must have the full size."""
    values = [term.factor or term.value for term in found.terms]
    dims, whole = [work.dims(value) for value in values], work.dims(name)
    if whole is None or any(d is None or len(d) != len(whole) for d in dims):
        return False
    longest = [max(d[axis] for d in dims if d) for axis in range(1, len(whole) - 1)]
    has_candidate = any(not term.is_contexts for term in found.terms)
    return has_candidate and longest == list(whole[1:-1])


def _num_columns(work: Work, found: Sum) -> float:
    """The number of columns that are multiplied for each candidate; columns of stretched values count less."""
    columns: dict[str, float] = {}
    for term in found.terms:
        dims = work.dims(term.value) or ()
        longest = work.dims(term.factor) if term.factor else dims
        if not term.is_contexts:
            size = math.prod((longest or dims)[1:-1]) * dims[-1]
            columns[term.value] = max(columns.get(term.value, 0), size)
    return sum(columns.values())


def _collected(terms: Iterable[Term]) -> list[Term]:
    """Each value, and each product of two, once."""
    found: dict[tuple[str, str, int], Term] = {}
    for term in terms:
        key = term.value, term.factor, 0 if term.left is None else id(term.left)
        known = found.get(key)
        found[key] = term if known is None else known._replace(matrix=known.matrix + term.matrix)
    return list(found.values())


@dataclass
class _Limit:
    """Which sums may be taken apart."""

    bounds: Bounds
    weights: Matrix


def _apart(work: Work, name: str, limit: _Limit | None) -> Sum:
    """A value as a sum; only with a limit are sums in the graph taken apart, too."""
    width = (work.dims(name) or (0,))[-1]
    whole = Sum([Term(name, np.eye(width), False)], np.zeros(width))
    if (source := work.tiled(name)) is not None:
        return Sum([Term(source, np.eye(width), True)], np.zeros(width))
    node = work.made_by.get(name)
    if node is None or node.domain:
        return whole
    rule = _RULES.get(node.op_type)
    found = None if rule is None else rule(work, node, limit)
    if found is None or not (rule is _of_expansion or any(term.is_contexts or term.factor for term in found.terms)):
        return whole
    return found


def _of_concat(work: Work, node: NodeProto, limit: _Limit | None) -> Sum | None:
    rank = work.rank(node.output[0])
    if rank is None or attribute(node, "axis", 0) % rank != rank - 1:
        return None
    parts = [_apart(work, name, limit) for name in node.input]
    total, begin, terms = sum(len(part.constant) for part in parts), 0, list[Term]()
    if total != (work.dims(node.output[0]) or (0,))[-1]:
        return None
    for part in parts:
        sides = begin, total - begin - len(part.constant)
        terms += [term._replace(matrix=np.pad(term.matrix, ((0, 0), sides))) for term in part.terms]
        begin += len(part.constant)
    return Sum(terms, np.concatenate([part.constant for part in parts]))


def _of_sum(work: Work, node: NodeProto, limit: _Limit | None) -> Sum | None:
    """Add or Sub, where the limit allows it."""
    sign = -1.0 if node.op_type == "Sub" else 1.0
    if limit is None or not limit.bounds.may_part(node, limit.weights):
        return None
    left, right = (_addend(work, node, position, limit) for position in (0, 1))
    if left is None or right is None:
        return None
    return Sum([*left.terms, *_scaled(right.terms, sign)], left.constant + sign * right.constant)


def _addend(work: Work, node: NodeProto, position: int, limit: _Limit) -> Sum | None:
    """One input of Add or Sub, which has the output's shape, or is a constant row beside one that has it."""
    width = (work.dims(node.output[0]) or (0,))[-1]
    constant, other = work.constant(node.input[position]), work.constant(node.input[1 - position])
    if constant is not None:
        row = _row(constant, width)
        return None if row is None else Sum([], row)
    if not (_same_rank(work, node) if other is None else _keeps_shape(work, node, position)):
        return None
    found = _apart(work, node.input[position], limit)
    return found if len(found.constant) == width else None


def _scaled(terms: Sequence[Term], factor: float | Matrix) -> list[Term]:
    return [term._replace(matrix=term.matrix * factor) for term in terms]


def _keeps_shape(work: Work, node: NodeProto, position: int) -> bool:
    return work.all_dims(node.input[position]) == work.all_dims(node.output[0])


def _same_rank(work: Work, node: NodeProto) -> bool:
    return len({work.rank(name) for name in (*node.input, *node.output)}) == 1


def _row(constant: NDArray[np.generic] | None, width: int) -> Matrix | None:
    """A constant that is the same for all but the last axis, as a row."""
    if constant is None or constant.size not in (1, width) or (constant.size > 1 and constant.shape[-1] != width):
        return None
    return np.broadcast_to(constant.astype(np.float64).reshape(-1), (width,))


def _of_scaled(work: Work, node: NodeProto, limit: _Limit | None) -> Sum | None:
    """Mul or Div by a constant, or Mul of a context's and a candidate's value."""
    constants = [work.constant(name) for name in node.input]
    if node.op_type == "Mul" and constants == [None, None]:
        return _of_woven(work, node, limit)
    position = 0 if constants[0] is None else 1
    if constants[1 - position] is None or (node.op_type == "Div" and position == 1):
        return None
    row = _row(constants[1 - position], (work.dims(node.output[0]) or (0,))[-1])
    if row is None or not _keeps_shape(work, node, position):
        return None
    given = _apart(work, node.input[position], limit)
    factor = 1 / row if node.op_type == "Div" else row
    return Sum(_scaled(given.terms, factor), given.constant * factor)


def _of_woven(work: Work, node: NodeProto, limit: _Limit | None) -> Sum | None:
    for name, other in (tuple(node.input), tuple(reversed(node.input))):
        factor, dims, whole = work.tiled(name), work.dims(other), work.dims(node.output[0])
        if factor is None or dims is None or whole is None or len(dims) != len(whole) or len(dims) not in (2, 3):
            continue
        if work.dims(name) == whole and dims[-1] == whole[-1] and set(dims[1:-1]) <= {1}:
            return _narrower(work, node, (factor, other), limit) or Sum(
                [Term(other, np.eye(whole[-1]), False, factor)], np.zeros(whole[-1])
            )
    return None


def _narrower(work: Work, node: NodeProto, names: tuple[str, str], limit: _Limit | None) -> Sum | None:
    """The columns of r in u * (r U + b), where those are fewer: r U diag(u), and u * b of the context alone."""
    factor, other = names
    found = linear_layer(work, work.made_by.get(other))
    if found is None or limit is None or work.rank(other) != 2 or len(found.weights) >= found.weights.shape[1]:
        return None
    if not limit.bounds.may_part(node, limit.weights):
        return None
    width = found.weights.shape[1]
    woven = Term(found.matrix, np.eye(width), False, factor, found.weights)
    return Sum([woven, Term(factor, np.diag(found.bias), True)], np.zeros(width))


def _of_negative(work: Work, node: NodeProto, limit: _Limit | None) -> Sum | None:
    given = _apart(work, node.input[0], limit)
    return Sum(_scaled(given.terms, -1.0), -given.constant)


def _of_copy(work: Work, node: NodeProto, limit: _Limit | None) -> Sum | None:
    return _apart(work, node.input[0], limit)


def _of_expansion(work: Work, node: NodeProto, limit: _Limit | None) -> Sum | None:
    """A value that is stretched along other axes than the last is stretched when the terms are added."""
    before, after = work.dims(node.input[0]), work.dims(node.output[0])
    if before is None or after is None or len(before) != len(after) or before[-1] != after[-1]:
        return None
    stretched = all(one in (1, other) for one, other in zip(before[1:], after[1:], strict=True))
    return _apart(work, node.input[0], limit) if before[0] == after[0] and stretched else None


def _of_gather(work: Work, node: NodeProto, limit: _Limit | None) -> Sum | None:
    """Some of the columns."""
    rank, columns = work.rank(node.input[0]), work.constant(node.input[1])
    if rank is None or columns is None or columns.ndim != 1 or attribute(node, "axis", 0) % rank != rank - 1:
        return None
    given = _apart(work, node.input[0], limit)
    picked = columns.astype(np.int64) % len(given.constant)
    return Sum([term._replace(matrix=term.matrix[:, picked]) for term in given.terms], given.constant[picked])


_RULES = {
    "Add": _of_sum,
    "Concat": _of_concat,
    "Div": _of_scaled,
    "Dropout": _of_copy,
    "Expand": _of_expansion,
    "Gather": _of_gather,
    "Identity": _of_copy,
    "Mul": _of_scaled,
    "Neg": _of_negative,
    "Sub": _of_sum,
    "Tile": _of_expansion,
}


class _Writer:
    """Writes a product that has been taken apart."""

    def __init__(self, work: Work, product: _Product, bias: Matrix) -> None:
        self._work = work
        self._product = product
        self._bias = bias
        self._builder = WorkBuilder(work, product.output)

    def write(self, found: Sum) -> list[NodeProto]:
        """The context's part, tiled, plus the candidates' parts, the least first.

        Of matrices, the product itself adds the context's part, and the next operator (e.g. ReLU) can be fused with it.
        """
        terms = _collected(found.terms)
        contexts = self._contexts([term for term in terms if term.is_contexts])
        candidates = [term for term in terms if not term.is_contexts]
        factors = [term.factor for term in candidates if term.factor]
        woven = [term for term in candidates if factors and self._has_one_row(term)]
        total = self._woven(woven, contexts, factors[0]) if woven else self._builder.tile(contexts or "")
        for group in self._groups([term for term in candidates if not (factors and self._has_one_row(term))]):
            if self._work.rank(group[0].value) == 2:
                total = self._builder.add("Gemm", [*self._factors(group), total])
            else:
                total = self._builder.add("Add", [self._multiplied(group), total])
        self._builder.rename(total, self._product.output)
        return self._builder.nodes

    def _contexts(self, terms: Sequence[Term]) -> str | None:
        """The sum of the context's terms and the constant row, at one row per context; None without such terms."""
        groups = self._groups(terms)
        if not groups:
            return None
        total = self._sum([self._multiplied(group) for group in groups])
        return self._builder.add("Add", [total, self._builder.weight(self._bias)]) if self._bias.any() else total

    def _groups(self, terms: Sequence[Term]) -> list[list[Term]]:
        """Terms that can stand side by side in one matrix, the smallest matrices first."""
        groups: dict[tuple[int, ...], list[Term]] = {}
        for term in terms:
            groups.setdefault((self._work.dims(term.value) or ())[1:-1], []).append(term)
        return [groups[dims] for dims in sorted(groups, key=math.prod)]

    def _multiplied(self, terms: Sequence[Term]) -> str:
        return self._builder.add("MatMul", self._factors(terms))

    def _factors(self, terms: Sequence[Term]) -> tuple[str, str]:
        weights = np.concatenate([term.matrix for term in terms]) @ self._product.weights
        return self._beside([term.value for term in terms]), self._builder.weight(weights)

    def _sum(self, parts: Sequence[str]) -> str:
        return reduce(lambda total, part: self._builder.add("Add", [total, part]), parts)

    def _beside(self, values: Sequence[str]) -> str:
        axis = (self._work.rank(values[0]) or 0) - 1
        return values[0] if len(values) == 1 else self._builder.add("Concat", values, axis=axis)

    # Products of a context's and a candidate's value

    def _has_one_row(self, term: Term) -> bool:
        """Whether a candidate's value is one row, which the context's matrix can be multiplied by."""
        return set((self._work.dims(term.value) or ())[1:-1]) <= {1}

    def _woven(self, terms: Sequence[Term], contexts: str | None, factor: str) -> str:
        """(h * t) W4 + t W2 + c as [t, 1] times a matrix that the context makes, once: [diag(h) W4 + W2; c].

        The matrix is [contexts, columns of t and one, rows of h, width].
        """
        builder, width = self._builder, self._product.weights.shape[1]
        rows = [builder.size(factor, axis) for axis in range(1, (self._work.rank(factor) or 0) - 1)]
        number = builder.add("Slice", [builder.add("Shape", [factor]), builder.integers([0]), builder.integers([1])])
        values = list(dict.fromkeys(term.value for term in terms))
        matrices = [self._matrix([term for term in terms if term.value == value], number, rows) for value in values]
        matrices.append(self._last_rows(contexts, number, rows))
        matrix = builder.add("Concat", matrices, axis=1)
        num_columns = sum((self._work.dims(value) or (0,))[-1] for value in values) + 1
        flat = builder.add("Reshape", [matrix, builder.list_of([number, num_columns, -1])])
        ones = builder.ones_beside(values[0])
        beside = builder.add("Concat", [*values, ones], axis=(self._work.rank(values[0]) or 0) - 1)
        tall = builder.add("Reshape", [beside, builder.list_of([builder.num_blocks(), -1, num_columns])])
        product = builder.add("MatMul", [tall, builder.of_blocks(flat)])
        return builder.add("Reshape", [product, builder.list_of([-1, *rows, width])])

    def _matrix(self, terms: Sequence[Term], number: str, rows: Sequence[int | str]) -> str:
        """What the context multiplies one value by, [contexts, columns, rows, width]."""
        terms = sorted(terms, key=lambda term: not term.factor)
        total = self._sum([self._matrix_of(term, number, rows) for term in terms])
        if terms[0].factor:
            return total
        shape = number, len(terms[0].matrix), *rows, self._product.weights.shape[1]
        return self._builder.add("Expand", [total, self._builder.list_of(shape)])

    def _matrix_of(self, term: Term, number: str, rows: Sequence[int | str]) -> str:
        """What one term adds to the matrix; it is the same for all contexts and rows if it has no factor."""
        if term.left is not None:
            return self._narrow_matrix(term, term.left, number)
        builder, weights = self._builder, term.matrix @ self._product.weights
        num_columns, width = weights.shape
        shared = builder.weight(weights.reshape(num_columns, *[1] * len(rows), width))
        if not term.factor:
            return shared
        turned = builder.add("Transpose", [term.factor], perm=[0, 2, 1]) if rows else term.factor
        apart = builder.add("Reshape", [turned, builder.list_of([number, num_columns, *rows, 1])])
        return builder.add("Mul", [apart, shared])

    def _narrow_matrix(self, term: Term, left: Matrix, number: str) -> str:
        """U diag(u) W, [contexts, columns of the value, width]."""
        builder = self._builder
        apart = builder.add("Reshape", [term.factor, builder.list_of([number, left.shape[1], 1])])
        scaled = builder.add("Mul", [apart, builder.weight(term.matrix @ self._product.weights)])
        return builder.add("MatMul", [builder.weight(left), scaled])

    def _last_rows(self, contexts: str | None, number: str, rows: Sequence[int | str]) -> str:
        """What is added for every candidate of a context, [contexts, 1, rows, width]."""
        builder, width = self._builder, self._product.weights.shape[1]
        shape = builder.list_of([number, 1, *rows, width])
        if contexts is None:
            return builder.add("Expand", [builder.weight(self._bias), shape])
        return builder.add(
            "Expand",
            [builder.add("Reshape", [contexts, builder.list_of([number, 1, *[-1] * bool(rows), width])]), shape],
        )
