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
from distman.testing._coverage import measured
from distman.testing._messages import RankReport, RankStatus, RankTask, SeenWarning, Signal
from distman.testing._serialization import Call
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
    """Run the tests that arrive over the connection until it closes."""
    stacks, connection, stdout, stderr = descriptors
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    with Connection(connection) as pytest_process:
        while True:
            try:
                task = pytest_process.recv()
            except EOFError:
                return
            if isinstance(task, RankTask):
                _perform(task, pytest_process)


def _perform(task: RankTask, connection: _Connection) -> None:
    """Run one test, say how it ended, and put everything back once all ranks have ended."""
    with preserved_state():
        with measured(task.coverage):
            report = _run(task, connection)
        flush_output()
        connection.send(report)
        if report.status is not RankStatus.PASSED:
            # The others may wait for this rank in a collective: leaving the group ends their wait.
            attempt(_leave_group)
        _expect(Signal.RELEASE, connection)
        end = _describe(task, attempt(_leave_group), [])
    flush_output()
    connection.send(end)


def _expect(expected: Signal, connection: _Connection) -> None:
    message = connection.recv()
    if message is not expected:
        raise TypeError(f"the pytest process must send {expected} now, got {message!r}.")


def _run(task: RankTask, connection: _Connection) -> RankReport:
    with warnings.catch_warnings(record=True) as seen:
        error = attempt(partial(_test, task, connection))
        if error is not None:
            connection.send(Signal.RAISED)
        return _describe(task, error, seen)


def _test(task: RankTask, connection: _Connection) -> None:
    __tracebackhide__ = True
    _enter(task)
    call: Call = cloudpickle.loads(task.call)
    warnings.resetwarnings()
    for one in reversed(call.filters):
        warnings.filterwarnings(*one)  # type: ignore[arg-type]  # it takes a tuple of categories, too
    _join_group(task)
    connection.send(Signal.JOINED)
    _expect(Signal.BEGIN, connection)
    available = {"rank": task.rank, "world_size": task.world_size}
    with ExitStack() as stack:
        for value in call.arguments.values():
            if isinstance(value, pytest.MonkeyPatch):
                stack.callback(value.undo)
        stack.enter_context(only_this_process())
        call.function(**call.arguments, **{name: available[name] for name in call.parameters})


def _enter(task: RankTask) -> None:
    rank, size = str(task.rank), str(task.world_size)
    os.environ.clear()
    os.environ.update(task.environ, RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size)
    os.chdir(task.directory)
    sys.path[:] = task.search_path
    seed_generators(zlib.crc32(task.test.encode()) + task.rank)


def _join_group(task: RankTask) -> None:
    __tracebackhide__ = True
    count_groups_from_zero()  # after a start that failed, the ranks' counts differ and they would never meet
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


def _describe(task: RankTask, error: BaseException | None, seen: list[warnings.WarningMessage]) -> RankReport:
    os.chdir(task.report_directory)
    shown = tuple(_warning(message) for message in seen)
    report = partial(RankReport, task.rank, warnings=shown, ended_at=time.monotonic())
    if error is None:
        return report(RankStatus.PASSED)
    if isinstance(error, pytest.skip.Exception | unittest.SkipTest):
        return report(RankStatus.SKIPPED, str(error))
    if isinstance(error, pytest.xfail.Exception):
        return report(RankStatus.XFAILED, str(error.msg))
    headline, detail = describe_error(error, task.traceback_style, shows_locals=task.shows_locals)
    return report(RankStatus.RAISED, headline, detail)


def _warning(message: warnings.WarningMessage) -> SeenWarning:
    category = message.category
    return SeenWarning(
        str(message.message), category.__module__, category.__qualname__, message.filename, message.lineno
    )
