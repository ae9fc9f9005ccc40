"""Ranks that do something together over the store, and the one way in which they wait for each other."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from distman._coordination.failure.record import LEFT, FailureRecord, Place

if TYPE_CHECKING:
    from torch.distributed import Store


_LOOKS_WITHOUT_PAUSE = 8
_FIRST_PAUSE = 0.0002
_GROWTH = 1.5
_PAUSE_PER_RANK = 50e-6
_SHORTEST_LIMIT = 0.005
_LONGEST_LIMIT = 1.0
_LOOK_AROUND_EVERY = 0.5
_LEAVING = 1.5  # seconds in which a launcher or parent that knows more of a rank that left may end the others
_LOOK_AROUND_PER_RANK = 1e-3


@dataclasses.dataclass(frozen=True)
class StoreGroup:
    """Some ranks of a job, as they talk over its store.

    Attributes:
        job_store: The part of the store that belongs to the whole job.
        store: The part of it that belongs to these ranks.
        rank: This process's index among them.
        ranks: Their ranks in the world.
        peers: All ranks of the job, in rank order.
    """

    job_store: Store
    store: Store
    rank: int
    ranks: Sequence[int]
    peers: Sequence[Place]

    @property
    def size(self) -> int:
        """Number of these ranks."""
        return len(self.ranks)

    def describe(self, index: int) -> str:
        """Return who one of them is, such as ``rank 2 (n1, pid 812)``."""
        return str(self.peers[self.ranks[index]])

    def wait_until(
        self,
        is_there: Callable[[], bool],
        *,
        place: str,
        awaited: Callable[[], Iterable[int]],
        timeout: float | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> bool:
        """Wait until something is in the store, and return whether it came in time.

        Blocking.

        Args:
            is_there: Looks for it.
            place: What is waited at, for messages.
            awaited: Says which of these ranks, by index, have yet to bring it.
            timeout: Seconds to wait; None waits as long as the job goes on.
            look: Called every now and then; what it raises ends the wait.

        Raises:
            RankFailedError: The job failed, or an awaited rank left it.
        """
        began = time.monotonic()
        look_around, left_since = began + _LOOK_AROUND_EVERY, began
        num_looks, pause = 0, _FIRST_PAUSE
        longest = min(max(_SHORTEST_LIMIT, _PAUSE_PER_RANK * self.size), _LONGEST_LIMIT)
        while not is_there():
            now = time.monotonic()
            if timeout is not None and now > began + timeout:
                return False
            if now > look_around:
                look()
                record = self._look_around(place, awaited)
                has_left = record is not None and record.error_type == LEFT
                if not has_left:
                    left_since = now
                if record is not None and (not has_left or now - left_since > _LEAVING) and not is_there():
                    raise record.to_error()
                look_around = now + max(_LOOK_AROUND_EVERY, _LOOK_AROUND_PER_RANK * self.size)
            num_looks += 1
            if num_looks > _LOOKS_WITHOUT_PAUSE:
                time.sleep(pause)
                pause = min(_GROWTH * pause, longest)
        return True

    def _look_around(self, place: str, awaited: Callable[[], Iterable[int]]) -> FailureRecord | None:
        """Return why there is nothing to wait for any more, or None."""
        record = FailureRecord.read(self.job_store)
        if record is not None and record.rank != self.ranks[self.rank]:
            return record
        if not self.job_store.add("left", 0):
            return None
        left = (index for index in awaited() if self.job_store.check([f"left/{self.ranks[index]}"]))
        return next((FailureRecord.left(self.peers[self.ranks[index]], place) for index in left), None)
