"""What surrounds every call that waits for other ranks, and what it asks the watcher: why they do not arrive."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

from distman._base.process_state import puts_back
from distman._coordination.failure import hook
from distman._coordination.failure.delivery import errors_in
from distman._coordination.failure.record import LEFT, FailureRecord
from distman._coordination.monitor.deadlocks import reason_of
from distman._coordination.monitor.watcher import current
from distman._coordination.tracking import TrackedWait, call_site, current_wait
from distman._torch_internals import collective_errors, is_lost_connection, outside_graphs
from distman.errors import DistmanError, JobFailed, PlanMismatchError


def note_raised(error: JobFailed) -> JobFailed:
    """Return an error that a wait raises; the watcher then need not raise one itself if it is of the same failure."""
    watcher = current()
    if watcher is not None:
        if not watcher.has_warned and (watcher.has_survived or _is_in_handler(error)):
            watcher.has_warned = True  # what is raised now ends the program in silence
            hook.write(
                f"distman: {call_site()} waits for other ranks, of which one has failed, and raises JobFailed again. "
                "Save there with local=True."
            )
        watcher.note(error)
    else:
        hook.required_end_by(error)
    return error


def _is_in_handler(error: JobFailed) -> bool:
    return any(type(one) is JobFailed for one in errors_in(sys.exc_info()[1]) if one is not error)


def raise_failure(record: FailureRecord | None, error: BaseException | None) -> None:
    """Raise the failure by which a wait ended; its own error goes on as if the handler had not waited."""
    failure = error if record is None and isinstance(error, JobFailed) else record.to_failure() if record else None
    if failure is None:
        return
    watcher, record = current(), record or FailureRecord.of(failure, failure.rank)
    is_mine = watcher is not None and record.rank == watcher.context.rank
    original = next(filter(record.is_of, errors_in(error)), None) if is_mine else None
    if original is not None:
        try:
            _raise_again(original)
        finally:
            del original, error, failure  # as below; an exit is told where the interpreter drops it
    note_raised(failure)
    try:
        if failure is not error:
            raise failure from error
    finally:
        del failure  # else its traceback would hold this frame, and the frame the error, with the files of its frames


def _raise_again(error: BaseException) -> None:
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context
        del error


def look_after_others(record: FailureRecord) -> None:
    """At the end of this process, see to ranks that do nothing any more: of the job, and of this host."""
    watcher = current()
    if watcher is not None:
        watcher.look_after_others(record)
        watcher.look_after_mates(record)


def has_failed() -> bool:
    """Return whether the watcher of this process knows that a rank has failed, this one perhaps."""
    watcher = current()
    return watcher is not None and watcher.record is not None


def raise_if_failed() -> None:
    """Raise the failure if a rank has failed, this one perhaps: nothing that waits for ranks begins any more."""
    watcher = current()
    if watcher is not None and watcher.record is not None:
        raise note_raised(watcher.record.to_failure())


def let_others_hear_first() -> None:
    """If the store may end with this process, wait until the others know the failure on record too."""
    watcher = current()
    if watcher is not None and watcher.context.holds_store:
        watcher.wait_until_known()


def mismatch_behind(error: BaseException, wait: TrackedWait) -> str:
    """Return why a call does not match those of other ranks, if its connection broke because of that, or nothing."""
    watcher, call = current(), wait.call
    if wait.mismatch or call is None or watcher is None or not is_lost_connection(error):
        return wait.mismatch
    with contextlib.suppress(dist.DistError):  # then the store is gone
        return reason_of(watcher.store, call)
    return ""


def failure_behind(error: BaseException, operation: str = "a collective") -> FailureRecord | None:
    """Return the failure on another rank because of which a connection broke, if known within a second."""
    watcher = current()
    if watcher is None or isinstance(error, DistmanError | JobFailed) or not is_lost_connection(error):
        return None  # an error of the package knows its cause, whatever words of others it quotes
    return watcher.explain(error, operation)


def _raise_failure_first(_: logging.LogRecord) -> bool:
    """Raise the failure of the job in place of an error that a collective of torch is about to report of it.

    Such collectives break when another rank dies, often before its death is known.
    """
    error = sys.exc_info()[1]
    if error is None or current_wait() is not None:  # a call of this package finds the cause itself
        return True
    cause = failure_behind(error, "a collective of torch")
    is_late = "timed out" in str(error).lower()  # which may have nothing to do with a rank that left
    try:
        if cause is not None and not (cause.error_type == LEFT and is_late):
            raise_failure(cause, error)
    finally:
        del error
    return True


def watch_collectives() -> None:
    """Let torch's collectives raise the failure of the job from now on, where one breaks them."""
    collective_errors().addFilter(_raise_failure_first)


@puts_back
def leave_collectives_alone() -> None:
    collective_errors().removeFilter(_raise_failure_first)


P = ParamSpec("P")
R = TypeVar("R")


class WaitScope(TrackedWait):
    """For the length of a ``with`` block this thread waits for other ranks, and says why if they do not come.

    Where the failure of another rank broke a connection, ``JobFailed`` takes the place of that error; where the
    ranks wait in calls that do not match, or one of them refuses its part, ``PlanMismatchError`` does.
    """

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
        try:
            if self.is_outermost and (record is not None or isinstance(error, JobFailed)):
                raise_failure(record, error)
        finally:
            del error, trace  # else what is raised again would hold this frame, and the frame itself


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
