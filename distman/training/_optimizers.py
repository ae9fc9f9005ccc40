"""The optimizers of a model, and their states."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from distman.checkpoint import without_compiled as bare_name
from distman.manager import DistributedManager
from distman.training._changes import Changes, class_of, options_of, use_options
from distman.training._sharding import place_optimizer_state

UNNAMED = "optimizer"
"""Name of an optimizer that is the only one."""


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
        own = {id(one): name for name, parameters in self.parameters.items() for one in parameters}
        self._check_parameters(module, own)
        self.not_optimized = [one for one in module.parameters() if id(one) not in own]
        self._described = {name: _describe(module, one, (given or {}).get(name)) for name, one in by_name.items()}

    def _check_parameters(self, module: torch.nn.Module, own: Mapping[int, str]) -> None:
        for name, parameters in self.parameters.items():
            shared = [own[id(one)] for one in parameters if own[id(one)] != name]
            if shared:
                raise ValueError(
                    f"a parameter must belong to one optimizer, got {len(shared)} that belong to {name!r} and "
                    f"{shared[0]!r}. Choose them with parameters=, as in set_optimizer(torch.optim.Adam, "
                    f"name={name!r}, parameters=lambda model: model.{name}.parameters())."
                )
        num_foreign = len(own.keys() - {id(one) for one in module.parameters()})
        if num_foreign and DistributedManager().world_size > 1:
            raise ValueError(
                f"parameters of the optimizer must be the model's, got {num_foreign} others, whose gradients would "
                "not be averaged over the ranks. Make them part of the model."
            )

    def state_dict(self) -> dict[str, Any]:
        states = {name: optimizer.state_dict() for name, optimizer in self.by_name.items()}
        return {
            **({"optimizer": states[UNNAMED]} if states.keys() == {UNNAMED} else {"optimizers": states}),
            "described": self._described,
        }

    def compare(self, state: Mapping[str, Any], changes: Changes) -> list[str]:
        """Return the names of the optimizers that such a state can be loaded into, and note what differs."""
        states, described = _states_in(state), state["described"]
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
        states, described = _states_in(state), state["described"]
        for name in self.compare(state, changes):
            optimizer = self.by_name[name]
            optimizer.load_state_dict(place_optimizer_state(optimizer, states[name]))
            if changes.are_of_program:
                use_options(optimizer, described[name]["options"], self._described[name]["options"])


def _describe(module: torch.nn.Module, optimizer: torch.optim.Optimizer, given: Any) -> dict[str, Any]:
    """Return what makes an optimizer another one: its class, the names of its parameters, and its options."""
    names = {id(one): bare_name(name) for name, one in module.named_parameters()}
    parameters = [[names.get(id(one), "foreign") for one in group["params"]] for group in optimizer.param_groups]
    return {"class": class_of(optimizer), "parameters": parameters, "options": given or options_of(optimizer)}


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer computes the loss several times per step, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _states_in(state: Mapping[str, Any]) -> Mapping[str, Any]:
    states: Mapping[str, Any] = state["optimizers"] if "optimizers" in state else {UNNAMED: state["optimizer"]}
    return states
