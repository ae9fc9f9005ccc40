"""Numbers about a job as a whole."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from distman.collectives import debug
from distman.collectives.border import GroupLike, check_member, resolve_group
from distman.collectives.exchange import control_device
from distman.collectives.fused import fused_all_reduce
from distman.collectives.objects import all_gather_objects
from distman.control.collective import collective
from distman.errors import PlanMismatchError
from distman.manager import DistributedManager

__all__ = ["aggregate_loss", "aggregate_metrics", "reduce_loss"]

Number = float | torch.Tensor


@runtime_checkable
class _Metric(Protocol):
    """A metric of torchmetrics: it keeps what it has seen, and brings the ranks' parts together itself."""

    def update(self, *args: object, **kwargs: object) -> None:
        """Take a batch into account."""

    def compute(self) -> Number:
        """Return the metric over all that was seen."""


@collective
def aggregate_metrics(
    metrics: Mapping[str, Number | _Metric],
    *ignored: object,
    weight: float | None = None,
    group: GroupLike = None,
) -> dict[str, float]:
    """Return the weighted mean of each metric over all ranks, the same on all of them.

    Collective. Blocking. Not differentiable. In double precision, in one message for up to some 240 metrics.

    Args:
        metrics: This rank's metrics by name, numbers or tensors with one element; the same names on all ranks, in any
            order. What is NaN on a rank does not count there; a metric that counts nowhere is NaN. Objects of
            torchmetrics are computed over all ranks by themselves.
        ignored: Ranks and device, which older programs pass; found out by itself now.
        weight: What this rank's metrics count, the number of its samples, say; 0 for a rank that had none. None lets
            all ranks count the same.
        group: A process group, the name of one, or None for the world.

    Returns:
        The means by name, in this rank's order.

    Raises:
        ValueError: A metric has more than one element, or the weight is negative or not finite.
        PlanMismatchError: On every rank: the ranks have different names.
    """
    _warn_of(ignored, "aggregate_metrics")
    own = {name: metric for name, metric in metrics.items() if isinstance(metric, _Metric)}
    numbers = {name: value for name, value in sorted(metrics.items()) if not isinstance(value, _Metric)}
    found = dict(zip(numbers, _means(numbers, _checked_weight(weight), sorted(own), group), strict=True))
    found |= {name: float(own[name].compute()) for name in sorted(own)}
    return {name: found[name] for name in metrics}


@collective
def aggregate_loss(loss: Number, *ignored: object, weight: float | None = None, group: GroupLike = None) -> float:
    """Return the weighted mean of all ranks' losses, the same on all of them.

    Collective. Blocking. Not differentiable. In double precision.

    Args:
        loss: This rank's loss, a number or a tensor with one element; NaN does not count.
        ignored: See :func:`aggregate_metrics`.
        weight: See :func:`aggregate_metrics`.
        group: A process group, the name of one, or None for the world.

    Raises:
        ValueError: The loss has more than one element, or the weight is negative or not finite.
    """
    _warn_of(ignored, "aggregate_loss")
    (mean,) = _means({"loss": loss}, _checked_weight(weight), [], group)
    return mean


def _means(numbers: Mapping[str, Number], weight: float, others: Sequence[str], group: GroupLike) -> list[float]:
    """Return the weighted means over the ranks that have a number; all ranks must have the same names."""
    values = _as_double(numbers)
    weights = torch.where(values.isnan(), 0.0, weight)
    parts = torch.stack([torch.where(weights > 0, values * weights, 0.0), weights])
    try:
        device = control_device(resolve_group(group), DistributedManager().device)
        totals = fused_all_reduce({"\n".join([*numbers, "", *others]): parts}, group=group, device=device)
    except PlanMismatchError:
        raise PlanMismatchError(_describe_names([*numbers, *others], group)) from None
    (total,) = totals.values()
    means: list[float] = (total[0] / total[1]).tolist()
    return means


def _describe_names(names: list[str], group: GroupLike) -> str:
    everyone = [set(one) for one in all_gather_objects(names, group)]
    common = set.intersection(*everyone)
    ranks = resolve_group(group).ranks
    rows = [f"  rank {rank}: {sorted(own - common)} besides" for rank, own in zip(ranks, everyone, strict=True)]
    return (
        f"all ranks must bring the same metrics, got {len(common)} in common. Correct those that differ:\n"
        + "\n".join(rows)
    )


def _as_double(numbers: Mapping[str, Number]) -> torch.Tensor:
    """Return numbers as one tensor on the CPU; those on an accelerator are fetched at once."""
    for name, value in numbers.items():
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise ValueError(f"{name} must be one number, got a tensor of shape {tuple(value.shape)}. Take its mean.")
    tensors = [value.detach().double().reshape(()) for value in numbers.values() if isinstance(value, torch.Tensor)]
    fetched = iter(torch.stack(tensors).tolist() if tensors else [])
    return torch.tensor(
        [next(fetched) if isinstance(value, torch.Tensor) else float(value) for value in numbers.values()],
        dtype=torch.float64,
    )


def _checked_weight(weight: float | None) -> float:
    weight = 1.0 if weight is None else float(weight)
    if not 0 <= weight < math.inf:
        raise ValueError(f"weight must be a number of 0 or more, got {weight}. Pass the number of samples.")
    return weight


def _warn_of(ignored: tuple[object, ...], name: str) -> None:
    if ignored:
        warnings.warn(
            f"{name} finds out the number of ranks and the device by itself: pass neither",
            DeprecationWarning,
            stacklevel=4,
        )


@collective
def reduce_loss(
    loss: float | torch.Tensor, dst_rank: int = 0, mean: bool = True, *, group: GroupLike = None
) -> float | None:
    """Return the mean, or the sum, of all ranks' losses on one rank.

    Collective. Blocking. Not differentiable. In double precision.

    Args:
        loss: This rank's loss, a number or a tensor with one element.
        dst_rank: The rank in the group that gets the result.
        mean: Divide by the number of ranks.
        group: A process group, the name of one, or None for the world.

    Returns:
        The result on ``dst_rank``; None elsewhere.

    Raises:
        ValueError: The group has no rank ``dst_rank``.
        PlanMismatchError: In debug mode, on every rank: the ranks call differently.
    """
    members = resolve_group(group)
    debug.compare("reduce_loss", members, dst_rank=dst_rank, mean=mean)
    check_member("dst_rank", dst_rank, members)
    if isinstance(loss, torch.Tensor) and loss.numel() != 1:
        raise ValueError(f"loss must be one number, got a tensor of shape {tuple(loss.shape)}. Take its mean.")
    device = control_device(members, DistributedManager().device)
    total = torch.tensor(float(loss), dtype=torch.float64, device=device)
    if members.size > 1:
        dist.reduce(total, group=members.process_group, group_dst=dst_rank)
    if members.rank != dst_rank:
        return None
    return total.item() / members.size if mean else total.item()
