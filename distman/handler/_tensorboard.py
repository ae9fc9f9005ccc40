"""The numbers of a training for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distman.handler._history import Record
from distman.handler._tracking import Kind, Status, Tracker, check_installed, curves


class TensorBoardTracker(Tracker):
    """Writes curves for TensorBoard, which ``tensorboard --logdir FOLDER`` shows.

    Each run has a folder of its own in there. A resumed run goes on in its folder; TensorBoard leaves out what had been
    written of the steps that it does again.

    Args:
        folder: The folder of all runs.
        run: Name of the run; None makes one. A resumed training goes on with the run of its checkpoint.

    Raises:
        ImportError: The package tensorboard is not installed.

    Example:
        >>> handler = NNHandler(torch.nn.Linear, in_features=1, out_features=1)
        >>> handler.add_callback(TensorBoardTracker("runs", run="first"))
    """

    def __init__(self, folder: str | os.PathLike[str], run: str | None = None) -> None:
        check_installed("tensorboard", type(self).__name__)
        super().__init__(run)
        self._folder = Path(folder)
        self._writer: Any = None

    def open(self, run: str, step: int) -> None:
        """Open a file of events in the folder of the run.

        Local. On rank 0, in a thread.
        """
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self._folder / run, purge_step=step + 1)

    def write(self, kind: Kind, records: Sequence[Record]) -> None:
        """Add points to the curves.

        Local. On rank 0, in a thread.
        """
        for record in records:
            for name, value in curves(kind, record).items():
                self._writer.add_scalar(name, value, int(record["step"]))
        self._writer.flush()

    def close(self, status: Status) -> None:
        """Close the file.

        Local. On rank 0, in a thread.
        """
        self._writer.close()
