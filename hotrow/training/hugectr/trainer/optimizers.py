"""HugeCTR's optimizers, by its formulas: of whole tensors, and of the rows of a table that a batch touched."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from hotrow.training.hugectr.arguments.enums import Optimizer_t, Update_t
from hotrow.training.hugectr.arguments.parameters import OptParamsPy
from inference_session.errors import UnsupportedModelError

_TINY = 1.1920928955078125e-07
"""The number that Ftrl adds below its roots."""


class Rule(ABC):
    """Updates weights by gradients. The caller keeps its states, in tensors as large as the weights."""

    state_names: tuple[str, ...] = ()
    first_state = 0.0
    """The initial value of the states."""
    moves_untouched = False
    """Whether a step changes weights whose gradient is zero, so that Global is not Local."""

    def __init__(self, params: OptParamsPy) -> None:
        self.params = params

    @property
    def original_states(self) -> tuple[str, ...]:
        """The states in the order in which HugeCTR saves those of a table; it does not save all of them."""
        return self.state_names

    @abstractmethod
    def update(self, weight: Tensor, gradient: Tensor, states: Sequence[Tensor], lr: float, step: int) -> None:
        """One step in place, the first of which is number 1."""

    def kernel(self, lr: float, step: int) -> tuple[str, tuple[float, ...]] | None:
        """The kernel of `device_rows` that updates rows of a table on a GPU, and its settings; None where none does."""
        return None

    def update_all(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        lr: float,
        step: int,
    ) -> None:
        """As `update`, of several weights."""
        for weight, gradient, own in zip(weights, gradients, states, strict=True):
            self.update(weight, gradient, own, lr, step)


class Adam(Rule):
    """Adam; HugeCTR adds epsilon to the root before bias correction."""

    state_names = ("m", "v")
    moves_untouched = True

    def update(self, weight: Tensor, gradient: Tensor, states: Sequence[Tensor], lr: float, step: int) -> None:
        self.update_all([weight], [gradient], [states], lr, step)

    def update_all(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        lr: float,
        step: int,
    ) -> None:
        """As `Rule`, in one pass over all of them."""
        params, (m, v) = self.params, zip(*states, strict=True)
        # torch corrects the root before it adds epsilon.
        epsilon = params.epsilon / (1.0 - params.beta2**step) ** 0.5
        # Filled on the device: a number that is copied there would make the host wait.
        steps = [torch.full((), float(step), device=weights[0].device)] * len(weights)
        # What torch.optim.Adam(fused=True) calls; what it does before, in Python, takes longer than the pass itself.
        torch._fused_adam_(
            list(weights), list(gradients), list(m), list(v), [], steps, lr=lr, beta1=params.beta1, beta2=params.beta2,
            weight_decay=0.0, eps=epsilon, amsgrad=False, maximize=False,
        )  # fmt: skip

    def kernel(self, lr: float, step: int) -> tuple[str, tuple[float, ...]]:
        beta1, beta2 = self.params.beta1, self.params.beta2
        rate = lr * (1.0 - beta2**step) ** 0.5 / (1.0 - beta1**step)
        return "learn_adam", (rate, 1.0 - beta1, beta2, 1.0 - beta2, self.params.epsilon)


class LazyAdam(Rule):
    """Adam that applies the steps that a row missed when the row is touched next."""

    state_names = ("m", "v", "touched")

    @property
    def original_states(self) -> tuple[str, ...]:
        return ("m", "v")

    def update(self, weight: Tensor, gradient: Tensor, states: Sequence[Tensor], lr: float, step: int) -> None:
        """As `Rule`; `touched` holds the step before which each element was touched last, less 1."""
        m, v, touched = states
        beta1, beta2 = self.params.beta1, self.params.beta2
        last = touched + 1.0
        skipped = step - last
        kept = beta1**skipped
        alpha = lr / (1.0 - beta1) * (1.0 - beta2**last).sqrt() / (1.0 - beta1**last) * (1.0 - kept)
        # The part of the last gradient's movement that is still to be applied.
        weight.sub_(alpha * m / (v.sqrt() + self.params.epsilon))
        m.mul_(kept).add_(gradient, alpha=1.0 - beta1)
        v.mul_(beta2**skipped).addcmul_(gradient, gradient, value=1.0 - beta2)
        touched.fill_(float(step - 1))


class AdaGrad(Rule):
    """AdaGrad."""

    state_names = ("sum",)

    def __init__(self, params: OptParamsPy) -> None:
        super().__init__(params)
        self.first_state = params.initial_accu_value

    def update(self, weight: Tensor, gradient: Tensor, states: Sequence[Tensor], lr: float, step: int) -> None:
        (total,) = states
        total.addcmul_(gradient, gradient)
        weight.addcdiv_(gradient, total.sqrt().add_(self.params.epsilon), value=-lr)

    def kernel(self, lr: float, step: int) -> tuple[str, tuple[float, ...]]:
        return "learn_adagrad", (lr, 0.0, 0.0, 0.0, self.params.epsilon)


class MomentumSGD(Rule):
    """Steps that keep a share of the last."""

    state_names = ("momentum",)
    moves_untouched = True

    def update(self, weight: Tensor, gradient: Tensor, states: Sequence[Tensor], lr: float, step: int) -> None:
        (momentum,) = states
        momentum.mul_(self.params.momentum_factor).sub_(gradient, alpha=lr)
        weight.add_(momentum)


class Nesterov(Rule):
    """Momentum that looks one step ahead."""

    state_names = ("accm",)
    moves_untouched = True

    def update(self, weight: Tensor, gradient: Tensor, states: Sequence[Tensor], lr: float, step: int) -> None:
        (accm,) = states
        mu = self.params.momentum_factor
        weight.sub_(accm, alpha=mu)
        accm.mul_(mu).sub_(gradient, alpha=lr)
        weight.add_(accm, alpha=1.0 + mu)


class SGD(Rule):
    """Plain steps."""

    def update(self, weight: Tensor, gradient: Tensor, states: Sequence[Tensor], lr: float, step: int) -> None:
        weight.sub_(gradient, alpha=lr)

    def kernel(self, lr: float, step: int) -> tuple[str, tuple[float, ...]]:
        return "learn_sgd", (lr, 0.0, 0.0, 0.0, 0.0)


class Ftrl(Rule):
    """Follow the regularized leader."""

    state_names = ("z", "n")

    @property
    def original_states(self) -> tuple[str, ...]:
        return ("n", "z")

    def update(self, weight: Tensor, gradient: Tensor, states: Sequence[Tensor], lr: float, step: int) -> None:
        if lr == 0.0:
            return
        z, n = states
        before = (n + _TINY).sqrt()
        n.addcmul_(gradient, gradient)
        root = (n + _TINY).sqrt()
        z.add_(gradient).add_((before - root) * weight / lr)
        held = self.params.lambda1 * z.sign() - z
        steps = (self.params.beta + root) / lr + self.params.lambda2
        weight.copy_(torch.where(z.abs() > self.params.lambda1, held / steps, 0.0))


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
