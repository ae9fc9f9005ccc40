"""What a rank waits in: something in the store, or a call of a group, in which its ranks wait for each other.

Messages of unlike calls have unlike tags, so they never meet, and both ranks wait.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist

from distman._base import timing
from distman._coordination.timeouts import run_with_timeout
from distman._torch_internals import abort_backends, close_beside, close_connections


class Members(Protocol):
    """The group that a call is made in; ``ranks`` are those of the world, and ``rank`` is this one's index there."""

    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> Sequence[int]: ...
    @property
    def process_group(self) -> dist.ProcessGroup | None: ...
    @property
    def exchanges(self) -> CallNumbers: ...


class CallNumbers:
    """The numbers of a group's calls."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last = -1

    def __next__(self) -> int:
        self.last += 1
        return self.last


@dataclasses.dataclass(eq=False)
class StoreWait:
    """A wait for something in the store."""

    text: str  # the same on all ranks that wait for the same
    awaited: Callable[[], Sequence[int]]  # which ranks of the world have yet to bring it
    since: float = dataclasses.field(default_factory=time.monotonic)

    place = ("", 0)  # of no group
    label = ""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that it waits for, in the world."""
        return self.awaited()


@dataclasses.dataclass(eq=False, slots=True)
class Call:
    """What this rank waits in."""

    group: Members
    number: int  # in the group, the same on all members
    text: str  # what must be equal on all of them
    # Bytes to and from each rank of the group; None if it is an operation of the backend.
    pieces: tuple[Sequence[int], Sequence[int]] | None = None
    since: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def place(self) -> tuple[str, int]:
        """The name of its process group, empty if that has gone, and the call's number in it."""
        process_group = self.group.process_group
        return (process_group.group_name if process_group is not None else "", self.number)

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that make it, in the world."""
        return self.group.ranks

    @property
    def label(self) -> str:
        """The group, for messages."""
        return str(self.group.name or self.group.ranks)

    def interrupt(self) -> None:
        """Let the wait end with an error; connections are closed, else what it has sent would meet a later call."""
        end_waits(self.group)


def end_waits(group: Members) -> None:
    """End what ranks wait for in a group, which is good for nothing afterwards, see :meth:`Call.interrupt`."""
    process_group = group.process_group
    if process_group is not None:
        close_beside(process_group)  # at once: the next line may take seconds
        run_with_timeout(lambda: abort_backends(process_group), timing.ABORT_GROUPS)
        close_connections(process_group)
