"""Work that may never come back, such as a call into the store of a stopped process, with a limit."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


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
        is_done.set()

    def wait(seconds: float | None) -> bool:
        is_in_time = is_done.wait(seconds)
        if raised:
            raise raised[0]
        return is_in_time

    try:
        _start(run)
    except (RuntimeError, MemoryError):
        run()
    return wait


def leave(work: Callable[[], None]) -> None:
    """Do something in another thread, if one can be had, and wait for nothing."""
    with contextlib.suppress(RuntimeError, MemoryError):
        _start(work)


def run_with_timeout(work: Callable[[], object], seconds: float) -> bool:
    """Do something in another thread, see :func:`begin`; return whether it was done in time, or raise its error."""
    return begin(work)(seconds)


def result_within(work: Callable[[], Result], seconds: float) -> Result | None:
    """Return what something returns in another thread, or None where it was not done in time; or raise its error."""
    found: list[Result] = []
    begin(lambda: found.append(work()))(seconds)
    return found[0] if found else None


def _start(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="distman-timeout", daemon=True).start()
