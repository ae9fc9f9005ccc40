"""The score as estimated by a network."""

from __future__ import annotations

from collections.abc import Callable

import torch

from distman.score._sde import SDE, per_sample

Network = Callable[..., torch.Tensor]
"""A function of times ``(batch,)``, samples ``(batch, *)``, and where there are any, conditions ``(batch, *)``."""


def score(
    model: Network,
    sde: SDE,
    t: torch.Tensor,
    x: torch.Tensor,
    condition: torch.Tensor | None = None,
    *,
    guidance: float = 1.0,
    null_condition: float = 0.0,
) -> torch.Tensor:
    """Return the score, the gradient of the log-density of the noisy data, as a network estimates it.

    Local. Differentiable. By convention the network estimates minus the noise in ``x``, which is of order 1 at all
    times, and the score is ``model(t, x) / std(t)``. ``functools.partial(score, model, sde)`` is the function that
    :func:`sample` and :func:`log_likelihood` take. Pass ``model.module`` of a model in DistributedDataParallel
    there: the ranks may call it different numbers of times.

    Args:
        model: The network, a function of times, samples and, if they are given, conditions.
        sde: The equation.
        t: Times, shape ``(batch,)``.
        x: Noisy samples, shape ``(batch, *)``.
        condition: The conditions of the samples, shape ``(batch, *)``.
        guidance: Scale of classifier-free guidance: the score without a condition, plus so many times the difference
            that the condition makes. 1 is the score under the condition, 0 that without; above 1, samples follow their
            conditions more closely and vary less.
        null_condition: What stands for no condition, as in :func:`denoising_loss`.

    Returns:
        A new tensor, shaped as ``x``.

    Raises:
        ValueError: There is not one time for each sample, the network returns a different shape, or there is guidance
            without a condition.

    Example:
        >>> model = lambda t, x: -x
        >>> score(model, VarianceExploding(sigma_max=10.0), torch.ones(1), torch.ones(1, 2))
        tensor([[-0.1000, -0.1000]])

    Source:
        Song et al., "Score-Based Generative Modeling through Stochastic Differential Equations", ICLR 2021. Ho and
        Salimans, "Classifier-Free Diffusion Guidance", 2022; their weight is ``guidance - 1``.
    """
    _, std = sde.marginal(t)
    std = per_sample(std, x)
    if guidance == 1:
        return evaluate(model, t, x, condition, name="model") / std
    if condition is None:
        raise ValueError(f"guidance must be 1 without a condition, got {guidance}. Pass condition.")
    null = torch.full_like(condition, null_condition)
    both = evaluate(model, torch.cat([t, t]), torch.cat([x, x]), torch.cat([null, condition]), name="model")
    without, under = both.chunk(2)
    return (without + guidance * (under - without)) / std


def guided_score(
    score_fn: Network, log_likelihood: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *, scale: float = 1.0
) -> Network:
    """Return the score of the samples given something that is known of them, such as a measurement or a class.

    Local. By Bayes' rule that is the score plus the gradient of the log-likelihood. For :func:`sample`.

    Args:
        score_fn: The score, a function of times and samples, and conditions if there are any.
        log_likelihood: Takes times ``(batch,)`` and noisy samples ``(batch, *)``, and returns for each how likely what
            is known is given them, in nats, shape ``(batch,)``: a classifier that was trained on noisy samples, say.
        scale: Factor of the gradient.

    Returns:
        A function of the same arguments as ``score_fn``.

    Example:
        >>> prior = lambda t, x: -x  # the standard Gaussian
        >>> measured = lambda t, x: -(x[:, 0] - 3).square() / 2  # its first number, with an error of 1
        >>> guided_score(prior, measured)(torch.ones(1), torch.zeros(1, 2))
        tensor([[3., 0.]])

    Source:
        Dhariwal and Nichol, "Diffusion Models Beat GANs on Image Synthesis", NeurIPS 2021.
    """

    def guided(t: torch.Tensor, x: torch.Tensor, *condition: torch.Tensor) -> torch.Tensor:
        is_differentiated = torch.is_grad_enabled() and x.requires_grad
        with torch.enable_grad():
            point = x if x.requires_grad else x.detach().requires_grad_()
            nats = log_likelihood(t, point)
            if nats.shape != t.shape:
                raise ValueError(
                    f"log_likelihood must return a number for each sample, shape {tuple(t.shape)}, got "
                    f"{tuple(nats.shape)}. Sum over the other dims."
                )
            (gradient,) = torch.autograd.grad(nats.sum(), point, create_graph=is_differentiated)
        return score_fn(t, x, *condition) + scale * gradient

    return guided


def evaluate(
    network: Network, t: torch.Tensor, x: torch.Tensor, condition: torch.Tensor | None = None, *, name: str
) -> torch.Tensor:
    """Return the value of a network or a score function, ``name`` in messages, after a check of its shape.

    A different shape might broadcast with that of ``x`` by accident, so it is a ValueError.
    """
    found = network(t, x) if condition is None else network(t, x, condition)
    if found.shape != x.shape:
        raise ValueError(
            f"{name}(t, x) must have the shape of x, {tuple(x.shape)}, got {tuple(found.shape)}. Check what it returns."
        )
    return found
