"""What is known of a job that is up."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from distman._coordination.failure import hook
from distman._coordination.failure.job_abort import abort_job_after, ending_of
from distman._coordination.sync import StoreGroup
from distman._job.meeting import mpi
from distman._job.meeting.job_store import JobStore
from distman._job.meeting.peers import Peer
from distman._store.torch_store import TorchStore
from distman.environments import LAUNCHERS, LaunchEnvironment
from distman.errors import JobFailed


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long to wait, in seconds."""

    collective: float  # for a collective to end
    rendezvous: float  # for all ranks to arrive, and for the members of a group to make it


@dataclasses.dataclass(frozen=True)
class Job:
    """What is known of a job that is up."""

    peer: Peer  # this rank
    world_size: int
    device: torch.device
    backend: str | None  # backend of the process group; None where there is none
    limits: Limits
    roll_call: tuple[Peer, ...]  # all ranks, in rank order
    environment: LaunchEnvironment
    rendezvous: JobStore | None = None  # where the ranks met; None on one process without a group
    is_adopted: bool = False  # whether other code made the process group
    # numbers of the barriers to come, for each name by itself
    barriers: Mapping[str | None, Iterator[int]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(itertools.count)
    )

    def store_group(self, ranks: Sequence[int] | None = None, store: TorchStore | None = None) -> StoreGroup | None:
        """Return ranks that exchange messages over the store of the job; None on one process without a group."""
        # ``ranks`` has this one among them.
        if self.rendezvous is None:
            return None
        ranks = range(self.world_size) if ranks is None else ranks
        job_store = self.rendezvous.store
        return StoreGroup(job_store, store or job_store, ranks.index(self.peer.rank), ranks, self.roll_call)

    @property
    def ending(self) -> Callable[[], None] | None:
        """What ends the job where MPI or the launcher waits for every rank; None elsewhere."""
        return mpi.abort if mpi.is_up() else ending_of(self.environment)

    @property
    def holds_store(self) -> bool:
        """Whether the launcher may end the process that serves the store with the last rank of this host."""
        # Then this process stays until the others are done with it.
        if self.rendezvous is None:
            return False
        is_ended = self.peer.num_nodes > 1 and LAUNCHERS[self.environment.launcher].ends_leftovers
        return is_ended and self.rendezvous.is_opened_here

    def end_after(self, error: BaseException) -> None:
        """Make the launcher end the job once this process ends, where it would not do so by itself."""
        abort_job(self.environment, error, is_beside=isinstance(error, JobFailed) and self._is_beside(error))

    def _is_beside(self, error: JobFailed) -> bool:
        """Return whether the rank that an error tells of runs on this host; it may be of another job."""
        if error.rank not in range(self.world_size):
            return False
        failed = self.roll_call[error.rank]
        return (failed.machine, failed.pid) == (self.peer.machine, error.pid)


def abort_job(environment: LaunchEnvironment, error: BaseException, *, is_beside: bool = False) -> None:
    if environment.world_size > 1 and mpi.is_up():
        hook.end_job_at_exit(mpi.abort)  # no rank would come out of MPI_Finalize without this one
    abort_job_after(error, environment, is_beside=is_beside)
