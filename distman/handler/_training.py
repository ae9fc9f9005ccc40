"""Epoch after epoch, in step with the other ranks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from distman.collectives._fused import fused_all_reduce
from distman.collectives._objects import all_gather_objects
from distman.handler._accumulators import Accumulators, Metric
from distman.handler._history import History
from distman.handler._objective import Objective
from distman.handler._optimization import Optimization
from distman.handler._randomness import generators_state, set_generators_state
from distman.handler._reporting import ProgressBar, Reporter
from distman.handler._scheduling import Scheduling
from distman.handler._sources import Source, Step
from distman.manager import DistributedManager
from distman.metrics import aggregate_loss


class Hooks:
    """What the program does at the turns of a training; nothing, unless a subclass says so."""

    def on_epoch_begin(self, epoch: int) -> None:
        """Before an epoch, or the rest of one."""

    def on_step_end(self, step: int) -> None:
        """After a step of the optimizer."""

    def validate(self, epoch: int) -> dict[str, float]:
        """Return loss and metrics of the validation; empty where there is none after this epoch.

        Collective.
        """
        return {}

    def on_epoch_end(self, record: dict[str, float]) -> None:
        """After an epoch and its validation."""

    def is_to_save(self, *, step: int | None = None, epoch: int | None = None) -> bool:
        """Return whether to save after this step, or this epoch; the same on all ranks."""
        return False

    def save(self) -> None:
        """Save the training as it stands.

        Collective.
        """


class Training:
    """The loop over epochs and steps, which can be left and gone on with after any step.

    Args:
        objective: What is minimized.
        optimization: How the optimizer steps.
        source: Where the batches come from.
        scheduling: The learning rate's schedule.
        metrics: What to measure besides the loss.
        history: Where the epochs are recorded.
        reporter: What is told of them.
        hooks: What the program does.

    Attributes:
        epoch: Index of the epoch under way, or of the next one.
        reason: Why the ranks agreed to stop before the last epoch; empty if they did not.
    """

    def __init__(
        self,
        *,
        objective: Objective,
        optimization: Optimization,
        source: Source,
        scheduling: Scheduling,
        metrics: Mapping[str, Metric],
        history: History,
        reporter: Reporter,
        hooks: Hooks,
    ) -> None:
        self._objective, self.optimization, self.source = objective, optimization, source
        self._scheduling, self._metrics, self._history = scheduling, metrics, history
        self._reporter, self._hooks = reporter, hooks
        self.epoch = 0
        self.reason = ""
        self._wish = ""
        self._accumulators = Accumulators(metrics)
        self._seconds = 0.0
        self._is_resumed = False
        source.begin(0)

    def run(self, epochs: int, *, accumulate: int = 1, progress: bool | None = None) -> bool:
        """Go on until so many epochs are done; return False if it was left to be gone on with in another run.

        Collective. It is left when :meth:`DistributedManager.should_stop` says so, after it was saved.

        Args:
            epochs: Number of epochs in all, with those of the runs before.
            accumulate: Number of batches whose gradients make a step.
            progress: Show a bar; None shows it on a terminal.
        """
        while self.epoch < epochs and not self.reason:
            bar = ProgressBar(self.epoch, epochs, self.source.num_steps(), is_shown=progress)
            try:
                is_over = self._run_epoch(accumulate, bar)
            finally:
                bar.close()
            if not is_over:
                return False
            self._finish_epoch(epochs)
        return True

    def stop(self, reason: str) -> None:
        """End the training after this epoch, if any rank says so."""
        self._wish = reason

    def state_dict(self) -> dict[str, Any]:
        """Return all that the rest of the training depends on, but for the model and the history.

        Collective.
        """
        source = {"kind": type(self.source).__name__, "position": self.source.state_dict()}
        own = {
            "random": generators_state(),
            "sums": self._accumulators.sums.cpu(),
            "source": source,
            "wish": self._wish,
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
        """Go on from such a state; of another number of ranks random numbers are left out, and sums are rank 0's.

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
        goes_on = source["kind"] == type(self.source).__name__
        if goes_on:
            goes_on = self.source.load_state_dict(source["position"], is_same_job=is_same_job)
        else:
            self.source.begin(self.epoch)
        self._accumulators = Accumulators(self._metrics)
        sums = ranks[manager.rank]["sums"] if is_same_job else sum(own["sums"] for own in ranks)
        if goes_on and (is_same_job or manager.is_main) and sums.shape == self._accumulators.sums.shape:
            self._accumulators.sums = sums
        if is_same_job:
            self._wish = ranks[manager.rank]["wish"]
            set_generators_state(ranks[manager.rank]["random"])
        self._is_resumed = True

    def _run_epoch(self, accumulate: int, bar: ProgressBar) -> bool:
        """Go through the rest of an epoch; return False if it was left."""
        self._hooks.on_epoch_begin(self.epoch)
        started = time.perf_counter()
        for steps in _windows(self.source.steps(self.epoch), accumulate):
            if self._is_resumed:
                self.optimization.rehearse(self._objective, steps)
                self._is_resumed = False
            is_taken = self.optimization.run(self._objective, steps, self._accumulators)
            if is_taken:
                self._hooks.on_step_end(self.optimization.num_steps)
                self._scheduling.after_step()
            bar.advance(len(steps), self._accumulators)
            is_left = DistributedManager().should_stop()
            if is_left or (is_taken and self._hooks.is_to_save(step=self.optimization.num_steps)):
                started = self._add_time(started)
                self._hooks.save()
            if is_left:
                return False
        self._add_time(started)
        return True

    def _add_time(self, started: float) -> float:
        now = time.perf_counter()
        self._seconds += now - started
        return now

    def _finish_epoch(self, epochs: int) -> None:
        found = self._accumulators.compute()
        validated = self._hooks.validate(self.epoch)
        record = {
            "epoch": float(self.epoch),
            **found,
            **{f"val_{name}": value for name, value in validated.items()},
            "lr": self._scheduling.learning_rate,
            "skipped": float(self.optimization.num_skipped),
            "seconds": aggregate_loss(self._seconds),
        }
        self._scheduling.after_epoch(record)
        self._history.add(record)
        self.epoch += 1
        self._accumulators, self._seconds, self.optimization.num_skipped = Accumulators(self._metrics), 0.0, 0
        self._hooks.on_epoch_end(record)
        self._reporter.say_epoch(record, epochs)
        self._agree_to_stop()
        if self._hooks.is_to_save(epoch=self.epoch) or self.reason or self.epoch >= epochs:
            self._hooks.save()

    def _agree_to_stop(self) -> None:
        """Stop on all ranks for a reason that one of them has."""
        wishes = fused_all_reduce(torch.tensor(int(bool(self._wish)), device=DistributedManager().device))
        if wishes.item() and (reasons := [reason for reason in all_gather_objects(self._wish) if reason]):
            self.reason, self._wish = reasons[0], ""
            self._reporter.say("stopped: %s", self.reason)


def _windows(steps: Iterator[Step], size: int) -> Iterator[list[Step]]:
    while window := list(itertools.islice(steps, size)):
        yield window
