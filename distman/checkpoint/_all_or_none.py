"""Functions that succeed on all ranks or fail on all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar, cast

from distman.decorators import on_rank
from distman.errors import RankFailedError
from distman.manager import DistributedManager

R = TypeVar("R")


def on_all_ranks(func: Callable[[], R]) -> R:
    """Run a function on every rank, and return only if it succeeded on all.

    Collective. Blocking.

    Args:
        func: What to run.

    Returns:
        What it returned on this rank.

    Raises:
        Exception: The function's own error, on a rank where it failed.
        RankFailedError: On the other ranks, with that error.
    """
    own: list[Exception] = []

    def recorded() -> R:
        try:
            return func()
        except Exception as error:
            own.append(error)
            raise

    named = func.func if isinstance(func, functools.partial) else func
    recorded.__qualname__ = getattr(named, "__qualname__", recorded.__qualname__)
    manager = DistributedManager.find()
    world_size = manager.world_size if manager is not None else 1
    try:
        return cast("R", on_rank(range(world_size))(recorded)())
    except RankFailedError:
        if own:
            raise own[0] from own[0].__cause__
        raise
