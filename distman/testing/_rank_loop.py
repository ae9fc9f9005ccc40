"""What a worker of the test kit does: one test after another, each on a process group of its own."""

from __future__ import annotations

import faulthandler
import importlib
import os
import shutil
import sys
import time
import unittest
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import TypeAlias

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from distman._base.process_state import reset
from distman._base.seeds import seed_generators
from distman._torch_internals import count_groups_from_zero
from distman._workers.fork_server import STACK_SIGNAL, Work
from distman._workers.output import flush_output, only_this_process
from distman.manager import DistributedManager
from distman.testing._coverage import WorkerCoverage
from distman.testing._debugger import offer_debugger
from distman.testing._messages import (
    Begin,
    Joined,
    Raised,
    RankResult,
    RankStatus,
    RankTask,
    Release,
    Released,
    SeenWarning,
)
from distman.testing._serialization import Call, WarningFilter
from distman.testing._state import preserved_state
from distman.testing._tracebacks import attempt, describe_error, explained_assertions

_Connection: TypeAlias = "Connection[object, object]"


@contextmanager
def prepare(store_directory: str, verbosity: int) -> Iterator[Work]:
    """Yield what a worker does; the directory of the stores is removed at the end."""
    with explained_assertions(verbosity):
        try:
            yield _work
        finally:
            shutil.rmtree(store_directory, ignore_errors=True)


def _work(_: dict[str, object], descriptors: Sequence[int]) -> None:
    """Run the tests that come over the connection until it closes."""
    stacks, connection, stdout, stderr = descriptors
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    coverage = WorkerCoverage()
    with Connection(connection) as pytest_process:
        while True:
            try:
                task = pytest_process.recv()
            except EOFError:
                return
            if isinstance(task, RankTask):
                _perform(task, pytest_process, coverage)


def _perform(task: RankTask, connection: _Connection, coverage: WorkerCoverage) -> None:
    """Run one test, say how it ended, and put everything back once all ranks have ended."""
    with preserved_state():
        with coverage.measured(task.coverage):
            result = _run(task, connection)
        flush_output()
        connection.send(result)
        if result.status is not RankStatus.PASSED:
            # The others may wait for this rank in a collective: leaving the group ends their wait.
            attempt(_leave_group)
        _expect(Release, connection)
        problem = _describe(task, attempt(_leave_group), [])
    flush_output()
    connection.send(Released(None if problem.status is RankStatus.PASSED else problem))


def _expect(kind: type, connection: _Connection) -> None:
    message = connection.recv()
    if not isinstance(message, kind):
        raise TypeError(f"the pytest process must send {kind.__name__} now, got {message!r}.")


def _run(task: RankTask, connection: _Connection) -> RankResult:
    with warnings.catch_warnings(record=True) as seen:
        error = attempt(partial(_test, task, connection))
        if error is not None:
            connection.send(Raised())
        result = _describe(task, error, seen)
        if task.debugs and error is not None and result.status is RankStatus.RAISED:
            offer_debugger(result.headline, result.detail, error.__traceback__, connection)
        return result


def _test(task: RankTask, connection: _Connection) -> None:
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
        stack.enter_context(only_this_process())
        call.function(**call.arguments, **{name: available[name] for name in call.parameters})


def _enter(task: RankTask) -> None:
    os.environ.clear()
    os.environ.update(task.environ)
    os.chdir(task.directory)
    sys.path[:] = task.search_path
    seed_generators(zlib.crc32(task.test.encode()) + task.rank)


def _set_filters(filters: Sequence[WarningFilter]) -> None:
    warnings.resetwarnings()
    for one in reversed(filters):
        warnings.filterwarnings(one.action, one.message, one.category, one.module, one.line)  # type: ignore[arg-type]
    # Hypothesis draws in the pytest process and knows of no test here.
    warnings.filterwarnings("ignore", "Using `(assume|reject)` outside a property-based test")


def _join_group(task: RankTask) -> None:
    __tracebackhide__ = True
    count_groups_from_zero()  # a start that failed leaves a count behind, and ranks would wait under different names
    if task.backend_module:
        importlib.import_module(task.backend_module)
    store = dist.FileStore(task.store_file, task.world_size)
    dist.init_process_group(
        task.backend,
        store=store,
        rank=task.rank,
        world_size=task.world_size,
        timeout=timedelta(seconds=task.group_timeout),
    )
    if task.uses_manager:
        DistributedManager.initialize()


def _leave_group() -> None:
    reset()
    if dist.is_initialized():
        dist.destroy_process_group()


def _describe(task: RankTask, error: BaseException | None, seen: list[warnings.WarningMessage]) -> RankResult:
    ended_at = time.monotonic()
    os.chdir(task.report_directory)
    shown = [_warning(message) for message in seen]
    if error is None:
        return RankResult(RankStatus.PASSED, "", "", ended_at, shown)
    if isinstance(error, pytest.skip.Exception | unittest.SkipTest):
        return RankResult(RankStatus.SKIPPED, str(error), "", ended_at, shown)
    if isinstance(error, pytest.xfail.Exception):
        return RankResult(RankStatus.XFAILED, str(error.msg), "", ended_at, shown)
    headline, detail = describe_error(error, task.traceback_style, shows_locals=task.shows_locals)
    types = tuple(f"{one.__module__}:{one.__qualname__}" for one in type(error).__mro__)
    return RankResult(RankStatus.RAISED, headline, detail, ended_at, shown, types)


def _warning(message: warnings.WarningMessage) -> SeenWarning:
    category = message.category
    return SeenWarning(
        str(message.message), category.__module__, category.__qualname__, message.filename, message.lineno
    )
