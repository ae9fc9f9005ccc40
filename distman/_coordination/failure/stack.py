"""What the main thread is doing: which errors it has in hand, and whether it may be interrupted there."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from types import CodeType, FrameType
from typing import TypeVar

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
    """Return whether a stack has a function of :func:`ends_block`."""
    return any(one.f_code in _ENDS for one in _stack(frame))


def error_in_hand(thread: int | None) -> BaseException | None:
    """Return the error that a thread is handling, the innermost one."""
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
