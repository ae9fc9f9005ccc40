"""Methods that all ranks call: an error that leaves one of them on some ranks only fails the job."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import ParamSpec, TypeVar

from distman.manager import DistributedManager

P = ParamSpec("P")
R = TypeVar("R")


def joint(method: Callable[P, R]) -> Callable[P, R]:
    """Let all ranks hear of an error of the method, where not all of them raise one.

    The program may catch it, and the others would wait for this rank in the next collective.
    """

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        blocks = DistributedManager().resolve_group(None).joint_blocks
        with blocks.block(f"{method.__name__}()") if blocks is not None else nullcontext():
            return method(*args, **kwargs)

    return call
