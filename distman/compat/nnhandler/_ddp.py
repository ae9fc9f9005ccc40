"""``nn_handler.utils.ddp_init``, ``ddp_decorators`` and ``ddp_helpers``: jobs, some of their ranks, numbers of all."""

from __future__ import annotations

import datetime
import functools
import inspect
import os
import re
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from distman import collectives, decorators, executor, metrics
from distman._job.device import resolve_device
from distman._job.meeting.early_failure import is_started_by_rank
from distman.environments import should_use_distributed
from distman.errors import WorkerError
from distman.manager import DistributedManager

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Answer = tuple[bool, int, int, int, torch.device]

_unreported: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""Groups that a call other than initialize_ddp() has made, and which it has yet to report."""


def initialize_ddp(timeout: float | datetime.timedelta | None = None) -> Answer | None:
    """Bring the ranks together, and return what was found; None where a process group is there already.

    Collective. A group that other code made is adopted. A collective may take ``timeout`` seconds, by default an hour.
    The answer is ``(distributed, rank, local_rank, world_size, device)``; the local rank of a lone process is -1.
    """
    is_known = dist.is_initialized() and dist.group.WORLD not in _unreported
    manager = start(timeout=timeout)
    _unreported.clear()
    if is_known:
        return None
    local_rank = manager.local_rank if manager.distributed else -1
    return manager.distributed, manager.rank, local_rank, manager.world_size, manager.device


def start(
    device: torch.device | str | None = None,
    *,
    use_distributed: bool | None = None,
    timeout: float | datetime.timedelta | None = None,
) -> DistributedManager:
    """Initialize the manager, if the program has not: over the process group that is there, else as the launcher says.

    The device is that of a process that is alone.
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
            _unreported.add(dist.group.WORLD)
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
    """Return whether a launcher has started this process as one of several ranks. Local."""
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


def on_rank(
    rank: int | list[int], barrier: bool = False, check_exception: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Let a function run on one rank, or on some, while the others wait; in a process that is alone it runs.

    Local; the decorated function is collective. See :func:`distman.on_rank`. ``check_exception`` makes no difference:
    an error on one rank is an error on all.
    """
    on_those = decorators.on_rank(rank, barrier)

    def decorate(func: Callable[P, R]) -> Callable[P, R | None]:
        there = on_those(func)

        @functools.wraps(func)
        def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
            return func(*args, **kwargs) if find_job() is None else there(*args, **kwargs)

        return call

    return decorate


class ParallelExecutor(executor.ParallelExecutor):
    """A function on every device at once, in processes that stay from call to call; ``devices`` may be CPUs."""

    def __init__(
        self,
        num_gpus: int | None = None,
        pass_device: bool = True,
        *,
        devices: Sequence[str | torch.device] | None = None,
    ) -> None:
        super().__init__(num_gpus, pass_device, devices=devices)
        self.num_gpus, self.pass_device = len(self.devices), pass_device

    def run(self, func: Callable[..., R], /, *args: Any, **kwargs: Any) -> list[R]:
        """Call the function on every device at once, and return the results in the order of the devices.

        Local. Blocks.

        Raises:
            RuntimeError: The function raised on one of them; that error is the cause.
        """
        try:
            return super().run(_with_named_device(func) if self.pass_device else func, *args, **kwargs)
        except Exception as error:
            if isinstance(error, RuntimeError) or not isinstance(error.__cause__, WorkerError):
                raise
            raise RuntimeError(f"the function failed in a worker: {error!r}") from error


def parallelize_on_gpus(
    num_gpus: int | None = None,
    pass_device: bool = True,
    *,
    devices: Sequence[str | torch.device] | None = None,
) -> Callable[[Callable[..., R]], Callable[..., list[R]]]:
    """Return a decorator: a call of the function runs it on every device and returns the list of results.

    Local. The arguments are those of :class:`ParallelExecutor`; it is made by the first call.
    """
    return executor.run_by(lambda: ParallelExecutor(num_gpus, pass_device, devices=devices))


def _with_named_device(func: Callable[..., R]) -> Callable[..., R]:
    """Return the function; one that takes its device among any keywords, by a wrapper that says so."""
    try:
        parameters = inspect.signature(func).parameters
    except (TypeError, ValueError):  # a builtin without a signature, or nothing that can be called
        return func
    if "device" in parameters or not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return func

    def call(*args: Any, device: torch.device, **kwargs: Any) -> R:
        return func(*args, device=device, **kwargs)

    return call


def aggregate_metrics(metrics_dict: Mapping[str, float], world_size: int, device: object = None) -> dict[str, float]:
    """Return the mean of each metric over all ranks; one that is NaN is left out on its rank.

    Collective. Blocking. With ``world_size`` 1 they are returned as they are; ``device`` makes no difference.
    """
    is_alone = world_size <= 1 or find_job() is None
    return dict(metrics_dict) if is_alone else metrics.aggregate_metrics(metrics_dict)


def aggregate_loss(loss_value: float, world_size: int, device: object = None) -> float:
    """Return the mean loss over all ranks; one that is NaN is left out on its rank.

    Collective. Blocking. The arguments are as those of :func:`aggregate_metrics`.
    """
    return loss_value if world_size <= 1 or find_job() is None else metrics.aggregate_loss(loss_value)


def broadcast_data(data: T, src: int = 0) -> T:
    """Return one rank's data on all ranks; a tensor of the same shape and type is written in place.

    Collective. Blocking. On ``src`` it is anything that can be pickled; elsewhere a tensor to receive, or anything.
    """
    if find_job() is None:
        return data
    received = collectives.broadcast_data(data, src)
    if not (isinstance(data, torch.Tensor) and isinstance(received, torch.Tensor)) or data is received:
        return received
    if (data.shape, data.dtype) != (received.shape, received.dtype):
        return received
    with torch.no_grad():
        data.copy_(received)
    return data


def make_train_val_indices(
    n_items: int, val_fraction: float = 0.1, seed: int = 1234, save_path: str | None = None, overwrite: bool = False
) -> tuple[Any, Any]:
    """Return the indices of samples to train and to validate with, as NumPy arrays, the same on all ranks.

    Collective. Rank 0 draws them, or reads them from ``save_path`` if that is there and ``overwrite`` is False.
    """
    import numpy as np  # torch works without it

    def split() -> tuple[Any, Any]:
        if save_path and Path(save_path).exists() and not overwrite:
            saved = np.load(save_path)
            return saved["train_idx"], saved["val_idx"]
        order = np.random.default_rng(seed).permutation(n_items)
        first = round(val_fraction * n_items)
        indices = np.sort(order[first:]), np.sort(order[:first])
        if save_path:
            np.savez_compressed(save_path, train_idx=indices[0], val_idx=indices[1])
        return indices

    return broadcast_data(on_rank(0)(split)() or (None, None))
