"""New samples, by the reverse equation from noise to data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from distman._base.arguments import check_choice, check_number
from distman._job.groups.registry import Group
from distman.collectives import GroupLike, admitted, all_gather_v, check_member, gather_v, resolve_group
from distman.decorators import on_rank
from distman.manager import DistributedManager
from distman.score import _sharing
from distman.score._network import Network, evaluate
from distman.score._sde import SDE, per_sample

Method = Literal["euler_maruyama", "predictor_corrector", "probability_flow"]


def sample(
    score_fn: Network,
    sde: SDE,
    shape: Sequence[int],
    condition: torch.Tensor | None = None,
    *,
    num_steps: int = 1000,
    method: Method = "euler_maruyama",
    snr: float = 0.16,
    seed: int | None = None,
    batch_size: int | None = None,
    dst: int | None = None,
    rank_zero: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    group: GroupLike = None,
) -> torch.Tensor:
    """Draw samples by the reverse equation, distributed over the ranks.

    Collective. Blocking. Not differentiable. Steps of equal length lead from the prior to epsilon. With a seed the
    samples are the same in every run: on the same number of ranks, each of which draws from its own random stream, or
    with ``batch_size`` on any number, since each batch then has a stream of its own. Waiting and errors are as in
    :func:`~distman.on_rank`: over the store, without a timeout, and an error on one rank is raised on all.

    Args:
        score_fn: The score, a function of times ``(batch,)``, samples ``(batch, *)`` and, if they are given,
            conditions; the same on all ranks. It is called without gradients, and less often on ranks with fewer
            samples. The network's training or evaluation mode is not changed.
        sde: The equation.
        shape: Shape of the result, ``(num, *)``, with the total number of samples of all ranks.
        condition: The conditions of the samples, shape ``(num, *)``, the same on all ranks.
        num_steps: Number of steps.
        method: How to solve it. ``"euler_maruyama"``: an evaluation of the score per step; the last one adds no noise.
            ``"predictor_corrector"``: each step but the last is followed by one of Langevin dynamics, two evaluations.
            ``"probability_flow"``: Heun's method for the equation without noise, which has the same density at each
            time: the samples are a smooth function of the prior's, in fewer steps of two evaluations.
        snr: Signal-to-noise ratio of the steps of Langevin dynamics.
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
        ValueError: Shape, a number, the method, the conditions, dst, group or device are not valid.
        PlanMismatchError: On every rank: the arguments, or the conditions, differ between ranks.
        Exception: On a rank where the score raised, has the wrong shape, or led to samples that are infinite or NaN
            (FloatingPointError).
        RankFailedError: On the other ranks, then.

    Example on two ranks:
        >>> samples = sample(lambda t, x: -x, VariancePreserving(), (1000, 2), num_steps=50, seed=0)
        >>> samples.shape, abs(samples.std().item() - 1) < 0.05  # the score of the standard Gaussian
        (torch.Size([1000, 2]), True)

    Source:
        Song et al., "Score-Based Generative Modeling through Stochastic Differential Equations", ICLR 2021; for
        the ratio of the norms of noise and score in the step length of Langevin dynamics stands the kernel's standard
        deviation, which it is close to in many dims, so that no sample depends on others. Heun's method: Karras et al.,
        NeurIPS 2022.
    """
    members = resolve_group(group)
    shape = tuple(shape)
    if not shape or any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in shape):
        raise ValueError(
            f"shape must be whole numbers of 1 or more, (num, *), got {shape}. Pass the shape of all samples."
        )
    check_number("num_steps", num_steps)
    _sharing.check_condition(condition, shape[0])
    check_choice("method", method, get_args(Method))
    _sharing.check_positive("snr", snr, "a ratio such as 0.16")
    if batch_size is not None:
        check_number("batch_size", batch_size)
    if dst is not None:
        check_member("dst", dst, members)
    empty = torch.empty(0, *shape[1:], device=device or DistributedManager().device, dtype=dtype)
    empty = admitted("sample", empty, members)
    call = {"shape": shape, "num_steps": num_steps, "method": method, "snr": snr, "batch_size": batch_size, "dst": dst}
    call |= {"rank_zero": rank_zero, "condition": _sharing.described(condition), "sde": sde, "dtype": empty.dtype}
    seed = _sharing.agree("sample", call, seed, group)

    shares, sizes = _sharing.share_out(shape[0], batch_size, members.size, rank_zero=rank_zero)
    solver = _ReverseSolver(score_fn, sde, num_steps, method, snr, members)
    conditions = None if condition is None else condition.to(empty.device)

    def draw_share() -> torch.Tensor:
        found = [empty]
        for index, part in shares[members.rank]:
            generator = _sharing.random_stream("sample", seed, index, empty.device)
            own = None if conditions is None else conditions[part]
            found.append(solver.draw(part.stop - part.start, empty, generator, own))
        return torch.cat(found)

    drawn = on_rank(0, group=group)(draw_share)() if rank_zero else _sharing.run_jointly(draw_share, "sample", members)
    drawn = empty if drawn is None else drawn
    return all_gather_v(drawn, sizes, group=group) if dst is None else gather_v(drawn, sizes, dst=dst, group=group)


@dataclass(frozen=True)
class _ReverseSolver:
    """The reverse equation, solved backwards in time."""

    score_fn: Network
    sde: SDE
    num_steps: int
    method: Method
    snr: float  # signal-to-noise ratio of the steps of Langevin dynamics
    group: Group

    @torch.no_grad()
    def draw(
        self, num: int, like: torch.Tensor, generator: torch.Generator, condition: torch.Tensor | None
    ) -> torch.Tensor:
        """Return some samples, with the device, data type and shape of the samples in another tensor."""
        if not num:
            return like
        shape = (num, *like.shape[1:])
        x = self.sde.sample_prior(shape, generator=generator, device=like.device, dtype=like.dtype)
        times = torch.linspace(self.sde.horizon, self.sde.epsilon, self.num_steps + 1, dtype=torch.float64).tolist()
        for step, (time, next_time) in enumerate(itertools.pairwise(times), start=1):
            length, is_last = time - next_time, step == self.num_steps
            if self.method == "probability_flow":  # by Heun's method
                slope = self._slope(x, time, condition, 0.5)
                x = x - length / 2 * (slope + self._slope(x - length * slope, next_time, condition, 0.5))
                continue
            diffusion = per_sample(self.sde.diffusion(x.new_full((num,), time)), x)
            x = x - self._slope(x, time, condition, 1.0) * length
            if not is_last:
                x = x + diffusion * math.sqrt(length) * _noise_like(x, generator)
            if self.method == "predictor_corrector" and not is_last:
                x = self._langevin(x, next_time, condition, generator)
        _sharing.check_finite("samples", x, self.group)
        return x

    def _score(self, x: torch.Tensor, time: float, condition: torch.Tensor | None) -> torch.Tensor:
        return evaluate(self.score_fn, x.new_full((len(x),), time), x, condition, name="score_fn")

    def _slope(self, x: torch.Tensor, time: float, condition: torch.Tensor | None, factor: float) -> torch.Tensor:
        """Return the drift of the equation without its noise: the reverse one with factor 1, the flow with a half."""
        t = x.new_full((len(x),), time)
        diffusion = per_sample(self.sde.diffusion(t), x)
        return self.sde.drift(t, x) - factor * diffusion.square() * self._score(x, time, condition)

    def _langevin(
        self, x: torch.Tensor, time: float, condition: torch.Tensor | None, generator: torch.Generator
    ) -> torch.Tensor:
        _, std = self.sde.marginal(x.new_full((len(x),), time))
        length: torch.Tensor = 2 * (self.snr * per_sample(std, x)).square()
        return x + length * self._score(x, time, condition) + (2 * length).sqrt() * _noise_like(x, generator)


def _noise_like(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
