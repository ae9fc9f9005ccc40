"""The training loop over epochs and steps, the same on all ranks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from distman._text import printable
from distman.collectives._fused import fused_all_reduce
from distman.collectives._objects import all_gather_objects
from distman.handler._accumulators import Accumulators, Metric
from distman.handler._events import Callback, Callbacks
from distman.handler._history import History, turn_into_numbers
from distman.handler._objective import Objective
from distman.handler._optimization import Optimization
from distman.handler._randomness import generators_state, set_generators_state
from distman.handler._reporting import ProgressBar, Reporter
from distman.handler._resumption import AutoSave
from distman.handler._scheduling import Scheduling
from distman.handler._sources import Source, Step
from distman.manager import DistributedManager
from distman.metrics import aggregate_loss

if TYPE_CHECKING:
    from distman.handler._nn_handler import NNHandler


class Training:
    """The loop over epochs and steps, which can be interrupted and resumed after any step.

    Args:
        handler: The handler, which callbacks are called with, and which validates and says what to save.
        objective: What is minimized.
        optimization: How the optimizer steps.
        source: Where the batches come from.
        scheduling: The schedule of the learning rate.
        metrics: What to measure besides the loss.
        history: Where the results of the epochs are recorded.
        reporter: Where they are logged.
        callbacks: What is called at the events of the training.
        auto_save: When to save; None for never.
        validate_every: Number of epochs from one validation to the next.

    Attributes:
        epoch: Index of the current epoch; between epochs, of the next one.
        reason: Why the ranks agreed to stop before the last epoch; empty if they did not.

    Raises:
        ValueError: ``validate_every`` is less than 1.
    """

    def __init__(
        self,
        handler: NNHandler,
        *,
        objective: Objective,
        optimization: Optimization,
        source: Source,
        scheduling: Scheduling,
        metrics: Mapping[str, Metric],
        history: History,
        reporter: Reporter,
        callbacks: Callbacks,
        auto_save: AutoSave | None,
        validate_every: int = 1,
    ) -> None:
        if validate_every < 1:
            raise ValueError(f"validate_every must be at least 1, got {validate_every}. Pass a number of epochs.")
        self._handler = handler
        self._objective, self.optimization, self.source = objective, optimization, source
        self._scheduling, self._metrics, self._history = scheduling, metrics, history
        self._reporter, self._callbacks = reporter, callbacks
        self._auto_save, self._validate_every = auto_save, validate_every
        self.epoch = 0
        self.reason = ""
        self._stop_reason = ""
        self._accumulators = Accumulators(metrics)
        self._seconds = 0.0
        self._must_rehearse = False
        source.begin(0)

    def run(self, epochs: int, *, accumulate: int = 1, progress: bool | None = None) -> bool:
        """Train until so many epochs are done; return False if the job was asked to stop before.

        Collective. When :meth:`DistributedManager.should_stop` says so, the training is saved after the current step,
        to be resumed by another run.

        Args:
            epochs: Total number of epochs, including those of earlier runs.
            accumulate: Number of batches whose gradients make a step.
            progress: Show a progress bar; None shows it on a terminal.
        """
        self._callbacks.emit(Callback.on_train_begin, self._handler)
        while self.epoch < epochs and not self.reason:
            bar = ProgressBar(self.epoch, epochs, self.source.num_steps(), is_shown=progress)
            try:
                is_over = self._run_epoch(accumulate, bar)
            finally:
                bar.close()
            if not is_over:
                return False
            self._finish_epoch(epochs)
        self._callbacks.emit(Callback.on_train_end, self._handler)
        return True

    def stop(self, reason: str) -> None:
        """Ask for the training to end after this epoch; it does if any rank has asked."""
        self._stop_reason = reason

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the rest of the training depends on, except for the model and the history.

        Collective.

        Raises:
            NonFiniteLossError: On every rank: a step has spoilt the model, as :meth:`Optimization.check` says.
        """
        self.optimization.check()
        source = {"kind": type(self.source).__name__, "position": self.source.state_dict()}
        own = {
            "random": generators_state(),
            "sums": self._accumulators.sums.cpu(),
            "source": source,
            "stop_reason": self._stop_reason,
        }
        return {
            "epoch": self.epoch,
            "seconds": self._seconds,
            "reason": self.reason,
            "optimization": self.optimization.state_dict(),
            "scheduler": self._scheduling.state_dict(),
            "ranks": all_gather_objects(own),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, keeps_optimizer: bool = False) -> None:
        """Resume from such a state.

        If another number of ranks saved it, random numbers are not restored, and rank 0 takes over all sums.

        Args:
            state: The state.
            keeps_optimizer: Leave optimizer and scheduler as they are.
        """
        self.epoch, self._seconds, self.reason = state["epoch"], state["seconds"], state["reason"]
        self.optimization.load_state_dict(state["optimization"], keeps_optimizer=keeps_optimizer)
        if not keeps_optimizer:
            self._scheduling.load_state_dict(state["scheduler"])
        manager, ranks = DistributedManager(), state["ranks"]
        is_same_job = len(ranks) == manager.world_size
        source = ranks[manager.rank if is_same_job else 0]["source"]
        is_resumed = source["kind"] == type(self.source).__name__
        if is_resumed:
            is_resumed = self.source.load_state_dict(source["position"], is_same_job=is_same_job)
        else:
            self.source.begin(self.epoch)
        self._accumulators = Accumulators(self._metrics)
        sums = ranks[manager.rank]["sums"] if is_same_job else sum(own["sums"] for own in ranks)
        if is_resumed and (is_same_job or manager.is_main) and sums.shape == self._accumulators.sums.shape:
            self._accumulators.sums = sums
        if is_same_job:
            self._stop_reason = ranks[manager.rank]["stop_reason"]
            set_generators_state(ranks[manager.rank]["random"])
        self._must_rehearse = True

    def _run_epoch(self, accumulate: int, bar: ProgressBar) -> bool:
        """Train for the rest of an epoch; return False if the job was asked to stop."""
        self._callbacks.emit(Callback.on_epoch_begin, self._handler, self.epoch)
        started = time.perf_counter()
        for steps in _windows(self.source.steps(self.epoch), accumulate):
            if self._must_rehearse:
                self.optimization.rehearse(self._objective, steps)
                self._must_rehearse = False
            is_taken = self.optimization.run(self._objective, steps, self._accumulators)
            if is_taken:
                self._callbacks.emit(Callback.on_step_end, self._handler, self.optimization.num_steps)
                self._scheduling.after_step()
            bar.advance(len(steps), self._accumulators)
            must_stop = DistributedManager().should_stop()
            if must_stop or (is_taken and self._is_save_due(step=self.optimization.num_steps)):
                started = self._add_time(started)
                self._save()
            if must_stop:
                return False
        self.optimization.check()  # before the validation
        self._add_time(started)
        return True

    def _add_time(self, started: float) -> float:
        now = time.perf_counter()
        self._seconds += now - started
        return now

    def _finish_epoch(self, epochs: int) -> None:
        record = {
            "epoch": float(self.epoch),
            **self._accumulators.compute(),
            **{f"val_{name}": value for name, value in self._validate().items()},
            "lr": self._scheduling.learning_rate,
            "skipped": float(self.optimization.num_skipped),
            "seconds": aggregate_loss(self._seconds),
        }
        self._scheduling.after_epoch(record)
        self._history.add(record)
        self.epoch += 1
        self._accumulators, self._seconds, self.optimization.num_skipped = Accumulators(self._metrics), 0.0, 0
        self._callbacks.emit(Callback.on_epoch_end, self._handler, record)
        turn_into_numbers(record)
        self._reporter.log_epoch(record, epochs)
        self._agree_to_stop()
        if self._is_save_due(epoch=self.epoch) or self.reason or self.epoch >= epochs:
            self._save()

    def _validate(self) -> dict[str, float]:
        """Return loss and metrics of the validation; empty if there is none after this epoch."""
        is_due = (self.epoch + 1) % self._validate_every == 0
        return self._handler.validate() if is_due and self._handler.validates else {}

    def _is_save_due(self, *, step: int | None = None, epoch: int | None = None) -> bool:
        return self._auto_save is not None and self._auto_save.is_due(step=step, epoch=epoch)

    def _save(self) -> None:
        if self._auto_save is not None:
            self._auto_save.save(self._handler)

    def _agree_to_stop(self) -> None:
        """End the training on all ranks if one of them asked for it."""
        is_asked = torch.tensor(int(bool(self._stop_reason)), device=DistributedManager().device)
        num_asked = fused_all_reduce(is_asked).item()  # a number first: the reasons are pickles, which take longer
        if num_asked and (reasons := [reason for reason in all_gather_objects(self._stop_reason) if reason]):
            self.reason, self._stop_reason = reasons[0], ""
            self._reporter.log("stopped: %s", printable(self.reason))


def _windows(steps: Iterator[Step], size: int) -> Iterator[list[Step]]:
    while window := list(itertools.islice(steps, size)):
        yield window
