"""How long a training goes on, and when it validates."""

from __future__ import annotations

import dataclasses

from distman.topology._partition import is_whole_number


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long a training goes on, and when it validates.

    Attributes:
        epochs: Total number of epochs; None leaves the end to ``max_steps``.
        max_steps: Total number of steps of the optimizer; None leaves the end to ``epochs``.
        limit_batches: Largest number of a rank's batches in an epoch; None reads all data.
        validate_every: Number of epochs from one validation to the next.
        validate_every_steps: Number of steps from one validation to the next, instead; None validates after epochs.
    """

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
        """Return whether so many epochs, or so many steps, are all there are to be."""
        return (self.epochs is not None and num_epochs >= self.epochs) or self.has_last(num_steps)

    def has_last(self, num_steps: int) -> bool:
        """Return whether so many steps are all there are to be."""
        return self.max_steps is not None and num_steps >= self.max_steps

    def is_full(self, num_batches: int) -> bool:
        """Return whether an epoch of so many batches is over."""
        return self.limit_batches is not None and num_batches >= self.limit_batches

    def validates_after_epoch(self, epoch: int) -> bool:
        """Return whether a validation follows the epoch of this index."""
        return self.validate_every_steps is None and (epoch + 1) % self.validate_every == 0

    def validates_after_step(self, num_steps: int) -> bool:
        """Return whether a validation follows so many steps."""
        return self.validate_every_steps is not None and num_steps % self.validate_every_steps == 0
