"""Brings live PyTorch and TorchRec models, in training, to the servers. Needs the extra `hotrow[torch]`.

    from hotrow import training

    version = training.export(model, example=batch, inputs=training.padded(max_len=20), outputs=["click"],
                              repository="model_repository", name="ctr")

`export` writes a version directory. hotrow trains nothing itself; nothing else in hotrow imports this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from inference_session.errors import ConfigurationError

if TYPE_CHECKING:
    from hotrow.training.checkpoint import Checkpoint
    from hotrow.training.export import export
    from hotrow.training.hash_embedding import HashEmbedding, HashEmbeddingBag
    from hotrow.training.hash_rows import Rows
    from hotrow.training.inputs import Lengths, Padded, lengths, padded
    from hotrow.training.keras_callback import KerasCallback
    from hotrow.training.row_optimizers import SGD, Adagrad, Adam, RowOptimizer
    from hotrow.training.updates import UpdatePublisher

_PLACES = {
    "Adagrad": "row_optimizers",
    "Adam": "row_optimizers",
    "Checkpoint": "checkpoint",
    "export": "export",
    "HashEmbedding": "hash_embedding",
    "HashEmbeddingBag": "hash_embedding",
    "RowOptimizer": "row_optimizers",
    "Rows": "hash_rows",
    "SGD": "row_optimizers",
    "padded": "inputs",
    "lengths": "inputs",
    "Padded": "inputs",
    "Lengths": "inputs",
    "KerasCallback": "keras_callback",
    "UpdatePublisher": "updates",
}
"""The module of each public name, loaded when the name is first used."""

_PACKAGES = {
    "torch": "pip install 'hotrow[torch]'",
    "onnxscript": "pip install 'hotrow[torch]'",
    "keras": "pip install 'keras>=3.5'",
}
"""The dependencies that may be missing, and how to install them."""

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Checkpoint",
    "HashEmbedding",
    "HashEmbeddingBag",
    "KerasCallback",
    "Lengths",
    "Padded",
    "RowOptimizer",
    "Rows",
    "UpdatePublisher",
    "export",
    "lengths",
    "padded",
]


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
    globals()[name] = value  # also where a submodule of the same name was just loaded
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
