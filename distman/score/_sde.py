"""Stochastic differential equations that turn data into noise, with known transition kernels."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class SDE(abc.ABC):
    """The equation ``dx = drift(t, x) dt + diffusion(t) dw``, from data at time 0 to noise at the horizon.

    The kernel from the data to any time is Gaussian: ``x(t) = scale(t) x(0) + std(t) noise``.

    Attributes:
        horizon: Time at which the samples follow the prior.
        epsilon: Smallest time that is used: at 0 the score of data on a lower-dimensional surface is infinite.

    Raises:
        ValueError: Epsilon is not above 0 and below the horizon.

    Example:
        >>> sde: SDE = VariancePreserving(horizon=2.0)
        >>> scale, std = sde.marginal(torch.tensor([0.0, 2.0]))  # from data to noise
        >>> [round(one, 2) for one in scale.tolist()], [round(one, 2) for one in std.tolist()]
        ([1.0, 0.0], [0.0, 1.0])

    Source:
        Song et al., "Score-Based Generative Modeling through Stochastic Differential Equations", ICLR 2021.
    """

    horizon: float = 1.0
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < self.horizon < math.inf:
            raise ValueError(
                f"epsilon must be above 0 and below the horizon, got epsilon {self.epsilon} and horizon "
                f"{self.horizon}. Choose an epsilon such as 1e-5 of the horizon."
            )

    @property
    @abc.abstractmethod
    def prior_std(self) -> float:
        """Standard deviation of the prior, a Gaussian around 0."""

    @abc.abstractmethod
    def drift(self, t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the forward drift.

        Local. Differentiable.

        Args:
            t: Times, shape ``(batch,)``.
            x: Samples, shape ``(batch, *)``.

        Returns:
            A new tensor, shaped as ``x``.

        Raises:
            ValueError: There is not one time for each sample.

        Example:
            >>> VariancePreserving(beta_max=2.0).drift(torch.ones(1), torch.ones(1, 3))
            tensor([[-1., -1., -1.]])
        """

    @abc.abstractmethod
    def diffusion(self, t: torch.Tensor) -> torch.Tensor:
        """Return the coefficient of the noise, shape ``(batch,)``.

        Local.

        Args:
            t: Times, shape ``(batch,)``.

        Example:
            >>> VariancePreserving(beta_max=4.0).diffusion(torch.ones(2))
            tensor([2., 2.])
        """

    @abc.abstractmethod
    def marginal(self, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and standard deviation of the kernel from the data to these times, shape ``(batch,)`` each.

        Local.

        Args:
            t: Times, shape ``(batch,)``.

        Example:
            >>> VarianceExploding(sigma_max=10.0).marginal(torch.ones(2))
            (tensor([1., 1.]), tensor([10.0000, 10.0000]))
        """

    def sample_prior(
        self,
        shape: Sequence[int],
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return samples of the prior.

        Local.

        Args:
            shape: Shape of the result, ``(batch, *)``.
            generator: Generator of the numbers, on ``device``; None is torch's default generator.
            device: Device of the result; None is torch's default device.
            dtype: Data type of the result; None is torch's default data type.

        Example:
            >>> VarianceExploding().sample_prior((100, 3, 8, 8)).shape
            torch.Size([100, 3, 8, 8])
        """
        return torch.randn(tuple(shape), generator=generator, device=device, dtype=dtype) * self.prior_std

    def prior_log_density(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of the prior's density, in nats.

        Local. Differentiable.

        Args:
            x: Samples, shape ``(batch, *)``.

        Returns:
            A new tensor, shape ``(batch,)``.

        Example:
            >>> VariancePreserving().prior_log_density(torch.zeros(1, 2))
            tensor([-1.8379])
        """
        values = x.reshape(len(x), -1) if len(x) else x.new_empty(0, 1)
        log_norm = math.log(self.prior_std) + 0.5 * math.log(2 * math.pi)
        return -0.5 * (values / self.prior_std).square().sum(dim=1) - values.shape[1] * log_norm


@dataclass(frozen=True)
class VariancePreserving(SDE):
    """The equation ``dx = -beta(t) x / 2 dt + sqrt(beta(t)) dw``, with a rate beta that grows linearly.

    Data of unit variance keep unit variance, and the prior is the standard Gaussian. The defaults are those of Song et
    al.

    Attributes:
        beta_min: Rate at time 0.
        beta_max: Rate at the horizon.

    Raises:
        ValueError: Not ``0 < beta_min <= beta_max``; or see :class:`SDE`.

    Example:
        >>> scale, std = VariancePreserving().marginal(torch.tensor([0.1, 0.5, 0.9]))
        >>> torch.allclose(scale**2 + std**2, torch.ones(3))
        True
    """

    beta_min: float = 0.1
    beta_max: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.beta_min <= self.beta_max < math.inf:
            raise ValueError(
                f"beta_min must be above 0 and at most beta_max, got beta_min {self.beta_min} and beta_max "
                f"{self.beta_max}. Pass rates such as 0.1 and 20."
            )

    @property
    def prior_std(self) -> float:
        """Standard deviation of the prior, 1."""
        return 1.0

    def drift(self, t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return -0.5 * per_sample(self._rate(t), x) * x

    def diffusion(self, t: torch.Tensor) -> torch.Tensor:
        return self._rate(t).sqrt()

    def marginal(self, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        integral = self.beta_min * t + (self.beta_max - self.beta_min) * t.square() / (2 * self.horizon)
        return torch.exp(-0.5 * integral), (-torch.expm1(-integral)).sqrt()

    def _rate(self, t: torch.Tensor) -> torch.Tensor:
        return self.beta_min + (self.beta_max - self.beta_min) * t / self.horizon


@dataclass(frozen=True)
class VarianceExploding(SDE):
    """The equation ``dx = sqrt(d sigma(t)^2 / dt) dw``, with a sigma that grows geometrically.

    The data are not scaled; noise of variance ``sigma(t)^2 - sigma_min^2`` is added to them. This is the exact kernel
    of the equation, without noise at time 0. The defaults are those of Song et al. for small images.

    Attributes:
        sigma_min: Sigma at time 0.
        sigma_max: Sigma at the horizon; a few times the largest distance between two samples.

    Raises:
        ValueError: Not ``0 < sigma_min < sigma_max``; or see :class:`SDE`.

    Example:
        >>> sde = VarianceExploding(sigma_max=10.0)
        >>> scale, std = sde.marginal(torch.tensor([0.0, 1.0]))
        >>> scale, std.round()
        (tensor([1., 1.]), tensor([ 0., 10.]))
    """

    sigma_min: float = 0.01
    sigma_max: float = 50.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.sigma_min < self.sigma_max < math.inf:
            raise ValueError(
                f"sigma_min must be above 0 and below sigma_max, got sigma_min {self.sigma_min} and sigma_max "
                f"{self.sigma_max}. Pass values such as 0.01 and 50."
            )

    @property
    def prior_std(self) -> float:
        """Standard deviation of the prior, that of the kernel at the horizon."""
        return math.sqrt(self.sigma_max**2 - self.sigma_min**2)

    def drift(self, t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(per_sample(t, x) * x)

    def diffusion(self, t: torch.Tensor) -> torch.Tensor:
        sigma = self.sigma_min * torch.exp(self._growth * t)
        return sigma * math.sqrt(2 * self._growth)

    def marginal(self, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones_like(t), self.sigma_min * torch.expm1(2 * self._growth * t).sqrt()

    @property
    def _growth(self) -> float:
        return math.log(self.sigma_max / self.sigma_min) / self.horizon


def per_sample(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a view of one value for each sample that broadcasts with the samples."""
    if x.ndim == 0 or values.shape != x.shape[:1]:
        raise ValueError(
            f"t must have one time for each sample of shape {tuple(x.shape)}, got shape {tuple(values.shape)}. Pass "
            "shape (batch,) for samples of shape (batch, *)."
        )
    return values.reshape(-1, *[1] * (x.ndim - 1))
