"""HugeCTR's learning rate by step: warm-up, then constant, then decay to a power."""

from __future__ import annotations

from inference_session.errors import ConfigurationError


class LearningRateScheduler:
    """The result of `Model.get_learning_rate_scheduler`."""

    def __init__(
        self,
        base_lr: float,
        warmup_steps: int = 1,
        decay_start: int = 0,
        decay_steps: int = 1,
        decay_power: float = 2.0,
        end_lr: float = 0.0,
    ) -> None:
        """`warmup_steps` 0: no warm-up. `decay_start` 0: the rate does not decay. ConfigurationError: a wrong value."""
        if base_lr < 0 or warmup_steps < 0 or decay_steps < 0 or decay_power < 1.0 or end_lr < 0.0:
            raise ConfigurationError(
                f"learning rate: base_lr {base_lr}, warmup_steps {warmup_steps}, decay_steps {decay_steps}, "
                f"decay_power {decay_power}, end_lr {end_lr}; allowed: rates and steps from 0, power from 1"
            )
        self._base_lr, self._warmup_steps = base_lr, warmup_steps
        self._decay_start, self._decay_steps, self._decay_power = decay_start, decay_steps, decay_power
        self._end_lr = end_lr
        self._step = 0
        self._lr = 0.0

    def get_next(self) -> float:
        """The rate of the next step."""
        self._step += 1
        self._lr = self._rate(self._step)
        return self._lr

    def get_lr(self) -> float:
        """The rate that was handed out last."""
        return self._lr

    def get_step(self) -> int:
        """How many rates were handed out."""
        return self._step

    def _rate(self, step: int) -> float:
        if step <= self._warmup_steps:
            return step * self._base_lr / self._warmup_steps
        if not self._decay_start or step <= self._decay_start:
            return self._base_lr
        left = self._decay_start + self._decay_steps - step
        if left < 0:
            return self._end_lr
        return max(self._base_lr * (left / self._decay_steps) ** self._decay_power, self._end_lr)
