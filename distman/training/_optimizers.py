"""The optimizers of a model and their schedules, and what a program has changed since it saved."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from distman._base.arguments import check_choice
from distman._base.log import logger
from distman._base.text import printable
from distman.checkpoint import map_state, without_compiled as bare_name
from distman.errors import CheckpointError
from distman.manager import DistributedManager
from distman.training._sharding import place_optimizer_state

OnChange = Literal["file", "program", "error"]

_ABOUT_SPEED = ("foreach", "fused", "capturable", "differentiable")  # options that do not change what is computed

_OF_THE_OPTIMIZER = ("base_lrs", "last_epoch")
"""Parts of a scheduler's state that say how far it is, or what the optimizer's options say."""

UNNAMED = "optimizer"  # the name of an optimizer that is the only one


class Changes:
    """Compares what a program was when it saved with what it is now."""

    def __init__(self, on_change: OnChange | None = None) -> None:
        check_choice("on_change", on_change, (*get_args(OnChange), None))
        self._on_change, self.are_of_program = on_change, on_change == "program"
        self._found: list[str] = []

    def fit(self, what: str, saved: object, own: object) -> bool:
        """Return whether a state that was saved for one thing may be loaded into another."""
        if saved == own:
            return True
        if not self.are_of_program:
            raise CheckpointError(
                f"{what} must be as saved, {printable(_shown(saved))}, got {_shown(own)}. Make it the same again; or "
                "pass on_change='program', and begin with a new one."
            )
        self._found += _differences(what, saved, own)
        return False

    def note(self, what: str, saved: Any, own: Any, *, suffix: str = "") -> None:
        """Note in what two descriptions differ, of which the file's is to go on unless the program counts."""
        self._found += [f"{one}{suffix}" for one in _differences(what, saved, own)]

    def report(self) -> None:
        if not self._found:
            return
        found = printable("; ".join(self._found))
        if self._on_change == "error":
            raise CheckpointError(
                f"the program must be as it was when the checkpoint was saved, got {found}. Change it back, or let the "
                "file or the program count with on_change=."
            )
        if DistributedManager().is_main:
            logger.warning(
                "the program has changed since the checkpoint was saved: %s. It goes on with what is in the %s; "
                "on_change= chooses",
                found,
                "program" if self.are_of_program else "file",
            )


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {name: _plain(value) for name, value in group.items() if name not in ("params", *_ABOUT_SPEED)}
        for group in optimizer.param_groups
    ]


def _use_options(optimizer: torch.optim.Optimizer, saved: Sequence[Any], own: Sequence[Any]) -> None:
    """Give an optimizer whose state was loaded the options of the program, where these differ from the file's.

    A learning rate that a schedule has changed since keeps its ratio to the one that was set.
    """
    for group, before, now in zip(optimizer.param_groups, saved, own, strict=True):
        for name in [one for one in now if one in before and before[one] != now[one]]:
            value = now[name]
            if name == "lr":
                group |= {"initial_lr": value} if "initial_lr" in group else {}
                current = float(group["lr"])
                value = value if current == before[name] or not before[name] else current * value / before[name]
            if isinstance(group[name], torch.Tensor):
                group[name].fill_(value)
            else:
                group[name] = tuple(value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Return a value as a checkpoint holds it, and as it compares: numbers, strings, and lists and dicts of such."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return value.item()
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


def _without_numpy(state: Any) -> Any:
    """Return a state with Python's numbers in the place of NumPy's, which schedules bring, and files do not hold."""
    return map_state(state, lambda value, _: value.item() if isinstance(value, np.generic) else value)


def _class_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _updated(value: Any, saved: Any, own: Any, current: Any) -> Any:
    """Return a value in which what differs between two descriptions, of the file and the program, is the program's."""
    if saved == own:
        return value
    if all(isinstance(one, Mapping) for one in (value, saved, own, current)):
        names = [name for name in value if name in saved and name in own]
        new = {name: _updated(value[name], saved[name], own[name], current[name]) for name in names}
        return {**value, **new}
    if _are_lists_of_parts(saved, own) and len(value) == len(saved):
        return [_updated(*parts) for parts in zip(value, saved, own, current, strict=True)]
    return current


def _differences(what: str, saved: Any, own: Any) -> Iterator[str]:
    if isinstance(saved, Mapping) and isinstance(own, Mapping):
        shared = [name for name in saved if name in own and name not in _OF_THE_OPTIMIZER]
        for name in [one for one in shared if one == "_schedulers" or not one.startswith("_")]:
            yield from _differences(f"{what} {name}".strip(), saved[name], own[name])
    elif _are_lists_of_parts(saved, own):
        for index, (one, other) in enumerate(zip(saved, own, strict=True)):
            yield from _differences(f"{what} {index}" if len(saved) > 1 else what, one, other)
    elif saved != own:
        yield f"{what}: {_shown(saved)} in the file, {_shown(own)} in the program"


def _are_lists_of_parts(saved: Any, own: Any) -> bool:
    are_lists = isinstance(saved, list) and isinstance(own, list) and len(saved) == len(own)
    return are_lists and all(isinstance(one, Mapping) for one in [*saved, *own])


def _shown(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = ", ".join(map(str, value))
    text = str(value).removeprefix("torch.optim.") or "nothing"
    return text if len(text) < 200 else f"{text[:200]} and more"  # names of parameters may be thousands


class Optimizers:
    """The optimizers of a model by name, each with parameters of its own."""

    def __init__(
        self,
        module: torch.nn.Module,
        by_name: Mapping[str, torch.optim.Optimizer],
        given: Mapping[str, Any] | None = None,  # options, from before a schedule has changed them
    ) -> None:
        self.by_name = dict(by_name)
        self.parameters = {
            name: [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for name, optimizer in by_name.items()
        }
        names = {id(one): bare_name(name) for name, one in module.named_parameters()}
        own = {id(one): name for name, parameters in self.parameters.items() for one in parameters}
        self._check_parameters(own, names)
        self.not_optimized = [one for one in module.parameters() if id(one) not in own]
        self._described = {  # what makes an optimizer another one
            name: {
                "class": _class_of(one),
                "parameters": [
                    [names.get(id(part), "foreign") for part in group["params"]] for group in one.param_groups
                ],
                "options": (given or {}).get(name) or options_of(one),
            }
            for name, one in by_name.items()
        }

    def _check_parameters(self, own: Mapping[int, str], names: Mapping[int, str]) -> None:
        for name, parameters in self.parameters.items():
            shared = [own[id(one)] for one in parameters if own[id(one)] != name]
            if shared:
                raise ValueError(
                    f"a parameter must belong to one optimizer, got {len(shared)} that belong to {name!r} and "
                    f"{shared[0]!r}. Choose them with parameters=, as in set_optimizer(torch.optim.Adam, "
                    f"name={name!r}, parameters=lambda model: model.{name}.parameters())."
                )
        num_foreign = len(own.keys() - names.keys())
        if num_foreign and DistributedManager().world_size > 1:
            raise ValueError(
                f"parameters of the optimizer must be the model's, got {num_foreign} others, whose gradients would "
                "not be averaged over the ranks. Make them part of the model."
            )

    def state_dict(self) -> dict[str, Any]:
        states = {name: _without_numpy(optimizer.state_dict()) for name, optimizer in self.by_name.items()}
        return {"optimizers": states, "described": self._described}

    def compare(self, state: Mapping[str, Any], changes: Changes) -> list[str]:
        """Return the names of the optimizers that such a state can be loaded into, and note what differs."""
        states, described = state["optimizers"], state["described"]
        if not changes.fit("the names of the optimizers", sorted(states), sorted(self.by_name)):
            states = {name: one for name, one in states.items() if name in self.by_name}
        fitting = []
        for name in states:
            saved, own = described[name], self._described[name]
            label = "the optimizer" if name == UNNAMED else f"the optimizer {name}"
            parts = {"class": f"the class of {label}", "parameters": f"the parameters of {label}"}
            if all([changes.fit(what, saved[part], own[part]) for part, what in parts.items()]):  # noqa: C419 - all of them
                changes.note(label, saved["options"], own["options"])
                fitting.append(name)
        return fitting

    def load_state_dict(self, state: Mapping[str, Any], changes: Changes) -> None:
        states, described = state["optimizers"], state["described"]
        for name in self.compare(state, changes):
            optimizer = self.by_name[name]
            optimizer.load_state_dict(place_optimizer_state(optimizer, states[name]))
            if changes.are_of_program:
                _use_options(optimizer, described[name]["options"], self._described[name]["options"])


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


@dataclasses.dataclass
class Scheduling:
    """A learning rate scheduler of torch, and when it steps."""

    scheduler: LRScheduler
    per: Literal["epoch", "step"]
    monitor: str

    def __post_init__(self) -> None:
        check_choice("per", self.per, ("epoch", "step"))
        if self.per == "step" and isinstance(self.scheduler, ReduceLROnPlateau):
            raise ValueError("per must be 'epoch' for ReduceLROnPlateau, got 'step'. It compares values of epochs.")
        self.fresh = copy.deepcopy(self.scheduler.state_dict())
        self.described = {"class": _class_of(self.scheduler), "per": self.per, "options": _plain(self.fresh)}


class Schedules:
    """The learning rates of a training's optimizers, by name, which are constant where no schedule has been set."""

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer], by_name: Mapping[str, Scheduling]) -> None:
        self._optimizers, self._by_name = dict(optimizers), dict(by_name)
        self._is_single = [*optimizers] == [UNNAMED]

    @property
    def learning_rates(self) -> dict[str, float]:
        """Learning rates by their names in the history: ``lr``, or ``lr_`` and the name of the optimizer."""
        return {
            "lr" if self._is_single else f"lr_{name}": float(one.param_groups[0]["lr"])
            for name, one in self._optimizers.items()
        }

    def after_step(self, num_taken: Mapping[str, int]) -> None:
        for name, one in self._by_name.items():
            if one.per == "step":
                for _ in range(num_taken[name]):
                    one.scheduler.step()

    def after_validation(self, record: Mapping[str, float]) -> None:
        for one in self._by_name.values():
            if isinstance(one.scheduler, ReduceLROnPlateau) and one.monitor in record:
                one.scheduler.step(record[one.monitor])

    def after_epoch(self, record: Mapping[str, float]) -> None:
        self.after_validation(record)
        for one in self._by_name.values():
            if one.per == "epoch" and not isinstance(one.scheduler, ReduceLROnPlateau):
                one.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {name: _without_numpy(one.scheduler.state_dict()) for name, one in self._by_name.items()}

    @property
    def described(self) -> dict[str, Any]:
        none = {"class": "", "per": "epoch", "options": {}}
        return {name: self._by_name[name].described if name in self._by_name else none for name in self._optimizers}

    def load_state_dict(self, state: Mapping[str, Any], described: Mapping[str, Any], changes: Changes) -> None:
        """Restore such a state; where the program counts, with its options in the place of those that were saved."""
        for name in self.compare(described, changes):
            one, saved = self._by_name[name], dict(state[name])
            if changes.are_of_program:
                saved = _updated(saved, described[name]["options"], one.described["options"], one.fresh)
            one.scheduler.load_state_dict(saved)

    def compare(self, described: Mapping[str, Any], changes: Changes) -> list[str]:
        """Return the names of those that saved states can be loaded into, and note what differs."""
        fitting = []
        for name, own in self.described.items():
            if name not in described:
                continue
            saved = described[name]
            label = "the scheduler" if self._is_single else f"the scheduler of {name}"
            changes.note(f"the class of {label}", saved["class"], own["class"], suffix=", which begins anew")
            if saved["class"] == own["class"]:
                changes.note(f"{label}, per", saved["per"], own["per"])
                changes.note(label, saved["options"], own["options"])
                fitting += [name] if name in self._by_name else []
        return fitting
