"""``nn_handler.utils.ddp_decorators``: functions on some ranks, and on all devices of a machine."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from distman import decorators, executor
from distman.compat.nnhandler._start import find_job
from distman.errors import WorkerError

P = ParamSpec("P")
R = TypeVar("R")


def on_rank(
    rank: int | list[int], barrier: bool = False, check_exception: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Let a function run on one rank, or on some, while the others wait; in a process that is alone it runs.

    Local; the decorated function is collective. See :func:`distman.on_rank`.

    Args:
        rank: The rank, or several of them.
        barrier: Let the ranks that run wait for the others as well.
        check_exception: Makes no difference: an error on one rank is an error on all.
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
    """A function on every device at once, in processes that stay from call to call.

    Args:
        num_gpus: How many GPUs to use; None takes all, or one CPU worker where there is no GPU.
        pass_device: Whether functions take the device.
        devices: The devices instead, such as ``["cpu", "cpu"]``.
    """

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

    def decorate(func: Callable[..., R]) -> Callable[..., list[R]]:
        @functools.cache
        def workers() -> ParallelExecutor:
            return ParallelExecutor(num_gpus, pass_device, devices=devices)

        @functools.wraps(func)
        def call(*args: Any, **kwargs: Any) -> list[R]:
            return workers().run(func, *args, **kwargs)

        return call

    return decorate


def _with_named_device(func: Callable[..., R]) -> Callable[..., R]:
    """Return the function; one that takes its device among any keywords, by a wrapper that says so."""
    try:
        parameters = inspect.signature(func).parameters
    except (TypeError, ValueError):  # a builtin without a signature, or nothing that can be called
        return func
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return _ByName(func) if takes_any and "device" not in parameters else func


class _ByName:
    def __init__(self, func: Callable[..., Any]) -> None:
        self._func = func

    def __call__(self, *args: Any, device: torch.device, **kwargs: Any) -> Any:
        return self._func(*args, device=device, **kwargs)
