"""Ending what the main thread does when another rank has failed: by an exception, or by the end of the process."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from distman._base import timing
from distman._coordination.failure import hook
from distman._coordination.failure.delivery import (
    Delivery,
    Stage,
    is_at_end_of_block,
    is_between_programs,
    is_program_over,
    may_hold_lock,
)
from distman._coordination.failure.pending_work import is_anything_left
from distman._coordination.failure.record import FailureRecord
from distman._coordination.timeouts import run_with_timeout
from distman._coordination.tracking import stacks
from distman._torch_internals import close_all_connections
from distman.errors import JobFailed

_SIGNAL = signal.SIGURG  # ignored by default: harmless where it meets nobody
_MOST_DEFERRALS = 100  # of a raise in a place that is left within microseconds, or that waits there


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long the program may take, in seconds."""

    to_handle: float = timing.FAILURE_GRACE  # for handlers and ``finally`` to be done with the error
    to_come: float = timing.FAILURE_GRACE_NATIVE  # for code that does not return to the interpreter
    to_give_in: float = timing.GIVE_IN
    between_looks: float = timing.DELIVERY_EVERY


class Interruption:
    """Raises ``JobFailed`` in the main thread from another thread, until the program ends or survives.

    A signal handler of Python's does it, so calls of the system that wait come back.
    """

    def __init__(
        self,
        announce: Callable[[FailureRecord], None],
        abort_job: Callable[[BaseException], None],
        is_over: threading.Event,
        patience: Patience,
    ) -> None:
        self._announce = announce  # shows a failure, before it is raised
        self._abort_job = abort_job
        self._is_over = is_over  # set when this rank leaves the job: then nothing has to be interrupted
        self._patience = patience
        self._delivery: Delivery | None = None
        self._is_due = False
        self._is_answered = threading.Event()
        self._num_deferrals = 0
        self._is_awaited = False
        self._delivering = threading.Lock()
        self._is_insisting = False
        self._has_aborted = False
        self._previous: Callable[[int, FrameType | None], Any] | int | None = None
        self._is_installed = threading.current_thread() is threading.main_thread()
        if self._is_installed:
            self._previous = _handler_in_use()
            signal.signal(_SIGNAL, self._handle)

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """For the length of a ``with`` block, raise nothing: the main thread waits for the record, and will see it."""
        self._is_awaited = threading.current_thread() is threading.main_thread()
        try:
            yield
        finally:
            self._is_awaited = False

    @property
    def has_survived(self) -> bool:
        return self._delivery is not None and self._delivery.stage is Stage.SURVIVED

    def restore(self) -> None:
        """Put the earlier signal handler back, in the main thread; elsewhere this one stays, and hands signals over."""
        if self._is_installed and threading.current_thread() is threading.main_thread():
            signal.signal(_SIGNAL, self._previous if self._previous is not None else signal.SIG_DFL)
        elif self._is_installed:
            self._abort_job = lambda _: None  # what stays must not keep the job's store open
            self._announce = lambda _: None
        self._is_installed = False

    def note(self, error: JobFailed) -> None:
        """Take an error that a wait raises of itself for the one to be raised."""
        self._begin(FailureRecord.of(error, error.rank)).note(error, sys._getframe())

    def insist(self, record: FailureRecord) -> None:
        """Do what :meth:`deliver` does, in a thread of its own."""
        if not self._is_insisting:
            self._is_insisting = True
            threading.Thread(target=self.deliver, args=(record,), name="distman-failure", daemon=True).start()

    def deliver(self, record: FailureRecord) -> None:
        """Make the main thread, not this one, raise it until the program ends or survives, or end the process."""
        with self._delivering:
            self._deliver(self._begin(record))
            if self.has_survived:
                self._abort_groups()  # the rank that failed may wait for this one in a handler

    def _begin(self, record: FailureRecord) -> Delivery:
        if self._delivery is None:
            self._delivery = Delivery(record)
            hook.require_end(self._delivery)
            self._announce(record)
        return self._delivery

    def _deliver(self, delivery: Delivery) -> None:
        known_at = time.monotonic()
        while not self._is_done(delivery):
            is_in_hand, now = delivery.look(), time.monotonic()
            if self._is_done(delivery):
                return
            is_forgotten = (
                not is_in_hand or now - delivery.last_swallowed_at < timing.DELIVERY_LONGEST_PAUSE
            )  # by a loop, say
            if delivery.num_swallowed and now - delivery.swallowed_at > self._patience.to_give_in and is_forgotten:
                self._exit(delivery, f"This process swallowed it {delivery.num_swallowed} times:")
            if is_in_hand and now - delivery.raised_at > self._patience.to_handle and not is_anything_left():
                self._exit(delivery, "This process did not end by it within DISTMAN_FAILURE_GRACE:")
            if not is_in_hand and not self._interrupt() and now - known_at > self._patience.to_come:
                self._exit(delivery, "This process could not be interrupted:")
            self._abort_groups()
            self._is_over.wait(self._pause(delivery))

    def _pause(self, delivery: Delivery) -> float:
        if self._num_deferrals:
            return timing.DELIVERY_DEFERRAL
        return min(self._patience.between_looks * (1 + delivery.num_swallowed), timing.DELIVERY_LONGEST_PAUSE)

    def _is_done(self, delivery: Delivery) -> bool:
        is_ending = delivery.is_over or is_program_over()
        return is_ending or self._is_over.is_set() or hook.has_failed()

    def _interrupt(self) -> bool:
        """Let the main thread raise the error, unless it is not at its program, and return whether it came to it."""
        self._is_answered.clear()
        self._is_due = True
        main = threading.main_thread().ident
        if self._is_installed and main is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pthread_kill(main, _SIGNAL)
        self._abort_groups()  # after the signal: what the main thread raises when its wait ends is this error
        return self._is_answered.wait(self._patience.between_looks)

    def _abort_groups(self) -> None:
        """Let what waits for the other ranks end, once: what a handler saves comes after it in a GPU's stream."""
        if not self._has_aborted:
            self._has_aborted = True
            run_with_timeout(close_all_connections, timing.ABORT_GROUPS)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_due, self._is_due = self._is_due, False
        if not is_due:
            if callable(self._previous):
                self._previous(number, frame)
            return
        delivery = self._delivery
        error = delivery.next_error(frame) if delivery is not None and self._may_raise(delivery, frame) else None
        self._is_answered.set()
        if error is not None:
            try:
                raise error
            finally:
                del error  # else it would hold its own frames, and whatever is in their variables

    def _may_raise(self, delivery: Delivery, frame: FrameType | None) -> bool:
        if self._is_awaited or is_at_end_of_block(frame) or is_between_programs(frame):
            return False
        if self._is_done(delivery) or delivery.look():
            return False
        if may_hold_lock(frame) and self._num_deferrals < _MOST_DEFERRALS:
            self._num_deferrals += 1
            return False
        self._num_deferrals = 0
        return not self._is_done(delivery)

    def _exit(self, delivery: Delivery, what: str) -> None:
        hook.write(f"distman: {delivery.record.headline}\n\n{what}\n{stacks()}")
        self._abort_job(delivery.record.to_failure())
        hook.exit_now(JobFailed.EXIT_CODE)


def _handler_in_use() -> Callable[[int, FrameType | None], Any] | int | None:
    """Return what handles the signal, or did before interruptions that are over."""
    handler = signal.getsignal(_SIGNAL)
    while isinstance(one := getattr(handler, "__self__", None), Interruption) and not one._is_installed:
        handler = one._previous
    return handler
