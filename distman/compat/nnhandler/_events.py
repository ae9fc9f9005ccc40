"""The events of a training, and how they follow from those of distman's handler."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from distman import handler as ours
from distman.compat.nnhandler._kinds import ModelType

Logs = dict[str, Any]
_BATCH_EVENTS = ("on_train_batch_begin", "on_train_batch_end", "on_val_batch_begin", "on_val_batch_end")


class Callback:
    """The events of a training, one method each, called on every rank with the results of all ranks.

    An exception ends the training on all ranks. ``on_train_batch_end`` follows the step of the optimizer; where several
    batches make a step, that of the last one does, and the others come before. Its loss and metrics, as those of
    ``on_val_batch_end``, are this rank's.

    Attributes:
        handler: The :class:`NNHandler`, once the callback has been added to one.
    """

    handler: Any

    def set_handler(self, handler: Any) -> None:
        """Take the handler."""
        self.handler = handler

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Called before the first epoch."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Called after the last epoch."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Called before an epoch."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Called after an epoch and its validation."""

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Called before the model sees a batch."""

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Called after a batch, and after the optimizer's step if the batch is the last one of it."""

    def on_val_begin(self, logs: Logs | None = None) -> None:
        """Called before a validation."""

    def on_val_end(self, logs: Logs | None = None) -> None:
        """Called after a validation."""

    def on_val_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Called before the model sees a batch of a validation."""

    def on_val_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Called after a batch of a validation."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know, as plain values and tensors."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore such a state."""


class Validating(ours.NNHandler):
    """distman's handler, with events for validations."""

    bridge: Bridge

    def validate(self) -> dict[str, float]:
        return self.bridge.validated(super().validate)


class Bridge(ours.Callback):
    """Calls the callbacks of an NNHandler, and computes its loss."""

    def __init__(self, handler: Any) -> None:
        self._nn = handler
        self.phase = ""  # "train" or "val"; empty outside of a training
        self.epoch = 0  # its index, counted over all trainings
        self.done = 0  # epochs that distman's handler has counted
        self._offset = 0  # epochs of the history that it has not counted: those of a file without its state
        self._states: dict[str, dict[str, Any]] = {}  # of callbacks that have yet to be added, by their classes' names
        self._total = self._batch = 0
        self._pending: Logs | None = None
        self._last: Logs = {}

    def begin(self, epochs: int) -> int:
        """Get ready for so many more epochs; return the number of epochs in all, as distman's handler counts them."""
        self._offset = len(self._nn.train_losses) - self.done
        self._total = self.done + epochs
        return self._total

    def on_train_begin(self, handler: ours.NNHandler) -> None:
        self.phase, self._last = "train", {}
        start, total = self.done + self._offset, self._total + self._offset
        self._call(
            "on_train_begin", logs={"start_epoch": start, "total_epochs": total, "world_size": self._nn._world_size}
        )

    def on_epoch_begin(self, handler: ours.NNHandler, epoch: int) -> None:
        """Call the callbacks, and put the modules into their modes."""
        self.epoch, self._batch = epoch + self._offset, 0
        for module in self._nn.modules_always_eval:
            module.eval()
        self._call("on_epoch_begin", epoch=self.epoch, logs={"epoch": self.epoch + 1})

    def on_step_end(self, handler: ours.NNHandler, step: int) -> None:
        self._end_batch()

    def on_epoch_end(self, handler: ours.NNHandler, record: dict[str, float]) -> None:
        """Call the callbacks, and save."""
        self._end_batch()
        self.done += 1
        rates = [float(group["lr"]) for group in handler.optimizer.param_groups]
        logs: Logs = {
            **{name: value for name, value in record.items() if name not in ("seconds", "skipped")},
            "epoch": self.epoch + 1,
            "epoch_time": record["seconds"],
            "lr": rates[0],
            **{f"lr_group_{index}": rate for index, rate in enumerate(rates)},
        }
        for name in ["val_loss", *(f"val_{metric}" for metric in self._nn.metrics)]:
            logs.setdefault(name, math.nan)
        self._call("on_epoch_end", epoch=self.epoch, logs=logs)
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in logs.items() if isinstance(value, float))
        self._nn.log(f"epoch {self.epoch + 1}/{self._total + self._offset}: {numbers}")
        self._nn._save_after(logs, is_last=False)
        self._last = logs

    def on_train_end(self, handler: ours.NNHandler) -> None:
        """Save after what has turned out to be the last epoch, and call the callbacks."""
        if self._last:
            self._nn._save_after(self._last, is_last=True)
        self._call("on_train_end", logs={**self._last, "final_epoch": self.epoch + 1})
        self.phase = ""

    def state_dict(self) -> dict[str, Any]:
        return {type(callback).__name__: callback.state_dict() for callback in self._nn.callbacks} | self._states

    def load_state_dict(self, state: Any) -> None:
        """Restore the states of the callbacks, also of those that are added later."""
        self._states = dict(state)
        for callback in self._nn.callbacks:
            self.restore(callback)

    def restore(self, callback: Callback) -> None:
        """Give a callback the state that was loaded for it, if there is one."""
        state = self._states.pop(type(callback).__name__, None)
        if state is not None:
            callback.load_state_dict(state)

    def validated(self, validate: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Validate, and call the callbacks before and afterwards; outside of a training, only validate."""
        if not self.phase:
            return validate()
        self._end_batch()
        num_batches, self.phase, self._batch = self._batch, "val", 0
        self._call("on_val_begin", logs={"epoch": self.epoch + 1})
        results = validate()
        self._end_batch()
        logs = {"epoch": self.epoch + 1, **{f"val_{name}": value for name, value in results.items()}}
        self._call("on_val_end", logs=logs)
        self.phase, self._batch = "train", num_batches
        return results

    def forward(self, model: torch.nn.Module, batch: Any) -> tuple[Any, Any]:
        """Return the outputs for a batch and its targets; for a score-based model, the model and the samples."""
        parts = batch if isinstance(batch, list | tuple) else [batch]
        if self._nn._model_type is ModelType.SCORE_BASED:
            self._begin_batch(batch)
            return model, parts[0]
        is_own_target = self._nn._model_type is ModelType.GENERATIVE
        if len(parts) < 2 and not is_own_target and self.phase:
            raise ValueError(
                f"a batch of a {self._nn._model_type.value} model must have inputs and targets, got {len(parts)} part. "
                "Let the dataset return both, or pass model_type='generative', whose inputs are its targets."
            )
        self._begin_batch(batch)
        inputs, *others = parts
        targets = inputs if is_own_target else others.pop(0) if others else None
        num_taken = len(inspect.signature(self._nn.module.forward).parameters) - 1
        if len(others) > num_taken:
            warnings.warn(
                f"forward() takes {num_taken} parts of a batch besides the inputs: others are left out", stacklevel=2
            )
        return model(inputs, *others[:num_taken]), targets

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Return the loss of a batch; the first one, if there are several."""
        handler = self._nn
        kwargs = dict(handler.loss_fn_kwargs)
        if handler.pass_epoch_to_loss:
            kwargs["epoch"] = self.epoch
        is_score_based = handler._model_type is ModelType.SCORE_BASED
        arguments = (targets, handler.sde, outputs, handler.device) if is_score_based else (outputs, targets)
        found = handler.loss_fn(*arguments, **kwargs)
        loss: torch.Tensor = found[0] if isinstance(found, tuple) else found
        if self._pending is not None:
            prefix = "val_" if self.phase == "val" else ""
            self._pending[f"{prefix}loss"] = loss.item()
            with torch.no_grad():
                measured = {} if is_score_based else handler.metrics
                values = {name: float(metric(outputs, targets)) for name, metric in measured.items()}
            self._pending |= {f"{prefix}{name}": value for name, value in values.items()}
        return loss

    def _begin_batch(self, batch: Any) -> None:
        if not self.phase or not self._has_batch_events():
            return
        self._end_batch()
        first = batch[0] if isinstance(batch, list | tuple) and batch else batch
        self._pending = {"batch": self._batch, "size": len(first) if isinstance(first, torch.Tensor) else -1}
        self._call(f"on_{self.phase}_batch_begin", batch=self._batch, logs=self._pending)

    def _end_batch(self) -> None:
        if self._pending is not None:
            self._call(f"on_{self.phase}_batch_end", batch=self._batch, logs=self._pending)
            self._batch, self._pending = self._batch + 1, None

    def _has_batch_events(self) -> bool:
        """Return whether a callback has events of batches, whose losses have to be fetched from the device then."""
        found = [getattr(type(callback), event) for callback in self._nn.callbacks for event in _BATCH_EVENTS]
        return found != [getattr(Callback, event) for _ in self._nn.callbacks for event in _BATCH_EVENTS]

    def _call(self, event: str, **arguments: Any) -> None:
        for callback in self._nn.callbacks:
            getattr(callback, event)(**arguments)
