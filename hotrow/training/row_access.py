"""Rows of tensors by their numbers: compiled code on the processor, kernels on a GPU, torch's operators elsewhere."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.training.kernels import device_rows
from hotrow.training.kernels import vectors as compiled
from inference_session.platform.memory import take_large_pages

_NO_FACTORS = np.empty(0, np.float32)


def unwritten(like: Tensor, num_rows: int) -> Tensor:
    """Rows as those of a tensor, with any values. On the processor, in large pages where the kernel has them."""
    rows = like.new_empty((num_rows, *like.shape[1:]))
    if _is_here(rows):
        take_large_pages(rows.data_ptr(), rows.nbytes)
    return rows


def gather(table: Tensor, rows: Tensor) -> Tensor:
    """float32 [any, dim] and int64 [n] to [n, dim]."""
    if table.dtype is not torch.float32 or not (_is_here(table) or device_rows.can_run(table.device)):
        return table.index_select(0, rows)
    output = unwritten(table, len(rows))
    if _is_here(table):
        compiled.gather(_array(table), rows.numpy(), _array(output))
    else:
        device_rows.gather(table.detach().contiguous(), rows.contiguous(), output)
    return output


def scatter(table: Tensor, rows: Tensor, vectors: Tensor) -> None:
    """Write vectors [n, dim] to rows, each of which is named once."""
    if _is_here(table):
        compiled.scatter(_array(table), rows.numpy(), _array(vectors.contiguous()))
    else:
        table.index_copy_(0, rows, vectors)


def longer(tensor: Tensor, num_rows: int, fill: float | None = None) -> Tensor:
    """The same rows, and behind them more, whose elements have that value; None: any values."""
    grown = unwritten(tensor, num_rows)
    grown[: len(tensor)] = tensor
    if fill is not None:
        grown[len(tensor) :] = fill
    return grown


def add_up(
    num_rows: int,
    rows: Tensor,
    vectors: Tensor,
    sources: Tensor | int = 1,
    factors: Tensor | None = None,
    sums: Tensor | None = None,
) -> Tensor:
    """The sums of the vectors of each row, float32 [num_rows, dim]; zeros where a row is not named.

    Args:
        rows: int64 [n], to which row a vector is added.
        vectors: [any, dim].
        sources: int64 [n], which vector it is; or how many rows that follow each other get the same.
        factors: float32 [n], of each vector.
        sums: zeros, float32 [num_rows, dim], that get and are the answer; new ones if None.
    """
    vectors = vectors.to(torch.float32).contiguous()
    factors = None if factors is None else factors.to(torch.float32).contiguous()
    if sums is None:
        sums = unwritten(vectors, num_rows).zero_()
    if device_rows.can_run(vectors.device) and not _is_here(vectors):
        device_rows.add_up(sums, rows, vectors, sources, factors)
        return sums
    if isinstance(sources, int) and sources > 1:
        sources = torch.arange(len(rows), device=rows.device).div_(sources, rounding_mode="floor")
    if _is_here(vectors):
        places, scales = (
            rows if isinstance(sources, int) else sources,
            _NO_FACTORS if factors is None else factors.numpy(),
        )
        of_bags = not isinstance(sources, int)
        compiled.add_up(_array(sums), rows.numpy(), _array(vectors), of_bags, places.numpy(), scales)
        return sums
    added = vectors if isinstance(sources, int) else vectors[sources]
    return sums.index_add_(0, rows, added if factors is None else added * factors[:, None])


def _array(tensor: Tensor) -> NDArray[np.float32]:
    """The same memory, float32 and contiguous, for compiled code."""
    return tensor.detach().numpy()


def _is_here(table: Tensor) -> bool:
    return table.device.type == "cpu"
