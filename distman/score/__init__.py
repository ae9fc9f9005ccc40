"""Score-based generative models: equations, training loss, samples and likelihoods, on any number of ranks."""

from __future__ import annotations

from distman.score.denoising import denoising_loss
from distman.score.likelihood import log_likelihood
from distman.score.network import score
from distman.score.sampling import sample
from distman.score.sde import SDE, VarianceExploding, VariancePreserving
from distman.score.streams import random_stream

__all__ = [
    "SDE",
    "VarianceExploding",
    "VariancePreserving",
    "denoising_loss",
    "log_likelihood",
    "random_stream",
    "sample",
    "score",
]
