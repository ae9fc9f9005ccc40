"""From a batch to its loss, and what a score-based model is used for besides."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch

from distman import score
from distman.manager import DistributedManager
from distman.score import SDE, VarianceExploding, VariancePreserving

Forward = Callable[[torch.nn.Module, Any], tuple[Any, Any]]
LossFunction = Callable[..., torch.Tensor]


class Outcome(NamedTuple):
    """The mean loss of a batch, shape ``()``; without outputs, metrics do not apply to it."""

    loss: torch.Tensor
    outputs: Any = None
    targets: Any = None


Objective = Callable[[torch.nn.Module, Any], Outcome]


def supervised(forward: Forward, loss_fn: LossFunction, model: torch.nn.Module, batch: Any) -> Outcome:
    outputs, targets = forward(model, batch)
    with _explained("has no targets" if forward is default_forward and targets is None else ""):
        return Outcome(loss_fn(outputs, targets), outputs, targets)


def default_forward(model: torch.nn.Module, batch: Any) -> tuple[Any, Any]:
    """Return the outputs for a batch's first element, and its last one, the targets; None if it has one element."""
    if isinstance(batch, list | tuple):
        return model(batch[0]), batch[-1] if len(batch) > 1 else None
    with _explained(f"is a mapping with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""):
        return model(batch), None


@contextmanager
def _explained(how: str) -> Iterator[None]:
    """Say how an odd batch is where the model or the loss fails with it: a function ought to take it apart."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        if not how:
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
        self.sde, self._is_conditional, self._null_condition = sde, conditional, null_condition
        self._loss_options = {"null_condition": null_condition, **loss_options}

    def __call__(self, model: torch.nn.Module, batch: Any) -> Outcome:
        """Return the denoising loss of a batch of samples; without conditions, what else is in the batch is ignored."""
        samples = batch[0] if isinstance(batch, list | tuple) else batch
        condition = batch[1] if self._is_conditional else None
        return Outcome(score.denoising_loss(model, self.sde, samples, condition, **self._loss_options))

    def _score_of(self, model: torch.nn.Module, **options: Any) -> Callable[..., torch.Tensor]:
        return functools.partial(score.score, model, self.sde, null_condition=self._null_condition, **options)

    def sample(
        self, model: torch.nn.Module, shape: Sequence[int], *, guidance: float = 1.0, **kwargs: Any
    ) -> torch.Tensor:
        with evaluating(model):
            return score.sample(self._score_of(model, guidance=guidance), self.sde, shape, **kwargs)

    def log_likelihood(self, model: torch.nn.Module, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        with evaluating(model):
            return score.log_likelihood(self._score_of(model), self.sde, x, **kwargs)
