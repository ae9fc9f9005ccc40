"""What the import of the package does: a rank that fails on its way to ``initialize()`` is heard."""

from __future__ import annotations

import dataclasses
import os

from distman.control import failure
from distman.control.ending import end_job_after
from distman.control.notice import FailureNotice
from distman.environments import detect
from distman.errors import LaunchEnvironmentError
from distman.rendezvous.early_failure import tell_waiting_ranks

__all__ = ["watch"]


def watch() -> None:
    """Install the exception hook in a process that a launcher started beside others; elsewhere do nothing.

    Local.
    """
    try:
        environment = detect(os.environ).environment
    except (LaunchEnvironmentError, ValueError):
        return  # initialize() will say what is wrong
    if environment.world_size > 1:
        failure.install(_tell)


def _tell(error: BaseException) -> None:
    environment = detect(os.environ).environment
    end_job_after(error, environment)
    notice = FailureNotice.of(error, environment.rank)
    tell_waiting_ranks(dataclasses.asdict(notice), os.environ)
