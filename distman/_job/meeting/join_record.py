"""What a rank says of itself when it comes, and what tells two processes that claim one rank apart."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Hashable, Iterable
from pathlib import Path

from distman._base import timing
from distman._base.text import Line, printable
from distman._job.meeting.ancestry import start_time

_MAX_COMMAND = 60  # characters: a message has several
OWN_PORT = "If these are two jobs, give each its own MASTER_PORT or DISTMAN_JOB_ID."
OWN_RANK = f"Give each process its own rank. {OWN_PORT}"

COMMON = {
    "world_size": f"Start all ranks with one command. {OWN_PORT}",
    "backend": "Let all ranks see the same kind of device, and ask for the same backend.",
    "distman": "Install one version of distman on all hosts.",
    "torch": "Install one version of torch on all hosts.",
}
"""What all ranks of a job must have in common, and what to do where they have not."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a process comes from; may differ between the ranks of a job, and speaks where two claim one rank."""

    started: float  # in seconds of time.time
    command: Line  # the program and its arguments, fit to be printed
    folder: Line  # its working directory
    parent: int  # process id of its parent
    session: int  # id of its session, such as that of a terminal

    @classmethod
    def of_this_process(cls) -> Origin:
        """Return where this process comes from."""
        command = printable(" ".join(sys.argv))
        try:
            folder = printable(str(Path.cwd()))
        except OSError:  # it was removed
            folder = ""
        return cls(
            started=start_time(),
            command=command if len(command) <= _MAX_COMMAND else f"{command[:_MAX_COMMAND]} ...",
            folder=folder,
            parent=os.getppid(),
            session=os.getsid(0),
        )


@dataclasses.dataclass(frozen=True)
class JoinRecord:
    """What a rank says of itself when it arrives; ``None`` where its launcher is silent."""

    rank: int
    world_size: int  # the number of ranks it believes in
    local_rank: int | None
    local_world_size: int | None
    node_rank: int | None
    num_nodes: int | None
    host: Line
    boot_id: Line  # what tells that host from others of the same name; empty where the system does not show it
    pid: int
    launcher: Line
    backend: Line  # of the process group that it is about to make
    device_type: Line  # type of device it computes on
    device: Line | None  # the device that the program asked for; None leaves the choice to the rank's place
    visible: tuple[Line, ...]  # UUIDs of the devices it sees, in the order of their indices; empty for the CPU
    has_own_devices: bool  # whether the launcher says that no other rank sees these devices
    is_sharing_allowed: bool  # whether it accepts to share its GPU with other ranks
    torch: Line
    distman: Line
    origin: Origin  # where its process comes from, which may tell its job from another one

    def __post_init__(self) -> None:
        """Refuse what no process can say of itself: it is of another process, perhaps of another program."""
        places = (self.rank, self.local_rank, self.node_rank)
        sizes = (self.world_size, self.local_world_size, self.num_nodes)
        if any((place or 0) < 0 for place in places) or any((1 if size is None else size) < 1 for size in sizes):
            raise ValueError(f"ranks must be 0 or more and their numbers 1 or more, got {places} of {sizes}")

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    @property
    def machine(self) -> tuple[str, str]:
        """Its host: machines may all be called localhost, and containers of one machine have names of their own."""
        return self.host, self.boot_id

    @property
    def common(self) -> tuple[Hashable, ...]:
        """The values of what all ranks of a job must have in common, in the order of :data:`COMMON`."""
        return self.world_size, self.backend, self.distman, ".".join(self.torch.split(".")[:2])


def describe_claim(claim: JoinRecord) -> str:
    """Return which process claims a rank, such as ``pid 812 on n1 (train.py --lr 1, started 12:00:07)``."""
    started = time.strftime("%H:%M:%S", time.localtime(claim.origin.started))
    return f"pid {claim.pid} on {claim.host} ({claim.origin.command}, started {started})"


def is_mixed(surplus: JoinRecord, holder: JoinRecord, members: Iterable[JoinRecord]) -> bool:
    """Return whether a complete job may consist of ranks of two, now that another process claims one of its ranks."""
    # A job that was complete long before is not blamed for a later one that takes the same port. Two that start
    # together may have met in any order: unless each other member of the job is more like the holder of the rank than
    # like the process that came too late, nobody can tell which of them belongs to it.
    if abs(surplus.origin.started - holder.origin.started) > timing.SAME_START:
        return False
    others = (member for member in members if member.rank != holder.rank)
    return any(_in_common(member, surplus) >= _in_common(member, holder) for member in others)


def _in_common(one: JoinRecord, other: JoinRecord) -> set[str]:
    """Return which signs of one job two processes share; ids of processes mean something on one host only."""
    signs = ("command", "folder", "parent", "session") if one.machine == other.machine else ("command", "folder")
    return {sign for sign in signs if getattr(one.origin, sign) == getattr(other.origin, sign)}
