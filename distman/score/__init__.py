"""Score-based generative models on any number of ranks: equations, training loss, samples, likelihoods."""

from __future__ import annotations

# What is imported as itself is for other parts of the package.
from distman.score._denoising import Weighting as Weighting, denoising_loss
from distman.score._likelihood import log_likelihood
from distman.score._network import guided_score, score
from distman.score._sampling import sample
from distman.score._sde import SDE, VarianceExploding, VariancePreserving
from distman.score._sharing import random_stream

__all__ = [
    "SDE",
    "VarianceExploding",
    "VariancePreserving",
    "denoising_loss",
    "guided_score",
    "log_likelihood",
    "random_stream",
    "sample",
    "score",
]
