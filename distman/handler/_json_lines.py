"""The numbers of a training as lines of JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from distman.handler._history import Record
from distman.handler._tracking import Kind, Status, Tracker


class JsonLinesTracker(Tracker):
    """Appends a line of JSON to a file for each step, validation within an epoch, and epoch.

    A line has the ``run``, the ``kind``, one of ``"step"``, ``"validation"`` and ``"epoch"``, the ``step``, and the
    other numbers, null for those that are not finite. A resumed run first cuts off its lines of the steps that it does
    again.

    Args:
        path: The file. Folders above it are made.
        run: Name of the run; None makes one. A resumed training goes on with the run of its checkpoint.

    Example:
        >>> handler = NNHandler(torch.nn.Linear, in_features=1, out_features=1)
        >>> handler.set_optimizer(torch.optim.SGD, lr=0.5)
        >>> handler.set_loss_fn(torch.nn.functional.mse_loss)
        >>> handler.set_train_loader(TensorDataset(torch.ones(8, 1), torch.ones(8, 1)), batch_size=4)
        >>> handler.add_callback(JsonLinesTracker("numbers.jsonl", run="first"))
        >>> history = handler.train(1)
        >>> with open("numbers.jsonl") as file:
        ...     print(file.read())
        {"run": "first", "kind": "step", "step": 1, "epoch": 0, "lr": 0.5, "loss": ..., "waiting": ...}
        ...
        {"run": "first", "kind": "epoch", "step": 2, "epoch": 0, "loss": ..., "lr": 0.5, ...}
        <BLANKLINE>
    """

    def __init__(self, path: str | os.PathLike[str], run: str | None = None) -> None:
        super().__init__(run)
        self._path = Path(path)
        self._of_run: dict[str, str] = {}

    def open(self, run: str, step: int) -> None:
        """Remove the lines of the run's later steps.

        Local. On rank 0, in a thread.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.is_file():
            os.truncate(self._path, _length_until(self._path, run, step))
        self._of_run = {"run": run}

    def write(self, kind: Kind, records: Sequence[Record]) -> None:
        """Append lines.

        Local. On rank 0, in a thread.
        """
        lines = [self._of_run | {"kind": kind} | _as_json(record) for record in records]
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, allow_nan=False) + "\n" for line in lines)

    def close(self, status: Status) -> None:
        """Do nothing: all has been written.

        Local. On rank 0, in a thread.
        """


def _as_json(record: Record) -> dict[str, float | int | None]:
    values: dict[str, float | int | None] = {
        name: value if math.isfinite(value) else None for name, value in record.items()
    }
    return values | {name: int(record[name]) for name in ("step", "epoch")}


def _length_until(path: Path, run: str, step: int) -> int:
    """Return the number of bytes up to the last line that stays: no torn one, and none of the run's later steps."""
    length = reached = 0
    with path.open("rb") as file:
        for line in file:
            reached += len(line)
            if line.endswith(b"\n") and not _is_later(line, run, step):
                length = reached
    return length


def _is_later(line: bytes, run: str, step: int) -> bool:
    try:
        values = json.loads(line)
        return bool(values["run"] == run and values["step"] > step)
    except (ValueError, TypeError, KeyError):  # a line of somebody else's
        return False
