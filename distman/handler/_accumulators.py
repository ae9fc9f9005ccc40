"""The numbers of batches: summed into means over the samples of all ranks, of an epoch and of each step."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from distman._base import timing
from distman._torch_internals import tree_map
from distman.collectives import all_gather_objects, fused_all_reduce
from distman.handler._history import Record
from distman.handler._objective import Outcome
from distman.manager import DistributedManager
from distman.training import Step

MetricFunction = Callable[[Any, Any], float | torch.Tensor]
RESERVED = ("epoch", "step", "lr", "seconds", "skipped")  # names that records have besides those of numbers

_MOST_UNREAD = 32  # steps from one reading to the next, for each of which the host waits for the GPU


@runtime_checkable
class StatefulMetric(Protocol):
    """A metric with a state, updated batch by batch, that combines the ranks' states itself: those of torchmetrics."""

    def reset(self) -> None: ...

    def update(self, *args: Any) -> None: ...

    def compute(self) -> Any: ...


Metric = MetricFunction | StatefulMetric


class Accumulators:
    """Adds up the loss and the metrics of this rank's batches.

    A batch for which a metric is NaN does not count in it. A loss that is NaN makes the mean NaN.
    """

    may_lack = False  # whether NaN stands for a number that a batch lacks

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._by_batch: dict[str, MetricFunction] = {}
        self._stateful: dict[str, StatefulMetric] = {}
        for name, metric in metrics.items():
            if isinstance(metric, StatefulMetric):
                self._stateful[name] = _gathering(copy.deepcopy(metric))
                self._stateful[name].reset()
            else:
                self._by_batch[name] = metric
        self.names = ["loss", *self._by_batch]  # of what is added up batch by batch
        # Over samples, and the numbers of these samples: shape (2, names).
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
        if not num_samples or not (self._by_batch or self._stateful):
            return loss
        outputs, targets = tree_map(_detached, (outcome.outputs, outcome.targets))
        with torch.no_grad():
            for stateful in self._stateful.values():
                stateful.update(outputs, targets)
            values = [_as_number(name, measure(outputs, targets)) for name, measure in self._by_batch.items()]
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
            value = stateful.compute()
            parts = (
                {f"{name}_{part}": one for part, one in value.items()} if isinstance(value, Mapping) else {name: value}
            )
            means |= {part: _as_number(part, one).item() for part, one in parts.items()}
        return means


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
        found = [_as_number(name, _detached(given[name])).to(self.sums.device) for name in self.names]
        return torch.cat(found) if found else self.sums.new_zeros(0)

    def compute(self) -> dict[str, float]:
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


def _as_number(name: str, value: float | torch.Tensor) -> torch.Tensor:
    number = torch.as_tensor(value, dtype=torch.float64)
    if number.numel() != 1:
        raise ValueError(f"metric {name} must be one number, got shape {tuple(number.shape)}. Return its mean.")
    return number.reshape(1)


def _checked(name: object) -> str:
    if not isinstance(name, str) or name in RESERVED or name.startswith(("val_", "lr_")):
        raise ValueError(
            f"a step must return numbers by names that the history does not have, got {name!r}. Choose another name."
        )
    return name


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


class TakenStep(NamedTuple):
    """A step: what is known of it, its batches, this rank's numbers for each, and the gradient's norm."""

    record: Record
    batches: Sequence[Step]
    values: Sequence[torch.Tensor]
    norm: torch.Tensor | None  # if an option needs it


class StepRecords:
    """Keeps the numbers of each step until they are due, and returns them, the same on all ranks."""

    def __init__(self, *, are_kept: bool) -> None:
        self.are_kept = are_kept
        self._unread: list[TakenStep] = []
        self._num_until_due = 1
        self._since = time.perf_counter()
        self._seconds = self._waited = 0.0

    @property
    def are_due(self) -> bool:
        return len(self._unread) >= self._num_until_due

    def resume(self) -> None:
        """Count time from now on again: what went before was no training."""
        self._since = time.perf_counter()

    def wait(self, seconds: float) -> None:
        self._waited += seconds

    def add(self, step: TakenStep) -> None:
        now = time.perf_counter()
        self._seconds, self._since = self._seconds + now - self._since, now
        self._unread.append(step)

    def take(self, accumulators: Accumulators) -> list[Record]:
        """Return the numbers of all steps since the last call. Collective; waits for the device."""
        unread, self._unread = self._unread, []
        if not unread:
            return []
        names, device = accumulators.of_steps, DistributedManager().device
        own = _sums_of(unread, len(names), may_lack=accumulators.may_lack).unbind(-1)
        everyone = fused_all_reduce(dict(zip(names, own, strict=True)))  # which refuses other names on other ranks
        means = {name: (sums / counts).tolist() for name, (sums, counts) in everyone.items()}
        times = torch.tensor([self._seconds, self._waited], dtype=torch.float64, device=device)
        seconds, waited = fused_all_reduce(times, op="MAX").tolist()  # all ranks wait for the slowest
        self._seconds = self._waited = 0.0
        self._num_until_due = max(1, min(_MOST_UNREAD, int(timing.NUMBERS_UNREAD * len(unread) / seconds)))
        num_samples = sum(batch.num_total for one in unread for batch in one.batches)
        rates = {"samples_per_second": num_samples / seconds, "waiting": waited / seconds}
        norms = [one.norm for one in unread if one.norm is not None]
        read = iter(torch.stack(norms).tolist() if norms else [])
        return [
            one.record
            | {name: values[index] for name, values in means.items()}
            | ({} if one.norm is None else {"grad_norm": next(read)})
            | rates
            for index, one in enumerate(unread)
        ]


def _sums_of(unread: Sequence[TakenStep], num_names: int, *, may_lack: bool) -> torch.Tensor:
    """Return this rank's sums over the samples of each step, and their numbers, shape ``(2, steps, names)``."""
    values = torch.stack([values[:num_names] for one in unread for values in one.values]).double()
    num_own = torch.tensor([batch.num_own for one in unread for batch in one.batches], device=values.device)
    counts = num_own[:, None] * (~values.isnan() if may_lack else torch.ones_like(values))
    parts = torch.stack([torch.where(counts > 0, values, 0.0) * counts, counts])
    return torch.stack([part.sum(1) for part in parts.split([len(one.batches) for one in unread], dim=1)], dim=1)
