"""The options of a training: how long it goes on, when it validates, and how it steps."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from distman.topology._partition import is_whole_number

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long a training goes on, and when it validates; what they mean is said by :meth:`NNHandler.train`."""

    epochs: int | None
    max_steps: int | None = None
    limit_batches: int | None = None
    validate_every: int = 1
    validate_every_steps: int | None = None

    def __post_init__(self) -> None:
        if not is_whole_number(self.epochs) and (self.epochs is not None or self.max_steps is None):
            raise TypeError(
                f"epochs must be a whole number, got {self.epochs!r}. Pass the total number of epochs, or max_steps."
            )
        for name in ("max_steps", "limit_batches", "validate_every", "validate_every_steps"):
            number = getattr(self, name)
            if number is None and name != "validate_every":
                continue
            if not is_whole_number(number):
                raise TypeError(f"{name} must be a whole number, got {number!r}. Pass an integer.")
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}. Pass a positive number.")

    def are_reached(self, num_epochs: int, num_steps: int) -> bool:
        return (self.epochs is not None and num_epochs >= self.epochs) or self.has_last(num_steps)

    def has_last(self, num_steps: int) -> bool:
        return self.max_steps is not None and num_steps >= self.max_steps

    def is_full(self, num_batches: int) -> bool:
        return self.limit_batches is not None and num_batches >= self.limit_batches

    def validates_after_epoch(self, epoch: int) -> bool:
        return self.validate_every_steps is None and (epoch + 1) % self.validate_every == 0

    def validates_after_step(self, num_steps: int) -> bool:
        return self.validate_every_steps is not None and num_steps % self.validate_every_steps == 0


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """How the optimizers step; what the options mean is said by :meth:`NNHandler.train`."""

    accumulate: int = 1
    amp: Literal["bf16", "fp16"] | None = None
    clip_norm: float | None = None
    ema_decay: float | None = None
    non_finite: Literal["raise", "skip", "ignore"] = "raise"
    check_every: int | None = None
    use_buffers: bool | None = None

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, got {self.accumulate}. Pass a number of batches.")
        if self.amp not in (None, *_DTYPES):
            raise ValueError(f"amp must be 'bf16', 'fp16' or None, got {self.amp!r}. Choose one of them.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be greater than 0, got {self.clip_norm}. Pass None not to clip.")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay must lie between 0 and 1, got {self.ema_decay}. Pass None for no average.")
        if self.non_finite not in ("raise", "skip", "ignore"):
            raise ValueError(
                f"non_finite must be 'raise', 'skip' or 'ignore', got {self.non_finite!r}. Choose one of them."
            )
        if self.check_every is not None and self.check_every < 1:
            raise ValueError(f"check_every must be at least 1, got {self.check_every}. Pass a number of steps.")

    @property
    def dtype(self) -> torch.dtype | None:
        return _DTYPES[self.amp] if self.amp else None
