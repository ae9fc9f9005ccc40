"""The oracle of the score models: a mixture of Gaussians, which under noise is a mixture again, with a known score."""

import math
from dataclasses import dataclass

import torch

from distman import DistributedManager
from distman.score import SDE, VarianceExploding, VariancePreserving

SDES = {"preserving": VariancePreserving(), "exploding": VarianceExploding(sigma_max=30.0)}
NUM_DIMS = 2


@dataclass(frozen=True)
class Mixture:
    """A mixture in two dims, of unequal parts around 0."""

    dtype: torch.dtype = torch.float64

    @property
    def weights(self):
        return torch.tensor([0.5, 0.3, 0.2], dtype=self.dtype)

    @property
    def means(self):
        return torch.tensor([[-0.9, 0.4], [0.9, 0.6], [0.9, -1.9]], dtype=self.dtype)

    @property
    def stds(self):
        return torch.tensor([0.3, 0.5, 0.4], dtype=self.dtype)

    def draw(self, num, seed=0):
        generator = torch.Generator().manual_seed(seed)
        parts = torch.multinomial(self.weights, num, replacement=True, generator=generator)
        noise = torch.randn(num, NUM_DIMS, generator=generator, dtype=self.dtype)
        return self.means[parts] + self.stds[parts, None] * noise

    def log_density(self, x, scale=1.0, std=0.0):
        """The log-density under a kernel, in nats; scale and std are numbers or one for each sample, (batch, 1)."""
        variances = (scale * self.stds) ** 2 + std**2
        squares = (x[:, None] - torch.as_tensor(scale)[..., None] * self.means).square().sum(dim=2)
        logs = self.weights.log() - 0.5 * squares / variances - NUM_DIMS / 2 * torch.log(2 * math.pi * variances)
        return logs.logsumexp(dim=1)


@dataclass(frozen=True)
class ExactScore:
    """The score of the mixture under an equation's noise; differentiable."""

    sde: SDE
    dtype: torch.dtype = torch.float64

    def __call__(self, t, x):
        mixture = Mixture(self.dtype)
        scale, std = (value[:, None] for value in self.sde.marginal(t))
        variances = (scale * mixture.stds) ** 2 + std**2
        differences = scale[..., None] * mixture.means - x[:, None]
        logs = mixture.weights.log() - 0.5 * differences.square().sum(dim=2) / variances
        logs = logs - NUM_DIMS / 2 * variances.log()
        return (logs.softmax(dim=1)[..., None] * differences / variances[..., None]).sum(dim=1)


class FailsOn:
    """Fails on one rank."""

    def __init__(self, rank, value=None):
        self.rank, self.value = rank, value

    def __call__(self, _, x):
        if DistributedManager().rank == self.rank:
            if self.value is None:
                raise KeyError("no weights")
            return x * self.value
        return -x
