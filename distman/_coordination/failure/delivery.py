"""A failure of another rank on its way into this program, until the program has handled it."""

from __future__ import annotations

import dataclasses
import enum
import sys
import threading
from collections.abc import Iterator
from typing import cast

from distman._coordination.failure.catching import Handler, error_in_hand, errors_in, handler_of
from distman._coordination.failure.record import FailureRecord
from distman.errors import RankFailedError

_NUM_LOOKS = 2
"""Looks in a row that must find an error in nobody's hand: between two handlers a destructor may run for a moment."""


class Fate(enum.Enum):
    """What became of the error that was raised last."""

    IN_HAND = enum.auto()
    """A handler, a ``finally`` or the end of a ``with`` block has it, and may yet let it go on."""

    BEING_HANDLED = enum.auto()
    """The same, and the handler names it."""

    GONE = enum.auto()
    """Nobody has it any more, or none was raised yet."""


@dataclasses.dataclass
class Delivery:
    """What this program has made of one failure.

    The error is kept until it is known what became of it, and with it the variables of the frames that it came through.

    Attributes:
        record: The failure.
        num_swallowed: How often its error was caught by a handler that does not name it.
        last_place: Where that was the last time, such as ``train.py:31 in step``.
        is_handled: Whether the program has handled it.
        error: The error that was raised last; None before, and when it is known what became of it.
    """

    record: FailureRecord
    num_swallowed: int = 0
    last_place: str = ""
    is_handled: bool = False
    error: RankFailedError | None = None
    _num_looks: int = 0

    def next_error(self) -> RankFailedError:
        """Return the error to raise, which says how often it was raised in vain."""
        self.error = self.record.to_error()
        if self.num_swallowed:
            self.error.args = (f"{self.error}\n\n{self.complaint}",)
        return self.error

    @property
    def complaint(self) -> str:
        """What is wrong with the program, in words."""
        times = "once" if self.num_swallowed == 1 else f"{self.num_swallowed} times"
        return (
            f"This error was caught {times} by code that does not name it, last at {self.last_place}, and is raised "
            "again. To handle it, catch RankFailedError by name."
        )

    @property
    def has_left(self) -> bool:
        """Whether the error has left the main program, which is at its end."""
        return self.error is not None and any(one is self.error for one in errors_in(getattr(sys, "last_value", None)))

    def is_in_hand(self) -> bool:
        """Return whether the main thread is handling an error of this failure, and keep that error in view."""
        for error in _errors_in_hand():
            if self.record.is_told_by(error):
                if not self.is_handled:
                    self.error = cast("RankFailedError", error)  # a wait of this rank may have raised one itself
                return True
        return False

    def is_last_in_hand(self) -> bool:
        """Return whether the main thread is handling the very error that was raised last."""
        return any(error is self.error for error in _errors_in_hand())

    def look(self) -> Fate:
        """Return what became of the error, for the other attributes to know."""
        if self.is_in_hand():
            self._num_looks = 0
            return Fate.BEING_HANDLED if self.error is not None and _is_named(self.error) else Fate.IN_HAND
        self._num_looks += 1
        if self.error is not None and self._num_looks < _NUM_LOOKS:
            return Fate.IN_HAND
        self.conclude()
        return Fate.GONE

    def conclude(self) -> None:
        """Find out who caught the error, which nobody has in hand any more."""
        error = self.error
        if error is None:
            return
        self.is_handled = _is_named(error)
        if not self.is_handled:
            self.num_swallowed += 1
            self.last_place = _place(error)
        self._num_looks = 0
        self.error = None  # last: two threads may want to know at the end of the program


def _errors_in_hand() -> Iterator[BaseException]:
    return errors_in(error_in_hand(threading.main_thread().ident))


def _is_named(error: BaseException) -> bool:
    return handler_of(error) is not Handler.CATCHES_ALL


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    if trace is None:
        return "a place that is not known"
    code = trace.tb_frame.f_code
    return f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
