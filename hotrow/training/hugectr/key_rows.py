"""From keys to the rows of a table that grows. Row 0 belongs to no key: it stands for keys that have no row."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class KeyRows:
    """Sorted keys and their rows."""

    def __init__(self) -> None:
        self.keys = torch.zeros(1, dtype=torch.int64)
        """The key of each row; that of row 0 means nothing."""
        self._sorted = np.empty(0, np.int64)
        self._rows = np.empty(0, np.int64)

    @property
    def num_rows(self) -> int:
        """Rows in use, row 0 among them."""
        return len(self.keys)

    def find(self, keys: Tensor) -> Tensor:
        """int64 [n] to the rows, 0 where there is none."""
        wanted = keys.numpy()
        if not len(self._sorted):
            return torch.zeros(len(keys), dtype=torch.int64)
        places = np.minimum(np.searchsorted(self._sorted, wanted), len(self._sorted) - 1)
        return torch.from_numpy(np.where(self._sorted[places] == wanted, self._rows[places], 0))

    def find_or_add(self, keys: Tensor) -> Tensor:
        """int64 [n], each once, to their rows; a key without one gets the next."""
        rows = self.find(keys)
        added = keys[rows == 0]
        if len(added):
            rows[rows == 0] = torch.arange(self.num_rows, self.num_rows + len(added))
            self.keys = torch.cat([self.keys, added])
            order = np.argsort(self.keys[1:].numpy(), kind="stable")
            self._sorted, self._rows = self.keys[1:].numpy()[order], order + 1
        return rows


def distinct(keys: Tensor) -> tuple[Tensor, Tensor]:
    """int64 [n] to each of them once, int64 [m], and where each of the n stands there, int64 [n]."""
    found, places = np.unique(keys.numpy(), return_inverse=True)
    return torch.from_numpy(found), torch.from_numpy(places)
