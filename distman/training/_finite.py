"""Looks for losses and gradients that are NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from distman.collectives import all_gather_objects
from distman.errors import NonFiniteLossError
from distman.manager import DistributedManager


class FiniteCheck:
    """Looks at the gradients of some steps at once, since each look waits for the device."""

    def __init__(
        self, scaler: torch.amp.GradScaler, non_finite: Literal["raise", "skip", "ignore"], check_every: int
    ) -> None:
        self._scaler, self._non_finite, self._check_every = scaler, non_finite, check_every
        # Of each gradient: number and name of its step, its norm, and this rank's losses.
        self._unchecked: list[tuple[int, str, torch.Tensor, Sequence[torch.Tensor]]] = []

    def add(self, step: int, name: str, norm: torch.Tensor | None, losses: Sequence[torch.Tensor]) -> None:
        if norm is not None and self._non_finite != "ignore":
            self._unchecked.append((step, name, norm, losses))

    def may_be_taken(self) -> bool:
        """Return whether the latest step may be taken, as far as has been seen. Collective every few steps."""
        return len(self._unchecked) < self._check_every or self.look(is_latest_taken=False)

    def look(self, *, is_latest_taken: bool = True) -> bool:
        """Look at the gradients of all steps since the last look; return False if the latest is to be left out.

        Collective. A step that was taken with a gradient that is not finite has spoilt the model for good, so this
        raises for it again and again, and it cannot be saved.
        """
        if not self._unchecked:
            return True
        unchecked, norms = self._unchecked, torch.stack([norm for _, _, norm, _ in self._unchecked]).tolist()
        bad = next((index for index, norm in enumerate(norms) if not math.isfinite(norm)), None)
        taken = unchecked if is_latest_taken else unchecked[:-1]
        num_spoilt = 0 if bad is None else len(taken[bad:])
        self._unchecked = taken if num_spoilt else []
        if bad is not None:
            step, name, _, losses = unchecked[bad]
            self._check_skippable(step, name, losses, num_spoilt)
        return bad is None

    def _check_skippable(self, step: int, name: str, own: Sequence[torch.Tensor], num_spoilt: int) -> None:
        """Raise unless the step may be skipped: the scale of the loss was too large, or the options say so."""
        everyone = all_gather_objects([loss.item() for loss in own])
        losses = {rank: loss for rank, found in enumerate(everyone) for loss in found if not math.isfinite(loss)}
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
            f"the loss {f'of {name!r} ' if name else ''}must be finite in step {step}, got "
            f"{got or 'a gradient that is not, with finite losses on all ranks'}. {remedy}"
        )
