"""``DISTMAN_DEBUG=1``: before each collective the ranks compare what they are about to do."""

from __future__ import annotations

import os

from distman._coordination import protocol
from distman._coordination.tracking import call_site, current_wait
from distman._job.groups.registry import Group
from distman.environments import read_flag

_VARIABLE = "DISTMAN_DEBUG"


def is_on() -> bool:
    return read_flag(os.environ, _VARIABLE)


def compare_calls(operation: str, group: Group, **details: object) -> None:
    """In debug mode, go on only if all ranks of the group call the same collective in the same way.

    It goes over the store, so that ranks which differ cannot hang each other. Without debug mode this only notes the
    operation, which is part of what messages are told apart by.
    """
    wait = current_wait()
    if wait is not None:
        wait.note = operation
    if group.consensus is None or not is_on():
        return
    call = {"operation": operation, **{name: str(_plain(value)) for name, value in details.items()}}
    key = protocol.collective(next(group.calls), group.name or group.ranks)
    group.consensus.compare(key, call, place=call_site())


def tell_apart(text: str) -> None:
    """Let the calls of ranks be found to differ that differ in this, without debug mode too."""
    wait = current_wait()
    if wait is not None:
        wait.note += f" {text}"


def _plain(value: object) -> object:
    """Return sequences and numbers of any kind as lists and numbers of Python's own."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
