"""The output of `Model.summary`, in HugeCTR's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hotrow.training.hugectr.arguments.parameters import DenseLayer, Input, SparseEmbedding
from inference_session.importers.hugectr.layers import Tensor

_WIDTHS = (40, 30, 30, 30)
_LINE = 114


def summary_text(
    data: Input, embeddings: Sequence[SparseEmbedding], layers: Sequence[DenseLayer], tensors: Mapping[str, Tensor]
) -> str:
    """The table of layers; `tensors` are those of the built network."""
    labels = ",".join(data.label_names)
    sparse = ",".join(item.top_name for item in data.data_reader_sparse_param_array)
    dims = ",".join(f"(None, {dim})" for dim in data.label_dims)
    lines = [
        _columns("label", "Dense", "Sparse"),
        _columns(labels, data.dense_name, sparse),
        _columns(dims, f"(None, {data.dense_dim})"),
        "—" * _LINE,
        _columns("Layer Type", "Input Name", "Output Name", "Output Shape"),
        "—" * _LINE,
    ]
    for embedding in embeddings:
        names = [embedding.bottom_name], [embedding.sparse_embedding_name]
        lines += _layer(embedding.embedding_type.value, *names, tensors)
    for layer in layers:
        lines += _layer(layer.layer_type.value, layer.bottom_names, layer.top_names, tensors)
    title = "Model Summary".center(_LINE, "=")
    return "\n".join([title, *lines])


def _layer(kind: str, bottoms: Sequence[str], tops: Sequence[str], tensors: Mapping[str, Tensor]) -> list[str]:
    lines = []
    for i in range(max(len(bottoms), len(tops))):
        top = tops[i] if i < len(tops) else ""
        bottom = bottoms[i] if i < len(bottoms) else ""
        lines.append(_columns("" if i else kind, bottom, top, _shape(tensors.get(top))))
    return [*lines, "-" * _LINE]


def _shape(tensor: Tensor | None) -> str:
    return "" if tensor is None else f"({', '.join(['None', *map(str, tensor.dims)])})"


def _columns(*texts: str) -> str:
    return "".join(f"{text:<{width - 1}} " for text, width in zip(texts, _WIDTHS, strict=False)).rstrip()
