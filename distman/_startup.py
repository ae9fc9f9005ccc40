"""What the import of the package does: a rank that fails on its way to ``initialize()`` is heard."""

from __future__ import annotations

import dataclasses
import os

from distman._coordination.failure import hook
from distman._coordination.failure.job_abort import abort_job_after
from distman._coordination.failure.record import FailureRecord
from distman._rendezvous.early_failure import tell_waiting_ranks
from distman.environments import detect
from distman.errors import LaunchEnvironmentError


def watch() -> None:
    """Install the exception hook in a process that a launcher started beside others; elsewhere do nothing."""
    try:
        environment = detect(os.environ).environment
    except (LaunchEnvironmentError, ValueError):
        return  # initialize() will say what is wrong
    if environment.world_size > 1:
        hook.install(_tell)


def _tell(error: BaseException) -> None:
    environment = detect(os.environ).environment
    abort_job_after(error, environment)
    record = FailureRecord.of(error, environment.rank)
    tell_waiting_ranks(dataclasses.asdict(record), os.environ)
