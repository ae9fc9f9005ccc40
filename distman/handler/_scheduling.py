"""The schedules of the learning rates."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from distman._base.arguments import check_choice
from distman.training import UNNAMED, Changes, class_of, plain, updated


@dataclasses.dataclass
class Scheduling:
    """A learning rate scheduler of torch, if there is one, and when it steps."""

    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None = None
    per: Literal["epoch", "step"] = "epoch"
    monitor: str = "val_loss"

    def __post_init__(self) -> None:
        check_choice("per", self.per, ("epoch", "step"))
        if self.per == "step" and isinstance(self.scheduler, ReduceLROnPlateau):
            raise ValueError("per must be 'epoch' for ReduceLROnPlateau, got 'step'. It compares values of epochs.")
        self.fresh = {} if self.scheduler is None else copy.deepcopy(self.scheduler.state_dict())
        self.described = {
            "class": "" if self.scheduler is None else class_of(self.scheduler),
            "per": self.per,
            "options": plain(self.fresh),
        }

    @property
    def monitored(self) -> str | None:
        """Name of the value that ReduceLROnPlateau monitors; None for other schedulers."""
        return self.monitor if isinstance(self.scheduler, ReduceLROnPlateau) else None

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scheduler is None else self.scheduler.state_dict()


class Schedules:
    """The schedules of a training's optimizers, by name."""

    def __init__(self, by_name: Mapping[str, Scheduling]) -> None:
        self._by_name = dict(by_name)
        self._is_single = [*by_name] == [UNNAMED]

    @property
    def learning_rates(self) -> dict[str, float]:
        """Learning rates by their names in the history: ``lr``, or ``lr_`` and the name of the optimizer."""
        rates = {name: float(one.optimizer.param_groups[0]["lr"]) for name, one in self._by_name.items()}
        return {"lr" if self._is_single else f"lr_{name}": rate for name, rate in rates.items()}

    def after_step(self, num_taken: Mapping[str, int]) -> None:
        for name, one in self._by_name.items():
            if one.scheduler is not None and one.per == "step":
                for _ in range(num_taken[name]):
                    one.scheduler.step()

    def after_validation(self, record: Mapping[str, float]) -> None:
        for one in self._by_name.values():
            if isinstance(one.scheduler, ReduceLROnPlateau) and one.monitor in record:
                one.scheduler.step(record[one.monitor])

    def after_epoch(self, record: Mapping[str, float]) -> None:
        self.after_validation(record)
        for one in self._by_name.values():
            if one.scheduler is not None and one.per == "epoch" and one.monitored is None:
                one.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the schedulers' states: of a single optimizer that has no name its own, else by name."""
        states = {name: one.state_dict() for name, one in self._by_name.items()}
        return states[UNNAMED] if self._is_single else {"schedulers": states}

    @property
    def described(self) -> dict[str, Any]:
        """What makes them other schedules: their classes and options, by name."""
        return {name: one.described for name, one in self._by_name.items()}

    def load_state_dict(self, state: Mapping[str, Any], described: Mapping[str, Any], changes: Changes) -> None:
        """Restore such a state; where the program counts, with its options in the place of those that were saved."""
        states = state.get("schedulers", {UNNAMED: state})
        for name in self.compare(described, changes):
            one, saved = self._by_name[name], states.get(name)
            if one.scheduler is None or not saved:
                continue
            if changes.are_of_program:
                options = described[name]["options"], one.described["options"], one.fresh
                saved = updated(dict(saved), *options)
            one.scheduler.load_state_dict(dict(saved))

    def compare(self, described: Mapping[str, Any], changes: Changes) -> list[str]:
        """Return the names of those that saved states can be loaded into, and note what differs."""
        fitting = []
        for name in [one for one in described if one in self._by_name]:
            saved, own = described[name], self._by_name[name].described
            label = "the scheduler" if self._is_single else f"the scheduler of {name}"
            changes.note(f"the class of {label}", saved["class"], own["class"], suffix=", which begins anew")
            if saved["class"] == own["class"]:
                changes.note(f"{label}, per", saved["per"], own["per"])
                changes.note(label, saved["options"], own["options"])
                fitting.append(name)
        return fitting
