"""Work that may never come back, such as a call into the store of a stopped process, with a limit."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from distman._base.process_state import puts_back

Result = TypeVar("Result")

_NUM_KEPT = 5
"""Threads that wait for work: one that publishes, one beside it that leaves the group, one that prints, and two that
bound the end of the process."""

_kept: list[_Thread] = []
"""Threads that are there before something fails: then memory may be out, or a limit of threads be reached. Where the
interpreter has no memory for a thread that Linux has started, the thread that starts it waits for ever."""


_under_way: dict[threading.Event, int] = {}
"""What says that a piece of work is done, with the process that began it."""


class _Thread:
    """A thread that does one piece of work, or one after another if it is kept."""

    def __init__(self, *, is_kept: bool) -> None:
        self.is_kept = is_kept
        self.pid = os.getpid()
        self.work: queue.SimpleQueue[tuple[Callable[[], None], threading.Event] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="distman-timeout", daemon=True).start()

    def _run(self) -> None:
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        """Do the next piece of work, and return whether this thread is kept for another one."""
        task = self.work.get()
        if task is None:
            return False
        work, is_done = task
        work()
        if self.is_kept:
            _kept.append(self)  # before the waiting thread hears of it, which may want a thread again
        _under_way.pop(is_done, None)
        is_done.set()
        return self.is_kept


def keep_threads() -> None:
    """Have threads ready for :func:`run_with_timeout`, which then needs no new one."""
    _kept.extend([*iter(_take, None)])  # without those of a parent
    while len(_kept) < _NUM_KEPT:
        _kept.append(_Thread(is_kept=True))


@puts_back
def _end_threads() -> None:
    while _kept:
        if (thread := _take()) is not None:
            thread.work.put(None)


def is_idle(frame: FrameType) -> bool:
    """Return whether the stack of a thread is that of one which is kept, and has nothing to do."""
    return frame.f_code is _Thread._do_next.__code__


def begin(work: Callable[[], object]) -> Callable[[float | None], bool]:
    """Begin something in another thread, and return what waits for it: some seconds, or for as long as it takes.

    It says whether the work was done, and raises what that raised. Work that is not done in time is left alone, and
    goes with the process. Where no thread can be had, it is done at once in this one, without a limit.
    """
    raised: list[BaseException] = []
    is_done = threading.Event()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
            raised.append(error)

    def wait(seconds: float | None) -> bool:
        is_in_time = is_done.wait(seconds)
        if raised:
            raise raised[0]
        return is_in_time

    try:
        _under_way[is_done] = os.getpid()
        _hand_over(run, is_done)
    except (RuntimeError, MemoryError):
        _under_way.pop(is_done, None)
        run()
        is_done.set()
    return wait


def _hand_over(work: Callable[[], None], is_done: threading.Event) -> None:
    thread = _take() or _Thread(is_kept=False)
    thread.work.put((work, is_done))


def wait_for_work(seconds: float) -> None:
    """Wait until all work is done that was begun here and is left alone, some seconds at most.

    Where a thread holds the last reference to a process group as the interpreter ends, torch aborts the process.
    """
    until = time.monotonic() + seconds
    for is_done, pid in [*_under_way.items()]:
        if pid == os.getpid():
            is_done.wait(max(until - time.monotonic(), 0))


def leave(work: Callable[[], None]) -> None:
    """Do something in another thread, if one can be had, and wait for nothing, not even at the end of the process."""
    with contextlib.suppress(RuntimeError, MemoryError):
        _hand_over(work, threading.Event())


def run_with_timeout(work: Callable[[], object], seconds: float) -> bool:
    """Do something in another thread, see :func:`begin`; return whether it was done in time, or raise its error."""
    return begin(work)(seconds)


def result_within(work: Callable[[], Result], seconds: float) -> Result | None:
    """Return what something returns in another thread, or None where it was not done in time; or raise its error."""
    found: list[Result] = []
    begin(lambda: found.append(work()))(seconds)
    return found[0] if found else None


def _take() -> _Thread | None:
    """Return a kept thread of this process: a forked child has none of its parent's."""
    with contextlib.suppress(IndexError):  # others have taken the last one, maybe at this moment
        while True:
            thread = _kept.pop()
            if thread.pid == os.getpid():
                return thread
    return None
