"""The failure of the job on its way into this program, and what the main thread, which is to raise it, is doing."""

from __future__ import annotations

import enum
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from types import CodeType, FrameType
from typing import TypeVar

from distman._coordination.failure.record import FailureRecord
from distman.errors import JobFailed

Function = TypeVar("Function", bound=Callable[..., object])

_RUNNERS = {"IPython": "run_code", "_pytest": "from_call", "distman": "attempt"}
"""The function, by package, that runs a piece of a program and shows its errors: a cell, or a test."""

_WAITING = {"IPython": "IPython", "ipykernel": "IPython", "_pytest": "_pytest"}
"""Packages that wait for such pieces in the main thread, and which of those above then runs them."""

_BRIEF = {"_frozen_importlib", "contextlib", "importlib", "logging", "queue", "threading"}
"""Packages of Python's that take a lock, and give it back in another statement; they are left within microseconds."""

LAST_FRAME = BaseProcess._bootstrap.__code__  # type: ignore[attr-defined]  # typeshed lacks it
"""Code of the function that runs a process of ``multiprocessing``, whichever way it was started."""

_TOOLS = (3, 4, 5)
"""Numbers under which Python monitors, first those that belong to nobody; a debugger and others have lower ones."""

_NAME = "distman"

_MAX_CHAINED = 100  # errors that are looked through for one: a chain may be a ring

_GET_CONTEXT = vars(BaseException)["__context__"].__get__  # a program's class may have properties of these names
_GET_CAUSE = vars(BaseException)["__cause__"].__get__


_ENDS: set[CodeType] = set()


def ends_block(function: Function) -> Function:
    """Let nothing be raised in a function, which finds out what becomes of an error."""
    _ENDS.add(function.__code__)
    return function


def is_at_end_of_block(frame: FrameType | None) -> bool:
    return any(one.f_code in _ENDS for one in _stack(frame))


def error_in_hand(thread: int | None) -> BaseException | None:
    found = sys._current_exceptions().get(thread or 0)
    return found[1] if isinstance(found, tuple) else found


def errors_in(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, those during whose handling it was raised, and those in groups of these."""
    found = [error]
    for _ in range(_MAX_CHAINED):
        if not found:
            return
        error = found.pop()
        if error is None or not issubclass(type(error), BaseException):
            continue
        yield error
        found += [_GET_CAUSE(error), _GET_CONTEXT(error)]
        if issubclass(type(error), BaseExceptionGroup):
            found += error.exceptions  # type: ignore[attr-defined]  # mypy does not narrow by issubclass()


def is_between_programs(frame: FrameType | None) -> bool:
    """Return whether a stack is that of a kernel, or a session of pytest, that runs no cell or test just now."""
    packages, runners = set(), set()
    for one in _stack(frame):
        packages.add(_package(one))
        if _is_runner(one):
            runners.add(_package(one))
    return not all(runner in runners for package, runner in _WAITING.items() if package in packages)


def is_shown_by_runner(frame: FrameType | None) -> bool:
    """Return whether a stack is that of a cell or test, whose errors are shown there and end nothing else."""
    return any(map(_is_runner, _stack(frame)))


def is_program_over() -> bool:
    """Return whether the main program has ended; its threads, exit handlers and destructors may still run."""
    is_joining = getattr(threading, "_SHUTTING_DOWN", False)  # pools, while it still says that the main thread lives
    return is_joining or not threading.main_thread().is_alive()


def error_that_ends_process() -> BaseException | None:
    """Return the exception that is ending this process, if one is; one that its parent was handling does not."""
    error = sys.exc_info()[1]
    trace = error.__traceback__ if error is not None else None
    return error if trace is not None and trace.tb_frame.f_code is LAST_FRAME else None


def call_before_it_is_printed(action: Callable[[], object]) -> None:
    """Let something be called, perhaps several times, while Python handles the exception that ends this process.

    Before Python 3.13 nothing need be called, since finalizers are, before the error is printed. From then on they are
    when it has been forgotten, and after the program's threads, which may wait for the others. So the lines of that
    one function, which is under way, are monitored, unless other tools have taken all numbers.
    """
    if sys.version_info >= (3, 13):
        monitoring = sys.monitoring
        tool = next((tool for tool in _TOOLS if monitoring.get_tool(tool) in (None, _NAME)), None)
        if tool is None:
            return
        if monitoring.get_tool(tool) is None:  # else forked from a process that did this
            monitoring.use_tool_id(tool, _NAME)
        monitoring.register_callback(tool, monitoring.events.LINE, lambda *_: action())
        monitoring.set_local_events(tool, LAST_FRAME, monitoring.events.LINE)


def may_hold_lock(frame: FrameType | None) -> bool:
    """Return whether an error raised in this frame may leave a lock of Python's held for ever, or be lost."""
    return (frame is not None and _package(frame) in _BRIEF) or any(
        one.f_code.co_name == "__del__" for one in _stack(frame)
    )


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames from a given one outwards; without those of the process that this one was forked from."""
    while frame is not None and frame.f_code is not LAST_FRAME:
        yield frame
        frame = frame.f_back


def _is_runner(frame: FrameType) -> bool:
    return _RUNNERS.get(_package(frame)) == frame.f_code.co_name


def _package(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__")
    return name.partition(".")[0] if type(name) is str else ""


_NUM_LOOKS = 2
"""Looks in a row that must find an error in nobody's hand: between two handlers a destructor may run for a moment."""


class Stage(enum.Enum):
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
