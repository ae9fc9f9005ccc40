"""``nn_handler.utils.ddp_init``: the start of a job, and which device a process computes on."""

from __future__ import annotations

import datetime
import os
import re
import warnings
import weakref

import torch
import torch.distributed as dist

from distman._job.device import resolve_device
from distman._job.meeting.early_failure import is_started_by_rank
from distman.environments import should_use_distributed
from distman.manager import DistributedManager

Answer = tuple[bool, int, int, int, torch.device]

_untold: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""Groups that a call other than initialize_ddp() has made, of which it has not told yet."""


def initialize_ddp(timeout: float | datetime.timedelta | None = None) -> Answer | None:
    """Bring the ranks together, and return what was found; None where a process group is there already.

    Collective. A group that other code made is adopted.

    Args:
        timeout: Seconds that a collective may take; None is an hour.

    Returns:
        ``(distributed, rank, local_rank, world_size, device)``; the local rank of a lone process is -1.
    """
    is_told = dist.is_initialized() and dist.group.WORLD not in _untold
    manager = start(timeout=timeout)
    _untold.clear()
    if is_told:
        return None
    local_rank = manager.local_rank if manager.distributed else -1
    return manager.distributed, manager.rank, local_rank, manager.world_size, manager.device


def _initialize_distributed(timeout: float | datetime.timedelta | None = None) -> Answer | None:
    """Do what :func:`initialize_ddp` does.

    Collective.
    """
    return initialize_ddp(timeout)


def start(
    device: torch.device | str | None = None,
    *,
    use_distributed: bool | None = None,
    timeout: float | datetime.timedelta | None = None,
) -> DistributedManager:
    """Initialize the manager, if the program has not: over the process group that is there, else as the launcher says.

    Collective where there is one of these, else local.

    Args:
        device: Device of a process that is alone; a rank of a job has that of its place on its host.
        use_distributed: False is one process whatever the launcher says.
        timeout: Seconds that a collective may take; None leaves it to the manager.
    """
    if DistributedManager.is_initialized():
        return DistributedManager()
    is_job = use_distributed is not False and (dist.is_initialized() or _should_use_distributed(use_distributed))
    return DistributedManager.initialize(
        device=None if is_job or device is None else _resolve_device(device),
        use_distributed=None if is_job else False,
        timeout=timeout,
    )


def find_job() -> DistributedManager | None:
    """Return the manager of a job; None in a process that is alone, or was started by a rank for work of its own.

    Collective at the first use in a job: where a process group is there it is adopted, else the launcher is believed.
    So no rank takes itself for the only one before the job is initialized.
    """
    if not DistributedManager.is_initialized():
        if not dist.is_initialized() and (not should_use_distributed(None) or is_started_by_rank(os.environ)):
            return None
        had_group = dist.is_initialized()
        start()
        if not had_group and dist.group.WORLD is not None:
            _untold.add(dist.group.WORLD)
    manager = DistributedManager()
    return manager if manager.distributed else None


def _should_use_distributed(use_distributed_flag: bool | None) -> bool:
    """Return whether a launcher has started several ranks, and the flag does not rule them out.

    Local. True where there is one process warns, and is False.
    """
    is_job = use_distributed_flag is not False and should_use_distributed(None)
    if use_distributed_flag and not is_job:
        warnings.warn("use_distributed=True, but no launcher has started several ranks: one process", stacklevel=2)
    return is_job


def _is_env_distributed() -> bool:
    """Return whether a launcher has started this process as one of several ranks.

    Local.
    """
    return should_use_distributed(None)


def _resolve_device(device: torch.device | str) -> torch.device:
    """Return the device that a specification names, or the CPU, with a warning, where there is no such GPU.

    Local.

    Raises:
        TypeError: It is neither a string nor a device.
        ValueError: The string names no device.
    """
    text = str(device).strip().lower()
    try:
        return resolve_device(device)
    except ValueError:
        if not re.fullmatch(r"(cuda|gpu|xpu):\d+", text):
            raise
    warnings.warn(f"there is no device {text}: using the CPU instead", RuntimeWarning, stacklevel=2)
    return torch.device("cpu")
