"""What the import of the package does: a rank that fails on its way to ``initialize()`` is heard."""

from __future__ import annotations

import os

from distman.environments import LAUNCHERS, detect
from distman.errors import LaunchEnvironmentError


def watch() -> None:
    """Install the exception hook in a process that a launcher started beside others, or whose errors it shows."""
    try:
        environment = detect(os.environ).environment
    except (LaunchEnvironmentError, ValueError):
        return  # initialize() will say what is wrong
    if environment.world_size > 1 or LAUNCHERS[environment.launcher].shows_errors:
        from distman._coordination.failure import hook  # here: a program without ranks loads twice as fast without it
        from distman._rendezvous.early_failure import tell_of

        hook.install(tell_of)
