"""Work in the background that must be done before the process ends, such as writing what was saved."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from distman._base.process_state import puts_back

_tasks: dict[object, Callable[[], object]] = {}


def register(wait: Callable[[], object]) -> Callable[[], None]:
    """Let a process that ends in a hurry wait for something first.

    An end of the interpreter does not need it: that waits for all threads which are no daemons.

    Args:
        wait: Waits until it is done, and says so where it failed; it raises nothing.

    Returns:
        What to call once it is done.
    """
    task = object()
    _tasks[task] = wait

    def forget() -> None:
        _tasks.pop(task, None)

    return forget


@contextlib.contextmanager
def under_way() -> Iterator[None]:
    """Let a process that ends in a hurry wait for what a ``with`` block does, in whatever thread."""
    is_over = threading.Event()
    forget = register(lambda: bool(is_over.wait()))
    try:
        yield
    finally:
        is_over.set()
        forget()


def is_anything_left() -> bool:
    """Return whether something is not done yet."""
    return bool(_tasks)


@puts_back
def _forget_all() -> None:
    _tasks.clear()


def complete_all() -> None:
    """Wait until all is done.

    Blocking.
    """
    for wait in list(_tasks.values()):
        wait()
