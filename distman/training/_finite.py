"""Looks for losses and gradients that are NaN or infinite."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import torch

from distman.collectives import all_gather_objects
from distman.errors import NonFiniteLossError
from distman.manager import DistributedManager


@dataclasses.dataclass(eq=False)
class _Unchecked:
    """A gradient that has not been looked at: index and name of its step, its norm, and this rank's losses."""

    step: int
    name: str
    norm: torch.Tensor
    losses: Sequence[torch.Tensor]
    is_taken: bool = False


class FiniteCheck:
    """Looks at the gradients of some steps at once, since each look waits for the device."""

    def __init__(
        self, scaler: torch.amp.GradScaler, non_finite: Literal["raise", "skip", "ignore"], check_every: int
    ) -> None:
        self._scaler, self._non_finite, self._check_every = scaler, non_finite, check_every
        self._unchecked: list[_Unchecked] = []

    def add(self, step: int, name: str, norm: torch.Tensor | None, losses: Sequence[torch.Tensor]) -> None:
        if norm is not None and self._non_finite != "ignore":
            self._unchecked.append(_Unchecked(step, name, norm, losses))

    def may_be_taken(self) -> bool:
        """Return whether the latest step may be taken, as far as has been seen. Collective every few steps."""
        return len(self._unchecked) < self._check_every or self.look()

    def note_taken(self) -> None:
        if self._unchecked:
            self._unchecked[-1].is_taken = True

    def look(self) -> bool:
        """Look at the gradients of all steps since the last look; return False if the latest is to be left out.

        Collective. A step that was taken with a gradient that is not finite has spoilt the model for good, so this
        raises for it again and again, and it cannot be saved.
        """
        if not self._unchecked:
            return True
        norms = torch.stack([one.norm for one in self._unchecked]).tolist()
        bad = next((one for one, norm in zip(self._unchecked, norms, strict=True) if not math.isfinite(norm)), None)
        num_spoilt = 0 if bad is None else sum(one.is_taken for one in self._unchecked[self._unchecked.index(bad) :])
        if bad is None or not bad.is_taken:
            self._unchecked.clear()
        if bad is not None:
            self._check_skippable(bad, num_spoilt)
        return bad is None

    def _check_skippable(self, bad: _Unchecked, num_spoilt: int) -> None:
        """Raise unless the step may be skipped: the scale of the loss was too large, or the options say so."""
        everyone = all_gather_objects([loss.item() for loss in bad.losses])
        losses = {rank: loss for rank, own in enumerate(everyone) for loss in own if not math.isfinite(loss)}
        is_overflow = not losses and self._scaler.is_enabled() and self._scaler.get_scale() >= 1
        if is_overflow or self._non_finite == "skip":
            return
        roll = DistributedManager().roll_call
        got = ", ".join(
            f"{loss} on rank {rank} ({roll[rank].host}, pid {roll[rank].pid})" for rank, loss in losses.items()
        )
        remedy = "Lower the learning rate, pass clip_norm, or skip such steps with non_finite='skip'."
        if num_spoilt:
            remedy += (
                f" {num_spoilt} steps were taken before this was seen, and have spoilt the model: go on from a "
                "checkpoint; check_every=1 looks before each step is taken."
            )
        raise NonFiniteLossError(
            f"the loss {f'of {bad.name!r} ' if bad.name else ''}must be finite in step {bad.step}, got "
            f"{got or 'a gradient that is not, with finite losses on all ranks'}. {remedy}"
        )
