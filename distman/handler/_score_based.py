"""Score-based models in a handler: their loss, samples and densities."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch

from distman import score
from distman.handler._evaluation import evaluating
from distman.handler._objective import Outcome
from distman.score import SDE, VarianceExploding, VariancePreserving


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
