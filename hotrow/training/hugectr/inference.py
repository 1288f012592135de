"""`hugectr.inference`: that of `inference_session.hugectr`, and predictions of data sets in HugeCTR's formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.training.checks import whole
from hotrow.training.hugectr.arguments.enums import Check_t, DataReaderType_t
from hotrow.training.hugectr.arguments.parameters import DataReaderParams
from hotrow.training.hugectr.graph.graph_json import read_data
from hotrow.training.hugectr.readers.batches import batches
from hotrow.training.hugectr.readers.block import Bags, Block, RecordShape
from hotrow.training.hugectr.readers.sources import Source
from hotrow.training.hugectr.trainer.metrics import auc, compared_columns
from inference_session import hugectr
from inference_session.errors import ModelFormatError
from inference_session.hugectr import (
    HPS,
    DatabaseOverflowPolicy_t,
    DatabaseType_t,
    EmbeddingCacheType_t,
    InferenceParams,
    ParameterServerConfig,
    PersistentDatabaseParams,
    UpdateSourceParams,
    UpdateSourceType_t,
    VolatileDatabaseParams,
)
from inference_session.importers.hugectr.data_source import DataSourceParams
from inference_session.importers.hugectr.graph import EMBEDDING_LAYERS
from inference_session.importers.hugectr.json_file import read_json

__all__ = [
    "HPS", "CreateInferenceSession", "DatabaseOverflowPolicy_t", "DatabaseType_t", "EmbeddingCacheType_t",
    "InferenceModel", "InferenceParams", "ParameterServerConfig", "PersistentDatabaseParams", "UpdateSourceParams",
    "UpdateSourceType_t", "VolatileDatabaseParams",
]  # fmt: skip


class CreateInferenceSession(hugectr.CreateInferenceSession):
    """An opened model that also reads data sets; errors and arguments as those of `inference_session.hugectr`."""

    def __init__(self, model_config_path: str | Path, inference_params: InferenceParams) -> None:
        super().__init__(model_config_path, inference_params)
        layers = read_json(Path(model_config_path), ModelFormatError).document["layers"]
        self._data, self._params = read_data(layers[0]), inference_params
        names = [item.top_name for item in self._data.data_reader_sparse_param_array]
        self._inputs = [names.index(layer["bottom"]) for layer in layers if layer["type"] in EMBEDDING_LAYERS]
        """By embedding layer, its sparse input."""

    def predict(self, *arguments: Any, **named: Any) -> Any:
        """Predictions of a request, or of a data set.

        `predict(dense_feature, embeddingcolumns, row_ptrs)` is that of `inference_session.hugectr`.
        `predict(num_batches, source, data_reader_type, check_type, slot_size_array)` reads `num_batches` batches of
        `max_batchsize` samples, from the beginning again where the data set ends. It returns float32 [samples], or
        [samples, columns of all labels] if there are several.

        Raises:
            ConfigurationError, ModelFormatError, OSError: the data cannot be read.
        """
        if "source" not in named and not (len(arguments) > 1 and isinstance(arguments[1], str)):
            return super().predict(*arguments, **named)
        predictions = np.concatenate([self._predict(block) for block in self._blocks(*arguments, **named)])
        return predictions[:, 0] if predictions.shape[1] == 1 else predictions

    def evaluate(self, *arguments: Any, **named: Any) -> float:
        """AUC over the samples of a data set, arguments and errors as those of `predict`; the mean over labels."""
        blocks = [*self._blocks(*arguments, **named)]
        labels = np.concatenate([block.labels for block in blocks]).astype(np.float64)
        predictions = np.concatenate([self._predict(block) for block in blocks]).astype(np.float64)
        spec = self._opened.session.spec
        outputs = {output.name: output.shape[-1] for output in spec.outputs if output.name in spec.label_outputs}
        dims = dict(zip(self._data.label_names, self._data.label_dims, strict=True))
        predicted, known = compared_columns(dims, outputs)
        columns = zip(predictions[:, predicted].T, labels[:, known].T, strict=True)
        return float(np.mean([auc(column, label) for column, label in columns]))

    def _blocks(
        self,
        num_batches: int,
        source: str,
        data_reader_type: DataReaderType_t,
        check_type: Check_t,
        slot_size_array: Sequence[int] = (),
        data_source_params: DataSourceParams | None = None,
    ) -> Iterator[Block]:
        whole("num_batches", num_batches)
        data, place = self._data, data_source_params or DataSourceParams()
        reader = DataReaderParams(
            data_reader_type, source, eval_source=source, check_type=check_type, slot_size_array=slot_size_array
        )
        sparse = tuple(item.sparse_input() for item in data.data_reader_sparse_param_array)
        key_bytes = 8 if self._params.i64_input_key else 4
        shape = RecordShape(sum(data.label_dims), data.dense_dim, sparse, key_bytes)
        made = batches(Source(source, reader, shape, 0, place), self._params.max_batchsize, repeats=True)
        return (next(made) for _ in range(num_batches))

    def _predict(self, block: Block) -> NDArray[np.float32]:
        """[samples, columns]"""
        tables = [block.bags[number] for number in self._inputs]
        samples = np.concatenate([_samples_of_keys(bags, len(block)) for bags in tables])
        keys = np.concatenate([bags.keys for bags in tables])[np.argsort(samples, kind="stable")]
        offsets = np.concatenate([bags.offsets for bags in tables])
        answers = super().predict(block.dense.ravel(), keys, offsets)
        return np.array(answers, np.float32).reshape(len(block), -1)


InferenceModel = CreateInferenceSession
"""The name of 3.4.1 for several GPUs; here each session uses one device."""


def _samples_of_keys(bags: Bags, num_samples: int) -> NDArray[np.int64]:
    """The sample that each key belongs to."""
    slots = (len(bags.offsets) - 1) // num_samples
    return np.repeat(np.arange(num_samples), np.diff(bags.offsets[::slots]))
