"""Callbacks that many trainings use: early stopping, checkpoints of the best epoch, the learning rate."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from distman._base.arguments import check_number
from distman.checkpoint import CheckpointFolder, check_writable
from distman.handler._archive import save_in
from distman.handler._events import Callback
from distman.handler._history import Record, sign_of
from distman.manager import DistributedManager

if TYPE_CHECKING:
    from distman.handler._nn_handler import NNHandler


class Best:
    """The best of some values."""

    def __init__(self, mode: Literal["min", "max"], min_delta: float) -> None:
        self._sign, self._min_delta = sign_of(mode), min_delta
        self.value: float | None = None

    def improves(self, value: float) -> bool:
        """Return whether this value is better, and keep it if it is."""
        is_first = self.value is None and not math.isnan(value)
        is_better = is_first or (self.value is not None and self._sign * (self.value - value) > self._min_delta)
        self.value = value if is_better else self.value
        return is_better


class _Monitoring(Callback):
    """Follows a value, of each epoch, and of each validation within one."""

    _monitor: str

    def on_epoch_end(self, handler: NNHandler, record: Record) -> None:
        name = self._monitor
        if name not in record and ("val_loss" in record or not handler.validates):
            raise ValueError(f"monitor must be a name in the history, got {name!r}. The history has {sorted(record)}.")
        value = record.get(name)  # None if it is of validations, and this epoch had none
        self._follow(handler, None if value is None else float(value))  # one of NumPy, say, which files do not hold

    def on_validation_end(self, handler: NNHandler, record: Record) -> None:
        if "step" in record and self._monitor.startswith("val_"):  # else the epoch ends, which counts
            self.on_epoch_end(handler, record)

    def _follow(self, handler: NNHandler, value: float | None) -> None:
        raise NotImplementedError


class EarlyStopping(_Monitoring):
    """Ends the training when a monitored value has stopped improving.

    All ranks see the same value, so they stop after the same epoch, or validation within an epoch. Epochs without the
    value do not count; NaN is not an improvement.

    Args:
        monitor: A name in the history, such as ``"val_loss"``.
        patience: Number of values in a row without improvement after which the training ends.
        min_delta: Smallest change that counts as an improvement.
        mode: ``"min"`` if smaller is better, ``"max"`` if larger is.

    Raises:
        ValueError: An option is not valid.

    Example:
        >>> handler = NNHandler(torch.nn.Linear, in_features=1, out_features=1)
        >>> handler.add_callback(EarlyStopping("loss", patience=3))  # a loss that never improves ends it after 4 epochs
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        patience: int = 5,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        self._monitor, self._patience = monitor, check_number("patience", patience)
        self._best = Best(mode, min_delta)
        self.num_waited = 0

    def _follow(self, handler: NNHandler, value: float | None) -> None:
        if value is None:
            return
        self.num_waited = 0 if self._best.improves(value) else self.num_waited + 1
        if self.num_waited >= self._patience:
            handler.stop(f"{self._monitor} did not improve {self.num_waited} times in a row")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best.value, "num_waited": self.num_waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best.value, self.num_waited = state["best"], state["num_waited"]


class ModelCheckpoint(_Monitoring):
    """Keeps checkpoints of the latest epochs, and of the best ones; validations within an epoch count like epochs.

    To resume after a kill, use :meth:`NNHandler.auto_save`.

    Args:
        folder: The folder to save in; see :class:`distman.checkpoint.CheckpointFolder`.
        monitor: A name in the history, by which the best epochs are chosen.
        mode: ``"min"`` if smaller is better, ``"max"`` if larger is.
        keep: Number of the latest checkpoints to keep besides the best.
        num_best: Number of the best checkpoints to keep.
        sharded: See :meth:`NNHandler.auto_save`.

    Attributes:
        best: The monitored values of the best, by step, the best one first. See :meth:`CheckpointFolder.best`.

    Raises:
        TypeError: ``num_best`` is not a whole number.
        ValueError: An option is not valid.

    Example:
        >>> handler = NNHandler(torch.nn.Linear, in_features=1, out_features=1)
        >>> handler.set_optimizer(torch.optim.SGD, lr=0.1)
        >>> handler.set_loss_fn(torch.nn.functional.mse_loss)
        >>> handler.set_train_loader(TensorDataset(torch.ones(8, 1), torch.ones(8, 1)), batch_size=4)
        >>> handler.add_callback(ModelCheckpoint("best", monitor="loss"))
        >>> history = handler.train(3)
        >>> CheckpointFolder("best").best().name  # after three epochs of two steps
        'checkpoint-00000006.pt'
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        monitor: str = "val_loss",
        mode: Literal["min", "max"] = "min",
        keep: int = 1,
        num_best: int = 1,
        sharded: bool = False,
    ) -> None:
        self.folder = CheckpointFolder(folder, keep=keep, sharded=sharded)
        self.best: dict[int, float] = {}
        self._monitor, self._sign = monitor, sign_of(mode)
        self._num_best = check_number("num_best", num_best)

    def on_train_begin(self, handler: NNHandler) -> None:
        check_writable(self.folder)

    def _follow(self, handler: NNHandler, value: float | None) -> None:
        step = handler.num_steps
        if value is not None and not math.isnan(value):
            ranked = sorted((self.best | {step: value}).items(), key=lambda item: self._sign * item[1])
            self.best = dict(ranked[: self._num_best])
        save_in(self.folder, handler, is_best=step == next(iter(self.best), None), good=self.best)

    def on_train_end(self, handler: NNHandler) -> None:
        self.folder.wait()

    def state_dict(self) -> dict[str, Any]:
        return {"best": dict(self.best)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = dict([*state["best"].items()][: self._num_best])


class ReplicaCheck(Callback):
    """Compares the model and the optimizer's state between the ranks every so many steps, bit for bit.

    See :meth:`distman.DistributedManager.check_replicas`.

    Args:
        every: Number of steps between two checks.
        buffers: Compare buffers, too.

    Raises:
        TypeError: ``every`` is not a whole number.
        ValueError: ``every`` is less than 1.
        DivergenceError: In a training, on every rank: a tensor differs on some rank.

    Example:
        >>> handler = NNHandler(torch.nn.Linear, in_features=1, out_features=1)
        >>> handler.add_callback(ReplicaCheck(every=2))
    """

    def __init__(self, every: int = 50, *, buffers: bool = True) -> None:
        self._every, self._buffers = check_number("every", every), buffers

    def on_step_end(self, handler: NNHandler, step: int) -> None:
        if step % self._every == 0:
            optimizers = handler.optimizers.values()
            DistributedManager().check_replicas(handler.model, *optimizers, step=step, buffers=self._buffers)
