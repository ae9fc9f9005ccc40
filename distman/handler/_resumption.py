"""Saving a training while it runs, and ending the program so that the next run resumes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from distman.checkpoint import CheckpointFolder
from distman.handler._changes import Changes, OnChange
from distman.handler._history import History
from distman.handler._options import Limits
from distman.handler._reporting import Reporter
from distman.handler._sharded_state import load_latest, save_in
from distman.manager import DistributedManager

if TYPE_CHECKING:
    from distman.handler._nn_handler import NNHandler
    from distman.handler._training import Training

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
    """When and where to save.

    Attributes:
        is_awaited: Whether a training that resumes from the latest checkpoint has yet to come.
    """

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
        self.is_awaited = resumes
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
        """Forget the state, which has been restored or is not there."""
        self.is_awaited, self._found = False, None


class Progress:
    """How far a handler's training has come: that of its latest run, or of a state loaded since."""

    def __init__(self) -> None:
        self._training: Training | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._changes = Changes()
        self.phases: list[dict[str, Any]] = []  # how far the calls of train() have come that are over
        self._is_passed = False  # all of them by an earlier run of the program

    @property
    def training(self) -> Training | None:
        """The training of the latest run, or of the current one; None before the first."""
        return self._training

    @property
    def num_steps(self) -> int:
        if self._loaded is not None:
            return int(self._loaded["optimization"]["num_steps"])
        if self._is_passed:
            return int(self.phases[-1]["steps"])
        return self._training.engine.num_steps if self._training is not None else 0

    def check(self) -> None:
        """Look at the gradients of the latest run. Collective."""
        if self._loaded is None and self._training is not None:
            self._training.engine.check()

    def resume(self, training: Training) -> None:
        """Let a new training resume from the state that was loaded, else from the latest run, and follow it."""
        if self._loaded is not None:
            training.load_state_dict(self._loaded, self._changes)
        elif self._training is not None:
            training.go_on_from(self._training)
        self._training, self._loaded, self._is_passed = training, None, False

    def end_phase(self, history: History) -> None:
        training = self._training
        if training is not None:
            self.phases.append(
                {
                    "epochs": training.epoch,
                    "steps": self.num_steps,
                    "reason": training.reason,
                    "records": len(history),
                    "validations": len(history.validations),
                }
            )

    def passes(self, limits: Limits, phases: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the present call of train() is one that an earlier run of the program has done; note that."""
        if len(self.phases) >= len(phases):
            return False
        end = phases[len(self.phases)]
        if not (end["reason"] or limits.are_reached(end["epochs"], end["steps"])):
            return False
        self.phases.append(dict(end))
        self._is_passed = True
        return True

    def state_dict(self) -> Mapping[str, Any] | None:
        """Return the state of the training; None if there was none. Collective."""
        if self._loaded is None and self._training is not None:
            return {**self._training.state_dict(), "phases": self.phases}
        return self._loaded

    def load_state_dict(self, state: Mapping[str, Any] | None, changes: Changes | None = None) -> None:
        """Let the next run resume from such a state; None lets it resume from the latest run."""
        self._loaded, self._changes = state, changes or Changes()
