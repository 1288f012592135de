"""The rewrites, in the order in which they are applied."""

from __future__ import annotations

from inference_session.importers.onnx.context.biases import carry_biases
from inference_session.importers.onnx.context.columns import cut_products
from inference_session.importers.onnx.context.concatenations import delay_concatenations
from inference_session.importers.onnx.context.elementwise import broadcast_elementwise, drop_expansions
from inference_session.importers.onnx.context.pairs import divide_pairs
from inference_session.importers.onnx.context.products import contract_sum, multiply_blocks
from inference_session.importers.onnx.context.reductions import reduce_by_parts
from inference_session.importers.onnx.context.siblings import multiply_siblings
from inference_session.importers.onnx.context.simplification import (
    answer_shape,
    fold_constants,
    share_equal_nodes,
    write_plainly,
)
from inference_session.importers.onnx.context.work import Work


def rewrite(work: Work, *, sums: bool) -> None:
    """Remove tiles, as many as can be.

    Args:
        sums: take sums of a context's and a candidate's value apart where their rounding allows it, and add fields in
            another order.
    """
    fold_constants(work)
    work.replace_each(answer_shape)
    work.replace_each(write_plainly)
    delay_concatenations(work)
    if sums:
        work.replace_each(reduce_by_parts)
    divide_pairs(work)
    delay_concatenations(work)
    drop_expansions(work)
    work.replace_each(contract_sum)
    carry_biases(work)
    cut_products(work, sums=sums)
    work.replace_each(multiply_blocks)
    work.replace_each(broadcast_elementwise)
    multiply_siblings(work)
    share_equal_nodes(work)
