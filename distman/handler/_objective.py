"""From a batch to its loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from distman._torch_internals import tree_map

Forward = Callable[[torch.nn.Module, Any], tuple[Any, Any]]
LossFunction = Callable[..., torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The mean loss of a batch, shape ``()``; without outputs, metrics do not apply to it."""

    loss: torch.Tensor
    outputs: Any = None
    targets: Any = None


Objective = Callable[[torch.nn.Module, Any], Outcome]


def check_loss(loss: object) -> None:
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"the loss must be a tensor with one element, got a {type(loss).__name__}. Return the number to minimize; "
            "pass what else is to be measured to add_metric()."
        )
    if loss.numel() != 1:
        raise ValueError(f"the loss must be one number, got shape {tuple(loss.shape)}. Take its mean over the batch.")


@dataclasses.dataclass(frozen=True)
class Supervised:
    """The loss of outputs against targets."""

    forward: Forward
    loss_fn: LossFunction

    def __call__(self, model: torch.nn.Module, batch: Any) -> Outcome:
        outputs, targets = self.forward(model, batch)
        with _explained(self.forward is default_forward and targets is None, "has no targets"):
            return Outcome(self.loss_fn(outputs, targets), outputs, targets)


def default_forward(model: torch.nn.Module, batch: Any) -> tuple[Any, Any]:
    """Return the outputs for a batch's first element, and its last one, the targets; None if it has one element."""
    if isinstance(batch, list | tuple):
        return model(batch[0]), batch[-1] if len(batch) > 1 else None
    names = f"is a mapping with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
    with _explained(bool(names), names):
        return model(batch), None


@contextmanager
def _explained(is_odd: bool, how: str) -> Iterator[None]:  # noqa: FBT001 - a condition
    """Say how a batch is where the model, or the loss, fails with one that a forward function ought to take apart."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        if not is_odd:
            raise
        raise TypeError(
            f"a batch must be one of inputs and targets unless a function takes it apart, got one that {how}: {error}. "
            "Pass set_loss_fn(loss_fn, forward=function), where function(model, batch) returns outputs and targets."
        ) from error


def to_device(batch: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return batch
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf, batch)
