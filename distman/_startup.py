"""What the import of the package does: a rank that fails on its way to ``initialize()`` is heard."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from distman.environments import LAUNCHERS, detect
from distman.errors import LaunchEnvironmentError


def watch() -> None:
    """Install the exception hook in a process that a launcher started beside others, or whose errors it shows.

    In any other, let the lines of a program stand at the end of its tracebacks, too.
    """
    try:
        environment = detect(os.environ).environment
    except (LaunchEnvironmentError, ValueError):
        environment = None  # initialize() will say what is wrong
    if environment and (environment.world_size > 1 or LAUNCHERS[environment.launcher].shows_errors):
        from distman._coordination.failure import hook  # here: a program without ranks loads twice as fast without it
        from distman._job.meeting.early_failure import tell_of

        hook.install(tell_of)
    elif sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show


def _show(error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    from distman._coordination.failure.short_traceback import show  # here: only what fails needs it

    show(error_type, error, trace)
