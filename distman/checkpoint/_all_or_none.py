"""Functions that succeed on all ranks or fail on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from distman.decorators import on_rank
from distman.manager import DistributedManager

P = ParamSpec("P")
R = TypeVar("R")


def on_all_ranks(func: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function on every rank, and return what it returned here if it succeeded on all; else raise on all."""
    manager = DistributedManager.find()
    world_size = manager.world_size if manager is not None else 1
    return cast("R", on_rank(range(world_size))(func)(*args, **kwargs))
