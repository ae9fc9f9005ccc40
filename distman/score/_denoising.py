"""The loss with which a network learns the score."""

from __future__ import annotations

import torch

from distman.score._network import Network, evaluate
from distman.score._sde import SDE, per_sample


def denoising_loss(
    model: Network, sde: SDE, x: torch.Tensor, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Return the denoising score matching loss, weighted by the variance of the noise.

    Local; with a model in DistributedDataParallel its backward pass is collective. Differentiable. For each
    sample a time and noise z are drawn; its loss is ``|model(t, scale x + std z) + z|^2``, which is
    ``std^2 |score - score of the kernel|^2``. Each time is uniformly distributed between epsilon and the horizon. The
    times of a batch are equally spaced, which reduces the variance of its loss.

    Args:
        model: The network, a function of times and noisy samples; see :func:`score` for what it estimates.
        sde: The equation.
        x: Samples of the data, shape ``(batch, *)``.
        generator: Generator of times and noise, on the device of ``x``, a different one on each rank; None is torch's
            default generator.

    Returns:
        The mean over the batch of the samples' losses, each a sum over all dims, shape ``()``.

    Raises:
        ValueError: There is no sample, or the network returns a different shape.

    Example:
        >>> sde, x = VariancePreserving(), torch.zeros(1000, 2)
        >>> perfect = lambda t, noisy: -noisy / sde.marginal(t)[1][:, None]  # where all data are 0
        >>> loss = denoising_loss(perfect, sde, x)
        >>> loss.item() < 1e-6
        True

    Source:
        Vincent, "A Connection Between Score Matching and Denoising Autoencoders", Neural Computation 2011; the weights
        are those of Song et al., ICLR 2021, the times those of Kingma et al., "Variational Diffusion Models", NeurIPS
        2021.
    """
    if x.ndim == 0 or not len(x) or not x.is_floating_point():
        raise ValueError(
            f"x must hold floating-point samples, got {x.dtype} of shape {tuple(x.shape)}. Pass at least "
            "one sample, shape (batch, *)."
        )
    t = _spread_times(sde, x, generator)
    noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
    scale, std = sde.marginal(t)
    noisy = per_sample(scale, x) * x + per_sample(std, x) * noise
    errors = evaluate(model, t, noisy, name="model") + noise
    return errors.square().sum() / len(x)


def _spread_times(sde: SDE, x: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Return a time for each sample: equally spaced, modulo the range of times, from a random start."""
    start = torch.rand((), generator=generator, device=x.device, dtype=x.dtype)
    fractions = (start + torch.arange(len(x), device=x.device, dtype=x.dtype) / len(x)) % 1
    return sde.epsilon + (sde.horizon - sde.epsilon) * fractions
