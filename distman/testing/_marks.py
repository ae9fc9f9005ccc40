"""The decorator ``ranks``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, TypeVar, cast

import pytest

from distman._base.arguments import check_seconds

_Test = TypeVar("_Test", bound=Callable[..., object])
_GIVEN_IN_THE_WORKER = ("rank", "world_size")


@dataclass(frozen=True)
class RanksSpec:
    """The arguments of ``@ranks(...)`` for one test function."""

    world_sizes: tuple[int, ...]  # the test runs once with each
    timeout: float
    uses_manager: bool
    dies: tuple[int, ...]
    parameters: tuple[str, ...] = ()  # those of ``rank`` and ``world_size`` that the function takes


def ranks(
    *world_sizes: int, timeout: float = 60.0, manager: bool = True, dies: Sequence[int] = ()
) -> Callable[[_Test], _Test]:
    """Run a pytest test function on several ranks at once, once for each of the world sizes.

    Local. Every run gets resident worker processes on the CPU and a fresh gloo process group as the default
    group. The function may take ``rank`` and ``world_size``, and any fixtures and parametrized arguments:
    those are made in the pytest process and sent to the workers by (cloud)pickle. ``monkeypatch`` is each
    rank's own. The environment is that of the pytest process with ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``
    and ``LOCAL_WORLD_SIZE`` added, and other launchers' variables removed; random generators are seeded by
    test and rank. A coroutine is run by ``asyncio.run`` on each rank.

    Args:
        world_sizes: Numbers of ranks.
        timeout: Seconds for the whole test. Ranks that have not ended by then are reported with their
            stacks.
        manager: Whether ``DistributedManager.initialize()`` is called before the test, and ``cleanup()``
            after it.
        dies: Ranks that must die in this test, by a signal or by leaving the interpreter, while all others
            pass.

    Returns:
        A decorator that marks the function and returns the same function; of a coroutine, a function that runs it.

    Raises:
        TypeError: Something other than a function is decorated, or a generator; a world size is not an integer, or
            the timeout not a number of seconds.
        ValueError: No world size, one below 1, a rank outside the world, or a timeout that is not positive.

    Example:
        >>> @ranks(2, 3)
        ... def test_sum(rank, world_size):
        ...     value = torch.tensor(rank)
        ...     torch.distributed.all_reduce(value)
        ...     assert value == sum(range(world_size))
    """
    spec = RanksSpec(tuple(world_sizes), check_seconds("timeout", timeout), manager, tuple(dies))
    _check(spec)

    def mark(test: _Test) -> _Test:
        if not isinstance(test, FunctionType):
            raise TypeError(f"ranks must decorate a test function, got {test!r}. Decorate each method of a class.")
        function = _runnable(test)
        return cast("_Test", pytest.mark.ranks(_hide_parameters(function, spec))(function))

    return mark


def _runnable(function: FunctionType) -> FunctionType:
    """Return a plain function that does what a function does: pytest's plugins run coroutines in ways of their own."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"@ranks must decorate a function without yield, got the generator {function.__qualname__!r}. Assert in it."
        )
    if not inspect.iscoroutinefunction(function):
        return function
    coroutine = cast("Callable[..., Coroutine[Any, Any, object]]", function)

    @functools.wraps(function)
    def run(*args: object, **kwargs: object) -> object:
        import asyncio

        return asyncio.run(coroutine(*args, **kwargs))

    return cast("FunctionType", run)


def _check(spec: RanksSpec) -> None:
    if not spec.world_sizes:
        raise ValueError("ranks must be given at least one world size, got none. Write @ranks(2).")
    for size in spec.world_sizes:
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"world sizes must be integers, got {size!r}. Write @ranks(2).")
        if size < 1:
            raise ValueError(f"world sizes must be at least 1, got {size}.")
    if len(set(spec.world_sizes)) < len(spec.world_sizes):
        raise ValueError(f"world sizes must differ from each other, got {spec.world_sizes}.")
    for rank in spec.dies:
        if not 0 <= rank < min(spec.world_sizes):
            raise ValueError(f"dies must name ranks of every world size, got rank {rank} with {spec.world_sizes}.")


def _hide_parameters(function: FunctionType, spec: RanksSpec) -> RanksSpec:
    """Let pytest see a signature without ``rank`` and ``world_size``, which are no fixtures."""
    signature = inspect.signature(function)
    own = tuple(name for name in _GIVEN_IN_THE_WORKER if name in signature.parameters)
    seen = [parameter for name, parameter in signature.parameters.items() if name not in own]
    function.__signature__ = signature.replace(parameters=seen)  # type: ignore[attr-defined]
    return replace(spec, parameters=own)
