"""The rewrites, in the order in which they are applied."""

from __future__ import annotations

from inference_session.importers.onnx.context.biases import fold_biases
from inference_session.importers.onnx.context.columns import cut_products
from inference_session.importers.onnx.context.concatenations import delay_concatenations
from inference_session.importers.onnx.context.contractions import contract_sums
from inference_session.importers.onnx.context.elementwise import broadcast_elementwise, drop_expansions
from inference_session.importers.onnx.context.pairs import divide_pairs
from inference_session.importers.onnx.context.products import multiply_blocks
from inference_session.importers.onnx.context.work import Work


def rewrite(work: Work) -> None:
    """Remove tiles, as many as can be."""
    for apply in (
        delay_concatenations,
        divide_pairs,
        delay_concatenations,
        drop_expansions,
        contract_sums,
        cut_products,
        multiply_blocks,
        broadcast_elementwise,
        fold_biases,
    ):
        apply(work)
