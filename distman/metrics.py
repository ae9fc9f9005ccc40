"""Numbers about a job as a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol, cast

import torch

from distman._coordination.wait_scope import collective
from distman._job.groups.registry import Group
from distman.collectives import (
    GroupLike,
    check_member,
    compare_calls,
    refuse,
    refuse_in_sum,
    resolve_group,
    sum_numbers,
    with_memory,
)

__all__ = ["aggregate_loss", "aggregate_metrics", "reduce_loss"]

_Number = float | torch.Tensor


class _Metric(Protocol):
    """A metric of torchmetrics, which brings the ranks' parts together itself."""

    def compute(self) -> _Number:
        """Return the metric over all that was seen."""


@collective
def aggregate_metrics(
    metrics: Mapping[str, _Number | _Metric], *, weight: float | None = None, group: GroupLike = None
) -> dict[str, float]:
    """Return the weighted mean of each metric over all ranks, the same on all of them.

    Collective. Blocking. Not differentiable. In double precision, in one message for up to some 240 metrics.

    Args:
        metrics: This rank's metrics by name, numbers or tensors with one element; the same names on all ranks, in any
            order. A NaN is left out on its rank; a metric that is NaN on all of them stays NaN. Objects of
            torchmetrics are computed over all ranks by themselves.
        weight: Weight of this rank's metrics, such as its number of samples; 0 for a rank without any. None gives
            all ranks the same weight.
        group: A process group, the name of one, or None for the world.

    Returns:
        The means by name, in this rank's order.

    Raises:
        ValueError: A metric has more than one element, or the weight is negative or not finite.
        PlanMismatchError: On every rank: the ranks have different names, or one of them was given what is no number.

    Example on two ranks:
        >>> metrics = {"loss": 1.0 + rank, "accuracy": torch.tensor(0.5)}
        >>> aggregate_metrics(metrics, weight=[30, 10][rank])  # numbers of samples
        {'loss': 1.25, 'accuracy': 0.5}
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a mapping, got {metrics!r}. Pass a dict of names and numbers.")
    weight = 1.0 if weight is None else _as_float("weight", weight)
    if not 0 <= weight < math.inf:
        raise ValueError(f"weight must be a number of 0 or more, got {weight}. Pass the number of samples.")
    members = resolve_group(group)
    own = {name: cast(_Metric, value) for name, value in sorted(metrics.items()) if hasattr(value, "compute")}
    numbers = {name: cast(_Number, value) for name, value in sorted(metrics.items()) if name not in own}
    values = _taken(numbers, "aggregate_metrics", members)
    compare_calls("aggregate_metrics", members)
    weights = [0.0 if math.isnan(value) else weight for value in values]
    weighted = [value * its if its else 0.0 for value, its in zip(values, weights, strict=True)]
    sums = sum_numbers([*weighted, *weights], f"aggregate_metrics of {len(numbers)} numbers", [*numbers, *own], members)
    totals = zip(numbers, sums[: len(values)], sums[len(values) :], strict=True)
    means = {name: total / its if its else math.nan for name, total, its in totals}
    means |= {name: float(metric.compute()) for name, metric in own.items()}
    return {name: means[name] for name in metrics}


@collective
def aggregate_loss(loss: _Number, *, weight: float | None = None, group: GroupLike = None) -> float:
    """Return the weighted mean of all ranks' losses, the same on all of them.

    Collective. Blocking. Not differentiable. In double precision.

    Args:
        loss: This rank's loss, a number or a tensor with one element; NaN does not count.
        weight: See :func:`aggregate_metrics`.
        group: A process group, the name of one, or None for the world.

    Raises:
        ValueError: The loss has more than one element, or the weight is negative or not finite.

    Example on two ranks:
        >>> aggregate_loss(1.0 + rank)
        1.5
    """
    return aggregate_metrics({"loss": loss}, weight=weight, group=group)["loss"]


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
        PlanMismatchError: On every rank: the ranks call differently, or one of them was given what is no number.

    Example on two ranks:
        >>> mean = reduce_loss(torch.tensor(1.0 + rank))
        >>> all_gather_objects(mean)
        [1.5, None]
    """
    members = resolve_group(group)
    values = _taken({"loss": loss}, "reduce_loss", members)
    compare_calls("reduce_loss", members, dst_rank=dst_rank, mean=mean)
    check_member("dst_rank", dst_rank, members)
    (total,) = sum_numbers(values, f"reduce_loss to rank {dst_rank}, mean {mean}", ["loss"], members)
    if members.rank != dst_rank:
        return None
    return total / members.size if mean else total


def _taken(numbers: Mapping[str, _Number], operation: str, group: Group) -> list[float]:
    """Return numbers on the host; where one is refused, the other ranks hear of it."""
    try:
        return _as_floats(numbers)
    except (TypeError, ValueError) as error:
        refuse(error, operation, group, refuse_in_sum)


def _as_floats(numbers: Mapping[str, _Number]) -> list[float]:
    """Return numbers on the host; those on an accelerator are fetched at once."""
    tensors = {name: with_memory(value, name) for name, value in numbers.items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        if tensor.numel() != 1:
            raise ValueError(f"{name} must be one number, got a tensor of shape {tuple(tensor.shape)}. Take its mean.")
        if tensor.is_complex():
            raise ValueError(f"{name} must be a real number, got {tensor.dtype}. Take its real part.")
    device = next((tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"), None)
    there = [tensor.detach().double().reshape(1).to(device) for tensor in tensors.values()]
    fetched = dict(zip(tensors, torch.cat(there).tolist() if there else (), strict=True))
    return [fetched[name] if name in fetched else _as_float(name, value) for name, value in numbers.items()]


def _as_float(name: str, value: _Number) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a number or a tensor with one element, got {value!r}. Convert it.") from error
