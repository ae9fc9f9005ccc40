"""New samples, by the reverse equation from noise to data."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distman._groups.registry import Group
from distman.collectives._all_gather import all_gather_v
from distman.collectives._gather import gather_v
from distman.collectives._validation import GroupLike, check_member, check_tensor, resolve_group
from distman.decorators import on_rank
from distman.manager import DistributedManager
from distman.score._network import Network, evaluate
from distman.score._sde import SDE, per_sample
from distman.score._sharing import agree, check_count, check_finite, run_jointly
from distman.score._streams import random_stream
from distman.topology import split_sizes


def sample(
    score_fn: Network,
    sde: SDE,
    shape: Sequence[int],
    *,
    num_steps: int = 1000,
    seed: int | None = None,
    batch_size: int | None = None,
    dst: int | None = None,
    rank_zero: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    group: GroupLike = None,
) -> torch.Tensor:
    """Draw samples by the reverse equation, distributed over the ranks.

    Collective. Blocking. Not differentiable. Euler-Maruyama steps of equal length lead from the prior to epsilon; the
    last one adds no noise. Each rank draws from its own random stream: with a seed the samples are the same in every
    run on the same number of ranks, and no two ranks draw the same. Waiting and errors are as in
    :func:`~distman.on_rank`: over the store, without a timeout, and an error on one rank is raised on all.

    Args:
        score_fn: The score, a function of times ``(batch,)`` and samples ``(batch, *)``; the same on all ranks. It is
            called without gradients, and less often on ranks with fewer samples. The network's training or evaluation
            mode is not changed.
        sde: The equation.
        shape: Shape of the result, ``(num, *)``, with the total number of samples of all ranks.
        num_steps: Number of steps.
        seed: Seed of all streams; None draws one from torch's default generator on rank 0.
        batch_size: Samples that a rank draws at a time; None is all of its share.
        dst: The rank in the group that gets the samples; None is all of them.
        rank_zero: Let rank 0 of the group draw all samples, as a single process would, while the others wait.
        device: Device of the samples; None is that of the manager.
        dtype: Data type of the samples; None is torch's default one.
        group: A process group, the name of one, or None for the world.

    Returns:
        A new tensor of that shape, with the samples in rank order; empty, ``(0, *)``, if ``dst`` is another rank.

    Raises:
        ValueError: Shape, a number, dst, group or device are not valid.
        PlanMismatchError: On every rank: the arguments differ between ranks.
        RankFailedError: On every rank: on one of them the score raised, has the wrong shape, or led to samples that are
            infinite or NaN (FloatingPointError).

    Example on two ranks:
        >>> samples = sample(lambda t, x: -x, VariancePreserving(), (1000, 2), num_steps=50, seed=0)
        >>> samples.shape, abs(samples.std().item() - 1) < 0.05  # the score of the standard Gaussian
        (torch.Size([1000, 2]), True)

    Source:
        Song et al., "Score-Based Generative Modeling through Stochastic Differential Equations", ICLR 2021.
    """
    members = resolve_group(group)
    shape = _checked_shape(shape)
    check_count("num_steps", num_steps)
    if batch_size is not None:
        check_count("batch_size", batch_size)
    if dst is not None:
        check_member("dst", dst, members)
    empty = torch.empty(0, *shape[1:], device=device or DistributedManager().device, dtype=dtype)
    check_tensor(empty, members)
    call = {"shape": shape, "num_steps": num_steps, "batch_size": batch_size, "dst": dst, "rank_zero": rank_zero}
    seed = agree("sample", {**call, "sde": sde, "dtype": empty.dtype}, seed, group)

    sizes = [shape[0], *[0] * (members.size - 1)] if rank_zero else split_sizes(shape[0], members.size)
    solver = _ReverseSolver(score_fn, sde, num_steps, members)
    drawn = _run(solver, sizes[members.rank], batch_size or shape[0], seed, empty, rank_zero=rank_zero, group=group)
    return all_gather_v(drawn, sizes, group=group) if dst is None else gather_v(drawn, sizes, dst=dst, group=group)


def _run(
    solver: _ReverseSolver,
    num: int,
    batch_size: int,
    seed: int,
    empty: torch.Tensor,
    *,
    rank_zero: bool,
    group: GroupLike,
) -> torch.Tensor:
    """Return this rank's samples, once all ranks have theirs."""

    def draw_samples() -> torch.Tensor:
        generator = random_stream("sample", seed, solver.group.rank, empty.device)
        batches = [min(batch_size, num - start) for start in range(0, num, batch_size)]
        return torch.cat([empty, *(solver.draw(size, empty, generator) for size in batches)])

    if not rank_zero:
        return run_jointly(draw_samples, "sample", solver.group)
    drawn = on_rank(0, group=group)(draw_samples)()
    return drawn if drawn is not None else empty


@dataclass(frozen=True)
class _ReverseSolver:
    """The reverse equation, solved backwards in time.

    Attributes:
        score_fn: The score.
        sde: The equation.
        num_steps: Number of steps.
        group: The ranks that draw samples.
    """

    score_fn: Network
    sde: SDE
    num_steps: int
    group: Group

    @torch.no_grad()
    def draw(self, num: int, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return some samples, with the device, data type and shape of the samples in another tensor."""
        shape = (num, *like.shape[1:])
        x = self.sde.sample_prior(shape, generator=generator, device=like.device, dtype=like.dtype)
        times = torch.linspace(self.sde.horizon, self.sde.epsilon, self.num_steps + 1, dtype=torch.float64).tolist()
        for step, (time, next_time) in enumerate(itertools.pairwise(times), start=1):
            length = time - next_time
            t = x.new_full((num,), time)
            diffusion = per_sample(self.sde.diffusion(t), x)
            slope = self.sde.drift(t, x) - diffusion.square() * evaluate(self.score_fn, t, x, name="score_fn")
            x = x - slope * length
            if step < self.num_steps:
                noise = torch.randn(shape, generator=generator, device=x.device, dtype=x.dtype)
                x = x + diffusion * length**0.5 * noise
        check_finite("samples", x, self.group)
        return x


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    lengths = tuple(shape)
    if not lengths or any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in lengths):
        raise ValueError(
            f"shape must be whole numbers of 1 or more, (num, *), got {shape}. Pass the shape of all samples."
        )
    return lengths
