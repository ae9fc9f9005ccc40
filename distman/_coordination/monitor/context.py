"""What a rank that watches the others knows of the job."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distman._coordination.failure.record import DIED, LEFT, SILENT, FailureRecord, Place

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclasses.dataclass(frozen=True)
class WatchContext:
    """What a watcher watches from.

    Attributes:
        store: The job's store.
        url: Where it is served.
        store_rank: The rank that serves it; None where a launcher's agent does.
        rank: This process's rank.
        peers: All ranks, in rank order.
        is_one_host: Whether all of them run on one host.
    """

    store: Store
    url: str
    store_rank: int | None
    rank: int
    peers: Sequence[Place]
    is_one_host: bool

    @property
    def me(self) -> Place:
        """This process."""
        return self.peers[self.rank]

    @property
    def is_store_rank(self) -> bool:
        """Whether this process serves the store."""
        return self.store_rank == self.rank

    def store_rank_is_silent(self, seconds: float) -> FailureRecord:
        """Return the notice that the store does not answer."""
        if self.store_rank is not None:
            role = f", which serves the job's store at {self.url}, "
            return FailureRecord.silent(self.peers[self.store_rank], seconds, role=role)
        text = f"got no answer from the job's store at {self.url} for {seconds:.0f} s. See what stopped who serves it."
        return FailureRecord(self.me.rank, self.me.host, self.me.pid, SILENT, text)

    def store_rank_has_left(self, operation: str) -> FailureRecord:
        """Return the record that nobody can tell why an operation failed: the store went with its rank."""
        place = self.me if self.store_rank is None else self.peers[self.store_rank]
        text = (
            f"served the job's store and left the job, so nobody can tell whose end broke {operation}: that rank's, or "
            "another's after it. Let all ranks take the same way to the end."
        )
        return FailureRecord(place.rank, place.host, place.pid, LEFT, text)

    def store_rank_is_gone(self) -> FailureRecord:
        """Return the notice that nobody serves the store any more."""
        if self.store_rank is not None and not self.is_store_rank:
            return FailureRecord.died(self.peers[self.store_rank], f", which served the job's store at {self.url}, ")
        text = f"lost the job's store: the process that served it at {self.url} is gone. See what ended it."
        return FailureRecord(self.me.rank, self.me.host, self.me.pid, DIED, text)
