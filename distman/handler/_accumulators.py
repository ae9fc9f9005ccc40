"""Sums of losses and metrics over batches, which are turned into means over the samples of all ranks."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from distman._torch_internals import tree_map
from distman.collectives import all_gather_objects, fused_all_reduce, gather_objects
from distman.decorators import on_rank
from distman.handler._nested import join, on_host
from distman.handler._objective import Outcome
from distman.manager import DistributedManager

MetricFunction = Callable[[Any, Any], float | torch.Tensor]
_OF_THE_RECORD = ("epoch", "step", "lr", "seconds", "skipped")


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

    Attributes:
        names: Names of what is added up batch by batch.
        sums: Sums of these over samples, and the numbers of these samples; shape ``(2, names)``.
    """

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
        self.names = ["loss", *self._by_batch]
        self.sums = torch.zeros(2, len(self.names), dtype=torch.float64, device=DistributedManager().device)

    @property
    def of_steps(self) -> Sequence[str]:
        """Names of the numbers that the record of a step has."""
        return self.names[:1]

    def resume(self, names: Sequence[str], sums: torch.Tensor) -> None:
        """Go on from sums of an epoch that was interrupted, unless they are of other metrics."""
        if [*names] == self.names:
            self.sums.copy_(sums)

    def measure(self, outcome: Outcome, num_samples: int) -> torch.Tensor:
        """Return loss and metrics of a batch, shape ``(names,)``; only the loss if none of its samples count."""
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
        if not self._by_batch and not self.may_lack:  # by as few operations as there can be
            self.sums[0].add_(values, alpha=num_samples)
            self.sums[1].add_(num_samples)
            return
        counts = ~values.isnan()
        if not self.may_lack:
            counts[0] = True
        self.sums += torch.stack([torch.where(counts, values, 0.0), counts]) * num_samples

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


class Numbers(Accumulators):
    """Adds up what the function of a step of your own returns for this rank's batches, and by which names."""

    may_lack = True

    def __init__(self) -> None:
        super().__init__({})
        self.names, self.sums = [], self.sums.new_zeros(2, 0)
        self._is_begun = False

    @property
    def of_steps(self) -> Sequence[str]:
        return self.names

    def resume(self, names: Sequence[str], sums: torch.Tensor) -> None:
        """Go on from sums of an epoch that was interrupted, unless the first batch says that they are of others."""
        self.names, self.sums = [*names], sums.to(self.sums.device, copy=True)

    def measure(self, returned: Any, num_samples: int) -> torch.Tensor:
        """Return the numbers for a batch, shape ``(names,)``."""
        given = returned if isinstance(returned, Mapping) else {} if returned is None else {"loss": returned}
        if not self._is_begun and {*given} != {*self.names}:
            self.names = [*map(_checked, given)]
            self.sums = self.sums.new_zeros(2, len(self.names))
        self._is_begun = True
        if given.keys() != set(self.names):
            raise ValueError(
                f"a step must return the same names for each batch, {self.names}, got {[*given]}. Return NaN for a "
                "number that a batch lacks; it does not count."
            )
        found = [as_number(name, _detached(given[name])).to(self.sums.device) for name in self.names]
        return torch.cat(found) if found else self.sums.new_zeros(0)

    def compute(self) -> dict[str, float]:
        """Return the means over the samples of all ranks; NaN without samples. Collective."""
        everyone = all_gather_objects(self.names)
        differing = next((rank for rank, names in enumerate(everyone) if names != everyone[0]), None)
        if differing is not None:
            raise ValueError(
                f"a step must return the same names in the same order on all ranks, got {everyone[0]} on rank 0 and "
                f"{everyone[differing]} on rank {differing}. Return NaN for a number that a rank lacks."
            )
        return super().compute() if self.names else {}


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


def _checked(name: object) -> str:
    if not isinstance(name, str) or name in _OF_THE_RECORD or name.startswith(("val_", "lr_")):
        raise ValueError(
            f"a step must return numbers by names that the history does not have, got {name!r}. Choose another name."
        )
    return name


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
