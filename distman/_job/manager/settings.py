"""What a program may say about the start of its job, by arguments and by variables."""

from __future__ import annotations

import datetime
import math
import os
import threading

import torch.distributed as dist

from distman._base import timing
from distman._base.arguments import check_seconds
from distman._base.log import logger
from distman._coordination.failure.interruption import Patience
from distman._coordination.monitor.context import WatchLimits
from distman._job.job import Limits
from distman._torch_internals import shortest_timeout
from distman.environments import LaunchEnvironment, detect, misspelt_variables, read_flag
from distman.topology import is_whole_number

_WATCH = "DISTMAN_WATCH"
_FIND_UNUSED = "DDP_FIND_UNUSED_PARAMETERS"


def group_to_adopt(*, use_distributed: bool | None) -> dist.ProcessGroup | None:
    """Return the default process group that other code has made, unless this process is to be alone."""
    return None if use_distributed is False else dist.group.WORLD


def limits(
    timeout: float | datetime.timedelta | None,
    rendezvous_timeout: float | datetime.timedelta | None,
    adopted: dist.ProcessGroup | None,
) -> Limits:
    default = (shortest_timeout(adopted) if adopted is not None else None) or timing.TIMEOUT
    return Limits(
        _seconds_of("DISTMAN_TIMEOUT", default) if timeout is None else check_seconds("timeout", timeout),
        _seconds_of("DISTMAN_RENDEZVOUS_TIMEOUT", timing.RENDEZVOUS_TIMEOUT)
        if rendezvous_timeout is None
        else check_seconds("rendezvous_timeout", rendezvous_timeout),
    )


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
    return read_flag(os.environ, _FIND_UNUSED)


def check_adopted_backend(backend: str | None) -> None:
    there = dict(part.split(":") for part in dist.get_backend_config().split(",") if ":" in part)
    for part in (backend or "").split(","):
        device, _, name = part.rpartition(":")
        if name and {there.get(device)} != {name} and {*there.values()} != {name}:
            raise ValueError(
                f"backend must be that of the process group that is adopted, {dist.get_backend_config()!r}, got "
                f"{backend!r}. Leave it out, or name it where the group is made."
            )


def environment(method: str | None, *, use_distributed: bool | None) -> LaunchEnvironment:
    if use_distributed is False:
        return LaunchEnvironment.lone()
    detection = detect(os.environ, method)
    for sentence in detection.warnings:
        logger.warning(sentence)
    if use_distributed:
        detection.require_launcher()
    return detection.environment


def _seconds_of(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < threading.TIMEOUT_MAX:
        raise ValueError(
            f"a timeout must be a positive number of seconds, got {text!r} from {variable}. Leave it out for the "
            "default."
        )
    return number


def watch_limits() -> WatchLimits | None:
    if not read_flag(os.environ, _WATCH, default=True):
        return None
    grace = _seconds_of("DISTMAN_FAILURE_GRACE", timing.FAILURE_GRACE)
    to_come = timing.FAILURE_GRACE_NATIVE / timing.FAILURE_GRACE * grace
    silence = _seconds_of("DISTMAN_SILENCE_TIMEOUT", timing.SILENCE_TIMEOUT)
    hang = _seconds_of("DISTMAN_HANG_TIMEOUT", timing.HANG_TIMEOUT)
    return WatchLimits(silence, hang, Patience(to_handle=grace, to_come=to_come))


def warn_of_misspelt(rank: int) -> None:
    if rank == 0:
        for sentence in misspelt_variables(os.environ):
            logger.warning(sentence)
