"""Errors of torch's own collectives, which break when another rank dies, often before its death is known."""

from __future__ import annotations

import logging
import sys

from distman._base.process_state import puts_back
from distman._coordination.failure.record import LEFT
from distman._coordination.monitor.current_watcher import failure_behind, raise_failure
from distman._coordination.tracking import current_wait
from distman._torch_internals import collective_errors


class _FailureFirst(logging.Filter):
    """Raises the failure of the job in place of an error that torch is about to report, where it comes from that."""

    def filter(self, record: logging.LogRecord) -> bool:  # noqa: ARG002 - the interface of logging
        """Return whether torch may report the error."""
        error = sys.exc_info()[1]
        is_ours = current_wait() is not None  # a call of this package finds the cause itself
        if error is None or is_ours:
            return True
        cause = failure_behind(error, "a collective of torch")
        is_late = "timed out" in str(error).lower()  # which may have nothing to do with a rank that left
        if cause is not None and not (cause.error_type == LEFT and is_late):
            raise_failure(cause, error)
        return True


_FILTER = _FailureFirst()


def watch_collectives() -> None:
    """Let torch's collectives raise the failure of the job from now on, where one breaks them."""
    collective_errors().addFilter(_FILTER)


@puts_back
def leave_collectives_alone() -> None:
    """Let torch's collectives raise their own errors again."""
    collective_errors().removeFilter(_FILTER)
