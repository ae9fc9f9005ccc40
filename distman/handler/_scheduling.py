"""The schedules of the learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

UNNAMED = "optimizer"
"""Name of an optimizer that is the only one."""


class Scheduling:
    """A learning rate scheduler of torch, and when it steps.

    Args:
        optimizer: The optimizer.
        scheduler: The scheduler; None keeps the learning rate constant.
        per: Whether it steps after each ``"step"`` of the optimizer, or after each ``"epoch"``.
        monitor: Name of the value that ReduceLROnPlateau monitors; epochs without it do not count.

    Raises:
        ValueError: ``per`` is neither, or is ``"step"`` for ReduceLROnPlateau.
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
            raise ValueError(f"per must be 'epoch' or 'step', got {per!r}. Choose one of them.")
        if per == "step" and isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError("per must be 'epoch' for ReduceLROnPlateau, got 'step'. It compares values of epochs.")
        self._optimizer, self._scheduler, self._per, self._monitor = optimizer, scheduler, per, monitor

    @property
    def monitored(self) -> str | None:
        """Name of the value that ReduceLROnPlateau monitors; None for other schedulers."""
        return self._monitor if isinstance(self._scheduler, ReduceLROnPlateau) else None

    @property
    def learning_rate(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def after_step(self, num_taken: int) -> None:
        """Tell the scheduler how often the optimizer has stepped since."""
        if self._scheduler is not None and self._per == "step":
            for _ in range(num_taken):
                self._scheduler.step()

    def after_epoch(self, record: Mapping[str, float]) -> None:
        """Tell the scheduler that an epoch is over.

        Args:
            record: Its results, the same on all ranks.
        """
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self.after_validation(record)
        elif self._scheduler is not None and self._per == "epoch":
            self._scheduler.step()

    def after_validation(self, record: Mapping[str, float]) -> None:
        """Tell a scheduler that monitors one of these results of it.

        Args:
            record: Results, the same on all ranks; some epochs have none of a validation.
        """
        if isinstance(self._scheduler, ReduceLROnPlateau) and self._monitor in record:
            self._scheduler.step(record[self._monitor])

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state; empty without one."""
        return {} if self._scheduler is None else self._scheduler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""
        if self._scheduler is not None and state:
            self._scheduler.load_state_dict(dict(state))


class Schedules:
    """The schedules of several optimizers.

    Args:
        by_name: The schedule of each, by the optimizer's name.
    """

    def __init__(self, by_name: Mapping[str, Scheduling]) -> None:
        self._by_name = dict(by_name)
        self._is_single = [*by_name] == [UNNAMED]

    @property
    def learning_rates(self) -> dict[str, float]:
        """Learning rates by their names in the history: ``lr``, or ``lr_`` and the name of the optimizer."""
        return {"lr" if self._is_single else f"lr_{name}": one.learning_rate for name, one in self._by_name.items()}

    def after_step(self, num_taken: Mapping[str, int]) -> None:
        """Tell the schedulers how often each optimizer has stepped since."""
        for name, one in self._by_name.items():
            one.after_step(num_taken[name])

    def after_epoch(self, record: Mapping[str, float]) -> None:
        """Tell the schedulers that an epoch is over."""
        for one in self._by_name.values():
            one.after_epoch(record)

    def after_validation(self, record: Mapping[str, float]) -> None:
        """Tell schedulers that monitor one of these results of it."""
        for one in self._by_name.values():
            one.after_validation(record)

    def state_dict(self) -> dict[str, Any]:
        """Return the schedulers' states: of a single optimizer that has no name its own, else by name."""
        states = {name: one.state_dict() for name, one in self._by_name.items()}
        return states[UNNAMED] if self._is_single else {"schedulers": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such states."""
        states = {UNNAMED: state} if self._is_single else state["schedulers"]
        for name, one in self._by_name.items():
            one.load_state_dict(states[name])
