"""How the rows of a hash embedding learn: torch's formulas, with state for each row, applied to the rows of a batch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hotrow.training.checks import check


class RowOptimizer(ABC):
    """Changes rows by their gradients. It keeps settings only: the states of rows are stored with the rows.

    Settings may be changed between steps, as by a schedule of the learning rate.
    """

    lr: float

    @abstractmethod
    def states(self) -> Mapping[str, float]:
        """Names of the states that each element of a row has, and their values in a new row."""

    @abstractmethod
    def update(self, vectors: Tensor, gradients: Tensor, states: Mapping[str, Tensor], step: int) -> None:
        """Change some rows and their states in place.

        Args:
            vectors: float32 [n, embedding_dim], each row once.
            gradients: [n, embedding_dim], of the whole batch.
            states: by name, each [n, embedding_dim].
            step: steps of this embedding, this one included; from 1 on.
        """

    def kernel(self, step: int) -> tuple[str, tuple[float, ...]] | None:
        """The kernel of `device_rows` that does on a GPU what `update` does, and its settings: rate, three factors,
        epsilon. None: no kernel does; a class derived from one with a kernel may learn by another formula.
        """
        return None


def _check(name: str, value: float, *, below: float = math.inf) -> None:
    check(0 <= value < below, name, value, f"numbers from 0 below {below}")


@dataclass
class SGD(RowOptimizer):
    """Stochastic gradient descent, as torch.optim.SGD without momentum."""

    lr: float = 0.01

    def __post_init__(self) -> None:
        _check("lr", self.lr)

    def states(self) -> Mapping[str, float]:
        """None."""
        return {}

    def update(self, vectors: Tensor, gradients: Tensor, states: Mapping[str, Tensor], step: int) -> None:
        vectors.add_(gradients, alpha=-self.lr)

    def kernel(self, step: int) -> tuple[str, tuple[float, ...]] | None:
        return ("learn_sgd", (self.lr, 0.0, 0.0, 0.0, 0.0)) if type(self) is SGD else None


@dataclass
class Adagrad(RowOptimizer):
    """As torch.optim.Adagrad, for each element of a row."""

    lr: float = 0.01
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        for name in ("lr", "initial_accumulator_value", "eps"):
            _check(name, getattr(self, name))

    def states(self) -> Mapping[str, float]:
        """`sum`: of the squares of all gradients."""
        return {"sum": self.initial_accumulator_value}

    def update(self, vectors: Tensor, gradients: Tensor, states: Mapping[str, Tensor], step: int) -> None:
        total = states["sum"].addcmul_(gradients, gradients)
        vectors.addcdiv_(gradients, total.sqrt().add_(self.eps), value=-self.lr)

    def kernel(self, step: int) -> tuple[str, tuple[float, ...]] | None:
        return ("learn_adagrad", (self.lr, 0.0, 0.0, 0.0, self.eps)) if type(self) is Adagrad else None


@dataclass
class Adam(RowOptimizer):
    """Lazy Adam, as torch.optim.SparseAdam: only rows of the batch change, corrected for all steps of the embedding."""

    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _check("lr", self.lr)
        _check("eps", self.eps)
        for beta in self.betas:
            _check("each of betas", beta, below=1)

    def states(self) -> Mapping[str, float]:
        """`exp_avg`, `exp_avg_sq`: moving averages of the gradients and of their squares."""
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def update(self, vectors: Tensor, gradients: Tensor, states: Mapping[str, Tensor], step: int) -> None:
        first, second = self.betas
        average = states["exp_avg"].lerp_(gradients, 1 - first)
        squares = states["exp_avg_sq"].mul_(second).addcmul_(gradients, gradients, value=1 - second)
        vectors.addcdiv_(average, squares.sqrt().add_(self.eps), value=-self.rate(step))

    def kernel(self, step: int) -> tuple[str, tuple[float, ...]] | None:
        first, second = self.betas
        settings = self.rate(step), 1 - first, second, 1 - second, self.eps
        return ("learn_adam", settings) if type(self) is Adam else None

    def rate(self, step: int) -> float:
        """The learning rate, corrected for the averages that begin at zero."""
        first, second = self.betas
        return self.lr * math.sqrt(1 - second**step) / (1 - first**step)
