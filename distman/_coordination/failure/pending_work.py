"""Work in the background that must be done before the process ends, such as writing what was saved."""

from __future__ import annotations

import itertools
from collections.abc import Callable

_tasks: dict[int, Callable[[], None]] = {}
_numbers = itertools.count()


def register(wait: Callable[[], None]) -> Callable[[], None]:
    """Let a process that ends in a hurry wait for something first.

    An end of the interpreter does not need it: that waits for all threads which are no daemons.

    Args:
        wait: Waits until it is done, and says so where it failed; it raises nothing.

    Returns:
        What to call once it is done.
    """
    number = next(_numbers)
    _tasks[number] = wait

    def forget() -> None:
        _tasks.pop(number, None)

    return forget


def is_anything_left() -> bool:
    """Return whether something is not done yet."""
    return bool(_tasks)


def complete_all() -> None:
    """Wait until all is done.

    Blocking.
    """
    for wait in list(_tasks.values()):
        wait()
