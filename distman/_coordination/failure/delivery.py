"""The failure of the job on its way into this program, which ends by it or says that it survives."""

from __future__ import annotations

import enum
import sys
import threading
import time
import weakref
from types import FrameType

from distman._coordination.failure.record import FailureRecord
from distman._coordination.failure.stack import error_in_hand, errors_in, is_shown_by_runner
from distman.errors import JobFailed

_NUM_LOOKS = 2
"""Looks in a row that must find an error in nobody's hand: between two handlers a destructor may run for a moment."""


class Stage(enum.Enum):
    """How far a failure has come on its way; see :class:`Delivery`."""

    DUE = enum.auto()
    RAISED = enum.auto()
    SHOWN = enum.auto()
    SURVIVED = enum.auto()
    LEFT = enum.auto()


class Delivery:
    """What this program has made of one failure.

    ::

        DUE --> RAISED --> LEFT: its error has left the main program, which ends with its exit code
         ^         |
         +---------+ the error was swallowed

        DUE --> SHOWN --> SURVIVED: a cell or a test has shown the error
        any stage ------> SURVIVED: the program says that it goes on without the other ranks

    No error that was raised is kept: it would keep the variables of the frames that it came through.
    """

    def __init__(self, record: FailureRecord) -> None:
        self.record = record
        self.stage = Stage.DUE
        self.num_swallowed = 0  # how often its error was caught and forgotten
        self.swallowed_at = self.last_swallowed_at = 0.0  # when that was first and last, by the monotonic clock
        self.raised_at = 0.0  # when the error was raised first; 0 before
        self._errors: list[weakref.ref[JobFailed]] = []
        self._num_looks = 0

    @property
    def is_over(self) -> bool:
        return self.stage in (Stage.SURVIVED, Stage.LEFT)

    def next_error(self, frame: FrameType | None) -> JobFailed:
        error = self.record.to_failure()
        self.note(error, frame)
        return error

    def note(self, error: JobFailed, frame: FrameType | None) -> None:
        """Take note of an error that is raised in a frame of the main thread."""
        if self.is_over or any(one() is error for one in self._errors):
            return
        if self.stage is Stage.RAISED and not self._errors:
            self._count_swallowed()  # the program waits again, and has forgotten the error of its last wait
        self._errors.append(weakref.ref(error, self._on_end))
        self._num_looks = 0
        self.raised_at = self.raised_at or time.monotonic()
        self.stage = Stage.SHOWN if is_shown_by_runner(frame) else Stage.RAISED

    def leave(self) -> None:
        """Take note that the main program ends by the failure."""
        if self.stage in (Stage.DUE, Stage.RAISED):
            self.stage = Stage.LEFT

    def _on_end(self, error: weakref.ref[JobFailed]) -> None:
        """Take note of the end of an error. Where it leaves the program, the interpreter drops it, and no function."""
        self._errors.remove(error)
        if threading.current_thread() is threading.main_thread() and sys._getframe().f_back is None:
            self.leave()

    def _is_in_hand(self) -> bool:
        """Return whether the main thread handles the error, or something else keeps it, such as a task of asyncio."""
        in_hand = errors_in(error_in_hand(threading.main_thread().ident))
        return any(map(self.record.is_told_by, in_hand)) or (bool(self._errors) and self.stage is Stage.RAISED)

    def settle(self) -> None:
        """Find out what became of the error, at the end of the program, when nothing runs beside."""
        for _ in range(_NUM_LOOKS):
            self.look()

    def look(self) -> bool:
        """Return whether the error is in the program's hand, and else find out what became of it."""
        if self.stage not in (Stage.RAISED, Stage.SHOWN):
            return False
        self._num_looks = 0 if self._is_in_hand() else self._num_looks + 1
        if self._num_looks < _NUM_LOOKS:
            return True
        if self.stage is Stage.SHOWN:
            self.stage = Stage.SURVIVED
        elif self.stage is Stage.RAISED:
            self.stage = Stage.DUE
            self._count_swallowed()
        return False

    def _count_swallowed(self) -> None:
        self.num_swallowed += 1
        self.last_swallowed_at = time.monotonic()
        self.swallowed_at = self.swallowed_at or self.last_swallowed_at
