"""What a program may say about the start of its job, by arguments and by variables."""

from __future__ import annotations

import datetime
import os
import threading

from distman._coordination.monitor.context import WatchLimits
from distman._job.job import Limits
from distman._log import logger
from distman.environments import LaunchEnvironment, detect, misspelt_variables
from distman.environments._base import read_flag
from distman.topology._partition import is_whole_number

# Variables of the environment, with the seconds that hold without them.
_TIMEOUT = ("DISTMAN_TIMEOUT", 3600.0)  # ranks may do different work for long, such as saving on one of them
_RENDEZVOUS_TIMEOUT = ("DISTMAN_RENDEZVOUS_TIMEOUT", 300.0)  # imports from a shared file system take minutes
_SILENCE_TIMEOUT = ("DISTMAN_SILENCE_TIMEOUT", 300.0)  # native code may hold the GIL for minutes
_HANG_TIMEOUT = "DISTMAN_HANG_TIMEOUT"
_WATCH = "DISTMAN_WATCH"
_FIND_UNUSED = "DDP_FIND_UNUSED_PARAMETERS"


def limits(timeout: float | datetime.timedelta | None, rendezvous_timeout: float | datetime.timedelta | None) -> Limits:
    """Return how long to wait: what the program says, else the variables."""
    return Limits(seconds(timeout, *_TIMEOUT), seconds(rendezvous_timeout, *_RENDEZVOUS_TIMEOUT))


def seed(value: int | None) -> int | None:
    """Return the seed as an integer of Python's; it is checked before the ranks meet."""
    if value is None:
        return None
    if isinstance(value, bool) or not is_whole_number(value):
        raise TypeError(f"seed must be an integer, got {value!r}. Pass one, the same on all ranks, or None.")
    if value < 0:
        raise ValueError(f"seed must be 0 or more, got {value}. Pass one, the same on all ranks, or None.")
    return int(value)


def finds_unused_parameters() -> bool:
    """Return whether the environment lets DDP look for unused parameters."""
    return read_flag(os.environ, _FIND_UNUSED)


def environment(method: str | None, *, use_distributed: bool | None) -> LaunchEnvironment:
    """Return what the launcher says, with its warnings in the log."""
    if use_distributed is False:
        return LaunchEnvironment.lone()
    detection = detect(os.environ, method)
    for sentence in detection.warnings:
        logger.warning(sentence)
    if use_distributed:
        detection.require_launcher()
    return detection.environment


def seconds(value: float | datetime.timedelta | None, variable: str, default: float) -> float:
    """Return a limit in seconds: the argument, else the variable, else the default."""
    got = f"{value} from the call"
    number = value.total_seconds() if isinstance(value, datetime.timedelta) else value
    if number is None:
        text = os.environ.get(variable)
        if not text:
            return default
        number, got = _number(text), f"{text!r} from {variable}"
    if number is None or not 0 < number < threading.TIMEOUT_MAX:
        raise ValueError(f"a timeout must be a positive number of seconds, got {got}. Leave it out for the default.")
    return float(number)


def watch_limits() -> WatchLimits | None:
    """Return the limits of the watcher; None where it is switched off."""
    if not read_flag(os.environ, _WATCH, default=True):
        return None
    hang = seconds(None, _HANG_TIMEOUT, 0.0) or None
    return WatchLimits(silence=seconds(None, *_SILENCE_TIMEOUT), hang=hang)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def warn_of_misspelt(rank: int) -> None:
    """Say on rank 0 which variables have no effect."""
    if rank == 0:
        for sentence in misspelt_variables(os.environ):
            logger.warning(sentence)
