"""Which classes a file may name: what only a file names is neither imported nor called."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from distman._base.process_state import puts_back
from distman.errors import CheckpointError

_OF_TORCH = {
    torch.nn.Module: torch.nn,
    torch.optim.Optimizer: torch.optim,
    torch.optim.lr_scheduler.LRScheduler: torch.optim.lr_scheduler,
}

_used: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes with which the program itself has made or set up a handler."""


@puts_back
def forget() -> None:
    _used.clear()


def remember(used: object) -> None:
    """Note a class that the program uses with a handler, or a function that makes such a thing."""
    if isinstance(used, type):
        _used.add(used)


def class_of(made: Mapping[str, Any], base: type, classes: Iterable[type] = ()) -> Any:
    """Return the class that a file names: a public one of torch, one that the program has used, or one of its list.

    Args:
        made: Its module, its name, and arguments for it.
        base: What it is derived from.
        classes: The program's list.

    Raises:
        CheckpointError: It is another one.
    """
    named = made["module"], made["name"]
    for one in (*vars(_OF_TORCH[base]).values(), *_used, *classes):
        if isinstance(one, type) and issubclass(one, base) and (one.__module__, one.__qualname__) == named:
            return one
    raise CheckpointError(
        f"{named[0]}.{named[1]} must be a class of {base.__name__} that this program has used, got one that only the "
        "file names. If you trust the file with its arguments, pass classes=[...] with this class to load(), or make "
        "the handler and call load() on it."
    )
