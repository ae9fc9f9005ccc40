"""The life of a worker: one test after another, each on a process group of its own."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.util
import os
import sys
import time
import warnings
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import TypeAlias

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from distman._process_state import reset
from distman._seeds import seed_generators
from distman._torch_internals import count_groups_from_zero
from distman.testing._messages import (
    STACK_SIGNAL,
    Begin,
    Ending,
    Joined,
    Outcome,
    Ready,
    Release,
    Released,
    SeenWarning,
    Task,
)
from distman.testing._serialization import Call, WarningFilter
from distman.testing._state import preserved_state
from distman.testing._tracebacks import attempt, describe_error

_Connection: TypeAlias = "Connection[object, object]"


def serve(connection: _Connection, stacks: int) -> None:
    """Run the tests that come over the connection until it closes.

    Blocks.

    Args:
        connection: To the pytest process.
        stacks: File descriptor to which all stacks are written when ``STACK_SIGNAL`` arrives.
    """
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    connection.send(Ready())
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        if isinstance(task, Task):
            _perform(task, connection)


def _perform(task: Task, connection: _Connection) -> None:
    """Run one test, say how it ended, and put everything back once all ranks have ended."""
    with preserved_state():
        outcome = _run(task, connection)
        _flush()
        connection.send(outcome)
        if outcome.ending is not Ending.PASSED:
            # The others may wait for this rank in a collective: leaving the group ends their wait.
            attempt(_leave_group)
        _expect(Release, connection)
        problem = _describe(task, attempt(_leave_group), [])
    _flush()
    connection.send(Released(None if problem.ending is Ending.PASSED else problem))


def _expect(kind: type, connection: _Connection) -> None:
    message = connection.recv()
    if not isinstance(message, kind):
        raise TypeError(f"the pytest process must send {kind.__name__} now, got {message!r}.")


def _run(task: Task, connection: _Connection) -> Outcome:
    with warnings.catch_warnings(record=True) as seen:
        error = attempt(partial(_test, task, connection))
        return _describe(task, error, seen)


def _test(task: Task, connection: _Connection) -> None:
    __tracebackhide__ = True
    _enter(task)
    call: Call = cloudpickle.loads(task.call)
    _set_filters(call.filters)
    _join_group(task)
    connection.send(Joined())
    _expect(Begin, connection)
    available = {"rank": task.rank, "world_size": task.world_size}
    with ExitStack() as stack:
        for value in call.arguments.values():
            if isinstance(value, pytest.MonkeyPatch):
                stack.callback(value.undo)
        call.function(**call.arguments, **{name: available[name] for name in call.parameters})


def _enter(task: Task) -> None:
    os.environ.clear()
    os.environ.update(task.environ)
    os.chdir(task.directory)
    sys.path[:] = task.search_path
    seed_generators(zlib.crc32(task.test.encode()) + task.rank)


def _set_filters(filters: Sequence[WarningFilter]) -> None:
    warnings.resetwarnings()
    for one in reversed(filters):
        warnings.filterwarnings(one.action, one.message, one.category, one.module, one.line)  # type: ignore[arg-type]


def _join_group(task: Task) -> None:
    __tracebackhide__ = True
    count_groups_from_zero()  # a start that failed leaves a count behind, and ranks would wait under different names
    store = dist.FileStore(task.store_file, task.world_size)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=task.rank,
        world_size=task.world_size,
        timeout=timedelta(seconds=task.group_timeout),
    )
    if task.uses_manager and _has_manager():
        from distman.manager import DistributedManager

        DistributedManager.initialize()


def _leave_group() -> None:
    reset()
    if dist.is_initialized():
        dist.destroy_process_group()


def _has_manager() -> bool:
    return importlib.util.find_spec("distman.manager") is not None


def _describe(task: Task, error: BaseException | None, seen: list[warnings.WarningMessage]) -> Outcome:
    ended_at = time.monotonic()
    os.chdir(task.report_directory)
    shown = [_warning(message) for message in seen]
    if error is None:
        return Outcome(Ending.PASSED, "", "", ended_at, shown)
    if isinstance(error, pytest.skip.Exception):
        return Outcome(Ending.SKIPPED, str(error.msg), "", ended_at, shown)
    if isinstance(error, pytest.xfail.Exception):
        return Outcome(Ending.XFAILED, str(error.msg), "", ended_at, shown)
    headline, detail = describe_error(error, task.traceback_style, shows_locals=task.shows_locals)
    return Outcome(Ending.RAISED, headline, detail, ended_at, shown)


def _warning(message: warnings.WarningMessage) -> SeenWarning:
    category = message.category
    return SeenWarning(
        str(message.message), category.__module__, category.__qualname__, message.filename, message.lineno
    )


def _flush() -> None:
    """Write out what C libraries hold back; Python's own streams are unbuffered here."""
    ctypes.CDLL(None).fflush(None)
