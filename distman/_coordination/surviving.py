"""A block of a program that goes on without the ranks that fail in it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from distman._coordination.failure.delivery import ends_block
from distman._coordination.failure.record import FailureRecord
from distman._coordination.wait_scope import failure_behind
from distman.errors import DistmanError, JobFailed


class SurvivedFailure:
    """What a :func:`surviving_failure` block has survived; true if that is something.

    Attributes:
        error: The failure; None if there was none.

    Example:
        >>> from distman import surviving_failure
        >>> with surviving_failure() as failure:
        ...     pass
        >>> failure.error is None, bool(failure)
        (True, False)
    """

    def __init__(self) -> None:
        self.error: JobFailed | None = None

    def __bool__(self) -> bool:
        return self.error is not None


class surviving_failure(AbstractContextManager[SurvivedFailure]):  # noqa: N801 - used like a function
    """Run a block, and go on behind it if another rank fails meanwhile.

    Local. The block survives one failure, also where torch noticed it first and raised an error of its own. From then
    on the exit code is the program's, and calls that wait for ranks that are gone raise
    :class:`~distman.JobFailed` again.

    Returns:
        The ``with`` statement gives an object that is true if a rank has failed, with the failure as ``error``.

    Example:
        >>> manager = DistributedManager.initialize()
        >>> with surviving_failure() as failure:
        ...     manager.barrier()
        >>> if failure:
        ...     print(f"going on without rank {failure.error.rank}")
    """

    def __init__(self) -> None:
        self._survived = SurvivedFailure()

    def __enter__(self) -> SurvivedFailure:
        return self._survived

    @ends_block
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        failure = _failure_in(error) if error is not None else None
        if failure is None:
            return False
        failure.acknowledge()
        # Without the traceback, which would keep the variables of the frames that it came through, groups among them.
        self._survived.error = FailureRecord.of(failure, failure.rank).to_failure()
        return True


def _failure_in(error: BaseException) -> JobFailed | None:
    if isinstance(error, BaseExceptionGroup):
        matching, others = error.split(JobFailed)
        return _failure_in(matching.exceptions[0]) if matching is not None and others is None else None
    if isinstance(error, JobFailed):
        return error
    is_of_torch = isinstance(error, RuntimeError) and not isinstance(error, DistmanError)
    record = failure_behind(error, "the block") if is_of_torch else None
    return record.to_failure() if record is not None else None
