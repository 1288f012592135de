"""Brings live PyTorch and TorchRec models, in training, to the servers. Needs the extra `hotrow[torch]`.

    from hotrow import training

    version = training.export(model, example=batch, inputs=training.padded(max_len=20), outputs=["click"],
                              repository="model_repository", name="ctr")

    onnx_export/       `export`: a live model, or a torch.export program, becomes a version directory
    row_updates/       `UpdatePublisher`: rows that training changes go to the servers while it trains
    checkpoints/       `Checkpoint`: what training needs to go on
    hash_embeddings/   `HashEmbedding`: embeddings of any keys, which grow as they learn
    hugectr/           HugeCTR's Python API, trained on PyTorch; hugectr2onnx/ is that of its converter

The rest is shared by these. Commands import this package only where they need it: torch takes seconds to load.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from inference_session.errors import ConfigurationError

if TYPE_CHECKING:
    from hotrow.training.checkpoints.checkpoint import Checkpoint
    from hotrow.training.hash_embeddings.embedding import HashEmbedding, HashEmbeddingBag
    from hotrow.training.hash_embeddings.optimizers import SGD, Adagrad, Adam, RowOptimizer
    from hotrow.training.hash_embeddings.rows import Rows
    from hotrow.training.keras_callback import KerasCallback
    from hotrow.training.onnx_export.export import export
    from hotrow.training.onnx_export.inputs import Lengths, Padded, lengths, padded
    from hotrow.training.row_updates.publisher import UpdatePublisher

_PLACES = {
    "Adagrad": "hash_embeddings.optimizers",
    "Adam": "hash_embeddings.optimizers",
    "Checkpoint": "checkpoints.checkpoint",
    "export": "onnx_export.export",
    "HashEmbedding": "hash_embeddings.embedding",
    "HashEmbeddingBag": "hash_embeddings.embedding",
    "RowOptimizer": "hash_embeddings.optimizers",
    "Rows": "hash_embeddings.rows",
    "SGD": "hash_embeddings.optimizers",
    "padded": "onnx_export.inputs",
    "lengths": "onnx_export.inputs",
    "Padded": "onnx_export.inputs",
    "Lengths": "onnx_export.inputs",
    "KerasCallback": "keras_callback",
    "UpdatePublisher": "row_updates.publisher",
}
"""The module of each public name, loaded when the name is first used."""

_PACKAGES = {
    "torch": "pip install 'hotrow[torch]'",
    "onnxscript": "pip install 'hotrow[torch]'",
    "keras": "pip install 'keras>=3.5'",
}
"""The dependencies that may be missing, and how to install them."""

__all__ = [
    "SGD", "Adagrad", "Adam", "Checkpoint", "HashEmbedding", "HashEmbeddingBag", "KerasCallback", "Lengths", "Padded",
    "RowOptimizer", "Rows", "UpdatePublisher", "export", "lengths", "padded",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] not in _PACKAGES:
            raise
        raise ConfigurationError(
            f"training.{name} needs the package `{missing.name}`: {_PACKAGES[missing.name.partition('.')[0]]}"
        ) from missing
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
