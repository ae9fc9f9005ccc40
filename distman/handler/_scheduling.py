"""The schedule of the learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau


class Scheduling:
    """A scheduler of torch's, and when it steps.

    Args:
        optimizer: The optimizer whose learning rate it is.
        scheduler: The scheduler; None keeps the rate.
        per: ``"step"`` of the optimizer, or ``"epoch"``.
        monitor: Which value of the epoch ReduceLROnPlateau watches; epochs without it do not count.

    Raises:
        ValueError: ``per`` is neither, or ReduceLROnPlateau shall step with the optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None = None,
        *,
        per: Literal["epoch", "step"] = "epoch",
        monitor: str = "val_loss",
    ) -> None:
        if per not in ("epoch", "step"):
            raise ValueError(f"per must be 'epoch' or 'step', got {per!r}. Correct it.")
        if per == "step" and isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError("per must be 'epoch' for ReduceLROnPlateau, got 'step'. Epochs are what it compares.")
        self._optimizer, self._scheduler, self._per, self._monitor = optimizer, scheduler, per, monitor

    @property
    def monitored(self) -> str | None:
        """Name of the value that ReduceLROnPlateau watches; None without one."""
        return self._monitor if isinstance(self._scheduler, ReduceLROnPlateau) else None

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first group of parameters."""
        return float(self._optimizer.param_groups[0]["lr"])

    def after_step(self) -> None:
        """Let the optimizer's step count."""
        if self._scheduler is not None and self._per == "step":
            self._scheduler.step()

    def after_epoch(self, record: Mapping[str, float]) -> None:
        """Let the epoch count.

        Args:
            record: What became of it, the same on all ranks.
        """
        if self._scheduler is None or self._per == "step":
            return
        if isinstance(self._scheduler, ReduceLROnPlateau):
            if self._monitor in record:  # else there was no validation
                self._scheduler.step(record[self._monitor])
        else:
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state; empty without one."""
        return {} if self._scheduler is None else self._scheduler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take such a state."""
        if self._scheduler is not None and state:
            self._scheduler.load_state_dict(dict(state))
