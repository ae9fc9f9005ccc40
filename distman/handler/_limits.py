"""How long a training goes on, and when it validates."""

from __future__ import annotations

import dataclasses

from distman.topology._partition import is_whole_number


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
