"""A rank of a running job that fails tells the others why it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from distman._base import timing
from distman._coordination import protocol
from distman._coordination.failure import hook
from distman._coordination.failure.record import SILENT, FailureRecord
from distman._coordination.failure.starter import is_shown_by_starter, write_error_file
from distman._coordination.messages import count
from distman._coordination.monitor.context import interval, late_after, wait_until_known
from distman._coordination.monitor.watcher import is_watching
from distman._coordination.timeouts import result_within, run_with_timeout
from distman._coordination.wait_scope import failure_behind
from distman.errors import JobFailed

if TYPE_CHECKING:
    from distman._store.torch_store import TorchStore


@dataclasses.dataclass
class JobReporter:
    """Tells the other ranks of a running job, over its store, why this one ends.

    The first rank that fails leaves its record, which the others print after their own traceback. It leaves the group,
    so that nobody waits for it, and stays until they have read: a launcher may end them as soon as it ends.
    """

    rank: int
    num_others: int  # ranks beside this one
    store: TorchStore
    store_host: str  # what serves the store, for messages
    leave_group: Callable[[], None]  # closes this process's connections to the others
    abort_job: Callable[[BaseException], None]  # makes the launcher end the job once this process ends
    look_after: Callable[[FailureRecord], object]  # finds ranks that would keep the launcher waiting
    cause: FailureRecord | None = None  # the failure by which the process ends, if that was found out before

    def __call__(self, error: BaseException) -> Callable[[], None]:
        """Tell of an exception that nothing caught, and return what is left to do when it is printed."""
        cause = self.cause or self._failure_behind(error)
        mine = cause or FailureRecord.of(error, self.rank)
        self.abort_job(mine.to_failure())
        if cause is not None and cause.rank != self.rank and not isinstance(error, JobFailed):
            hook.end_with(JobFailed.EXIT_CODE)
        first = self._publish_in_time(mine) if mine.error_type != SILENT else None
        write_error_file(self.rank, mine, first)

        def finish() -> None:
            self._finish(error, first or cause, is_told=first is not None)
            if first is not None or mine.error_type == SILENT:
                self.look_after(first or mine)

        return finish

    def _failure_behind(self, error: BaseException) -> FailureRecord | None:
        with contextlib.suppress(BaseException):  # it asks a program's exception for its text, which may raise anything
            return result_within(lambda: failure_behind(error), timing.PUBLISH + 2 * late_after(self.num_others + 1))
        return None

    def _finish(self, error: BaseException, cause: FailureRecord | None, *, is_told: bool) -> None:
        """Print what the error itself does not say, and stay until the others have read the record."""
        if not isinstance(error, JobFailed | KeyboardInterrupt):
            if cause is not None and cause.rank != self.rank and not is_shown_by_starter():
                hook.write(f"distman: the job failed first elsewhere: {hook.told_again(cause)}")
            if not is_told and cause is None:
                hook.write(
                    f"distman: the others are not told: {self.store_host}, which serves the job's store, is gone, or "
                    "does not answer. See its error."
                )
        if is_told and is_watching():  # where nobody watches, nobody says that it has read
            run_with_timeout(self.leave_group, timing.STAY_TO_BE_READ)
            seconds = timing.STAY_TO_BE_READ + interval(self.num_others + 1)
            run_with_timeout(lambda: wait_until_known(self.store, self.num_others, seconds), timing.PUBLISH)

    def _publish_in_time(self, mine: FailureRecord) -> FailureRecord | None:
        """Leave a record in the store, and return the first one there; None where that was not possible."""
        try:
            first = result_within(lambda: self._publish(mine), timing.PUBLISH + interval(self.num_others + 1))
        except Exception:  # noqa: BLE001 - the store is gone, or memory is out: the error has yet to be printed
            return None
        if first is None:  # that thread may come back from the store into an interpreter that is gone
            code = 1 if mine.rank == self.rank else JobFailed.EXIT_CODE
            hook.end_job_at_exit(functools.partial(os._exit, code))
        return first

    def _publish(self, mine: FailureRecord) -> FailureRecord:
        first = mine.publish(self.store)
        self.store.delete_key(protocol.beat(self.rank))  # it knows, though its watcher may not come to say so
        count(self.store, protocol.NEWS, 1)
        if not is_watching() and first.rank != self.rank:  # else the watcher says so, once
            count(self.store, protocol.FAILURE_SEEN, 1)
        return first
