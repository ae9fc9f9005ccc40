"""Sums of losses and metrics over batches, which are turned into means over the samples of all ranks."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from distman._torch_internals import tree_map
from distman.collectives._fused import fused_all_reduce
from distman.collectives._objects import all_gather_objects, gather_objects
from distman.decorators import on_rank
from distman.handler._nested import join, on_host
from distman.handler._objective import Outcome
from distman.manager import DistributedManager

MetricFunction = Callable[[Any, Any], float | torch.Tensor]


@runtime_checkable
class StatefulMetric(Protocol):
    """A metric with a state, updated batch by batch, that combines the ranks' states itself: those of torchmetrics."""

    def reset(self) -> None:
        """Reset the state."""

    def update(self, *args: Any) -> None:
        """Update the state with outputs and targets."""

    def compute(self) -> Any:
        """Return the metric over the samples of all ranks. Collective."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """A function of outputs and targets that returns the mean over their samples, or a stateful metric."""

    measure: MetricFunction | StatefulMetric
    needs_all: bool = False


class Accumulators:
    """Adds up the loss and the metrics of this rank's batches.

    A batch for which a metric is NaN does not count in it. A loss that is NaN makes the mean NaN.
    """

    told: Sequence[str] = ("loss",)  # of each step
    may_lack = False  # whether NaN stands for a number that a batch lacks

    def __init__(self, metrics: Mapping[str, Metric], *, keeps_all: bool = False) -> None:
        self._by_batch: dict[str, MetricFunction] = {}
        self._stateful: dict[str, StatefulMetric] = {}
        self._over_all: dict[str, MetricFunction] = {}
        for name, metric in metrics.items():
            if isinstance(metric.measure, StatefulMetric):
                self._stateful[name] = _gathering(copy.deepcopy(metric.measure))
                self._stateful[name].reset()
            elif not metric.needs_all:
                self._by_batch[name] = metric.measure
            elif keeps_all:
                self._over_all[name] = metric.measure
        self._kept: list[tuple[Any, Any]] = []
        device = DistributedManager().device
        self._sums = torch.zeros(2, 1 + len(self._by_batch), dtype=torch.float64, device=device)
        self._loss, self._num_samples = torch.zeros(1, dtype=torch.float64, device=device), 0

    @property
    def names(self) -> list[str]:
        """Names of what is added up batch by batch."""
        return ["loss", *self._by_batch]

    @property
    def sums(self) -> torch.Tensor:
        """Sums of loss and metrics over samples, and the numbers of these samples; shape ``(2, 1 + metrics)``."""
        sums = self._sums.clone()
        sums[0, 0], sums[1, 0] = self._loss[0], self._num_samples
        return sums

    @sums.setter
    def sums(self, sums: torch.Tensor) -> None:
        self._sums.copy_(sums)
        self._loss.copy_(sums[0, :1])
        self._num_samples = int(sums[1, 0])

    def resume(self, names: Sequence[str], sums: torch.Tensor) -> None:
        """Go on from sums of an epoch that was interrupted, unless they are of other metrics."""
        if [*names] == self.names and sums.shape == self._sums.shape:
            self.sums = sums

    def measure(self, outcome: Outcome, num_samples: int) -> torch.Tensor:
        """Return loss and metrics of a batch, shape ``(1 + metrics,)``; only the loss if none of its samples count."""
        loss = outcome.loss.detach().reshape(1)
        if not num_samples or not (self._by_batch or self._stateful or self._over_all):
            return loss
        return self._measure_all(loss, outcome)

    @torch.no_grad()
    def _measure_all(self, loss: torch.Tensor, outcome: Outcome) -> torch.Tensor:
        outputs, targets = tree_map(_detached, (outcome.outputs, outcome.targets))
        for stateful in self._stateful.values():
            stateful.update(outputs, targets)
        if self._over_all:
            self._kept.append(on_host((outputs, targets)))
        values = [as_number(name, measure(outputs, targets)) for name, measure in self._by_batch.items()]
        return torch.cat([loss.double(), *[value.to(loss.device) for value in values]]) if values else loss

    def add(self, values: torch.Tensor, num_samples: int) -> None:
        if not num_samples:
            return
        self._num_samples += num_samples
        if not self._by_batch:
            self._loss.add_(values, alpha=num_samples)
        else:
            self._loss.add_(values[:1], alpha=num_samples)
            counts = ~values.isnan()
            self._sums += torch.stack([torch.where(counts, values, 0.0), counts]) * num_samples

    def compute(self) -> dict[str, float]:
        """Return the means over the samples of all ranks, ``"loss"`` first; NaN without samples. Collective."""
        total, num = fused_all_reduce(self.sums)
        means = dict(zip(self.names, (total / num).tolist(), strict=True))
        for name, stateful in self._stateful.items():
            means |= _by_name(name, stateful.compute())
        return means | self._compute_over_all()

    def _compute_over_all(self) -> dict[str, float]:
        if not self._over_all:
            return {}
        everyone = gather_objects(self._kept)

        @on_rank(0, broadcast=True)
        def measure_all() -> dict[str, float]:
            pairs = [pair for kept in everyone or [] for pair in kept]
            if not pairs:
                return dict.fromkeys(self._over_all, math.nan)
            outputs, targets = join([(None, pair) for pair in pairs])
            return {name: float(measure(outputs, targets)) for name, measure in self._over_all.items()}

        return measure_all() or {}


def _gathering(metric: StatefulMetric) -> StatefulMetric:
    """Let a metric of torchmetrics, or a collection, gather its states by a function that takes unlike ones."""
    for part in metric.modules() if isinstance(metric, torch.nn.Module) else ():
        if getattr(part, "dist_sync_fn", part) is None:
            setattr(part, "dist_sync_fn", _gather_states)  # noqa: B010 - an attribute that torch.nn.Module does not declare
    return metric


def _gather_states(state: torch.Tensor, group: object = None) -> list[torch.Tensor]:  # noqa: ARG001 - see below
    """Return the state of every rank. That of one without samples says nothing of the others' types and shapes."""
    states = [one.to(state.device) for one in all_gather_objects(state)]
    like = next((one for one in states if one.numel()), state)
    return [one if one.numel() else like[:0] if like.ndim else one for one in states]


def _by_name(name: str, value: Any) -> dict[str, float]:
    parts = {f"{name}_{part}": one for part, one in value.items()} if isinstance(value, Mapping) else {name: value}
    return {part: as_number(part, one).item() for part, one in parts.items()}


def as_number(name: str, value: float | torch.Tensor) -> torch.Tensor:
    """Return a value as a tensor of shape ``(1,)``."""
    number = torch.as_tensor(value, dtype=torch.float64)
    if number.numel() != 1:
        raise ValueError(f"metric {name} must be one number, got shape {tuple(number.shape)}. Return its mean.")
    return number.reshape(1)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
