"""The decorator that makes a call run on every device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, overload

import torch

from distman.executor._parallel import ParallelExecutor

P = ParamSpec("P")
T = TypeVar("T")


class OnEveryDevice(Protocol[P, T]):
    """A function that a call runs on every device."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> list[T]: ...

    def shutdown(self) -> None:
        """End the workers. Blocks until they are gone."""


class _Decorator(Protocol):
    """Takes the device off the parameters, where that is the first one."""

    @overload
    def __call__(self, function: Callable[Concatenate[torch.device, P], T], /) -> OnEveryDevice[P, T]: ...

    @overload
    def __call__(self, function: Callable[..., T], /) -> OnEveryDevice[..., T]: ...


class _DecoratorWithoutDevice(Protocol):
    def __call__(self, function: Callable[P, T], /) -> OnEveryDevice[P, T]: ...


@overload
def parallelize_on_gpus(
    num_gpus: int | None = None,
    pass_device: Literal[True] = True,  # noqa: FBT002 - a settled interface
) -> _Decorator: ...


@overload
def parallelize_on_gpus(num_gpus: int | None = None, *, pass_device: Literal[False]) -> _DecoratorWithoutDevice: ...


@overload
def parallelize_on_gpus(num_gpus: int | None, pass_device: Literal[False]) -> _DecoratorWithoutDevice: ...


def parallelize_on_gpus(
    num_gpus: int | None = None,
    pass_device: bool = True,  # noqa: FBT001, FBT002 - a settled interface
) -> Callable[..., Any]:
    """Return a decorator: a call of the function runs it on every GPU and returns the list of results.

    Local. The workers are started by the first call, and stay until the program ends or ``shutdown()`` of the
    decorated function is called; the call after that starts new ones.

    Args:
        num_gpus: As for ``ParallelExecutor``; looked at by the first call.
        pass_device: Whether the function takes the device.

    Raises:
        WorkerError: When called: as ``ParallelExecutor.run``.

    Example:
        >>> @parallelize_on_gpus(pass_device=False)
        ... def add(x, y):
        ...     return x + y
        >>> set(add(1, 2))
        {3}
        >>> add.shutdown()
    """
    return run_by(lambda: ParallelExecutor(num_gpus, pass_device))


def run_by(make: Callable[[], ParallelExecutor]) -> Callable[..., Any]:
    """Return a decorator: a call of the function runs it by the executor that the first call makes."""

    def decorate(function: Callable[..., T]) -> Callable[..., Any]:
        resident: list[ParallelExecutor] = []

        @functools.wraps(function)
        def run_on_all(*args: Any, **kwargs: Any) -> list[T]:
            if not resident:
                resident.append(make())
            return resident[0].run(function, *args, **kwargs)

        def shutdown() -> None:
            """End the workers, and wait until they are gone."""
            while resident:
                resident.pop().shutdown()

        run_on_all.shutdown = shutdown  # type: ignore[attr-defined]
        return run_on_all

    return decorate
