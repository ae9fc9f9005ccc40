"""Saving a training while it runs, and leaving it so that the next run goes on."""

from __future__ import annotations

from typing import Any

from distman.checkpoint import CheckpointFolder

EXIT_CODE = 75
"""Exit code of a program that was asked to stop, saved, and wants to be started again.

Source:
    ``EX_TEMPFAIL`` of sysexits.h: try again later.
"""


class Preempted(SystemExit):
    """The job was asked to stop, and has saved what the next run goes on from; the program ends with exit code 75."""


class AutoSave:
    """When to save, and where.

    Args:
        folder: Where to.
        every_epochs: After how many epochs; None for never.
        every_steps: After how many steps of the optimizer; None for never.
        resumes: Whether a training goes on from the latest one.
        requeues: Whether Slurm shall queue the job again when it was asked to stop.

    Raises:
        ValueError: A number is less than 1.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        every_epochs: int | None,
        every_steps: int | None,
        *,
        resumes: bool,
        requeues: bool,
    ) -> None:
        for name, value in (("every_epochs", every_epochs), ("every_steps", every_steps)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}. Pass None not to save so.")
        self.folder, self.resumes, self.requeues = folder, resumes, requeues
        self._every_epochs, self._every_steps = every_epochs, every_steps

    def is_due(self, *, step: int | None, epoch: int | None) -> bool:
        """Return whether to save after this step, or after so many epochs."""
        after_epoch = epoch is not None and self._every_epochs is not None and epoch % self._every_epochs == 0
        after_step = step is not None and self._every_steps is not None and step % self._every_steps == 0
        return after_epoch or after_step

    def load(self) -> Any:
        """Return what was saved last; None if there is nothing.

        Collective.
        """
        return self.folder.load_latest(device="cpu")
