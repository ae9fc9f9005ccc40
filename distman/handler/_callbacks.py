"""What a program may do at the turns of a training."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from distman.checkpoint import CheckpointFolder

if TYPE_CHECKING:
    from distman.handler._nn_handler import NNHandler


Record = dict[str, float]


class Callback:
    """Called at the turns of a training, on every rank; what it raises ends the training, on all ranks.

    Methods that communicate must do so on all ranks. Write files or print on one of them only: see
    :func:`distman.on_rank`.
    """

    def on_train_begin(self, handler: NNHandler) -> None:
        """Do something before the first epoch, also of a resumed run.

        Local.
        """

    def on_epoch_begin(self, handler: NNHandler, epoch: int) -> None:
        """Do something before an epoch, also before the rest of one.

        Local.
        """

    def on_step_end(self, handler: NNHandler, step: int) -> None:
        """Do something after a step of the optimizer; steps are counted over all epochs, from 1 on.

        Local.
        """

    def on_epoch_end(self, handler: NNHandler, record: Record) -> None:
        """Do something after an epoch and its validation.

        Local.

        Args:
            handler: The handler.
            record: What became of the epoch, the same on all ranks; what is put into it becomes part of the history.
        """

    def on_train_end(self, handler: NNHandler) -> None:
        """Do something after the last epoch.

        Local.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know, of plain values and tensors.

        Local.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take such a state.

        Local.
        """


class EarlyStopping(Callback):
    """Ends the training when a value has not improved for some epochs, of those that have it.

    All ranks see the same value, so they stop together. NaN is no improvement.

    Args:
        monitor: A name of the history, such as ``"val_loss"``.
        patience: Number of times that it is found without improvement after which it stops.
        min_delta: By how much a value must be better to count.
        mode: ``"min"`` if smaller is better, ``"max"`` if larger is.

    Raises:
        ValueError: An option has no meaning.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        patience: int = 5,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        if patience < 1:
            raise ValueError(f"patience must be at least 1, got {patience}. Pass a number of epochs.")
        self._monitor, self._patience = monitor, patience
        self._judge = _Judge(mode, min_delta)
        self.num_waited = 0

    def on_epoch_end(self, handler: NNHandler, record: Record) -> None:
        """Stop if it is time to.

        Local.

        Raises:
            ValueError: There is no such value in the history.
        """
        value = _find(self._monitor, handler, record)
        if value is None:
            return
        self.num_waited = 0 if self._judge.improves(value) else self.num_waited + 1
        if self.num_waited >= self._patience:
            handler.stop(f"{self._monitor} was found {self.num_waited} times without improvement")

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, and for how long it has been so.

        Local.
        """
        return {"best": self._judge.best, "num_waited": self.num_waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take such a state.

        Local.
        """
        self._judge.best, self.num_waited = state["best"], state["num_waited"]


class ModelCheckpoint(Callback):
    """Keeps checkpoints of the last epochs, and of the best one.

    To resume after a kill, use :meth:`NNHandler.auto_save`.

    Args:
        folder: Where to; see :class:`distman.checkpoint.CheckpointFolder`.
        monitor: A name of the history, by which the best epoch is chosen.
        mode: ``"min"`` if smaller is better, ``"max"`` if larger is.
        keep: How many to keep besides the best.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        monitor: str = "val_loss",
        mode: Literal["min", "max"] = "min",
        keep: int = 1,
    ) -> None:
        self.folder = CheckpointFolder(folder, keep=keep)
        self._monitor, self._judge = monitor, _Judge(mode, 0.0)

    def on_epoch_end(self, handler: NNHandler, record: Record) -> None:
        """Save.

        Collective.

        Raises:
            ValueError: There is no such value in the history.
            RankFailedError: On every rank: rank 0 could not save.
        """
        value = _find(self._monitor, handler, record)
        is_best = value is not None and self._judge.improves(value)
        self.folder.save(handler.state_dict(), handler.num_steps, is_best=is_best)

    def on_train_end(self, handler: NNHandler) -> None:
        """Wait until all is written.

        Collective.
        """
        self.folder.wait()

    def state_dict(self) -> dict[str, Any]:
        """Return the best value.

        Local.
        """
        return {"best": self._judge.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take such a state.

        Local.
        """
        self._judge.best = state["best"]


class LearningRateMonitor(Callback):
    """Records the learning rate of each step.

    Attributes:
        rates: The first group's learning rate in each step.
    """

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_step_end(self, handler: NNHandler, step: int) -> None:
        """Record the rate of this step.

        Local.
        """
        self.rates.append(float(handler.optimizer.param_groups[0]["lr"]))

    def state_dict(self) -> dict[str, Any]:
        """Return the rates.

        Local.
        """
        return {"rates": torch.tensor(self.rates, dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take such a state.

        Local.
        """
        self.rates = state["rates"].tolist()


def _find(name: str, handler: NNHandler, record: Record) -> float | None:
    """Return a value of the epoch; None if it comes from a validation, and there was none."""
    if name not in record and ("val_loss" in record or not handler.validates):
        raise ValueError(f"monitor must be a value of the history, got {name!r}. It has {sorted(record)}.")
    return record.get(name)


class _Judge:
    """Says whether a value is better than all before."""

    def __init__(self, mode: Literal["min", "max"], min_delta: float) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', got {mode!r}. Correct it.")
        self._sign = 1.0 if mode == "min" else -1.0
        self._min_delta = min_delta
        self.best: float | None = None

    def improves(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is not None and self._sign * (self.best - value) <= self._min_delta:
            return False
        self.best = value
        return True
