"""The layers of a HugeCTR model: added one by one, checked against each other, and written as HugeCTR's graph."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hotrow.training.hugectr.arguments.embedding_collection import EmbeddingCollectionConfig
from hotrow.training.hugectr.arguments.enums import DataReaderType_t, Embedding_t
from hotrow.training.hugectr.arguments.parameters import (
    DataReaderParams,
    DataReaderSparseParam,
    DenseLayer,
    GroupDenseLayer,
    Input,
    OptParamsPy,
    Solver,
    SparseEmbedding,
)
from hotrow.training.hugectr.graph.graph_json import (
    data_document,
    dense_document,
    embedding_document,
    read_data,
    read_dense,
    read_embedding,
)
from hotrow.training.hugectr.readers.block import RecordShape, SparseInput
from inference_session.errors import ConfigurationError, ModelFormatError, UnsupportedModelError
from inference_session.importers.hugectr.graph import EMBEDDING_LAYERS, Graph, parse_graph
from inference_session.importers.hugectr.json_file import JsonFile


@dataclass
class Design:
    """The layers that were added to a model."""

    solver: Solver
    optimizer: OptParamsPy
    """Of embeddings that have none of their own."""
    given_data: Input | None = None
    embeddings: list[SparseEmbedding] = field(default_factory=list)
    layers: list[DenseLayer] = field(default_factory=list)

    def add(self, layer: object) -> None:
        """Add one of HugeCTR's layers; ConfigurationError or UnsupportedModelError where it does not fit the others."""
        if isinstance(layer, Input):
            if self.given_data is not None:
                raise ConfigurationError("Model.add: the model has an Input already")
            self.given_data = layer
        elif isinstance(layer, SparseEmbedding):
            self._add_embedding(layer)
        elif isinstance(layer, EmbeddingCollectionConfig):
            self._add_collection(layer)
        elif isinstance(layer, DenseLayer):
            self.layers.append(layer)
        elif isinstance(layer, GroupDenseLayer):
            self.layers += layer.layers()
        else:
            raise UnsupportedModelError(
                f"Model.add: {type(layer).__name__} is not supported; Input, SparseEmbedding, "
                "EmbeddingCollectionConfig, DenseLayer and GroupDenseLayer are"
            )

    def add_document(self, file: JsonFile, *, dense: bool) -> None:
        """Add the layers of a graph JSON; the dense layers only with `dense`. Errors name the layer."""
        layers = file.document.get("layers")
        if not isinstance(layers, list) or not layers or not all(isinstance(layer, dict) for layer in layers):
            file.fail(("layers",), "a list of layers is required")
        for position, layer in enumerate(layers):
            self._add_from(file, position, layer, dense=dense)

    @property
    def data(self) -> Input:
        """The data layer; ConfigurationError where none was added."""
        if self.given_data is None:
            raise ConfigurationError("the model has no Input; add one before the other layers")
        return self.given_data

    @property
    def params(self) -> list[OptParamsPy]:
        """The optimizer of each embedding."""
        return [embedding.optimizer or self.optimizer for embedding in self.embeddings]

    def document(self) -> dict[str, Any]:
        """The graph, as HugeCTR's JSON has it."""
        pairs = zip(self.embeddings, self.params, strict=True)
        embeddings = [embedding_document(layer, params, self.solver.num_gpus) for layer, params in pairs]
        joins_slots = any(embedding.table for embedding in self.embeddings)
        dense = [dense_document(layer, joins_slots=joins_slots) for layer in self.layers]
        layers = [data_document(self.data), *embeddings, *dense]
        name = {"model_name": self.solver.model_name} if self.solver.model_name else {}
        return {"layers": layers, **name}

    def text(self) -> str:
        """The document in JSON; ConfigurationError names a value that JSON does not have."""
        return json.dumps(self.document(), indent=2, default=_plain)

    def graph(self) -> Graph:
        """The graph as the importer reads it."""
        text = self.text()
        return parse_graph(JsonFile(Path("graph of the model"), text, json.loads(text), ModelFormatError))

    def record_shape(self, reader: DataReaderParams) -> RecordShape:
        """What a record of training data has."""
        return RecordShape(
            sum(self.data.label_dims),
            self.data.dense_dim,
            tuple(self._sparse_input(item, reader) for item in self.data.data_reader_sparse_param_array),
            8 if self.solver.i64_input_key else 4,
        )

    def _add_from(self, file: JsonFile, position: int, layer: Mapping[str, Any], *, dense: bool) -> None:
        try:
            if position == 0:
                self.add(read_data(layer))
            elif layer.get("type") in EMBEDDING_LAYERS:
                self.add(read_embedding(layer))
            elif dense:
                self.add(read_dense(layer))
        except (ConfigurationError, TypeError) as error:
            file.fail(("layers", position), str(error))

    def _add_embedding(self, layer: SparseEmbedding) -> None:
        same = [each for each in (*self.embeddings, layer) if each.table_name == layer.table_name]
        if any(each.table for each in same) and not all(each.table for each in same):
            raise ConfigurationError(
                f"Model.add: the model has a table {layer.table_name!r} already; give each table its own name"
            )
        if not layer.table:  # else a layer that a collection was saved as
            _check_readers(_inputs_of_slots(self.given_data), [layer])
        self.embeddings.append(layer)

    def _add_collection(self, collection: EmbeddingCollectionConfig) -> None:
        present = {embedding.table_name for embedding in self.embeddings}
        if again := sorted(present & {*collection.table_names}):
            raise ConfigurationError(f"Model.add: the model has tables {again} already; give each table its own name")
        before, after = self.data, collection.data(self.data)
        embeddings, layers = collection.layers(after)
        _check_readers(_inputs_of_slots(after) - _inputs_of_slots(before), self.embeddings)
        self.given_data = after
        self.embeddings += embeddings
        self.layers += layers

    def _sparse_input(self, item: DataReaderSparseParam, reader: DataReaderParams) -> SparseInput:
        """What readers need; keys that a HybridSparseEmbedding reads count per slot."""
        readers = [embedding for embedding in self.embeddings if embedding.bottom_name == item.top_name]
        hybrid = [embedding for embedding in readers if embedding.embedding_type is Embedding_t.HybridSparseEmbedding]
        is_one_hot = reader.data_reader_type is DataReaderType_t.RawAsync and not reader.raw_format.is_multi_hot
        is_collection = any(embedding.table for embedding in readers)
        if len(hybrid) != (len(readers) if is_one_hot and not is_collection else 0):
            raise ConfigurationError(
                f"the sparse input {item.top_name!r}: HybridSparseEmbedding and RawAsync without multi_hot_reader are "
                "used together, in HugeCTR too; else use LocalizedSlotSparseEmbeddingHash and DataReaderType_t.Raw, "
                "whose keys differ over slots"
            )
        if not hybrid:
            return item.sparse_input()
        sizes = tuple(hybrid[0].slot_size_array)
        if len(sizes) != item.slot_num:
            raise ConfigurationError(
                f"SparseEmbedding {hybrid[0].sparse_embedding_name!r}: {len(sizes)} numbers in slot_size_array for the "
                f"{item.slot_num} slots of {item.top_name!r}"
            )
        return replace(item.sparse_input(), slot_sizes=sizes)


def _plain(value: object) -> Any:
    """Numbers and arrays of NumPy, as JSON has them."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise ConfigurationError(f"Model: {value!r} is no value for a layer; give numbers, texts, or lists of them")


def _inputs_of_slots(data: Input | None) -> set[str]:
    """The sparse inputs whose keys are slots, for look-ups with `concat`."""
    return {item.top_name for item in data.data_reader_sparse_param_array if item.keys_are_slots} if data else set()


def _check_readers(of_slots: set[str], embeddings: Sequence[SparseEmbedding]) -> None:
    """Refuse other look-ups in such inputs: their bags would be others."""
    for each in embeddings:
        if each.bottom_name in of_slots:
            raise UnsupportedModelError(
                f"Model.add: {each.sparse_embedding_name!r} and a look-up with 'concat' read {each.bottom_name!r}, "
                "which is not supported; give one of them a sparse input of its own"
            )
