"""What a rank that watches the others knows of the job."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distman.control.notice import DIED, LEFT, SILENT, FailureNotice, Place

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["Post"]


@dataclasses.dataclass(frozen=True)
class Post:
    """What a watcher watches from.

    Attributes:
        store: The job's store.
        url: Where it is served.
        keeper: The rank that serves it; None where a launcher's agent does.
        rank: This process's rank.
        peers: All ranks, in rank order.
        is_one_host: Whether all of them run on one host.
    """

    store: Store
    url: str
    keeper: int | None
    rank: int
    peers: Sequence[Place]
    is_one_host: bool

    @property
    def me(self) -> Place:
        """This process."""
        return self.peers[self.rank]

    @property
    def is_keeper(self) -> bool:
        """Whether this process serves the store."""
        return self.keeper == self.rank

    def keeper_is_silent(self, seconds: float) -> FailureNotice:
        """Return the notice that the store does not answer.

        Local.
        """
        if self.keeper is not None:
            role = f", which serves the job's store at {self.url}, "
            return FailureNotice.silent(self.peers[self.keeper], seconds, role=role)
        text = f"got no answer from the job's store at {self.url} for {seconds:.0f} s. See what stopped who serves it."
        return FailureNotice(self.me.rank, self.me.host, self.me.pid, SILENT, text)

    def keeper_has_left(self, operation: str) -> FailureNotice:
        """Return the notice that nobody can tell why an operation failed: the store went with the rank that served it.

        Local.
        """
        place = self.me if self.keeper is None else self.peers[self.keeper]
        text = (
            f"served the job's store and left the job, so nobody can tell whose end broke {operation}: that rank's, or "
            "another's after it. Let all ranks take the same way to the end."
        )
        return FailureNotice(place.rank, place.host, place.pid, LEFT, text)

    def keeper_is_gone(self) -> FailureNotice:
        """Return the notice that nobody serves the store any more.

        Local.
        """
        if self.keeper is not None and not self.is_keeper:
            return FailureNotice.died(self.peers[self.keeper], f", which served the job's store at {self.url}, ")
        text = f"lost the job's store: the process that served it at {self.url} is gone. See what ended it."
        return FailureNotice(self.me.rank, self.me.host, self.me.pid, DIED, text)
