"""The training loop over epochs and steps, the same on all ranks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch

from distman._base.arguments import check_number
from distman._base.text import printable
from distman._coordination.wait_scope import has_failed
from distman.collectives import all_gather_objects
from distman.data import generators_state, set_generators_state
from distman.errors import DistmanError, NonFiniteLossError
from distman.handler._accumulators import Accumulators, Numbers, StepRecords, TakenStep
from distman.handler._archive import save_in
from distman.handler._history import Record, as_numbers
from distman.handler._objective import Outcome
from distman.handler._reporting import ProgressBar
from distman.handler._setup import Setup
from distman.manager import DistributedManager
from distman.metrics import aggregate_loss
from distman.topology import is_whole_number
from distman.training import Changes, Engine, Step, Stepper

if TYPE_CHECKING:
    from distman.handler._archive import Archive
    from distman.handler._nn_handler import NNHandler


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long a training goes on, and when it validates; what they mean is said by :meth:`NNHandler.train`."""

    epochs: int | None
    max_steps: int | None = None
    limit_batches: int | None = None
    accumulate: int = 1
    validate_every: int = 1
    validate_every_steps: int | None = None

    def __post_init__(self) -> None:
        if not is_whole_number(self.epochs) and (self.epochs is not None or self.max_steps is None):
            raise TypeError(
                f"epochs must be a whole number, got {self.epochs!r}. Pass the total number of epochs, or max_steps."
            )
        for name in ("max_steps", "limit_batches", "accumulate", "validate_every", "validate_every_steps"):
            number = getattr(self, name)
            if number is not None or name in ("accumulate", "validate_every"):
                check_number(name, number)

    def are_reached(self, num_epochs: int, num_steps: int) -> bool:
        return (self.epochs is not None and num_epochs >= self.epochs) or self.has_last(num_steps)

    def has_last(self, num_steps: int) -> bool:
        return self.max_steps is not None and num_steps >= self.max_steps

    def validates_after(self, num_steps: int) -> bool:
        return self.validate_every_steps is not None and num_steps % self.validate_every_steps == 0


_KEPT = ("epoch", "num_batches", "num_passes", "validated_at", "seconds", "reason", "pending")
"""What says how far a training is, the same on all ranks: attributes of it, and names in its state."""


class Training:
    """The loop over epochs and steps, which can be interrupted and resumed between any two steps.

    After the batches of a step follow the weights, their average and the counters, which the engine sets; then the
    schedule of the learning rate; then the events. After a validation within an epoch follow the schedule that monitors
    it, its record, and its events. After an epoch follow its validation, the schedule, the record, the counters, and
    its events. So what a callback saves is whole, and what is left to do then is *pending*: a run that is resumed from
    it calls the callbacks that have not been called for the event, and does what follows.
    """

    def __init__(self, handler: NNHandler, setup: Setup, archive: Archive, engine: Engine, limits: Limits) -> None:
        callbacks = archive.callbacks
        self.engine, self._learn = engine, _learning(setup, engine)
        engine.emit, callbacks.handler = callbacks.emit, weakref.ref(handler)
        self._data, self._source, self._schedules = setup.train_data, setup.make_source(), setup.make_schedules()
        self._new_accumulators = Numbers if setup.step is not None else functools.partial(Accumulators, setup.metrics)
        self._accumulators: Accumulators = self._new_accumulators()
        self._history, self._auto_save = archive.history, archive.auto_save
        self._reporter, self._callbacks, self._limits = archive.reporter, callbacks, limits
        self.epoch = self.num_batches = 0  # the current epoch, or the next one; and this rank's batches in it
        self.num_passes = 0  # through the data, that are over; epochs may end before the data do
        self.validated_at = 0  # number of steps at the latest validation within an epoch
        self.seconds, self._since = 0.0, time.perf_counter()  # that the epoch has taken on this rank
        self.reason = self._stop_reason = ""  # why the ranks agreed to stop before the last epoch; this rank's wish
        self.pending: Literal["", "step", "validation", "epoch"] = ""  # what has been done, without its events
        self._is_pass_over = False
        self._reading: Generator[Step] | None = None  # the rest of this pass, which the next epoch may go on with
        self._step_records = StepRecords(are_kept=False)  # until it runs
        self._emitted: list[Record] = []  # step records that callbacks are being called with
        self._record: Record | None = None  # of an epoch that has been validated, and is not over
        self._is_whole = True  # nothing has been read that has not been learned
        self._source.begin(0)

    def run(self, *, progress: bool | None = None) -> bool:
        """Train until the limits are reached; return False if the job was asked to stop before. Collective."""
        are_kept = all_gather_objects(self._callbacks.has_listeners("on_step_records"))
        self._step_records = StepRecords(are_kept=any(are_kept))
        self._callbacks.emit("on_train_begin")
        if self._emitted:
            self._callbacks.emit_rest("on_step_records", self._emitted)
            self._emitted = []
        if self.pending == "epoch":
            self._end_epoch()
        try:
            while self.num_batches or not self._is_over():
                known = [num for num in (self._source.num_steps(), self._limits.limit_batches) if num is not None]
                bar = ProgressBar(self.epoch, self._limits.epochs, min(known, default=None), is_shown=progress)
                try:
                    is_done = self._run_epoch(bar)
                finally:
                    bar.close()
                if not is_done:
                    return False
                self._finish_epoch()
                if not self._is_over() and DistributedManager().should_stop():  # perhaps during the validation
                    self._save()
                    return False
        except NonFiniteLossError:  # on all ranks: the steps before may show the reason
            self._emit_step_records()
            raise
        finally:
            if self._reading is not None:
                self._reading.close()  # and with it the workers of a loader
                self._reading = None
        self._callbacks.emit("on_train_end")
        return True

    def stop(self, reason: str) -> None:
        """Ask for the training to end after this epoch, or a validation in it; it does if any rank has asked."""
        self._stop_reason = reason

    def state_dict(self) -> dict[str, Any]:
        """Return what the rest of the training depends on, except for model and history. Collective."""
        self._emit_step_records()  # else those of the last steps would be lost to a run that resumes from here
        self.engine.check()
        if not (self._is_whole or has_failed()):  # then a step that is not whole is better than none
            raise DistmanError(
                "a training must be saved between two steps, got a call within a step, whose batches have not been "
                "learned yet. Save in on_step_end or in a later event; after an error within a step, load the last "
                "checkpoint, or write the weights alone with export()."
            )
        own = {
            "random": generators_state(),
            "buffers": self.engine.model.own_buffers(),
            "sums": self._accumulators.sums.to("cpu", copy=True),
            "source": self._source_state(),
            "stop_reason": self._stop_reason,
        }
        return {
            **{name: getattr(self, name) for name in _KEPT},
            "events": self._callbacks.called(),
            "emitted": as_numbers(self._emitted),
            "record": as_numbers([] if self._record is None else [self._record]),
            "optimization": self.engine.state_dict(),
            "scheduler": self._schedules.state_dict(),
            "schedules": self._schedules.described,
            "names": self._accumulators.names,
            "ranks": [own] if has_failed() else all_gather_objects(own),  # no other rank may be left
        }

    def load_state_dict(self, state: Mapping[str, Any], changes: Changes) -> None:
        """Resume from such a state.

        If another number of ranks saved it, random numbers are not restored, and rank 0 takes over all sums.
        """
        self._compare(state, changes)
        for name in _KEPT:
            setattr(self, name, state[name])
        self._emitted, self._record = [*state["emitted"]], next(iter(state["record"]), None)
        self._callbacks.set_called(state["events"])
        self.engine.load_state_dict(state["optimization"], Changes("program" if changes.are_of_program else None))
        self._schedules.load_state_dict(state["scheduler"], state["schedules"], changes)
        manager, ranks = DistributedManager(), state["ranks"]
        is_same_job = len(ranks) == manager.world_size
        own = ranks[manager.rank if is_same_job else 0]
        if self._resume_source(own["source"], is_same_job=is_same_job):
            sums = own["sums"] if is_same_job else sum(one["sums"] for one in ranks)
            is_for_another = not (is_same_job or manager.is_main)
            self._accumulators.resume(state["names"], torch.zeros_like(sums) if is_for_another else sums)
        if is_same_job:
            self._stop_reason = own["stop_reason"]
            self.engine.model.load_own_buffers(own["buffers"])
            set_generators_state(own["random"])

    def _compare(self, state: Mapping[str, Any], changes: Changes) -> None:
        """Find what the program has changed since, before anything is restored."""
        ranks, world_size = state["ranks"], DistributedManager().world_size
        if len(ranks) != world_size:
            self._reporter.log("resuming on %d ranks from a checkpoint of %d", world_size, len(ranks))
        self.engine.compare(state["optimization"], changes)
        self._schedules.compare(state["schedules"], changes)
        saved, own = ranks[0]["source"]["batch_size"], self._source.batch_size
        if saved is not None and own is not None and saved * len(ranks) != own * world_size:
            changes.note("batch_size", saved, own, suffix=", whose batches are used")
        changes.report()

    def go_on_from(self, latest: Training) -> None:
        """Resume from the latest run in this program, with its model, optimizer, scheduler and data as they are now."""
        for name in (*_KEPT, "_stop_reason", "_record"):
            setattr(self, name, getattr(latest, name))
        self.reason = ""
        self.engine.go_on_from(latest.engine)
        position = latest._source_state() if self._data is latest._data else None  # others are read from the beginning
        if self._resume_source(position, is_same_job=True):
            self._accumulators.resume(latest._accumulators.names, latest._accumulators.sums)

    def _source_state(self) -> dict[str, Any]:
        source = self._source
        return {"kind": type(source).__name__, "position": source.state_dict(), "batch_size": source.batch_size}

    def _resume_source(self, state: Mapping[str, Any] | None, *, is_same_job: bool) -> bool:
        """Resume an epoch, and return whether the source is where it was, so that the sums are of the same epoch."""
        if state is None or state["kind"] != type(self._source).__name__:
            self._source.begin(self.num_passes)
        elif self._source.load_state_dict(state["position"], is_same_job=is_same_job):
            return True
        self.num_batches, self._record = 0, None
        return False

    def _run_epoch(self, bar: ProgressBar) -> bool:
        """Train for the rest of an epoch; return False if the job was asked to stop."""
        self._callbacks.emit("on_epoch_begin", self.epoch)
        self.engine.wrap()
        if self.pending == "step":
            self._end_step()
        self._validate_within()  # where a stop came between a step and its validation
        self._count_time()
        batches = self._batches()
        while steps := list(itertools.islice(batches, self._limits.accumulate)):
            is_taken = self._take_step(steps)
            bar.advance(len(steps), self._accumulators)
            must_stop = DistributedManager().should_stop()
            if not must_stop and self._limits.validates_after(self.engine.num_steps):
                with self._pause():
                    self._validate_within()
                must_stop = DistributedManager().should_stop()  # before another step
            if must_stop or (is_taken and self._is_save_due(step=self.engine.num_steps)):
                with self._pause():
                    self._save()
            if must_stop:
                return False
        self._emit_step_records()
        self.engine.check()  # before the results of the epoch are recorded
        self.seconds += time.perf_counter() - self._since
        return True

    def _count_time(self) -> None:
        self._since = time.perf_counter()
        self._step_records.resume()

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self.seconds += time.perf_counter() - self._since
        yield
        self._count_time()

    def _take_step(self, steps: Sequence[Step]) -> bool:
        """Learn from some batches; return False if that was left out."""
        engine, accumulators, found = self.engine, self._accumulators, []
        rates = self._schedules.learning_rates if self._step_records.are_kept else {}  # your own step may set them
        with closing(engine.window(steps)) as batches:
            for batch, step in zip(batches, steps, strict=True):
                outcome = self._learn(batch)
                values = accumulators.measure(outcome, step.num_own)
                found.append(values)
                if isinstance(outcome, Outcome):
                    loss = outcome.loss.detach()
                else:
                    loss = values[0] if values.numel() else values.new_tensor(math.nan)
                self._callbacks.emit("on_train_batch_end", step.batch, loss)
        if not engine.num_left_out:
            for values, step in zip(found, steps, strict=True):
                accumulators.add(values, step.num_own)
        self._is_whole = True
        if not engine.is_taken:
            return False
        if self._step_records.are_kept:
            record = {"step": float(engine.num_steps), "epoch": float(self.epoch), **rates}
            self._step_records.add(TakenStep(record, steps, found, engine.norm))
        self._schedules.after_step(engine.num_taken)
        self._callbacks.begin()
        self.pending = "step"
        self._end_step()
        return True

    def _end_step(self) -> None:
        if self._step_records.are_due:
            self._emit_step_records()
        self._callbacks.emit_rest("on_step_end", self.engine.num_steps)
        self.pending = ""

    def _emit_step_records(self) -> None:
        if has_failed():  # then a state is saved without them: they are means over all ranks
            return
        if records := self._step_records.take(self._accumulators):
            self._emitted = records
            self._callbacks.emit("on_step_records", records)
            self._emitted = []

    def _batches(self) -> Iterator[Step]:
        """Yield the rest of the epoch: of a pass through the data, or as much of it as the limits allow."""
        most = math.inf if self._limits.limit_batches is None else self._limits.limit_batches
        while not self.reason and self.num_batches < most and not self._limits.has_last(self.engine.num_steps):
            if self._reading is None:
                self._reading = self._source.steps(self.num_passes)
            asked = time.perf_counter()
            step = next(self._reading, None)
            self._step_records.wait(time.perf_counter() - asked)
            if step is not None:
                self.num_batches, self._is_whole = self.num_batches + 1, False
                yield step
                continue
            self._reading = None
            if self.num_batches:
                self._is_pass_over = True  # its last batches have yet to make a step, after which it may be saved
                return
            self.num_passes += 1  # the epoch before had ended just where the data do

    def _is_over(self) -> bool:
        return bool(self.reason) or self._limits.are_reached(self.epoch, self.engine.num_steps)

    def _finish_epoch(self) -> None:
        if self._record is None:
            results = {"epoch": float(self.epoch), **self._accumulators.compute()}
            is_due = self._limits.validate_every_steps is None and (self.epoch + 1) % self._limits.validate_every == 0
            self._record = results | (self._validate() if is_due and self._callbacks.handler().validates else {})
        record = self._record
        if "val_loss" in record:
            self._callbacks.emit_rest("on_validation_end", record)
        record |= self._schedules.learning_rates
        record["skipped"] = float(self.engine.num_skipped)
        record["seconds"] = aggregate_loss(self.seconds)
        self._schedules.after_epoch(record)
        self._history.add(record)
        self.epoch, self.num_batches = self.epoch + 1, 0
        self.num_passes, self._is_pass_over = self.num_passes + self._is_pass_over, False
        self._accumulators, self.seconds = self._new_accumulators(), 0.0
        self.engine.num_skipped = 0
        self._record, self.pending = None, "epoch"
        self._end_epoch()

    def _end_epoch(self) -> None:
        self._tell("on_epoch_end", [*self._history][-1])
        self._callbacks.begin()
        if self._is_save_due(epoch=self.epoch) or self._is_over():
            self._save()

    def _validate(self) -> Record:
        self.engine.check()  # before the best of the weights is chosen
        self._callbacks.emit_rest("on_validation_start")
        return {f"val_{name}": value for name, value in self._callbacks.handler().validate().items()}

    def _validate_within(self) -> None:
        """Validate within the epoch, if that is due and has not been done."""
        num_steps = self.engine.num_steps
        if num_steps != self.validated_at and self._limits.validates_after(num_steps):
            self._emit_step_records()
            record = {"epoch": float(self.epoch), "step": float(num_steps), **self._validate()}
            record |= self._schedules.learning_rates
            self._schedules.after_validation(record)
            self._history.validations.append(record)
            self.validated_at, self.pending = num_steps, "validation"
        if self.pending == "validation":
            self._tell("on_validation_end", self._history.validations[-1])

    def _tell(self, event: str, record: Record) -> None:
        self._callbacks.emit_rest(event, record)
        record |= as_numbers([record])[0]
        self._reporter.log_record(record, self._limits.epochs)
        self._agree_to_stop()
        self.pending = ""

    def _is_save_due(self, *, step: int | None = None, epoch: int | None = None) -> bool:
        return self._auto_save is not None and self._auto_save.is_due(step=step, epoch=epoch)

    def _save(self) -> None:
        if self._auto_save is not None:
            save_in(self._auto_save.folder, self._callbacks.handler())

    def _agree_to_stop(self) -> None:
        """End the training on all ranks if one of them asked for it."""
        if reasons := [*filter(None, all_gather_objects(self._stop_reason))]:
            self.reason, self._stop_reason = reasons[0], ""
            self._reporter.log("stopped: %s", printable(self.reason))


def _learning(setup: Setup, engine: Engine) -> Callable[[Any], Any]:
    function, stepper = setup.step, Stepper._over(engine)
    if function is None:
        return functools.partial(engine.learn, setup.required_objective())

    def learn(batch: Any) -> Any:
        with engine.autocast():
            return function(stepper, batch)

    return learn
