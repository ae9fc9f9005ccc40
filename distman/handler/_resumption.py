"""Saving a training while it runs, and ending the program so that the next run resumes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from distman.checkpoint import CheckpointFolder
from distman.handler._changes import Changes, OnChange
from distman.handler._reporting import Reporter
from distman.handler._sharded_state import load_latest, save_in
from distman.manager import DistributedManager

if TYPE_CHECKING:
    from distman.handler._nn_handler import NNHandler

EXIT_CODE = 75
"""Exit code of a program that was asked to stop, saved, and wants to be started again.

Source:
    ``EX_TEMPFAIL`` of sysexits.h: try again later.
"""


class Preempted(SystemExit):
    """The job was asked to stop, and has saved what the next run resumes; the program ends with exit code 75.

    Raised by :meth:`NNHandler.train` on every rank. What is to be done before the program ends comes before it is
    raised again.

    Example:
        >>> def train(handler):
        ...     try:
        ...         handler.train(100)
        ...     except Preempted:
        ...         print("asked to stop after", len(handler.history), "epochs")
        ...         raise
    """


def end_program(auto_save: AutoSave | None, reporter: Reporter) -> NoReturn:
    """End a program that was asked to stop, and requeue its job if that is wanted."""
    if auto_save is None:
        reporter.log("asked to stop; nothing was saved: call auto_save() before train()")
    else:
        reporter.log("asked to stop; saved in %s", auto_save.folder.path)
    if auto_save is not None and auto_save.requeues:
        DistributedManager().requeue()
    raise Preempted(EXIT_CODE)


class AutoSave:
    """When and where to save."""

    def __init__(
        self,
        folder: CheckpointFolder,
        every_epochs: int | None,
        every_steps: int | None,
        *,
        resumes: bool,
        requeues: bool,
        on_change: OnChange | None,
    ) -> None:
        for name, value in (("every_epochs", every_epochs), ("every_steps", every_steps)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}. Pass None for never.")
        Changes(on_change)  # refuses what is none
        self.folder, self.requeues, self.on_change = folder, requeues, on_change
        self.is_awaited = resumes  # whether a training that resumes from the latest checkpoint has yet to come
        self._found: Any = None
        self._every_epochs, self._every_steps = every_epochs, every_steps

    def is_due(self, *, step: int | None, epoch: int | None) -> bool:
        after_epoch = epoch is not None and self._every_epochs is not None and epoch % self._every_epochs == 0
        after_step = step is not None and self._every_steps is not None and step % self._every_steps == 0
        return after_epoch or after_step

    def save(self, handler: NNHandler) -> None:
        save_in(self.folder, handler)

    def load(self, module: torch.nn.Module) -> Any:
        """Return the latest state, kept until :meth:`finish`: its phase may come later in the program. Collective."""
        if self._found is None:
            self._found = load_latest(self.folder, module)
        return self._found

    def finish(self) -> None:
        self.is_awaited, self._found = False, None
