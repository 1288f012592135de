"""One model in training: its dense network, its tables and their optimizers; a batch in, new weights out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.training.hugectr.embedding import BatchRows, EmbeddingTable
from hotrow.training.hugectr.losses import Loss, losses_of
from hotrow.training.hugectr.network import TrainingNetwork
from hotrow.training.hugectr.optimizers import Rule, dense_rule
from hotrow.training.hugectr.parameters import OptParamsPy, Solver
from hotrow.training.hugectr.processes import Processes
from hotrow.training.hugectr.readers.block import Bags, Block
from inference_session.importers.hugectr.graph import Graph


@dataclass
class DenseOptimizer:
    """The optimizer of the dense network, and its states."""

    rule: Rule
    states: list[list[Tensor]]
    """By weight, then by the names of the rule's states."""
    num_steps: int = 0

    def step(self, weights: Sequence[Tensor], scaler: float, lr: float) -> None:
        """Change weights by their gradients, which are `scaler` times too large."""
        self.num_steps += 1
        for weight, states in zip(weights, self.states, strict=True):
            if weight.grad is not None:
                self.rule.update(weight, weight.grad.div_(scaler), states, lr, self.num_steps)
                weight.grad = None


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
        self.network = TrainingNetwork(graph, solver.seed).to(processes.device)
        self.losses = losses_of(graph)
        self.loss_weights: dict[str, float] = {}
        """By label; 1 by default."""
        self.is_dense_trainable = True
        self._graph, self._solver, self.processes = graph, solver, processes
        self._table_inputs = table_inputs
        rule = dense_rule(params)
        self.dense_optimizer = DenseOptimizer(
            rule, [[torch.full_like(w.data, rule.first_state) for _ in rule.state_names] for w in self.weights]
        )
        self.tables = [
            EmbeddingTable(
                item.name, item.embedding_dim, item.combiner, own, seed=solver.seed + 1 + i, processes=processes
            )
            for i, (item, own) in enumerate(zip(graph.embeddings, table_params, strict=True))
        ]
        self._loss = torch.zeros((), device=processes.device)

    @property
    def weights(self) -> list[Tensor]:
        """Those of the dense network, in the order of the dense file."""
        return list(self.network.weights)

    def train(self, batch: Block, lr: float) -> None:
        """One step."""
        self.network.train()
        self.network.requires_grad_(self.is_dense_trainable)
        begin, end = self.processes.part(len(batch))
        touched, tensors = [], self._dense(batch, begin, end)
        for table, bags, name in self._lookups(batch):
            rows, places = table.touch(bags)
            touched.append((table, rows))
            tensors[name] = _pooled(table, rows.vectors, places, bags, len(batch), begin, end)
        with self._precision():
            logits = self.network(tensors)
        loss = self._total_loss(logits, self._labels(batch, begin, end))
        self._loss = loss.detach()
        if loss.requires_grad:
            (loss * self._scaler).backward()
            self._learn(touched, lr)

    def current_loss(self) -> float:
        """The loss of the last batch, as the mean over all processes."""
        loss = self._loss.clone()
        self.processes.average([loss])
        return float(loss)

    def evaluate(self, batch: Block) -> tuple[NDArray[np.float32], float]:
        """Predictions, [samples, columns of all labels], and the loss."""
        self.network.eval()
        begin, end = self.processes.part(len(batch))
        part = batch.part(begin, end)
        tensors = self._dense(part, 0, len(part))
        with torch.no_grad():
            for table, bags, name in self._lookups(batch):
                tensors[name] = _pooled(table, *table.find(bags), bags, len(batch), begin, end)
            with self._precision():
                logits = self.network(tensors)
            loss = self._total_loss(logits, self._labels(part, 0, len(part)))
            self.processes.average([loss])
            found = self.network.predictions(logits)
        joined = torch.cat([found[label.name] for label in self.network.translated.outputs], dim=1)
        return self.processes.gathered(joined, len(batch)).cpu().numpy(), float(loss)

    def _learn(self, touched: Sequence[tuple[EmbeddingTable, BatchRows]], lr: float) -> None:
        rows = [(table, each) for table, each in touched if each.vectors.grad is not None]
        gradients = [weight.grad for weight in self.weights if weight.grad is not None]
        self.processes.average([*gradients, *(each.vectors.grad for _, each in rows if each.vectors.grad is not None)])
        with torch.no_grad():
            if self.is_dense_trainable:
                self.dense_optimizer.step(self.weights, self._scaler, lr)
            for table, each in rows:
                if each.vectors.grad is not None:
                    table.update(each, each.vectors.grad.div_(self._scaler), lr)

    @property
    def _scaler(self) -> float:
        return self._solver.scaler if self._solver.use_mixed_precision else 1.0

    def _precision(self) -> torch.autocast:
        kind = self.processes.device.type
        dtype = torch.float16 if kind == "cuda" else torch.bfloat16
        return torch.autocast(kind, dtype=dtype, enabled=self._solver.use_mixed_precision)

    def _total_loss(self, logits: Mapping[str, Tensor], labels: Mapping[str, Tensor]) -> Tensor:
        terms = [
            self.loss_weights.get(loss.label, 1.0) * self._term(loss, logits[loss.label].float(), labels[loss.label])
            for loss in self.losses
        ]
        return torch.stack(terms).sum()

    def _term(self, loss: Loss, logits: Tensor, labels: Tensor) -> Tensor:
        value = loss.of(logits, labels)
        return value if loss.penalty is None else value + loss.penalty(self.weights, len(labels))

    def _dense(self, batch: Block, begin: int, end: int) -> dict[str, Tensor]:
        dense = torch.from_numpy(np.ascontiguousarray(batch.dense[begin:end]))
        return {self._graph.dense_name: dense.to(self.processes.device)}

    def _labels(self, batch: Block, begin: int, end: int) -> dict[str, Tensor]:
        columns = torch.from_numpy(np.ascontiguousarray(batch.labels[begin:end])).to(self.processes.device)
        parts = columns.split([label.dim for label in self._graph.labels], dim=1)
        return {label.name: part for label, part in zip(self._graph.labels, parts, strict=True)}

    def _lookups(self, batch: Block) -> list[tuple[EmbeddingTable, Bags, str]]:
        return [
            (table, batch.bags[number], table.name)
            for table, number in zip(self.tables, self._table_inputs, strict=True)
        ]


def _pooled(
    table: EmbeddingTable, vectors: Tensor, places: Tensor, bags: Bags, num_samples: int, begin: int, end: int
) -> Tensor:
    """[end - begin, slots, embedding_dim]: some samples of a batch, given the vector of each of its keys."""
    slots = (len(bags.offsets) - 1) // num_samples
    offsets = bags.offsets[begin * slots : end * slots + 1]
    pooled = table.pool(vectors, places[offsets[0] : offsets[-1]], offsets - offsets[0])
    return pooled.reshape(end - begin, slots, table.embedding_dim)
