"""The loss with which a network learns the score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from distman.score._network import Network, evaluate
from distman.score._sde import SDE, per_sample
from distman.score._sharing import check_condition, check_samples

Weighting = Literal["variance", "likelihood"] | Callable[[torch.Tensor], torch.Tensor]


def denoising_loss(
    model: Network,
    sde: SDE,
    x: torch.Tensor,
    condition: torch.Tensor | None = None,
    *,
    drop_condition: float = 0.0,
    null_condition: float = 0.0,
    weighting: Weighting = "variance",
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Return the denoising score matching loss.

    Local; with a model in DistributedDataParallel its backward pass is collective. Differentiable. For each
    sample a time and noise z are drawn; its loss is ``|model(t, scale x + std z) + z|^2``, which is
    ``std^2 |score - score of the kernel|^2``. Each time is uniformly distributed between epsilon and the horizon. The
    times of a batch are equally spaced, which reduces the variance of its loss.

    Args:
        model: The network, a function of times, noisy samples and, if they are given, conditions; see :func:`score` for
            what it estimates.
        sde: The equation.
        x: Samples of the data, shape ``(batch, *)``.
        condition: What is known of each sample, shape ``(batch, *)``, such as its class or a coarse field.
        drop_condition: Probability with which a sample loses its condition, so that the network learns the score
            without one too, for guidance in :func:`score`; 0.1 is usual.
        null_condition: The number that then stands in its place, such as the number of classes.
        weighting: Weight of each sample by its time: ``"variance"`` is 1, ``"likelihood"`` is ``(g / std)^2``, with
            which the loss bounds the log-likelihood; or a function of times ``(batch,)``.
        generator: Generator of times and noise, on the device of ``x``, a different one on each rank; None is torch's
            default generator.

    Returns:
        The mean over the batch of the samples' losses, each a sum over all dims, shape ``()``.

    Raises:
        ValueError: There is no sample, not one condition for each, an option is not valid, or the network returns a
            different shape.

    Example:
        >>> sde, x = VariancePreserving(), torch.zeros(1000, 2)
        >>> perfect = lambda t, noisy: -noisy / sde.marginal(t)[1][:, None]  # where all data are 0
        >>> loss = denoising_loss(perfect, sde, x)
        >>> loss.item() < 1e-6
        True

    Source:
        Vincent, "A Connection Between Score Matching and Denoising Autoencoders", Neural Computation 2011; the weights
        are those of Song et al., ICLR 2021, the times those of Kingma et al., "Variational Diffusion Models", NeurIPS
        2021. Likelihood weighting: Song, Durkan, Murray, Ermon, "Maximum Likelihood Training of Score-Based Diffusion
        Models", NeurIPS 2021.
    """
    check_samples(x, least_dims=1)
    start = torch.rand((), generator=generator, device=x.device, dtype=x.dtype)
    fractions = (start + torch.arange(len(x), device=x.device, dtype=x.dtype) / len(x)) % 1  # equally spaced
    t = sde.epsilon + (sde.horizon - sde.epsilon) * fractions
    noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
    scale, std = sde.marginal(t)
    noisy = per_sample(scale, x) * x + per_sample(std, x) * noise
    if condition is not None:
        condition = _drop(condition, drop_condition, null_condition, x, generator)
    elif drop_condition:
        raise ValueError(f"drop_condition must be 0 without a condition, got {drop_condition}. Pass condition.")
    errors = evaluate(model, t, noisy, condition, name="model") + noise
    return (_weights(weighting, sde, t, std) * errors.square().reshape(len(x), -1).sum(1)).sum() / len(x)


def _drop(
    condition: torch.Tensor, probability: float, null: float, x: torch.Tensor, generator: torch.Generator | None
) -> torch.Tensor:
    check_condition(condition, len(x))
    if not 0 <= probability <= 1:
        raise ValueError(f"drop_condition must be between 0 and 1, got {probability}. Pass a probability such as 0.1.")
    if not probability:
        return condition
    is_dropped = torch.rand(len(x), generator=generator, device=x.device) < probability
    is_dropped = is_dropped.reshape(-1, *[1] * (condition.ndim - 1)).to(condition.device)
    return condition.masked_fill(is_dropped, null)


def _weights(weighting: Weighting, sde: SDE, t: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    if callable(weighting):
        weights = weighting(t)
        if weights.shape != t.shape:
            raise ValueError(
                f"weighting must return a weight for each time, shape {tuple(t.shape)}, got {tuple(weights.shape)}."
            )
        return weights
    if weighting == "likelihood":
        return (sde.diffusion(t) / std).square()
    if weighting == "variance":
        return torch.ones_like(t)
    raise ValueError(f"weighting must be 'variance', 'likelihood' or a function, got {weighting!r}. Pass one of them.")
