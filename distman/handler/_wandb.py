"""The numbers of a training for Weights & Biases."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from distman.handler._history import Record
from distman.handler._resumption import EXIT_CODE
from distman.handler._tracking import Kind, Status, Tracker, check_installed, curves

_EXIT_CODES = {"finished": 0, "preempted": EXIT_CODE, "failed": 1}


class WandbTracker(Tracker):
    """Logs the numbers to a run of Weights & Biases.

    Args:
        run: Id of the run; None makes one. A resumed training goes on with the run of its checkpoint.
        options: Arguments of ``wandb.init``, such as ``project``, ``config``, and ``mode="offline"``, which writes
            files that ``wandb sync`` uploads.

    Raises:
        ImportError: The package wandb is not installed.

    Example:
        >>> handler = NNHandler(torch.nn.Linear, in_features=1, out_features=1)
        >>> handler.add_callback(WandbTracker(project="lines", config={"lr": 0.1}, mode="offline"))
    """

    def __init__(self, run: str | None = None, **options: Any) -> None:
        check_installed("wandb", type(self).__name__)
        super().__init__(run)
        self._options = options
        self._of_wandb: Any = None

    def open(self, run: str, step: int) -> None:
        """Begin the run, or resume it.

        Local. On rank 0, in a thread.
        """
        import wandb

        hooks = sys.excepthook, sys.exit
        self._of_wandb = wandb.init(id=run, resume="allow", **self._options)
        sys.excepthook, sys.exit = hooks  # its own would print an error before the other ranks hear of it
        self._of_wandb.define_metric("*", step_metric="step")  # its own steps only grow, and count calls of log

    def write(self, kind: Kind, records: Sequence[Record]) -> None:
        """Log the numbers.

        Local. On rank 0, in a thread.
        """
        for record in records:
            self._of_wandb.log({**curves(kind, record), "step": int(record["step"]), "epoch": int(record["epoch"])})

    def close(self, status: Status) -> None:
        """Finish the run.

        Local. On rank 0, in a thread.
        """
        self._of_wandb.finish(exit_code=_EXIT_CODES[status])
