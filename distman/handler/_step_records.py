"""The numbers of each step, which stay on the device until those of many steps are read at once."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence

import torch

from distman._base import timing
from distman.collectives import fused_all_reduce
from distman.handler._history import Record
from distman.manager import DistributedManager
from distman.training import Step

_MOST_UNREAD = 32  # steps from one reading to the next, for each of which the host waits for the GPU


@dataclasses.dataclass(frozen=True)
class TakenStep:
    """A step: what is known of it, its batches, this rank's numbers, and the gradient's norm, if an option needs it."""

    record: Record
    batches: Sequence[Step]
    numbers: Mapping[str, Sequence[torch.Tensor]]
    norm: torch.Tensor | None
    may_lack: bool


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
        """Whether it is time to read them, on all ranks alike."""
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

    def take(self) -> list[Record]:
        """Return the numbers of all steps since the last call. Collective; waits for the device."""
        unread, self._unread = self._unread, []
        if not unread:
            return []
        device = DistributedManager().device
        own = {name: torch.tensor(sums, dtype=torch.float64, device=device) for name, sums in _own_sums(unread).items()}
        means = {name: (sums / counts).tolist() for name, (sums, counts) in fused_all_reduce(own).items()}
        times = torch.tensor([self._seconds, self._waited], dtype=torch.float64, device=device)
        seconds, waited = fused_all_reduce(times, op="MAX").tolist()  # all ranks wait for the slowest
        self._seconds = self._waited = 0.0
        self._num_until_due = max(1, min(_MOST_UNREAD, int(timing.NUMBERS_UNREAD * len(unread) / seconds)))
        num_samples = sum(batch.num_total for one in unread for batch in one.batches)
        norms = _read([one.norm for one in unread if one.norm is not None])
        rates = {"samples_per_second": num_samples / seconds, "waiting": waited / seconds}
        return [
            one.record
            | {name: values[index] for name, values in means.items()}
            | ({} if one.norm is None else {"grad_norm": norms.pop(0)})
            | rates
            for index, one in enumerate(unread)
        ]


def _own_sums(unread: Sequence[TakenStep]) -> dict[str, tuple[list[float], list[int]]]:
    """Return by name, for each step, the sum of a number over this rank's samples, and how many these are."""
    read = iter(_read([value for one in unread for values in one.numbers.values() for value in values]))
    own: dict[str, tuple[list[float], list[int]]] = {name: ([], []) for name in unread[0].numbers}
    for one in unread:
        for name in one.numbers:
            parts = [(next(read), batch.num_own) for batch in one.batches]
            counted = [(value, num) for value, num in parts if num and not (one.may_lack and math.isnan(value))]
            sums, counts = own[name]
            sums.append(sum(value * num for value, num in counted))
            counts.append(sum(num for _, num in counted))
    return own


def _read(numbers: Sequence[torch.Tensor]) -> list[float]:
    values: list[float] = torch.stack([one.reshape(()) for one in numbers]).tolist() if numbers else []
    return values
