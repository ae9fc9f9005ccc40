"""What the import of the package does: a rank that fails on its way to ``initialize()`` is heard."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable

from distman._coordination.failure import hook
from distman._coordination.failure.error_file import write_error_file
from distman._coordination.failure.job_abort import abort_job_after, ending_of
from distman._coordination.failure.record import FailureRecord
from distman._coordination.timeouts import begin
from distman._rendezvous.early_failure import is_started_by_rank, tell_waiting_ranks
from distman.environments import LAUNCHERS, detect
from distman.errors import LaunchEnvironmentError


def watch() -> None:
    """Install the exception hook in a process that a launcher started beside others, or whose errors it shows."""
    try:
        environment = detect(os.environ).environment
    except (LaunchEnvironmentError, ValueError):
        return  # initialize() will say what is wrong
    if environment.world_size > 1 or LAUNCHERS[environment.launcher].shows_errors:
        hook.install(_tell)


def _tell(error: BaseException) -> Callable[[], object]:
    if is_started_by_rank(os.environ):
        return lambda: None
    environment = detect(os.environ).environment
    abort_job_after(error, environment)
    record = FailureRecord.of(error, environment.rank)
    # Whoever pressed Ctrl-C wants it to end.
    more = {"patience": 0} if isinstance(error, KeyboardInterrupt) else {}

    def tell() -> None:
        ending = ending_of(environment)
        if not tell_waiting_ranks(dataclasses.asdict(record), os.environ, **more) and ending is not None:
            hook.end_job_at_exit(ending)

    wait = begin(tell)  # while the error is printed
    write_error_file(environment.rank, record, None)
    return functools.partial(wait, None)  # it has a limit of its own
