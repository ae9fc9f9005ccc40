"""What the package changes in its process as a whole, and the one call that puts it back.

State that belongs to the process and not to an object is a variable of a module, in lower case. The module says beside
it, by :func:`puts_back`, how it becomes what it was after the import. The table in docs/process_state.md has all of it,
with the reasons; a test compares the two.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

PutBack = TypeVar("PutBack", bound=Callable[..., object])

_functions: list[Callable[..., object]] = []


def puts_back(function: PutBack) -> PutBack:
    """Let :func:`reset` call a function without arguments."""
    _functions.append(function)
    return function


def reset() -> None:
    """Leave the job, and put back what the package changed in this process, for the next test."""
    # What was declared last goes first, since a module is imported before those that use it. A function that fails
    # keeps no other from being called; the last error is raised.
    with ExitStack() as stack:
        for function in _functions:
            stack.callback(function)


@functools.cache
def keep_garbage_from_children() -> None:
    """Keep forked processes, such as workers of a loader, from collecting what was garbage when they were forked."""
    # The destructor of a process group, which a dropped DistributedDataParallel may be the last to hold, joins threads
    # that the child does not have: it crashes, or hangs.
    was_enabled = False

    def before() -> None:  # other modules' handlers in the child could set off a collection
        nonlocal was_enabled
        was_enabled = gc.isenabled()
        gc.disable()

    def in_parent() -> None:
        if was_enabled:
            gc.enable()

    def in_child() -> None:
        gc.freeze()
        in_parent()

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)
