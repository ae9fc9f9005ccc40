"""The numbers that a step of one's own returns, and their means over the samples of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from distman.collectives._fused import fused_all_reduce
from distman.collectives._objects import all_gather_objects
from distman.handler._accumulators import Accumulators, as_number
from distman.manager import DistributedManager

_OF_THE_RECORD = ("epoch", "step", "lr", "seconds", "skipped")


class Numbers(Accumulators):
    """Adds up what the function of a step returns for this rank's batches; it says by what names."""

    may_lack = True

    def __init__(self) -> None:
        super().__init__({})
        self._names: list[str] = []
        self._sums = self._sums.new_zeros(2, 0)
        self._is_begun = False

    @property
    def names(self) -> list[str]:
        return self._names

    told = names

    @property
    def sums(self) -> torch.Tensor:
        """Sums of the numbers over samples, and the numbers of these samples; shape ``(2, numbers)``."""
        return self._sums

    @sums.setter
    def sums(self, sums: torch.Tensor) -> None:
        self._sums = sums.to(self._sums.device, copy=True)

    def resume(self, names: Sequence[str], sums: torch.Tensor) -> None:
        """Go on from sums of an epoch that was interrupted, unless the first batch says that they are of others."""
        self._names, self.sums = list(names), sums

    def measure(self, returned: Any, num_samples: int) -> torch.Tensor:
        """Return the numbers for a batch, shape ``(numbers,)``."""
        given = returned if isinstance(returned, Mapping) else {} if returned is None else {"loss": returned}
        if not self._is_begun and {*given} != {*self._names}:
            self._names = [*map(_checked, given)]
            self._sums = self._sums.new_zeros(2, len(self._names))
        self._is_begun = True
        if given.keys() != set(self._names):
            raise ValueError(
                f"a step must return the same names for each batch, {self._names}, got {[*given]}. Return NaN for a "
                "number that a batch lacks; it does not count."
            )
        device = DistributedManager().device
        found = [as_number(name, _without_gradient(given[name])).to(device) for name in self._names]
        return torch.cat(found) if found else self._sums.new_zeros(0)

    def add(self, values: torch.Tensor, num_samples: int) -> None:
        if num_samples:
            counts = ~values.isnan()
            self._sums += torch.stack([torch.where(counts, values, 0.0), counts]) * num_samples

    def compute(self) -> dict[str, float]:
        """Return the means over the samples of all ranks; NaN without samples. Collective."""
        everyone = all_gather_objects(self.names)
        differing = next((rank for rank, names in enumerate(everyone) if names != everyone[0]), None)
        if differing is not None:
            raise ValueError(
                f"a step must return the same names in the same order on all ranks, got {everyone[0]} on rank 0 and "
                f"{everyone[differing]} on rank {differing}. Return NaN for a number that a rank lacks."
            )
        if not self.names:
            return {}
        total, num = fused_all_reduce(self.sums)
        return dict(zip(self.names, (total / num).tolist(), strict=True))


def _checked(name: object) -> str:
    if not isinstance(name, str) or name in _OF_THE_RECORD or name.startswith(("val_", "lr_")):
        raise ValueError(
            f"a step must return numbers by names that the history does not have, got {name!r}. Choose another name."
        )
    return name


def _without_gradient(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
