"""``nn_handler.callbacks``: ready-made callbacks."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import torch

from distman import checkpoint
from distman.compat.nnhandler._checkpoints import with_suffix
from distman.compat.nnhandler._events import Callback, Logs
from distman.compat.nnhandler._names import refuse
from distman.handler import Best, TensorBoardTracker, Tracker, WandbTracker


class _Monitoring(Callback):
    """A callback that follows the best value."""

    def __init__(self, monitor: str, mode: str, min_delta: float) -> None:
        self.monitor, self.mode = monitor, mode
        self._best = Best("max" if mode == "max" else "min", min_delta)
        if mode not in ("min", "max"):
            warnings.warn(f"mode must be 'min' or 'max', got {mode!r}: it is taken for 'min'", stacklevel=3)

    @property
    def best(self) -> float:
        """The best value so far."""
        worst = -math.inf if self.mode == "max" else math.inf
        return worst if self._best.value is None else self._best.value

    def _improves(self, logs: Logs) -> bool | None:
        """Return whether this epoch is the best; None, with a warning, if the value is not there."""
        value = logs.get(self.monitor)
        if value is None:
            warnings.warn(f"{type(self).__name__}: there is no {self.monitor} among {sorted(logs)}", stacklevel=3)
            return None
        return self._best.improves(float(value))


def _validated(handler: Any) -> list[torch.nn.Module]:
    """Return what has the weights that validations measure, and the handler has in the end; the average first."""
    return [one for one in (handler.ema, handler.module) if one is not None]


class ModelCheckpoint(_Monitoring):
    """Saves the handler, or the weights alone, after the best epochs or after every ``save_freq``.

    In ``filepath``, names of results in braces are filled in, such as ``{epoch:02d}``. The weights are those of the
    moving average, if there is one.
    """

    def __init__(
        self,
        filepath: str = ".",
        monitor: str = "val_loss",
        mode: str = "min",
        save_best_only: bool = True,
        save_weights_only: bool = False,
        save_freq: int = 1,
        verbose: int = 0,
    ) -> None:
        super().__init__(monitor, mode, 0.0)
        self.filepath, self.save_best_only, self.save_weights_only = filepath, save_best_only, save_weights_only
        self.save_freq, self.verbose = save_freq, verbose

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        logs = logs or {}
        is_due = self._improves(logs) if self.save_best_only else (epoch + 1) % self.save_freq == 0
        if not is_due:
            return
        path = with_suffix(self.filepath.format(**logs))
        if self.save_weights_only:
            checkpoint.save(checkpoint.model_state(_validated(self.handler)[0]), path)
        else:
            self.handler.save(path)
        if self.verbose:
            self.handler.log(f"epoch {epoch + 1}: saved {path}")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best.value = state_dict["best"]


class EarlyStopping(_Monitoring):
    """Ends the training after ``patience`` epochs in a row in which a result has not improved by ``min_delta``."""

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0.0,
        patience: int = 10,
        mode: str = "min",
        verbose: int = 0,
        restore_best_weights: bool = False,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        self.min_delta, self.patience, self.verbose = min_delta, patience, verbose
        self.restore_best_weights = restore_best_weights
        self.wait = self.stopped_epoch = 0
        self.best_weights: dict[str, Any] | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.wait, self.stopped_epoch, self._best.value, self.best_weights = 0, 0, None, None

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        has_improved = self._improves(logs or {})
        if has_improved is None:
            return
        if has_improved and self.restore_best_weights:
            self.best_weights = copy.deepcopy(checkpoint.model_state(_validated(self.handler)[0]))
        self.wait = 0 if has_improved else self.wait + 1
        if self.wait < self.patience:
            return
        self.stopped_epoch = epoch + 1
        self.handler._stop_training = True
        if self.best_weights is not None:
            for model in _validated(self.handler):
                checkpoint.load_model_state(model, self.best_weights)
        if self.verbose:
            self.handler.log(f"epoch {epoch + 1}: {self.monitor} has stopped improving")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best.value, "wait": self.wait, "stopped_epoch": self.stopped_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best.value, self.wait = state_dict["best"], state_dict["wait"]
        self.stopped_epoch = state_dict["stopped_epoch"]


class LearningRateMonitor(Callback):
    """Needs to do nothing: the learning rates are among the results of each epoch, as ``lr`` and ``lr_group_0``."""


class EpochTimer(Callback):
    """Puts the seconds of each epoch among its results, as ``epoch_time_sec``."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if logs is not None:
            logs["epoch_time_sec"] = logs["epoch_time"]


class ParameterNormMonitor(Callback):
    """Puts the norm of all parameters, whose type is a number or ``"inf"``, among the results, as ``param_norm_2``."""

    def __init__(self, log_freq_epoch: int = 1, norm_type: float | str = 2) -> None:
        self.log_freq_epoch, self.norm_type = log_freq_epoch, float(norm_type)
        self._name = f"param_norm_{str(norm_type).lower()}"

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if logs is not None and (epoch + 1) % self.log_freq_epoch == 0:
            parameters = [one.detach().flatten() for one in self.handler.module.parameters()]
            logs[self._name] = torch.cat(parameters).norm(self.norm_type).item()


class ParamScheduler(Callback):
    """Sets an attribute of the module before each epoch, to what ``schedule.get_value(epoch)`` returns."""

    def __init__(self, parameter_name: str, schedule: Any, verbose: int = 0) -> None:
        self.parameter_name, self.schedule, self.verbose = parameter_name, schedule, verbose

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        value = self.schedule.get_value(epoch)
        setattr(self.handler.module, self.parameter_name, value)
        if self.verbose:
            self.handler.log(f"epoch {epoch + 1}: {self.parameter_name} is {value:.6g}")


class _Logger(Callback):
    """A callback that lets a tracker write the results of steps and epochs, on rank 0."""

    tracker: Tracker

    def set_handler(self, handler: Any) -> None:
        super().set_handler(handler)
        handler.distman.add_callback(self.tracker)


class TensorBoardLogger(_Logger):
    """Writes curves for TensorBoard; each run has a folder of its own, named by ``comment`` if that is given."""

    def __init__(self, log_dir: str = "./logs", comment: str = "") -> None:
        self.tracker = TensorBoardTracker(log_dir, run=comment or None)


class WandbLogger(_Logger):
    """Writes curves to Weights & Biases, after each epoch.

    Another ``log_freq_epoch`` is refused, as is ``log_model_weights``; the topology of the model is left out.
    """

    def __init__(
        self,
        project: str,
        entity: str | None = None,
        run_name: str | None = None,
        config: dict[str, Any] | None = None,
        log_freq_epoch: int = 1,
        log_model_topology: bool = True,
        log_model_weights: bool = False,
        log_weight_freq_epoch: int = 10,
    ) -> None:
        refuse(log_freq_epoch=log_freq_epoch != 1, log_model_weights=log_model_weights)
        self.tracker = WandbTracker(run_name, project=project, entity=entity, config=config)
