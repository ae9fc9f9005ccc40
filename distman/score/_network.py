"""The score as estimated by a network."""

from __future__ import annotations

from collections.abc import Callable

import torch

from distman.score._sde import SDE, per_sample

Network = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def score(model: Network, sde: SDE, t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the score, the gradient of the log-density of the noisy data, as a network estimates it.

    Local. Differentiable. By convention the network estimates minus the noise in ``x``, which is of order 1 at all
    times, and the score is ``model(t, x) / std(t)``. ``functools.partial(score, model, sde)`` is the function that
    :func:`sample` and :func:`log_likelihood` take. Pass ``model.module`` of a model in DistributedDataParallel
    there: the ranks may call it different numbers of times.

    Args:
        model: The network, a function of times and samples.
        sde: The equation.
        t: Times, shape ``(batch,)``.
        x: Noisy samples, shape ``(batch, *)``.

    Returns:
        A new tensor, shaped as ``x``.

    Raises:
        ValueError: There is not one time for each sample, or the network returns a different shape.

    Example:
        >>> model = lambda t, x: -x
        >>> score(model, VarianceExploding(sigma_max=10.0), torch.ones(1), torch.ones(1, 2))
        tensor([[-0.1000, -0.1000]])

    Source:
        Song et al., "Score-Based Generative Modeling through Stochastic Differential Equations", ICLR 2021.
    """
    _, std = sde.marginal(t)
    std = per_sample(std, x)
    return evaluate(model, t, x, name="model") / std


def evaluate(network: Network, t: torch.Tensor, x: torch.Tensor, *, name: str) -> torch.Tensor:
    """Return the value of a network or a score function, after a check of its shape.

    Differentiable.

    Args:
        network: A function of times and samples.
        t: Times, shape ``(batch,)``.
        x: Samples, shape ``(batch, *)``.
        name: Name of the function, for messages.

    Raises:
        ValueError: It returns a different shape, which might broadcast with that of ``x`` by accident.
    """
    found = network(t, x)
    if found.shape != x.shape:
        raise ValueError(
            f"{name}(t, x) must have the shape of x, {tuple(x.shape)}, got {tuple(found.shape)}. Check what it returns."
        )
    return found
