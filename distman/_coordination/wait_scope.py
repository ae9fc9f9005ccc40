"""What surrounds every call that waits for other ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

import torch

from distman._coordination.monitor.current_watcher import (
    failure_behind,
    mismatch_behind,
    raise_failure,
    raise_if_failed,
)
from distman._coordination.tracking import TrackedWait, current_wait
from distman._torch_internals import outside_graphs
from distman.errors import JobFailed, PlanMismatchError

P = ParamSpec("P")
R = TypeVar("R")


class WaitScope(TrackedWait):
    """For the length of a ``with`` block this thread waits for other ranks, and says why if they do not come.

    Where the failure of another rank broke a connection, ``JobFailed`` takes the place of that error; where the
    ranks wait in calls that do not match, or one of them refuses its part, ``PlanMismatchError`` does.
    """

    __slots__ = ()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        wait = self if self.is_outermost else current_wait()
        if wait is not None and wait.refusal and (error is None or isinstance(error, RuntimeError)):
            refusal, wait.refusal = wait.refusal, ""
            raise PlanMismatchError(refusal) from error
        is_mine = self.is_outermost and isinstance(error, RuntimeError)
        is_told = isinstance(error, PlanMismatchError)
        mismatch = mismatch_behind(error, self) if error is not None and is_mine and not is_told else ""
        if mismatch:
            raise PlanMismatchError(mismatch) from error
        record = failure_behind(error, self.operation) if error is not None and is_mine else None
        if self.is_outermost and (record is not None or isinstance(error, JobFailed)):
            raise_failure(record, error)


def collective(func: Callable[P, R]) -> Callable[P, R]:
    """Let a function that waits for other ranks be found waiting, and be in no graph that ``torch.compile`` makes."""

    # A second copy of the next function, because the mark is on the code, which all that it returns would share.
    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with WaitScope(func.__name__):
            raise_if_failed()
            return func(*args, **kwargs)

    return outside_graphs(call)


def traceable_collective(func: Callable[P, R]) -> Callable[P, R]:
    """Let a function that waits for other ranks be found waiting; a graph of ``torch.compile`` holds it alone."""

    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        with WaitScope(func.__name__):
            raise_if_failed()
            return func(*args, **kwargs)

    return call
