"""The likelihood of samples, by the probability flow forwards in time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from distman._base.arguments import check_choice, check_number, require
from distman._job.groups.registry import Group
from distman.collectives import GroupLike, admitted, all_gather_v, resolve_group
from distman.score import _sharing
from distman.score._network import Network, evaluate
from distman.score._sde import SDE, per_sample

Probes = Literal["rademacher", "gaussian"]


def log_likelihood(
    score_fn: Network,
    sde: SDE,
    x: torch.Tensor,
    condition: torch.Tensor | None = None,
    *,
    num_probes: int | None = 1,
    probes: Probes = "rademacher",
    seed: int | None = None,
    batch_size: int = 64,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    group: GroupLike = None,
) -> torch.Tensor:
    """Return the log-density of samples under a model, distributed over the ranks.

    Collective. Blocking. Not differentiable. The probability flow carries each sample to the prior; its log-density
    changes by the integral of the flow's divergence. Samples are solved in batches, each with its own step sizes and
    random numbers, and the batches are distributed over the ranks: with a seed the result is the same on any number of
    ranks. Waiting and errors are as in :func:`~distman.on_rank`.

    Args:
        score_fn: The score, a function of times ``(batch,)``, samples ``(batch, *)`` and, if they are given,
            conditions, differentiable in the samples and the same on all ranks. The network's training or evaluation
            mode is not changed.
        sde: The equation.
        x: The samples, shape ``(batch, *)``, the same on all ranks.
        condition: Their conditions, shape ``(batch, *)``, the same on all ranks: the density is that under them.
        num_probes: Number of random vectors of Hutchinson's estimator of the divergence, drawn once for each sample;
            each costs a backward pass per evaluation. None computes the exact divergence, with a backward pass for each
            number in a sample.
        probes: Distribution of these vectors: ``"rademacher"``, random signs, or ``"gaussian"``.
        seed: Seed of the vectors; None draws one from torch's default generator on rank 0.
        batch_size: Samples solved at a time. Smaller batches balance the ranks better, larger ones cost less.
        rtol: Relative error tolerance per step, for the worst sample of a batch.
        atol: Absolute error tolerance per step, in units of the samples and in nats.
        group: A process group, the name of one, or None for the world.

    Returns:
        The log-densities in nats, shape ``(batch,)``, a new tensor with the data type of ``x``, equal on all ranks.

    Raises:
        ImportError: torchdiffeq is not installed.
        ValueError: Samples, a number, the kind of probes, group or device are not valid.
        PlanMismatchError: On every rank: the arguments, or the samples, differ between ranks.
        Exception: On a rank where the score raised, has the wrong shape, is not differentiable, or led to numbers that
            are infinite or NaN (FloatingPointError).
        RankFailedError: On the other ranks, then.

    Example on two ranks:
        >>> gaussian = lambda t, x: -x  # the score of the standard Gaussian
        >>> found = log_likelihood(gaussian, VariancePreserving(), torch.zeros(3, 2), seed=0)
        >>> [round(nats, 3) for nats in found.tolist()]
        [-1.838, -1.838, -1.838]

    Source:
        Song et al., "Score-Based Generative Modeling through Stochastic Differential Equations", ICLR 2021, section 4.3
        and appendix D.2. Hutchinson, Communications in Statistics 1990. Dormand and Prince's method by torchdiffeq.
    """
    odeint = require("torchdiffeq", "log_likelihood").odeint
    members = resolve_group(group)
    x = admitted("log_likelihood", x, members, name="x").detach()
    _sharing.check_samples(x, least_dims=2)
    _sharing.check_condition(condition, len(x))
    if num_probes is not None:
        check_number("num_probes", num_probes)
    check_number("batch_size", batch_size)
    check_choice("probes", probes, get_args(Probes))
    _sharing.check_positive("rtol", rtol, "a tolerance such as 1e-5")
    _sharing.check_positive("atol", atol, "a tolerance such as 1e-5")
    call: dict[str, object] = {"num_probes": num_probes, "probes": probes, "batch_size": batch_size, "sde": sde}
    call |= {"rtol": rtol, "atol": atol, "x": _sharing.described(x), "condition": _sharing.described(condition)}
    seed = _sharing.agree("log_likelihood", call, seed, group)

    shares, sizes = _sharing.share_out(len(x), batch_size, members.size)
    conditions = None if condition is None else condition.to(x.device)
    solver = _Solver(odeint, score_fn, sde, num_probes, probes, rtol, atol, members)

    def solve_all() -> torch.Tensor:
        found = [x.new_empty(0)]
        for index, part in shares[members.rank]:
            generator = _sharing.random_stream("probes", seed, index, x.device)
            found.append(solver.solve(x[part], None if conditions is None else conditions[part], generator))
        return torch.cat(found)

    return all_gather_v(_sharing.run_jointly(solve_all, "log_likelihood", members), sizes, group=group)


@dataclass(frozen=True)
class _Solver:
    """The probability flow, with the change of log-density along it."""

    odeint: Callable[..., Any]
    score_fn: Network
    sde: SDE
    num_probes: int | None  # None for the exact divergence
    probes: Probes  # their distribution
    rtol: float
    atol: float
    group: Group

    def solve(self, x: torch.Tensor, condition: torch.Tensor | None, generator: torch.Generator) -> torch.Tensor:
        vectors = self._draw(x, generator)

        def rates(time: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            """Return the velocity of the flow and its divergence."""
            with torch.enable_grad():
                x = state[0].detach().requires_grad_()
                t = time.to(x.dtype).expand(len(x))
                found = evaluate(self.score_fn, t, x, condition, name="score_fn")
                if not found.requires_grad:
                    raise ValueError(
                        "score_fn must be differentiable in x, got a score without a gradient. Do not compute it under "
                        "torch.no_grad()."
                    )
                velocity = self.sde.drift(t, x) - 0.5 * per_sample(self.sde.diffusion(t).square(), x) * found
                divergence = _exact_divergence(velocity, x) if vectors is None else _divergence(velocity, x, vectors)
            return velocity.detach(), divergence

        times = torch.tensor([self.sde.epsilon, self.sde.horizon], dtype=torch.float64, device=x.device)
        options = {"norm": _largest_error}
        try:
            with torch.no_grad():
                ends, changes = self.odeint(
                    rates, (x, x.new_zeros(len(x))), times, rtol=self.rtol, atol=self.atol, options=options
                )
        except AssertionError as error:  # torchdiffeq asserts that its step is not too small, and its state finite
            raise FloatingPointError(
                f"the steps of the flow must be finite, got {error} on rank {self.group.ranks[self.group.rank]}. Check "
                "the scores there, or increase rtol and atol."
            ) from error
        found: torch.Tensor = self.sde.prior_log_density(ends[-1]) + changes[-1]
        _sharing.check_finite("log-densities", found, self.group)
        return found

    def _draw(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor | None:
        if self.num_probes is None:
            return None
        shape = (self.num_probes, *x.shape)
        if self.probes == "gaussian":
            return torch.randn(shape, generator=generator, device=x.device, dtype=x.dtype)
        signs = torch.randint(2, shape, generator=generator, device=x.device, dtype=torch.int8)
        return 2 * signs.to(x.dtype) - 1


def _divergence(velocity: torch.Tensor, x: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Return Hutchinson's estimate of each sample's divergence."""
    total = x.new_zeros(len(x))
    for vector in vectors:
        (product,) = torch.autograd.grad(velocity, x, vector, retain_graph=True)
        total += (product * vector).flatten(1).sum(dim=1)
    return total / len(vectors)


def _exact_divergence(velocity: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    total = x.new_zeros(len(x))
    for column in range(velocity[0].numel()):
        # The sum separates: the velocity of a sample depends on that sample only.
        summed = velocity.flatten(1)[:, column].sum()
        (gradient,) = torch.autograd.grad(summed, x, retain_graph=True)
        total += gradient.flatten(1)[:, column]
    return total


def _largest_error(state: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the error of the worst sample, which a mean over the batch would hide."""
    x, change = state
    return torch.maximum(x.flatten(1).square().mean(dim=1).sqrt(), change.abs()).max()
