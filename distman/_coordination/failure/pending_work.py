"""Work in the background that must be done before the process ends, such as writing what was saved."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from distman._base.process_state import puts_back

_tasks: dict[object, Callable[[], object]] = {}


def register(wait: Callable[[], object]) -> Callable[[], None]:
    """Let a process that ends in a hurry wait first, which raises nothing; return what to call when it is done."""
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
    return bool(_tasks)


@puts_back
def _forget_all() -> None:
    _tasks.clear()


def complete_all() -> None:
    for wait in list(_tasks.values()):
        wait()
