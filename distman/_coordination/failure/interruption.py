"""Ending what the main thread does when another rank has failed: by an exception, or by the end of the process."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from distman._coordination.failure import hook
from distman._coordination.failure.catching import is_program_running
from distman._coordination.failure.delivery import Delivery, Fate
from distman._coordination.failure.hook import EXIT_CODE
from distman._coordination.failure.record import FailureRecord
from distman._coordination.timeouts import run_with_timeout
from distman._coordination.tracking import stacks
from distman._torch_internals import abort_all_backends
from distman.errors import RankFailedError

_SIGNAL = signal.SIGURG  # ignored by default: harmless where it meets nobody
_TICKS = 30  # in which the main thread may answer: each lets both threads run
_LONGEST_PAUSE = 1.0  # seconds; a program that swallows the error prints it each time, and is not in haste


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long the program may take, in seconds.

    Attributes:
        to_come: For the main thread to come back to the interpreter: a busy call of NumPy, say. One that runs Python
            does at once.
        to_handle: For handlers that do not name the error, ``finally`` among them, to be done with it: as long as the
            end of a process waits for what is being saved.
        to_give_in: From when the error was swallowed first. Launchers leave a process as long between SIGTERM and
            SIGKILL (Docker 10, Slurm and torchrun 30).
        between_looks: Between two looks what became of the error: short beside the interval of the watchers.
    """

    to_come: float = 3.0
    to_handle: float = 60.0
    to_give_in: float = 10.0
    between_looks: float = 0.1


_PATIENCE = Patience()


class Interruption:
    """Raises ``RankFailedError`` in the main thread from another thread, until the program handles it.

    A signal handler of Python's does it, so calls of the system that wait come back. Code of C or C++ that does not
    return to the interpreter, such as a wait of gloo or CUDA, cannot be interrupted so: after some seconds the
    process says why, and ends. It does so too if the program catches the error again and again without naming it.

    Args:
        abort_job: Makes the launcher end the job after an error, where it would not do so by itself.
        is_over: Set when this rank leaves the job: then nothing has to be interrupted.
        patience: How long the program may take.
    """

    def __init__(
        self,
        abort_job: Callable[[BaseException], None],
        is_over: threading.Event,
        *,
        patience: Patience = _PATIENCE,
    ) -> None:
        self._abort_job = abort_job
        self._is_over = is_over
        self._patience = patience
        self._delivery: Delivery | None = None
        self._is_due = False
        self._is_answered = threading.Event()
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

    def restore(self) -> None:
        """Put the signal handler back that was there before, and let go of the error that was raised last.

        Only the main thread can put it back; in others this one stays, and hands each signal over.
        One that the program has in hand, on its way through a ``finally`` for instance, is let go when it is gone.
        """
        if self._delivery is not None and self._delivery.is_in_hand():
            threading.Thread(target=self._let_go, args=[self._delivery], name="distman-failure", daemon=True).start()
        elif self._delivery is not None:
            self._delivery.conclude()
        if self._is_installed and threading.current_thread() is threading.main_thread():
            signal.signal(_SIGNAL, self._previous if self._previous is not None else signal.SIG_DFL)
        elif self._is_installed:
            self._abort_job = _forget  # the handler that stays would keep the job, and its store open
        self._is_installed = False

    def _let_go(self, delivery: Delivery) -> None:
        while delivery.look() is not Fate.GONE:
            time.sleep(self._patience.between_looks)

    def note(self, error: RankFailedError) -> None:
        """Take an error that a wait of the main thread raises of itself for the one to be raised."""
        if threading.current_thread() is not threading.main_thread():
            return
        last = self._delivery
        if last is not None and last.error is not error and not last.is_last_in_hand():
            last.conclude()  # the program goes on waiting: it has caught the last one
        delivery = self._begin(FailureRecord.of(error, error.rank))
        if not delivery.is_handled:
            delivery.error = error

    def insist(self) -> None:
        """Do what :meth:`deliver` does with the error that was noted last, in a thread of its own."""
        if not self._is_insisting:
            self._is_insisting = True
            threading.Thread(target=self._deliver_noted, name="distman-failure", daemon=True).start()

    def _deliver_noted(self) -> None:
        with self._delivering:
            self._is_insisting = False  # what is noted from now on may come too late for this thread
            if self._delivery is not None:
                self._deliver(self._delivery)

    def deliver(self, record: FailureRecord) -> None:
        """Make the main thread raise what the record says until the program has handled it, or end the process.

        Blocking. Not for the main thread.
        """
        with self._delivering:
            self._deliver(self._begin(record))

    def _deliver(self, delivery: Delivery) -> None:
        raised_at = swallowed_at = 0.0
        num_swallowed = 0
        while not self._is_done(delivery):
            fate, now = delivery.look(), time.monotonic()
            is_swallowing = delivery.num_swallowed > num_swallowed  # the one in hand is the next of many, perhaps
            num_swallowed = delivery.num_swallowed
            if delivery.is_handled:
                return
            if fate is Fate.BEING_HANDLED:
                raised_at = now
            elif delivery.num_swallowed or fate is not Fate.GONE:
                raised_at = raised_at or now
                swallowed_at = swallowed_at or (now if delivery.num_swallowed else 0.0)
                is_kept = fate is not Fate.GONE and not is_swallowing
                is_late = swallowed_at and now - swallowed_at > self._patience.to_give_in
                if (is_late and not is_kept) or now - raised_at > self._patience.to_handle:
                    self._exit(delivery, "This process did not end by it:")
            if fate is Fate.GONE and not self._interrupt() and not self._is_done(delivery):
                self._exit(delivery, "This process could not be interrupted:")
            self._abort_groups()
            self._is_over.wait(min(self._patience.between_looks * (1 + delivery.num_swallowed), _LONGEST_PAUSE))

    def _begin(self, record: FailureRecord) -> Delivery:
        if self._delivery is None or (self._delivery.is_handled and self._delivery.record != record):
            self._delivery = Delivery(record)
            hook.require_handling(self._delivery)
        return self._delivery

    def _is_done(self, delivery: Delivery) -> bool:
        return self._is_over.is_set() or hook.has_failed() or delivery.has_left

    def _interrupt(self) -> bool:
        """Let the main thread raise the error, unless it is not at its program, and return whether it came to it."""
        self._is_answered.clear()
        self._is_due = True
        main = threading.main_thread().ident
        if self._is_installed and main is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pthread_kill(main, _SIGNAL)
        self._abort_groups()  # after the signal: what the main thread raises when its wait ends is this error
        # By ticks, not by the time: on a busy host, or after a suspension, the main thread must have had its turn.
        return any(self._is_answered.wait(self._patience.to_come / _TICKS) for _ in range(_TICKS))

    def _abort_groups(self) -> None:
        """Let what waits for the other ranks on a GPU end, once: what a handler saves comes after it in the stream."""
        if not self._has_aborted:
            self._has_aborted = True
            run_with_timeout(abort_all_backends, self._patience.to_come)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_due, self._is_due = self._is_due, False
        if not is_due:
            if callable(self._previous):
                self._previous(number, frame)
            return
        delivery = self._delivery
        error = delivery.next_error() if delivery is not None and self._may_raise(delivery, frame) else None
        self._is_answered.set()
        if error is not None:
            try:
                raise error
            finally:
                del error  # else it would hold its own frames, and whatever is in their variables

    def _may_raise(self, delivery: Delivery, frame: FrameType | None) -> bool:
        if self._is_awaited or self._is_done(delivery) or not is_program_running(frame):
            return False
        return delivery.look() is Fate.GONE and not delivery.is_handled

    def _exit(self, delivery: Delivery, what: str) -> None:
        error = delivery.record.to_error()
        complaint = f"\n\n{delivery.complaint}" if delivery.num_swallowed else ""
        hook.write(f"distman: {error}{complaint}\n\n{what}\n{stacks()}")
        self._abort_job(error)
        hook.exit_now(EXIT_CODE)


def _forget(_: BaseException) -> None:
    """Do nothing: the job is over."""


def _handler_in_use() -> Callable[[int, FrameType | None], Any] | int | None:
    """Return what handles the signal, or did before interruptions that are over."""
    handler = signal.getsignal(_SIGNAL)
    while isinstance(one := getattr(handler, "__self__", None), Interruption) and not one._is_installed:
        handler = one._previous
    return handler
