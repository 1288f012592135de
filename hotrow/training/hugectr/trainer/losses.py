"""HugeCTR's losses, of logits, and its regularizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hotrow.training.hugectr.trainer.operators import with_constant
from inference_session.errors import UnsupportedModelError
from inference_session.importers.hugectr.graph import LOSS_LAYERS, Graph, Layer

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Logits and labels, both float32 [samples, columns], to the mean over the samples."""
Penalty = Callable[[Sequence[Tensor], int], Tensor]
"""The regularizer of all weights of the network, given the number of samples of the batch."""


@dataclass(frozen=True)
class Loss:
    """One loss layer."""

    name: str
    """Its top."""
    label: str
    of: LossFunction
    penalty: Penalty | None


def losses_of(graph: Graph) -> list[Loss]:
    """The losses of a graph, in its order.

    Raises:
        ModelFormatError, UnsupportedModelError: names the layer.
    """
    found = [_loss(graph, layer) for layer in graph.layers if layer.type in LOSS_LAYERS]
    if not found:
        raise UnsupportedModelError("the model has no loss; add a BinaryCrossEntropyLoss, CrossEntropyLoss or "
                                    "MultiCrossEntropyLoss")  # fmt: skip
    return found


def class_columns(graph: Graph, widths: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
    """Columns of the labels that hold the number of a class, each with how many classes there are.

    `widths`: the columns of the logits of each label.
    """
    of_classes = {layer.bottoms[1] for layer in graph.layers if layer.type == "CrossEntropyLoss"}
    found, column = [], 0
    for label in graph.labels:
        if label.name in of_classes and label.dim == 1:
            found.append((column, widths[label.name]))
        column += label.dim
    return tuple(found)


def _loss(graph: Graph, layer: Layer) -> Loss:
    name = layer.tops[0] if layer.tops else f"loss{layer.position}"
    of = _FORMULAS.get(layer.type) or _several(layer, _label_dim(graph, layer))
    return Loss(name, layer.bottoms[1], of, _penalty(layer))


def _label_dim(graph: Graph, layer: Layer) -> int:
    return next(label.dim for label in graph.labels if label.name == layer.bottoms[1])


def _classes(logits: Tensor, labels: Tensor) -> Tensor:
    if labels.shape[1] == 1:
        return functional.cross_entropy(logits, labels[:, 0].round().long())
    return functional.cross_entropy(logits, labels)


_FORMULAS = {"BinaryCrossEntropyLoss": functional.binary_cross_entropy_with_logits, "CrossEntropyLoss": _classes}


def _several(layer: Layer, width: int) -> LossFunction:
    """A loss for each column, weighted by `target_weight`; labels below -0.5 are unknown and do not count."""
    raw = layer.parameters.get("target_weight") or [1.0] * width
    if len(raw) != width:
        layer.fail(f"{len(raw)} weights for {width} columns of the label; give one for each", "target_weight")
    weighted = with_constant(np.array(raw, np.float32), torch.mul)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        each = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return cast("Tensor", (weighted(each) * (labels >= -0.5)).sum() / labels.numel())

    return loss


def _penalty(layer: Layer) -> Penalty | None:
    kind = layer.parameters.get("regularizer")
    if kind is None:
        return None
    share = layer.number("lambda", low=0, default=0.0)
    if kind not in ("L1", "L2"):
        layer.fail(f"found {kind!r}; allowed: 'L1', 'L2'", "regularizer")

    def penalty(weights: Sequence[Tensor], num_samples: int) -> Tensor:
        sizes = [weight.abs().sum() if kind == "L1" else weight.square().sum() / 2 for weight in weights]
        return torch.stack(sizes).sum() * (share / num_samples)

    return penalty
