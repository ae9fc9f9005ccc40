"""From a batch to its loss, and what a score-based model is used for besides."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from distman import score
from distman.manager import DistributedManager
from distman.score import SDE, VarianceExploding, VariancePreserving

Forward = Callable[[torch.nn.Module, Any], tuple[Any, Any]]
LossFunction = Callable[..., torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The mean loss of a batch, shape ``()``; without outputs, metrics do not apply to it."""

    loss: torch.Tensor
    outputs: Any = None
    targets: Any = None


Objective = Callable[[torch.nn.Module, Any], Outcome]


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


@contextmanager
def evaluating(model: torch.nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Put a model into evaluation mode for a ``with`` block, with mixed precision if a data type is given."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.autocast(DistributedManager().device.type, dtype=dtype, enabled=dtype is not None):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def make_sde(sde: SDE | Literal["vp", "ve"], **kwargs: Any) -> SDE:
    if sde == "vp":
        return VariancePreserving(**kwargs)
    if sde == "ve":
        return VarianceExploding(**kwargs)
    if isinstance(sde, str) or kwargs:
        given = f" with {', '.join(kwargs)}" if kwargs else ""
        raise ValueError(
            f"sde must be 'vp', 've', or an equation without options, got {sde!r}{given}. Set options of an equation "
            "where you make it."
        )
    if not isinstance(sde, SDE):
        raise TypeError(f"sde must be 'vp', 've', or an equation, got {sde!r}. Pass one of them.")
    return sde


class ScoreBased:
    """The objective of a score-based model, and what the trained model is used for."""

    def __init__(self, sde: SDE, *, conditional: bool, null_condition: float, **loss_options: Any) -> None:
        self.sde = sde
        self._is_conditional = conditional
        self._null_condition = null_condition
        self._loss_options = loss_options

    def __call__(self, model: torch.nn.Module, batch: Any) -> Outcome:
        """Return the denoising loss of a batch of samples; without conditions, what else is in the batch is ignored."""
        samples = batch[0] if isinstance(batch, list | tuple) else batch
        condition = batch[1] if self._is_conditional else None
        options = self._loss_options | {"null_condition": self._null_condition}
        return Outcome(score.denoising_loss(model, self.sde, samples, condition, **options))

    def score(
        self, model: torch.nn.Module, t: torch.Tensor, x: torch.Tensor, *condition: torch.Tensor, guidance: float = 1.0
    ) -> torch.Tensor:
        """Return the score at times ``(batch,)`` and points ``(batch, *)``."""
        with evaluating(model):
            null = self._null_condition
            return score.score(model, self.sde, t, x, *condition, guidance=guidance, null_condition=null)

    def sample(
        self, model: torch.nn.Module, shape: Sequence[int], *, guidance: float = 1.0, **kwargs: Any
    ) -> torch.Tensor:
        """Draw samples of this shape, ``(n, *)``. Collective."""
        score_fn = functools.partial(self.score, model, guidance=guidance)
        return score.sample(score_fn, self.sde, shape, **kwargs)

    def log_likelihood(self, model: torch.nn.Module, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return the log-density of samples ``(n, *)`` in nats. Collective."""
        return score.log_likelihood(functools.partial(self.score, model), self.sde, x, **kwargs)
