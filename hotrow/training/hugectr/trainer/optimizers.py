"""HugeCTR's optimizers, by its formulas: of whole tensors, and of the rows of a table that a batch touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hotrow.training.hash_embeddings.optimizers import RowOptimizer
from hotrow.training.hugectr.arguments.enums import Optimizer_t, Update_t
from hotrow.training.hugectr.arguments.parameters import OptParamsPy
from inference_session.errors import UnsupportedModelError

_TINY = 1.1920928955078125e-07
"""The number that Ftrl adds below its roots."""


class Rule(RowOptimizer):
    """Updates the weights of a network, or rows of a table. The caller keeps its states, as large as the weights."""

    state_names: tuple[str, ...] = ()
    squares: tuple[str, ...] = ()
    """Those of the states that are sums or means of squares, and so never negative."""
    first_state = 0.0
    """The initial value of the states."""
    moves_untouched = False
    """Whether a step changes weights whose gradient is zero, so that Global is not Local."""

    def __init__(self, params: OptParamsPy) -> None:
        self.params = params
        self.lr = 0.0
        """The rate of the next step, which the caller sets."""

    @property
    def original_states(self) -> tuple[str, ...]:
        """The states in the order in which HugeCTR saves those of a table; it does not save all of them."""
        return self.state_names

    def states(self) -> Mapping[str, float]:
        return dict.fromkeys(self.state_names, self.first_state)

    def update_all(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]], step: int
    ) -> None:
        """As `update`, of several weights."""
        for weight, gradient, own in zip(weights, gradients, states, strict=True):
            self.update(weight, gradient, own, step)


class Adam(Rule):
    """Adam; HugeCTR adds epsilon to the root before bias correction."""

    state_names = ("m", "v")
    squares = ("v",)
    moves_untouched = True

    def update(self, vectors: Tensor, gradients: Tensor, states: Mapping[str, Tensor], step: int) -> None:
        self.update_all([vectors], [gradients], [states], step)

    def update_all(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]], step: int
    ) -> None:
        """As `Rule`, in one pass over all of them."""
        params = self.params
        m, v = ([own[name] for own in states] for name in self.state_names)
        # torch corrects the root before it adds epsilon.
        epsilon = params.epsilon / (1.0 - params.beta2**step) ** 0.5
        # Filled on the device: a number that is copied there would make the host wait.
        steps = [torch.full((), float(step), device=weights[0].device)] * len(weights)
        # What torch.optim.Adam(fused=True) calls; what it does before, in Python, takes longer than the pass itself.
        torch._fused_adam_(
            list(weights), list(gradients), m, v, [], steps, lr=self.lr, beta1=params.beta1, beta2=params.beta2,
            weight_decay=0.0, eps=epsilon, amsgrad=False, maximize=False,
        )  # fmt: skip

    def kernel(self, step: int) -> tuple[str, tuple[float, ...]]:
        beta1, beta2 = self.params.beta1, self.params.beta2
        rate = self.lr * (1.0 - beta2**step) ** 0.5 / (1.0 - beta1**step)
        return "learn_adam", (rate, 1.0 - beta1, beta2, 1.0 - beta2, self.params.epsilon)


class LazyAdam(Rule):
    """Adam that applies the steps that a row missed when the row is touched next."""

    state_names = ("m", "v", "touched")

    @property
    def original_states(self) -> tuple[str, ...]:
        return ("m", "v")

    def update(self, vectors: Tensor, gradients: Tensor, states: Mapping[str, Tensor], step: int) -> None:
        """As `Rule`; `touched` holds the step before which each element was touched last, less 1."""
        m, v, touched = (states[name] for name in self.state_names)
        beta1, beta2 = self.params.beta1, self.params.beta2
        last = touched + 1.0
        skipped = step - last
        kept = beta1**skipped
        alpha = self.lr / (1.0 - beta1) * (1.0 - beta2**last).sqrt() / (1.0 - beta1**last) * (1.0 - kept)
        # The part of the last gradient's movement that is still to be applied.
        vectors.sub_(alpha * m / (v.sqrt() + self.params.epsilon))
        m.mul_(kept).add_(gradients, alpha=1.0 - beta1)
        v.mul_(beta2**skipped).addcmul_(gradients, gradients, value=1.0 - beta2)
        touched.fill_(float(step - 1))


class AdaGrad(Rule):
    """AdaGrad."""

    state_names = ("sum",)
    squares = ("sum",)

    def __init__(self, params: OptParamsPy) -> None:
        super().__init__(params)
        self.first_state = params.initial_accu_value

    def update(self, vectors: Tensor, gradients: Tensor, states: Mapping[str, Tensor], step: int) -> None:
        total = states["sum"].addcmul_(gradients, gradients)
        vectors.addcdiv_(gradients, total.sqrt().add_(self.params.epsilon), value=-self.lr)

    def kernel(self, step: int) -> tuple[str, tuple[float, ...]]:
        return "learn_adagrad", (self.lr, 0.0, 0.0, 0.0, self.params.epsilon)


class MomentumSGD(Rule):
    """Steps that keep a share of the last."""

    state_names = ("momentum",)
    moves_untouched = True

    def update(self, vectors: Tensor, gradients: Tensor, states: Mapping[str, Tensor], step: int) -> None:
        momentum = states["momentum"].mul_(self.params.momentum_factor).sub_(gradients, alpha=self.lr)
        vectors.add_(momentum)


class Nesterov(Rule):
    """Momentum that looks one step ahead."""

    state_names = ("accm",)
    moves_untouched = True

    def update(self, vectors: Tensor, gradients: Tensor, states: Mapping[str, Tensor], step: int) -> None:
        accm, mu = states["accm"], self.params.momentum_factor
        vectors.sub_(accm, alpha=mu)
        accm.mul_(mu).sub_(gradients, alpha=self.lr)
        vectors.add_(accm, alpha=1.0 + mu)


class SGD(Rule):
    """Plain steps."""

    def update(self, vectors: Tensor, gradients: Tensor, states: Mapping[str, Tensor], step: int) -> None:
        vectors.sub_(gradients, alpha=self.lr)

    def kernel(self, step: int) -> tuple[str, tuple[float, ...]]:
        return "learn_sgd", (self.lr, 0.0, 0.0, 0.0, 0.0)


class Ftrl(Rule):
    """Follow the regularized leader."""

    state_names = ("z", "n")
    squares = ("n",)

    @property
    def original_states(self) -> tuple[str, ...]:
        return ("n", "z")

    def update(self, vectors: Tensor, gradients: Tensor, states: Mapping[str, Tensor], step: int) -> None:
        if self.lr == 0.0:
            return
        z, n = states["z"], states["n"]
        before = (n + _TINY).sqrt()
        n.addcmul_(gradients, gradients)
        root = (n + _TINY).sqrt()
        z.add_(gradients).add_((before - root) * vectors / self.lr)
        held = self.params.lambda1 * z.sign() - z
        steps = (self.params.beta + root) / self.lr + self.params.lambda2
        vectors.copy_(torch.where(z.abs() > self.params.lambda1, held / steps, 0.0))


_RULES: dict[Optimizer_t, type[Rule]] = {
    Optimizer_t.Adam: Adam,
    Optimizer_t.AdaGrad: AdaGrad,
    Optimizer_t.MomentumSGD: MomentumSGD,
    Optimizer_t.Nesterov: Nesterov,
    Optimizer_t.SGD: SGD,
    Optimizer_t.Ftrl: Ftrl,
}


def dense_rule(params: OptParamsPy) -> Rule:
    """The rule of the dense network, all of whose weights have gradients."""
    return _RULES[params.optimizer_type](params)


def table_rule(params: OptParamsPy) -> Rule:
    """The rule of a table, which depends on `update_type`.

    Raises:
        UnsupportedModelError: LazyGlobal with another optimizer than Adam.
    """
    if params.update_type is not Update_t.LazyGlobal:
        return _RULES[params.optimizer_type](params)
    if params.optimizer_type is not Optimizer_t.Adam:
        raise UnsupportedModelError(
            f"update_type LazyGlobal is for Adam, not {params.optimizer_type.value}; use Update_t.Local or "
            "Update_t.Global"
        )
    return LazyAdam(params)
