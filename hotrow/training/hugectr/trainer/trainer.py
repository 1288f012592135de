"""One model in training: its dense network, its tables and their optimizers; a batch in, new weights out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.training.hugectr.arguments.parameters import OptParamsPy, Solver
from hotrow.training.hugectr.readers.block import Block
from hotrow.training.hugectr.trainer.batch import Batch, DeviceBags, Staging, joined
from hotrow.training.hugectr.trainer.embedding import BatchRows, EmbeddingTable
from hotrow.training.hugectr.trainer.losses import Loss, class_columns, losses_of
from hotrow.training.hugectr.trainer.metrics import compared_columns
from hotrow.training.hugectr.trainer.network import TrainingNetwork
from hotrow.training.hugectr.trainer.optimizers import Rule, dense_rule
from hotrow.training.hugectr.trainer.processes import Processes
from inference_session.errors import ConfigurationError
from inference_session.importers.hugectr.graph import Graph


@dataclass
class DenseOptimizer:
    """The optimizer of the dense network, and its states."""

    rule: Rule
    states: list[dict[str, Tensor]]
    """By weight, then by name."""
    num_steps: int = 0

    def step(self, weights: Sequence[Tensor], scaler: float, lr: float) -> None:
        """Change weights by their gradients, which are `scaler` times too large."""
        self.num_steps += 1
        pairs = zip(weights, self.states, strict=True)
        chosen = [(weight, weight.grad, states) for weight, states in pairs if weight.grad is not None]
        if not chosen:
            return
        changed, gradients, states = (list(column) for column in zip(*chosen, strict=True))
        self.rule.lr = lr
        self.rule.update_all(changed, _unscaled(gradients, scaler), states, self.num_steps)
        for weight in changed:
            weight.grad = None


def _unscaled(gradients: list[Tensor], scaler: float) -> list[Tensor]:
    if scaler != 1.0:
        for gradient in gradients:
            gradient.div_(scaler)
    return gradients


@dataclass(frozen=True)
class _EmbeddingLayer:
    """Makes one tensor of the graph from a sparse input, by a table that other layers may read too."""

    top: str
    sparse_input: int
    combiner: str


class Trainer:
    """Trains and evaluates batches on one device."""

    def __init__(
        self,
        graph: Graph,
        table_inputs: Sequence[int],
        table_params: Sequence[OptParamsPy],
        params: OptParamsPy,
        solver: Solver,
        processes: Processes,
    ) -> None:
        """Make the first weights.

        Args:
            table_inputs: by embedding layer, the number of the sparse input that it reads.
            table_params: by embedding layer, its optimizer.

        Raises:
            UnsupportedModelError, ModelFormatError: as `TrainingNetwork` and `EmbeddingTable`.
        """
        self.network = TrainingNetwork(graph, solver.seed, processes).to(processes.device)
        self.weights = self.network.weights
        """Those of the dense network, in the order of the dense file."""
        self.losses = losses_of(graph)
        widths = {label.name: label.dim for label in self.network.translated.outputs}
        self.num_classes = class_columns(graph, widths)
        """Of labels that hold the number of a class, by their columns, as `class_columns`."""
        self.compared_columns = compared_columns({label.name: label.dim for label in graph.labels}, widths)
        """Of predictions and of labels, for metrics."""
        self.loss_weights: dict[str, float] = {}
        """By label; 1 by default."""
        self._graph, self._solver, self.processes = graph, solver, processes
        self.staging = Staging(processes)
        rule = dense_rule(params)
        self.dense_optimizer = DenseOptimizer(
            rule, [{name: torch.full_like(w.data, v) for name, v in rule.states().items()} for w in self.weights]
        )
        own = {item.table: each for item, each in zip(graph.embeddings, table_params, strict=True)}
        self.tables = [
            EmbeddingTable(
                item.table, item.embedding_dim, own[item.table], seed=solver.seed + 1 + i, processes=processes
            )
            for i, item in enumerate(graph.tables)
        ]
        self._layers = [(table, _layers_of(table.name, graph, table_inputs)) for table in self.tables]
        self._loss = torch.zeros((), device=processes.device)
        self._evaluated: tuple[Mapping[str, Tensor], int] | None = None
        """All tensors of the batch that was evaluated last, as HugeCTR keeps them, and its samples."""

    @property
    def is_dense_trainable(self) -> bool:
        """Whether steps change the dense network; may be set."""
        return self.weights[0].requires_grad if self.weights else True

    @is_dense_trainable.setter
    def is_dense_trainable(self, is_trainable: bool) -> None:
        self.network.requires_grad_(is_trainable)

    def train(self, block: Block, lr: float) -> None:
        """One step."""
        self._set_mode(is_training=True)
        batch = self.staging.take(block)
        self.network.is_batch_divided = len(batch.labels) < len(block)
        touched, tensors = [], {self._graph.dense_name: batch.dense}
        for table, layers in self._layers:
            rows = table.touch(joined(_bags(layers, batch)))
            touched.append((table, rows))
            tensors.update(_pooled(table, layers, rows.vectors, rows.places, batch))
        with self._precision():
            logits = self.network(tensors)
        loss = self._total_loss(logits, self._labels(batch), len(block))
        self._loss = loss.detach()
        if loss.requires_grad:
            scaler = self._scaler
            (loss if scaler == 1.0 else loss * scaler).backward()
            self._learn(touched, lr)

    def current_loss(self) -> float:
        """The loss of the last batch, as the mean over all processes."""
        loss = self._loss.clone()
        self.processes.average([loss])
        return float(loss)

    def evaluate(self, block: Block) -> tuple[NDArray[np.float32], float]:
        """Predictions, [samples, columns of all labels], and the loss."""
        self._set_mode(is_training=False)
        self._evaluated = None
        batch = self.staging.take(block)
        with torch.no_grad():
            tensors = self._found(batch)
            with self._precision():
                values = self.network.values(tensors)
            self._evaluated = values, len(block)
            logits = self.network.logits(values)
            loss = self._total_loss(logits, self._labels(batch), len(block))
            self.processes.average([loss])
            found = self.network.predictions(logits)
        joined = torch.cat([found[label.name] for label in self.network.translated.outputs], dim=1)
        return self.processes.gathered(joined, len(block)).cpu().numpy(), float(loss)

    def evaluated(self, name: str) -> NDArray[np.float32]:
        """What a tensor of the graph was for the batch that was evaluated last, float32 [samples, …].

        Raises:
            ConfigurationError: no batch was evaluated.
        """
        if self._evaluated is None:
            raise ConfigurationError("no batch was evaluated; call Model.eval before Model.check_out_tensor")
        values, num_samples = self._evaluated
        tensor = self.network.translated.tensors[name]
        by_sample = values[tensor.name].float().reshape(-1, tensor.num_elements)
        return self.processes.gathered(by_sample, num_samples).cpu().numpy().reshape(-1, *tensor.dims)

    def _found(self, batch: Batch) -> dict[str, Tensor]:
        """The inputs of the dense network, for evaluation."""
        tensors = {self._graph.dense_name: batch.dense}
        for table, layers in self._layers:
            vectors, places = table.find(joined(_bags(layers, batch)))
            tensors.update(_pooled(table, layers, vectors, places, batch))
        return tensors

    def _learn(self, touched: Sequence[tuple[EmbeddingTable, BatchRows]], lr: float) -> None:
        rows = [(table, each) for table, each in touched if each.vectors.grad is not None]
        gradients = [weight.grad for weight in self.weights if weight.grad is not None]
        self.processes.average([*gradients, *(each.vectors.grad for _, each in rows if each.vectors.grad is not None)])
        with torch.no_grad():
            if self.is_dense_trainable:
                self.dense_optimizer.step(self.weights, self._scaler, lr)
            for table, each in rows:
                if each.vectors.grad is not None:
                    (gradient,) = _unscaled([each.vectors.grad], self._scaler)
                    table.update(each, gradient, lr)

    def _set_mode(self, *, is_training: bool) -> None:
        if self.network.training is not is_training:  # setting it visits all layers
            self.network.train(is_training)

    @property
    def _scaler(self) -> float:
        return self._solver.scaler if self._solver.use_mixed_precision else 1.0

    def _precision(self) -> AbstractContextManager[Any]:
        if not self._solver.use_mixed_precision:
            return nullcontext()
        kind = self.processes.device.type
        return torch.autocast(kind, dtype=torch.float16 if kind == "cuda" else torch.bfloat16)

    def _total_loss(self, logits: Mapping[str, Tensor], labels: Mapping[str, Tensor], num_samples: int) -> Tensor:
        """Of the samples of this process, among `num_samples` of the batch."""
        terms = [self._term(loss, logits[loss.label].float(), labels[loss.label], num_samples) for loss in self.losses]
        return terms[0] if len(terms) == 1 else torch.stack(terms).sum()

    def _term(self, loss: Loss, logits: Tensor, labels: Tensor, num_samples: int) -> Tensor:
        value, weight = loss.of(logits, labels), self.loss_weights.get(loss.label, 1.0)
        if loss.penalty is not None:
            value = value + loss.penalty(self.weights, num_samples)
        return value if weight == 1.0 else weight * value

    def _labels(self, batch: Batch) -> dict[str, Tensor]:
        parts = batch.labels.split([label.dim for label in self._graph.labels], dim=1)
        return {label.name: part for label, part in zip(self._graph.labels, parts, strict=True)}


def _layers_of(table: str, graph: Graph, inputs: Sequence[int]) -> list[_EmbeddingLayer]:
    numbered = zip(graph.embeddings, inputs, strict=True)
    return [_EmbeddingLayer(item.name, number, item.combiner) for item, number in numbered if item.table == table]


def _bags(layers: Sequence[_EmbeddingLayer], batch: Batch) -> list[DeviceBags]:
    return [batch.bags[layer.sparse_input] for layer in layers]


def _pooled(
    table: EmbeddingTable, layers: Sequence[_EmbeddingLayer], vectors: Tensor, places: Tensor | None, batch: Batch
) -> dict[str, Tensor]:
    """[samples, slots, embedding_dim] of each layer by its top, given the vector of each of their keys."""
    num_samples, bags = len(batch.labels), _bags(layers, batch)
    numbers = [len(each.keys) for each in bags]
    parts: list[tuple[Tensor, Tensor | None]] = [(vectors, places)]
    if len(bags) > 1:
        whole = vectors if places is None else places
        parts = [(part, None) if places is None else (vectors, part) for part in whole.split(numbers)]
    made = {}
    for layer, each, (some, where) in zip(layers, bags, parts, strict=True):
        pooled = table.pool(some, where, each, layer.combiner)
        made[layer.top] = pooled.reshape(num_samples, len(pooled) // num_samples, table.embedding_dim)
    return made
