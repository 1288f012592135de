"""HugeCTR's `Model`: what a script builds, trains, evaluates and saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from hotrow.training.checks import check, member, number
from hotrow.training.hugectr.arguments.embedding_collection import EmbeddingCollectionConfig
from hotrow.training.hugectr.arguments.enums import Tensor_t
from hotrow.training.hugectr.arguments.parameters import (
    DataReaderParams,
    DenseLayer,
    GroupDenseLayer,
    Input,
    OptParamsPy,
    Solver,
    SparseEmbedding,
    listed,
)
from hotrow.training.hugectr.arguments.tuning import TrainingCacheParams
from hotrow.training.hugectr.graph.design import Design
from hotrow.training.hugectr.graph.summary import summary_text
from hotrow.training.hugectr.readers.batches import DataReader
from hotrow.training.hugectr.readers.block import Block
from hotrow.training.hugectr.readers.sources import Source
from hotrow.training.hugectr.snapshots import snapshot
from hotrow.training.hugectr.snapshots.original_states import layout_of
from hotrow.training.hugectr.snapshots.training_cache import Oversubscriber, TrainingCache
from hotrow.training.hugectr.trainer.embedding import EmbeddingTable
from hotrow.training.hugectr.trainer.fitting import Fitting
from hotrow.training.hugectr.trainer.metrics import Metrics
from hotrow.training.hugectr.trainer.network import TrainingNetwork
from hotrow.training.hugectr.trainer.processes import join_processes
from hotrow.training.hugectr.trainer.schedule import LearningRateScheduler
from hotrow.training.hugectr.trainer.trainer import Trainer
from inference_session.errors import ConfigurationError, ModelFormatError, UnsupportedModelError
from inference_session.importers.hugectr.data_source import DataSourceParams
from inference_session.importers.hugectr.json_file import JsonFile, read_json
from inference_session.importers.hugectr.ps_fields import KeyType
from inference_session.platform.small_files import write_chosen

_ADDED = {"input", "sparse_embedding", "ebc_config", "dense_layer", "group_dense_layer"}
"""HugeCTR's names of what `Model.add` takes."""


class Model:
    """A model, from its layers to its files. Methods have HugeCTR's names, and its order: add, compile, fit."""

    def __init__(
        self,
        solver: Solver,
        reader_params: DataReaderParams,
        opt_params: OptParamsPy,
        etc_params: TrainingCacheParams | None = None,
    ) -> None:
        """Join the processes of the job; see `join_processes`.

        Raises:
            ConfigurationError: an argument is of another kind, or the batch size is not a multiple of the processes; or
                as `join_processes`.
        """
        for name, value, kind, made_by in (
            ("solver", solver, Solver, "CreateSolver"),
            ("reader_params", reader_params, DataReaderParams, "DataReaderParams"),
            ("opt_params", opt_params, OptParamsPy, "CreateOptimizer"),
        ):
            check(isinstance(value, kind), f"Model: {name}", value, f"what {made_by} returns")
        if etc_params is not None and solver.repeat_dataset:
            raise ConfigurationError("the embedding training cache is for epoch mode: repeat_dataset=False")
        self._cache_params = etc_params
        self._cache: TrainingCache | None = None
        self._solver, self._reader_params = solver, reader_params
        self._processes = join_processes(solver.vvgpu)
        if solver.batchsize % self._processes.count:
            raise ConfigurationError(
                f"CreateSolver: batchsize {solver.batchsize} is not a multiple of the number of processes, "
                f"{self._processes.count}"
            )
        self._design = Design(solver, opt_params)
        self._trainer: Trainer | None = None
        self._readers: dict[str, DataReader] = {}
        self._metrics = Metrics(solver.metrics_spec)
        self.reset_learning_rate_scheduler(
            solver.lr, solver.warmup_steps, solver.decay_start, solver.decay_steps, solver.decay_power, solver.end_lr
        )
        self._lr = solver.lr
        self.num_fitted = 0
        """Iterations of the last `fit`."""
        self.is_saved_later = False
        """Whether the caller of `fit` saves the weights afterwards in any case."""
        self._last_eval: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None

    def add(
        self,
        layer: Input | SparseEmbedding | EmbeddingCollectionConfig | DenseLayer | GroupDenseLayer | None = None,
        **named: Any,
    ) -> None:
        """Add the data layer, an embedding layer or a collection, a dense layer or a group of them, in this order.

        Args:
            layer: what to add.
            named: the same as `input`, `sparse_embedding`, `ebc_config`, `dense_layer` or `group_dense_layer`.
        """
        if layer is None and len(named) == 1 and {*named} <= _ADDED:
            (layer,) = named.values()
        elif named:
            raise TypeError(f"Model.add takes one layer, as its first argument or as one of {sorted(_ADDED)}")
        self._design.add(layer)

    def compile(self, loss_names: Sequence[str] | None = None, loss_weights: Sequence[float] | None = None) -> None:
        """Build the network and make its first weights; losses are weighted by the names of their labels or tops.

        Raises:
            ModelFormatError: the layers contradict each other; names layer and field.
            UnsupportedModelError: names a layer or parameter that cannot be trained.
            ConfigurationError: no data layer, or the weights do not fit the losses.
        """
        design, data = self._design, self._design.data
        graph = design.graph()  # checks the names of layers
        names = [item.top_name for item in data.data_reader_sparse_param_array]
        inputs = [names.index(embedding.bottom_name) for embedding in design.embeddings]
        self._trainer = Trainer(graph, inputs, design.params, design.optimizer, self._solver, self._processes)
        if self._cache_params is not None:
            self._cache = TrainingCache(self._cache_params, self._trainer.tables)
            snapshot.load_tables(self._cache.existing, DataSourceParams(), self._key_type)
        self._trainer.loss_weights = dict(zip(data.label_names, data.label_weights, strict=True))
        self._weight_losses(loss_names or (), loss_weights or ())
        train, evaluation = self._source(train=True), self._source(train=False)
        self._readers = {
            "train": self._reader(train, self._solver.batchsize),
            "eval": self._reader(evaluation, self._solver.batchsize_eval),
        }

    def summary(self) -> None:
        """Print the layers with the names and shapes of their tensors, also before `compile`; errors as there."""
        design = self._design
        network = self._trainer.network if self._trainer else TrainingNetwork(design.graph(), self._solver.seed)
        self._say(summary_text(design.data, design.embeddings, design.layers, network.translated.tensors))

    def graph_to_json(self, graph_config_file: str) -> None:
        """Write the graph as HugeCTR and `hotrow import hugectr` read it."""
        if self._processes.rank == 0:
            write_chosen(Path(graph_config_file), f"{self._design.text()}\n".encode())
        self._say(f"Save the model graph to {graph_config_file} successfully")

    def construct_from_json(self, graph_config_file: str, include_dense_network: bool) -> None:
        """Add the layers of a graph JSON: data layer and embeddings, and the dense layers if requested.

        Raises:
            ModelFormatError, ConfigurationError, UnsupportedModelError: the file cannot be read; names the layer.
        """
        self.add_document(read_json(Path(graph_config_file), ModelFormatError), dense=include_dense_network)
        self._say(f"Load the model graph from {graph_config_file} successfully")

    def add_document(self, file: JsonFile, *, dense: bool) -> None:
        """As `construct_from_json`, of a file that was read."""
        self._design.add_document(file, dense=dense)

    def fit(
        self,
        num_epochs: int = 0,
        max_iter: int = 2000,
        display: int = 200,
        eval_interval: int = 1000,
        snapshot: int = 10000,
        snapshot_prefix: str = "",
        data_source_params: DataSourceParams | None = None,
        *,
        export_predictions_prefix: str = "",
    ) -> None:
        """Train `max_iter` iterations in repeat mode, else `num_epochs` epochs.

        Prints the loss every `display` iterations, evaluates every `eval_interval`, and saves every `snapshot`.
        With `export_predictions_prefix`, an evaluation writes `<prefix>_prediction_<iter>` and `<prefix>_label_<iter>`.

        Raises:
            ConfigurationError: nothing is to be done.
            RuntimeError: the loss is not a number.
            ModelFormatError, OSError: the data cannot be read.
        """
        self._compiled("fit")
        callbacks = self._solver.training_callbacks if self._solver.repeat_dataset else ()
        run = Fitting(
            self, self._solver, self._say, display, eval_interval, snapshot, snapshot_prefix, data_source_params,
            export_predictions_prefix, callbacks, self._processes.any, self.is_saved_later,
        )  # fmt: skip
        if self._solver.repeat_dataset:
            run.iterations(max_iter)
        else:
            sources = self._reader_params.source if self._cache else self._reader_params.source[:1]
            run.epochs(num_epochs, sources, self._reader_params.eval_source)
        self.num_fitted = run.iteration

    def set_source(self, source: str | Sequence[str] = "", keyset: Any = None, eval_source: str | None = None) -> None:
        """Train the next `fit` on other data, in epoch mode: `set_source(source, eval_source)`.

        With a training cache, `source` may be a list; keysets have no effect.
        """
        if not isinstance(source, str) and self._cache_params is None:
            raise ConfigurationError("Model.set_source: several sources need a training cache, hugectr.CreateETC(…)")
        evaluation = eval_source if eval_source is not None else keyset
        if self._solver.repeat_dataset:
            raise ConfigurationError("Model.set_source is for epoch mode: repeat_dataset of the solver is True")
        if not source or not evaluation:
            raise ConfigurationError("Model.set_source: source and eval_source name the data, and are required")
        self._reader_params.source = listed("Model.set_source: source", source)
        self._reader_params.eval_source = str(evaluation)

    def start_data_reading(self) -> None:
        """Begin to read training and evaluation data, in repeat mode."""
        self._compiled("start_data_reading")
        if not self._solver.repeat_dataset:
            raise ConfigurationError(
                "Model.start_data_reading is for repeat mode; in epoch mode call set_source of the data readers"
            )
        for reader in self._readers.values():
            reader.start()

    @property
    def trainer(self) -> Trainer:
        """The network, the tables and their optimizers; ConfigurationError before `compile`."""
        return self._compiled("trainer")

    def get_data_reader_train(self) -> DataReader:
        """The reader of training data."""
        self._compiled("get_data_reader_train")
        return self._readers["train"]

    def get_data_reader_eval(self) -> DataReader:
        """The reader of evaluation data."""
        self._compiled("get_data_reader_eval")
        return self._readers["eval"]

    def get_learning_rate_scheduler(self) -> LearningRateScheduler:
        """The solver's schedule."""
        return self._schedule

    def reset_learning_rate_scheduler(
        self,
        base_lr: float,
        warmup_steps: int = 1,
        decay_start: int = 0,
        decay_steps: int = 1,
        decay_power: float = 2.0,
        end_lr: float = 0.0,
    ) -> None:
        """Begin another schedule; ConfigurationError: a value is not allowed."""
        self._schedule = LearningRateScheduler(base_lr, warmup_steps, decay_start, decay_steps, decay_power, end_lr)

    def set_learning_rate(self, lr: float) -> None:
        """The rate of the steps that follow; ConfigurationError unless it is a number from 0."""
        number("Model.set_learning_rate: lr", lr)
        self._lr = lr

    def train(self, is_first_batch: bool = True) -> bool:
        """One step; False where the data ended before."""
        trainer = self._compiled("train")
        batch = self._next("train", self._solver.batchsize)
        if batch is not None:
            trainer.train(batch, self._lr)
        return batch is not None

    def eval(self, is_first_batch: bool = True) -> bool:
        """Evaluate one batch; False where the data ended before."""
        trainer = self._compiled("eval")
        batch = self._next("eval", self._solver.batchsize_eval)
        if batch is None:
            self._last_eval = None
            return False
        predictions, loss = trainer.evaluate(batch)
        self._last_eval = predictions, batch.labels
        predicted, known = trainer.compared_columns
        self._metrics.add(predictions[:, predicted], batch.labels[:, known], loss)
        return True

    def get_current_loss(self) -> float:
        """The loss of the last training batch."""
        return self._compiled("get_current_loss").current_loss()

    def get_eval_metrics(self) -> list[tuple[str, float]]:
        """Names and values over all batches evaluated since the last call."""
        return self._metrics.take()

    def export_predictions(self, output_prediction_file_name: str, output_label_file_name: str) -> None:
        """Append predictions and labels of the batch that was evaluated last to two text files."""
        if self._last_eval is None:
            self._say("Reach end of eval dataset. Skip export prediction")
            return
        if self._processes.rank == 0:
            for name, numbers in zip(
                (output_prediction_file_name, output_label_file_name), self._last_eval, strict=True
            ):
                with Path(name).open("a", encoding="ascii") as file:
                    np.savetxt(file, numbers.reshape(1, -1), fmt="%.9g", newline=" ")

    def check_out_tensor(self, tensor_name: str, tensor_type: Tensor_t) -> NDArray[np.float32]:
        """What a layer, an embedding or the dense input is for the batch that was evaluated last, float32 [samples, …].

        Raises:
            ConfigurationError: no such tensor; or no batch was evaluated.
            UnsupportedModelError: `Tensor_t.Train`, for which HugeCTR gives gradients.
        """
        trainer = self._compiled("check_out_tensor")
        if member("Model.check_out_tensor: tensor_type", tensor_type, Tensor_t) is Tensor_t.Train:
            raise UnsupportedModelError(
                "Model.check_out_tensor: Tensor_t.Train is not supported; gradients of weights are not kept. Call "
                "Model.eval, and use Tensor_t.Evaluate"
            )
        if tensor_name not in (names := trainer.network.translated.tensors):
            raise ConfigurationError(
                f"Model.check_out_tensor: no tensor {tensor_name!r}; there are {', '.join(map(repr, names))}"
            )
        return trainer.evaluated(tensor_name)

    def save_params_to_files(
        self,
        prefix: str,
        iter: int = 0,  # noqa: A002  HugeCTR's name
        data_source_params: DataSourceParams | None = None,
    ) -> None:
        """Write weights, tables and optimizer states as `<prefix>_dense_<iter>.model` and so on."""
        trainer = self._compiled("save_params_to_files")
        snapshot.save_snapshot(trainer, prefix, iter, data_source_params or self._data_source)
        if self._cache is not None:
            self._cache.save(self._processes)
        self._processes.wait()
        self._say(f"Dumping weights and optimizer states of {prefix!r}, iteration {iter}, successful")

    # The loads of 3.4 take a DataSourceParams, which names the files where it is for HDFS.

    def load_dense_weights(self, dense_model_file: str, data_source_params: DataSourceParams | None = None) -> None:
        """Read dense weights, and running statistics if `<file>.ntp.json` is in the same folder."""
        trainer, place = self._compiled("load_dense_weights"), data_source_params or self._data_source
        file = _on_hdfs(data_source_params, "hdfs_dense_model") or dense_model_file
        snapshot.load_dense_weights(trainer, file, place)

    def load_dense_optimizer_states(
        self, dense_opt_states_file: str, data_source_params: DataSourceParams | None = None
    ) -> None:
        """Read optimizer states of the dense network."""
        trainer, place = self._compiled("load_dense_optimizer_states"), data_source_params or self._data_source
        file = _on_hdfs(data_source_params, "hdfs_dense_opt_states") or dense_opt_states_file
        snapshot.load_dense_states(trainer, file, place)

    def load_sparse_weights(
        self,
        sparse_embedding_files: Sequence[str] | Mapping[str, str] = (),
        data_source_params: DataSourceParams | None = None,
        *,
        sparse_embedding_files_map: Mapping[str, str] | None = None,
    ) -> None:
        """Read tables, all of them by a list, or some by a dict of their names."""
        files = sparse_embedding_files_map or sparse_embedding_files
        files = _on_hdfs(data_source_params, "hdfs_sparse_model") or files
        tables = self._by_table("load_sparse_weights", files)
        snapshot.load_tables(tables, data_source_params or self._data_source, self._key_type)

    def load_sparse_optimizer_states(
        self,
        sparse_opt_states_files: Sequence[str] | Mapping[str, str] = (),
        data_source_params: DataSourceParams | None = None,
        *,
        sparse_opt_states_files_map: Mapping[str, str] | None = None,
    ) -> None:
        """Read optimizer states of tables, after their weights; also those that HugeCTR wrote."""
        files = sparse_opt_states_files_map or sparse_opt_states_files
        files, source = _on_hdfs(data_source_params, "hdfs_sparse_opt_states") or files, data_source_params
        layouts = {item.table_name: layout_of(item, self._solver) for item in self._design.embeddings}
        for table, place in self._by_table("load_sparse_optimizer_states", files):
            snapshot.load_table_states(table, place, source or self._data_source, layouts[table.name], self._key_type)

    def freeze_dense(self) -> None:
        """Train the dense network no more."""
        self._compiled("freeze_dense").is_dense_trainable = False

    def unfreeze_dense(self) -> None:
        """Train the dense network again."""
        self._compiled("unfreeze_dense").is_dense_trainable = True

    def freeze_embedding(self, embedding_name: str | None = None) -> None:
        """Train a table, or all of them, no more."""
        self._set_trainable("freeze_embedding", embedding_name, is_trainable=False)

    def unfreeze_embedding(self, embedding_name: str | None = None) -> None:
        """Train a table, or all of them, again."""
        self._set_trainable("unfreeze_embedding", embedding_name, is_trainable=True)

    def get_embedding_training_cache(self) -> TrainingCache:
        """What `CreateETC` asked for; ConfigurationError if nothing did."""
        self._compiled("get_embedding_training_cache")
        if self._cache is None:
            raise ConfigurationError("the model has no training cache; give hugectr.CreateETC(…) to Model")
        return self._cache

    def get_model_oversubscriber(self) -> Oversubscriber:
        """As `get_embedding_training_cache`, in release 3.2."""
        return self.get_embedding_training_cache()

    def get_incremental_model(self) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """By table, keys [n] and vectors [n, embedding_vec_size] that changed since the last call, on this process."""
        return self.get_embedding_training_cache().changed_rows()

    def dump_incremental_model_2kafka(self) -> NoReturn:
        """Refused."""
        raise UnsupportedModelError(
            "Model.dump_incremental_model_2kafka is not supported; publish what Model.get_incremental_model returns "
            "with inference_session.update_stream.Publisher"
        )

    @property
    def _key_type(self) -> KeyType:
        return "int64" if self._solver.i64_input_key else "uint32"

    @property
    def _data_source(self) -> DataSourceParams:
        return self._solver.data_source_params or self._reader_params.data_source_params or DataSourceParams()

    def _weight_losses(self, names: Sequence[str], weights: Sequence[float]) -> None:
        trainer = self._compiled("compile")
        if len(names) != len(weights):
            raise ConfigurationError(
                f"Model.compile: {len(names)} loss_names, but {len(weights)} loss_weights; give one for each"
            )
        labels = {loss.name: loss.label for loss in trainer.losses} | {
            loss.label: loss.label for loss in trainer.losses
        }
        for name, weight in zip(names, weights, strict=True):
            if name not in labels:
                raise ConfigurationError(f"Model.compile: no loss or label {name!r}; there are {sorted(labels)}")
            trainer.loss_weights[labels[name]] = weight

    def _source(self, *, train: bool) -> Source:
        params = self._reader_params
        place = params.source[0] if train else params.eval_source
        count = params.num_samples if train else params.eval_num_samples
        shape = replace(self._design.record_shape(params), num_classes=self.trainer.num_classes)
        return Source(place, params, shape, count, self._data_source)

    def _reader(self, source: Source, batch_size: int) -> DataReader:
        staging, repeats = self.trainer.staging, self._solver.repeat_dataset
        return DataReader(source, batch_size, repeats=repeats, prepare=staging.pack, begin=staging.send)

    def _next(self, reader: str, size: int) -> Block | None:
        """The next batch; incomplete ones are dropped unless the solver keeps them."""
        if not self._readers[reader].is_started():
            raise ConfigurationError(
                f"start reading before Model.{reader}: start_data_reading, or set_source of the reader"
            )
        while (batch := self._readers[reader].next_batch()) is not None:
            if len(batch) == size or not self._solver.drop_incomplete_batch:
                return batch
            self._say(f"{reader} drop incomplete batch. batchsize:{len(batch)}")
        return None

    def _by_table(self, method: str, files: Sequence[str] | Mapping[str, str]) -> list[tuple[EmbeddingTable, str]]:
        if isinstance(files, Mapping):
            return [(self._table(method, name), place) for name, place in files.items()]
        if isinstance(files, str):
            raise ConfigurationError(f"Model.{method}: found {files!r}; allowed: a list of paths, or a dict by table")
        tables = self._compiled(method).tables
        if len(files) != len(tables):
            raise ConfigurationError(f"Model.{method}: {len(files)} files for {len(tables)} tables; give one for each")
        return list(zip(tables, files, strict=True))

    def _set_trainable(self, method: str, name: str | None, *, is_trainable: bool) -> None:
        for table in self._compiled(method).tables if name is None else [self._table(method, name)]:
            table.is_trainable = is_trainable

    def _table(self, method: str, name: str) -> EmbeddingTable:
        tables = {table.name: table for table in self._compiled(method).tables}
        if name not in tables:
            raise ConfigurationError(f"Model.{method}: no table {name!r}; there are {sorted(tables)}")
        return tables[name]

    def _compiled(self, method: str) -> Trainer:
        if self._trainer is None:
            raise ConfigurationError(f"Model.{method} comes after Model.compile")
        return self._trainer

    def _say(self, text: str) -> None:
        if self._processes.rank == 0:
            print(text, flush=True)


def _on_hdfs(params: DataSourceParams | None, name: str) -> Any:
    """The files of that name in parameters that are for HDFS; else nothing."""
    return getattr(params, name) if params is not None and params.is_hdfs else None
