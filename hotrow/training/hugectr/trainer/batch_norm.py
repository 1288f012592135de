"""Batch normalisation by the samples of all processes, so that they train as one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.training.hugectr.trainer.processes import Processes


def normalised_in_common(
    x: Tensor, mean: Tensor, variance: Tensor, factor: float, eps: float, processes: Processes
) -> Tensor:
    """Normalise the samples of this process, [samples, width], by the mean and variance of those of all.

    Each process has as many samples. The running `mean` and `variance` move towards those of the batch by `factor`.
    """
    values, total = x.float(), len(x) * processes.count
    found = _Total.apply(values.sum(0), processes) / total
    centred = values - found
    spread = _Total.apply(centred.square().sum(0), processes) / total
    with torch.no_grad():
        mean.lerp_(found, factor)
        variance.lerp_(spread * (total / max(total - 1, 1)), factor)
    return (centred * (spread + eps).rsqrt()).to(x.dtype)


class _Total(torch.autograd.Function):
    """The sum over all processes."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, processes: Processes) -> Tensor:
        ctx.processes = processes
        return processes.add_up(part.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.processes.add_up(gradient.clone()), None
