"""Calls of one group that do not match: found when ranks wait in them for each other, at no cost before that.

Messages of unlike calls have unlike tags, so they never meet, and both ranks wait. After a while each rank writes into
the store what it waits in, and compares it with what the first one wrote.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from distman._coordination import protocol, tracking
from distman._coordination.failure.record import Place
from distman._coordination.messages import claim, count, decode, unless_malformed
from distman._coordination.timeouts import run_with_timeout
from distman._host_channels import close_those_of
from distman._text import Line
from distman._torch_internals import abort_backends, close_connections

if TYPE_CHECKING:
    from torch.distributed import Store


_PATIENCE = 1.0  # seconds that ranks may be apart before the store is asked; a hang is not worse for them
_ABORT_LIMIT = 3.0  # seconds; NCCL may wait for the other ranks of the host, and a watcher has to go on


class Members(Protocol):
    """The group that a call is made in."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def rank(self) -> int:
        """This rank's index in it."""

    @property
    def ranks(self) -> Sequence[int]:
        """Its ranks in the world."""

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """What carries its messages."""

    @property
    def exchanges(self) -> CallNumbers:
        """The numbers of its calls."""


class CallNumbers:
    """The numbers of a group's calls.

    Attributes:
        last: That of the last one.
    """

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last = -1

    def __next__(self) -> int:
        self.last += 1
        return self.last


@dataclasses.dataclass(eq=False, slots=True)
class Call:
    """What this rank waits in.

    Attributes:
        group: The group.
        number: The call's number in the group, the same on all members.
        text: What must be equal on all of them.
        pieces: Bytes that it sends to each rank of the group, and receives from it; None if it is an operation of the
            backend.
        since: When it began.
    """

    group: Members
    number: int
    text: str
    pieces: tuple[Sequence[int], Sequence[int]] | None = None
    since: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def key(self) -> str:
        """The call's name in the store; empty if its group has gone."""
        process_group = self.group.process_group
        return protocol.exchange(self.number, process_group.group_name) if process_group is not None else ""

    def interrupt(self) -> None:
        """Let the wait end with an error, by closing the group's connections.

        What a call that is cut short has sent would otherwise meet a later one. On a GPU the group is aborted: a part
        of its batch may be under way, and would meet a later one.
        """
        end_waits(self.group)


def end_waits(group: Members) -> None:
    """End what ranks wait for in a group, which is good for nothing afterwards, see :meth:`Call.interrupt`."""
    process_group = group.process_group
    if process_group is not None:
        close_those_of(process_group)  # at once: the next line may take seconds
        run_with_timeout(lambda: abort_backends(process_group), _ABORT_LIMIT)
        close_connections(process_group)


class MismatchWatch:
    """Compares what this rank waits in with what the others wait in.

    Args:
        rank: This process's rank.
        peers: All ranks, in rank order.
    """

    def __init__(self, rank: int, peers: Sequence[Place]) -> None:
        self._me = peers[rank]
        self._told: dict[Call, str] = {}
        self._first: dict[Call, str] = {}

    def look(self, store: Store, *, is_news: bool) -> None:
        """Tell the others of a wait that lasts, and end it if they wait in something else.

        Args:
            store: The job's store.
            is_news: Whether another rank may have found that calls do not match.
        """
        waits = {wait.call: wait for wait in tracking.waits() if wait.call is not None}
        for call in [call for call in self._told if call not in waits]:
            del self._told[call]
            key = self._first.pop(call, "")
            if key:
                store.delete_key(protocol.first_proposal(key))
        for call, wait in waits.items():
            is_new = call not in self._told
            if is_new and (time.monotonic() - call.since < _PATIENCE or not self._tell(store, call, wait)):
                continue
            if is_new or is_news:
                wait.mismatch = wait.mismatch or mismatch(store, call)
                if wait.mismatch:
                    call.interrupt()

    def _tell(self, store: Store, call: Call, wait: tracking.TrackedWait) -> bool:
        key = call.key
        if not key:
            return False
        self._told[call] = key
        ours = (call.text, f"{self._me}: {call.text}, at {wait.line[0]}:{wait.line[1]}")
        first = claim(
            store,
            protocol.first_proposal(key),
            json.dumps(ours),
            lambda found: decode(found, tuple[str, str], f"what a rank waits in at {key}"),
        )
        if first == ours:
            self._first[call] = key
        elif first[0] != call.text:
            store.compare_set(protocol.other_proposal(key), "", json.dumps(sorted((first[1], ours[1]))))
            count(store, protocol.NEWS, 1)
        return True


def mismatch(store: Store, call: Call) -> str:
    """Return why a call does not match those of the other ranks, or nothing."""
    key = call.key
    if not key or not store.check([protocol.other_proposal(key)]):
        return ""
    found = store.get(protocol.other_proposal(key))
    lines = unless_malformed(lambda: decode(found, list[Line], f"two calls that differ at {key}"))
    if lines is None:
        return ""
    return (
        f"all ranks must make the same call at exchange {call.number} of group {call.group.name or call.group.ranks}, "
        f"but two differ. Correct them; the group's connections are closed.\n"
        + "\n".join(f"  {line}" for line in lines)
    )
