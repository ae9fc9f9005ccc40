"""The schedules of the learning rates."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from distman.handler._changes import Changes, class_of, plain, updated

UNNAMED = "optimizer"
"""Name of an optimizer that is the only one."""


class Scheduling:
    """A learning rate scheduler of torch, and when it steps."""

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
        self._fresh = {} if scheduler is None else copy.deepcopy(scheduler.state_dict())
        self.described = {
            "class": "" if scheduler is None else class_of(scheduler),
            "per": per,
            "options": plain(self._fresh),
        }

    @property
    def monitored(self) -> str | None:
        """Name of the value that ReduceLROnPlateau monitors; None for other schedulers."""
        return self._monitor if isinstance(self._scheduler, ReduceLROnPlateau) else None

    @property
    def learning_rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def after_step(self, num_taken: int) -> None:
        if self._scheduler is not None and self._per == "step":
            for _ in range(num_taken):
                self._scheduler.step()

    def after_epoch(self, record: Mapping[str, float]) -> None:
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self.after_validation(record)
        elif self._scheduler is not None and self._per == "epoch":
            self._scheduler.step()

    def after_validation(self, record: Mapping[str, float]) -> None:
        """Tell a scheduler that monitors one of these results of it."""
        if isinstance(self._scheduler, ReduceLROnPlateau) and self._monitor in record:
            self._scheduler.step(record[self._monitor])

    def state_dict(self) -> dict[str, Any]:
        return {} if self._scheduler is None else self._scheduler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], saved: Mapping[str, Any] | None = None) -> None:
        """Restore such a state; where the program counts, with its options in the place of those that were saved."""
        if self._scheduler is not None and state:
            own = self.described["options"]
            state = dict(state) if saved is None else updated(dict(state), saved["options"], own, self._fresh)
            self._scheduler.load_state_dict(dict(state))


class Schedules:
    def __init__(self, by_name: Mapping[str, Scheduling]) -> None:
        self._by_name = dict(by_name)
        self._is_single = [*by_name] == [UNNAMED]

    @property
    def learning_rates(self) -> dict[str, float]:
        """Learning rates by their names in the history: ``lr``, or ``lr_`` and the name of the optimizer."""
        return {"lr" if self._is_single else f"lr_{name}": one.learning_rate for name, one in self._by_name.items()}

    def after_step(self, num_taken: Mapping[str, int]) -> None:
        for name, one in self._by_name.items():
            one.after_step(num_taken[name])

    def after_epoch(self, record: Mapping[str, float]) -> None:
        for one in self._by_name.values():
            one.after_epoch(record)

    def after_validation(self, record: Mapping[str, float]) -> None:
        for one in self._by_name.values():
            one.after_validation(record)

    def state_dict(self) -> dict[str, Any]:
        """Return the schedulers' states: of a single optimizer that has no name its own, else by name."""
        states = {name: one.state_dict() for name, one in self._by_name.items()}
        return states[UNNAMED] if self._is_single else {"schedulers": states}

    @property
    def described(self) -> dict[str, Any]:
        """What makes them other schedules: their classes and options, by name."""
        return {name: one.described for name, one in self._by_name.items()}

    def load_state_dict(self, state: Mapping[str, Any], described: Mapping[str, Any], changes: Changes) -> None:
        states = state.get("schedulers", {UNNAMED: state})
        for name in self.compare(states, described, changes):
            self._by_name[name].load_state_dict(states[name], described.get(name) if changes.are_of_program else None)

    def compare(self, states: Iterable[str], described: Mapping[str, Any], changes: Changes) -> list[str]:
        """Return the names of those that saved states can be loaded into, and note what differs."""
        fitting = []
        for name in [one for one in states if one in self._by_name]:
            own = self._by_name[name].described
            saved, label = described.get(name, own), "the scheduler" if self._is_single else f"the scheduler of {name}"
            changes.note(f"the class of {label}", saved["class"], own["class"], suffix=", which begins anew")
            if saved["class"] == own["class"]:
                changes.note(f"{label}, per", saved["per"], own["per"])
                changes.note(label, saved["options"], own["options"])
                fitting.append(name)
        return fitting
