"""TorchRec's jagged tensors while a network is traced: made of served arrays, without fixed sizes.

TorchRec's own would become loops over lists of unknown length in the traced network, or constants of the example.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


class ServedLists(JaggedTensor):
    """One feature: lists of ids, or of vectors, for each sample. Concatenated, unless it is a `ServedMatrix`."""

    def __init__(self, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> None:
        super().__init__(values=values, lengths=lengths, weights=weights)

    def offsets(self) -> Tensor:
        """The begin of each list, and the end of the last one: int64 [samples + 1]."""
        return _offsets(self.lengths())

    def with_values(self, values: Tensor, weights: Tensor | None = None) -> ServedLists:
        """Lists of the same lengths with other values."""
        return ServedLists(values, self.lengths(), weights)

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """[samples, desired_length, ...]: longer lists are cut, shorter ones filled up."""
        values, counts = self.values(), self.lengths().to(torch.int64)
        length: Any = counts.max().item() if desired_length is None else desired_length
        if desired_length is None:
            torch._check(length >= 0)
        places = torch.arange(length, device=values.device)
        present = places < counts[:, None]
        spare = torch.cat([values, values.new_zeros((1, *values.shape[1:]))])  # so that there is a row to read
        rows = torch.where(present, self.offsets()[:-1, None] + places, 0)
        return _filled(spare[rows], present, padding_value)


class ServedMatrix(ServedLists):
    """Lists in the form of `padded`: a matrix [samples, width] or vectors [samples, width, dim], with padding."""

    def __init__(self, matrix: Tensor, present: Tensor, weights: Tensor | None = None) -> None:
        self.matrix, self.present, self.weight_matrix = matrix, present, weights
        # The attributes that TorchRec stores are computed on request: most models do not read them.
        self._values, self._lengths, self._offsets, self._weights = matrix, None, None, None

    def values(self) -> Tensor:
        """The values without padding, concatenated."""
        return self.matrix[self.present]

    def lengths(self) -> Tensor:
        """int64 [samples]."""
        return self.present.sum(1)

    def lengths_or_none(self) -> Tensor | None:
        """`lengths`."""
        return self.lengths()

    def weights(self) -> Tensor:
        """float32, one for each of `values`."""
        if self.weight_matrix is None:
            raise ValueError("This JaggedTensor doesn't have weights.")
        return self.weight_matrix[self.present]

    def weights_or_none(self) -> Tensor | None:
        """`weights` where there are any."""
        return None if self.weight_matrix is None else self.weights()

    def with_values(self, values: Tensor, weights: Tensor | None = None) -> ServedMatrix:
        """Lists of the same lengths with other values: `values` and `weights` are matrices, too."""
        return ServedMatrix(values, self.present, weights)

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """[samples, desired_length, ...]: longer lists are cut, shorter ones filled up."""
        if desired_length is None:
            return super().to_padded_dense(None, padding_value)
        matrix = _filled(self.matrix, self.present, padding_value)
        rest = matrix.new_full((matrix.shape[0], desired_length, *matrix.shape[2:]), padding_value)
        return torch.cat([matrix, rest], dim=1)[:, :desired_length]


def _offsets(lengths: Tensor) -> Tensor:
    ends = lengths.to(torch.int64).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends])


def _filled(matrix: Tensor, present: Tensor, padding_value: float) -> Tensor:
    while present.dim() < matrix.dim():
        present = present.unsqueeze(-1)
    return torch.where(present, matrix, torch.full((), padding_value, dtype=matrix.dtype, device=matrix.device))


class ServedFeatures(KeyedJaggedTensor):
    """Several features of the same samples. What keeps whole features (split, permute, by name) stays as it arrives."""

    def __init__(self, features: dict[str, ServedLists]) -> None:
        self.features = features
        self._keys = list(features)
        # Attributes that TorchRec's own methods read directly.
        self._length_per_key = self._offset_per_key = self._stride_per_key_per_rank = self._jt_dict = None
        self._inverse_indices = self._index_per_key = None

    def keys(self) -> list[str]:
        """Names of the features."""
        return list(self.features)

    def values(self) -> Tensor:
        """All ids, feature after feature."""
        return torch.cat([feature.values() for feature in self.features.values()])

    def lengths(self) -> Tensor:
        """The lengths of all lists, feature after feature."""
        return torch.cat([feature.lengths() for feature in self.features.values()])

    def lengths_or_none(self) -> Tensor | None:
        """`lengths`."""
        return self.lengths()

    def offsets(self) -> Tensor:
        """The begin of each list in `values`, and the end of the last one."""
        return _offsets(self.lengths())

    def offsets_or_none(self) -> Tensor | None:
        """`offsets`."""
        return self.offsets()

    def weights(self) -> Tensor:
        """One for each of `values`."""
        return torch.cat([feature.weights() for feature in self.features.values()])

    def weights_or_none(self) -> Tensor | None:
        """`weights` where all features have them."""
        if any(feature.weights_or_none() is None for feature in self.features.values()):
            return None
        return self.weights()

    def stride(self) -> int:
        """The number of samples."""
        first = next(iter(self.features.values()))
        return int(first.lengths().shape[0]) if not torch.compiler.is_exporting() else first.lengths().shape[0]

    def stride_per_key(self) -> list[int]:
        """The number of samples, for each feature."""
        return [self.stride()] * len(self.features)

    def variable_stride_per_key(self) -> bool:
        """All features have the same samples."""
        return False

    def inverse_indices_or_none(self) -> None:
        """There are none."""
        return

    def device(self) -> torch.device:
        """Where the arrays are."""
        return next(iter(self.features.values())).lengths().device

    def to(self, *_args: Any, **_options: Any) -> ServedFeatures:
        """The same: a served model has one device."""
        return self

    def split(self, segments: list[int]) -> list[ServedFeatures]:
        """Groups of features that follow each other."""
        items, groups, begin = list(self.features.items()), [], 0
        for count in segments:
            groups.append(ServedFeatures(dict(items[begin : begin + count])))
            begin += count
        return groups

    def permute(self, indices: list[int], indices_tensor: Tensor | None = None) -> ServedFeatures:
        """The features in another order."""
        names = self.keys()
        return ServedFeatures({names[index]: self.features[names[index]] for index in indices})

    def to_dict(self, compute_offsets: bool = True) -> dict[str, ServedLists]:
        """The features by name."""
        return dict(self.features)

    def __getitem__(self, key: str) -> ServedLists:
        return self.features[key]
