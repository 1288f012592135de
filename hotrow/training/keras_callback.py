"""A Keras 3 callback: publishes versions and changed rows from `model.fit`, with any backend."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import keras
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from hotrow.training.checks import whole
from hotrow.training.row_updates.outbox import Changes, Outbox
from inference_session.errors import ConfigurationError, UnsupportedModelError
from inference_session.importers.onnx import import_onnx
from inference_session.model_source import local_folder
from inference_session.model_spec import ModelSpec, folder_names
from inference_session.update_stream.publisher import DEFAULT_TIMEOUT_S, Publisher
from inference_session.version_directory.session_file import write_spec
from triton_backend.repository.config_writer import write_model_config

_CHUNK_ROWS = 1 << 16


class KerasCallback(keras.callbacks.Callback):
    """Publishes a version after each epoch, and the rows of Embedding layers that have changed while it trains.

        model.fit(data, callbacks=[training.KerasCallback("ctr", repository="trained", url="kafka://broker:9092")])

    Rows are compared with those published last, so rows that only momentum moves are published; this needs a copy of
    the tables. Tables have the names of their layers. Versions go through Keras's own export to ONNX.
    """

    def __init__(
        self,
        name: str,
        *,
        repository: str | Path | None = None,
        url: str | None = None,
        every_steps: int = 50,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Check the arguments. `fit` connects to the brokers.

        Args:
            name: the name of the served model.
            repository: where versions go; None: no versions are published.
            url: kafka://HOST:PORT, where rows go and versions are announced; None: rows are not published.
            every_steps: how often rows are compared and queued.
            timeout_s: the longest that the brokers may take to confirm a message.

        Raises:
            ConfigurationError: an argument is not allowed, or neither a repository nor a URL is given.
        """
        super().__init__()
        if repository is None and url is None:
            raise ConfigurationError("KerasCallback needs a repository for versions, a url for rows, or both")
        whole("every_steps", every_steps)
        self._name, self._url, self._every_steps, self._timeout_s = name, url, every_steps, timeout_s
        self._repository = None if repository is None else local_folder(repository)
        self._outbox: Outbox | None = None
        self._tables: list[_LayerTable] = []
        self._num_steps = 0
        self.versions: list[int] = []
        """The versions that were published, in order."""

    def on_train_begin(self, logs: Any = None) -> None:
        """Connect to the brokers, unless an earlier `fit` did. Raises UnavailableError if no broker answers.

        Rows that an earlier `fit` of the same model could not publish, because it failed, are sent now.
        """
        layers = [layer for layer in self.model._flatten_layers() if isinstance(layer, keras.layers.Embedding)]
        if not layers:
            raise UnsupportedModelError("the model has no Embedding layer, so there are no rows to publish")
        if [id(table.layer) for table in self._tables] != [id(layer) for layer in layers]:
            folders = folder_names([layer.name for layer in layers])
            self._tables = [_LayerTable(layer, folder) for layer, folder in zip(layers, folders, strict=True)]
        if self._url is not None and self._outbox is None:
            url = self._url
            self._outbox = Outbox(lambda: Publisher(url, self._name, timeout_s=self._timeout_s))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Queue changed rows every `every_steps` steps; raises errors of earlier ones."""
        self._num_steps += 1
        if self._outbox is not None and self._num_steps % self._every_steps == 0:
            self._queue(self._outbox)
            self._outbox.raise_error()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Publish a version, and announce it."""
        if self._repository is None:
            return
        version = export_keras(self.model, self._repository, self._name)
        self.versions.append(version)
        if self._outbox is not None:
            self._outbox.announce(version)

    def on_train_end(self, logs: Any = None) -> None:
        """Return when all changed rows are confirmed."""
        if self._outbox is not None:
            self._queue(self._outbox)
            self._outbox.drain()
            self._outbox.close()
            self._outbox = None

    def _queue(self, outbox: Outbox) -> None:
        for table in self._tables:
            for changes in table.changes():
                outbox.put(changes)


class _LayerTable:
    """The rows of one layer, and those that were published last."""

    def __init__(self, layer: Any, folder: str) -> None:
        self.layer, self._folder = layer, folder
        self._published = _rows(layer).copy()

    def changes(self) -> Iterator[Changes]:
        """The rows that have changed since the last call, some at a time."""
        now = _rows(self.layer)
        for begin in range(0, len(now), _CHUNK_ROWS):
            part, before = now[begin : begin + _CHUNK_ROWS], self._published[begin : begin + _CHUNK_ROWS]
            keys = np.flatnonzero((part != before).any(axis=1))
            if len(keys):
                before[keys] = part[keys]
                yield Changes(self._folder, (keys + begin).astype(np.int64), part[keys])


def _rows(layer: Any) -> NDArray[np.float32]:
    return np.asarray(keras.ops.convert_to_numpy(layer.embeddings), np.float32)


def export_keras(model: Any, repository: Path, name: str) -> int:
    """Write the current state of a Keras model as the next version, by Keras's export to ONNX; returns the version.

    Raises:
        ConfigurationError, UnsupportedModelError, ModelFormatError: as `hotrow import onnx`.
    """
    began = datetime.now(timezone.utc).isoformat()

    def complete(draft: Path, spec: ModelSpec) -> None:
        write_spec(replace(spec, settings={**spec.settings, "update_since": began}, source=model.name), draft)
        write_model_config(draft, spec, name)

    with tempfile.TemporaryDirectory(prefix="hotrow-keras-") as folder:
        path = Path(folder) / "model.onnx"
        model.export(str(path), format="onnx", verbose=False)
        network = onnx.load(path)
        _name_tables(network, model)
        onnx.save(network, path)
        report = import_onnx(path, repository, name, min_rows=1, complete=complete)
    return int(report.version_dir.name)


def _name_tables(network: onnx.ModelProto, model: Any) -> None:
    """Give the initializers that hold rows of a layer the name of the layer."""
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Embedding)]
    names: dict[str, str] = {}
    for tensor in network.graph.initializer:
        for layer in layers:
            free = layer.name not in names.values()
            if free and tuple(tensor.dims) == tuple(layer.embeddings.shape) and _holds(tensor, layer):
                names[tensor.name] = layer.name
                break
    for tensor in network.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for node in network.graph.node:
        node.input[:] = [names.get(value, value) for value in node.input]


def _holds(tensor: onnx.TensorProto, layer: Any) -> bool:
    return bool(np.array_equal(numpy_helper.to_array(tensor), _rows(layer)))
