"""What a rank that watches the others knows of the job, and how often it looks at them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from distman._base import timing
from distman._coordination import protocol
from distman._coordination.failure.interruption import Patience
from distman._coordination.failure.record import DIED, LEFT, SILENT, FailureRecord, Place
from distman._coordination.messages import count

if TYPE_CHECKING:
    from distman._store.torch_store import TorchStore


def interval(world_size: int) -> float:
    """Return the seconds between two looks into the store: longer for many ranks that ask it."""
    return max(timing.WATCH_EVERY, timing.WATCH_EVERY_PER_RANK * world_size)


def late_after(world_size: int) -> float:
    """Return the seconds after which a look is late: an interval to look, one to come back, and one for a busy host."""
    return timing.WATCH_LATE + 2 * interval(world_size)


def wait_until_known(store: TorchStore, num_others: int, seconds: float, is_over: Callable[[], bool] = bool) -> None:
    """Wait until all other ranks that can know of the failure on record do, or have left, or some seconds are over."""
    until = time.monotonic() + seconds
    with contextlib.suppress(dist.DistError):
        while time.monotonic() < until and not is_over():
            if count(store, protocol.FAILURE_SEEN) + count(store, protocol.GONE) >= num_others:
                return
            time.sleep(timing.KNOWN_PAUSE)


# Of the silence that a rank is allowed.
_UNREACHABLE_SHARE = 0.15  # 45 s by default, and more where more is allowed for a bad network
_LARGEST_SHARE = 0.75  # that a host does not answer has to be found before the silence of the ranks there


@dataclasses.dataclass(frozen=True)
class WatchLimits:
    """How long to wait, in seconds."""

    silence: float  # for a heartbeat of another rank
    hang: float = timing.HANG_TIMEOUT  # for a collective, before all ranks are asked for their stacks
    # For the program to end after a failure.
    patience: Patience = dataclasses.field(default_factory=Patience)

    @property
    def unreachable(self) -> float:
        """For any answer of another host: a system answers even while the process is stopped or busy."""
        return min(_LARGEST_SHARE * self.silence, max(timing.UNREACHABLE_SHORTEST, _UNREACHABLE_SHARE * self.silence))


@dataclasses.dataclass(frozen=True)
class WatchContext:
    store: TorchStore
    url: str  # where the store is served
    rank: int
    peers: Sequence[Place]
    opener: int  # the rank on whose host the store's process runs
    holds_store: bool = False  # the store may end with this rank; others are told of failures before
    wait_for_device: Callable[[], None] | None = None  # for all that the GPU was given; None on a CPU
    mates: Sequence[int] = ()  # the ranks of this host, where no launcher ends them

    @property
    def me(self) -> Place:
        return self.peers[self.rank]

    @property
    def interval(self) -> float:
        """Seconds between two looks into the store at most."""
        return interval(len(self.peers))

    @property
    def _opener(self) -> Place:
        return self.peers[self.opener]

    def store_is_silent(self, seconds: float) -> FailureRecord:
        if self._opener.host != self.me.host:  # it may be cut off
            text = (
                f"is beside the job's store at {self.url}, which has not answered for {seconds:.0f} s: its process is "
                "stopped, or that host is cut off."
            )
            return FailureRecord.about(self._opener, SILENT, text)
        text = f"got no answer from the job's store at {self.url} for {seconds:.0f} s. See what stopped its process."
        return FailureRecord.about(self.me, SILENT, text)

    def store_is_unreachable(self, seconds: float) -> FailureRecord:
        role = f", beside which the job's store runs at {self.url}, "
        return FailureRecord.unreachable(self._opener, seconds, role=role)

    def store_has_left(self, operation: str) -> FailureRecord:
        """Return the record that nobody can tell why an operation failed: the store went with its rank."""
        text = (
            f"held the job's store and left the job, so nobody can tell whose end broke {operation}: that rank's, or "
            "another's after it. Let all ranks take the same way to the end."
        )
        return FailureRecord.about(self._opener, LEFT, text)

    def store_is_gone(self) -> FailureRecord:
        text = f"lost the job's store: the process that served it at {self.url} is gone. See what ended it."
        return FailureRecord.about(self._opener, DIED, text)
