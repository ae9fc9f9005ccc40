"""One look at the other ranks: at news in the store, at signs of life, and at the connection to the next rank."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from distman._coordination import protocol, tracking
from distman._coordination.failure.record import FailureRecord
from distman._coordination.monitor.context import INTERVALS_PER_BEAT, WatchContext, late_after
from distman._coordination.monitor.hang import HangWatch, StackQueries
from distman._coordination.monitor.mismatch import MismatchWatch
from distman._coordination.monitor.peer_connection import PeerConnection

if TYPE_CHECKING:
    from torch.distributed import Store


class PeerMonitor:
    """Finds out what happened to the other ranks, as often as it is asked to look.

    Args:
        store: The job's store, over a connection of the caller's own.
        context: The job.
        silence: Seconds without a sign of life after which a rank is taken for failed.
        hangs: Reports waits that last too long; None does not.
        is_stopping: Set when this rank leaves: then no other one is said to have failed.
        clock: Tells the seconds, from any moment on.

    Attributes:
        is_closing: Whether the rank that serves the store leaves, so that nobody can be watched any more.
    """

    def __init__(
        self,
        store: Store,
        context: WatchContext,
        silence: float,
        hangs: HangWatch | None,
        is_stopping: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_closing = False
        self._store = store
        self._context = context
        self._silence = silence
        self._hangs = hangs
        self._is_stopping = is_stopping
        self._clock = clock
        self._stack_queries = StackQueries(store, context.rank)
        self._connection = PeerConnection(store, context.rank, context.peers, is_one_host=context.is_one_host)
        self._mismatches = MismatchWatch(context.rank, context.peers)
        self._neighbour = _Neighbour()
        self._num_news = 0
        self._last_beat = -math.inf
        self._asked_at = self._answered_at = clock()

    @property
    def is_late(self) -> bool:
        """Whether this process did not get to look for so long that the store may have been closed meanwhile."""
        return self._asked_at - self._answered_at > late_after(len(self._context.peers))

    def look(self) -> FailureRecord | None:
        """Look around once, wait for an interval, and return what failed, if something did.

        Blocking; :meth:`wake` ends the wait.
        """
        self._asked_at = self._clock()
        num_news = self._store.add(protocol.NEWS, 0)
        self._answered_at = self._asked_at
        is_news = num_news != self._num_news
        if is_news:
            self._num_news = num_news
            record = self._read_news()
            if record is not None or self.is_closing:
                return record
        now = self._clock()
        if now - self._last_beat > INTERVALS_PER_BEAT * self._context.interval:
            record = self._beat(now - self._last_beat)
            self._last_beat = now
            if record is not None:
                return self._publish(record)
        self._mismatches.look(self._store, is_news=is_news)
        if self._hangs is not None:
            self._hangs.look(self._stack_queries)
        died = self._connection.wait(self._context.interval)
        if died is None or self._is_stopping.is_set():
            return None
        if died.rank == self._context.store_rank:
            return self._context.store_rank_is_gone()  # the store went with it
        return self._publish(FailureRecord.died(died))

    def wake(self) -> None:
        """End the wait of a look under way in another thread."""
        self._connection.wake()

    def close(self) -> None:
        """Close the connections."""
        self._connection.close()

    def _read_news(self) -> FailureRecord | None:
        record = FailureRecord.read(self._store)
        if record is not None:
            self._store.add(protocol.FAILURE_SEEN, 1)
            return record
        self._stack_queries.answer()
        if self._store.check([protocol.CLOSING]):
            self.is_closing = True
            self._store.add(protocol.GONE, 1)
        return None

    def _beat(self, seconds: float) -> FailureRecord | None:
        """Give a sign of life, and return the next rank's failure to give one, if it has been silent for too long."""
        give_sign(self._store, self._context.rank)
        rank = self._connection.watched
        if rank is None:
            return None
        longest = 2 * INTERVALS_PER_BEAT * self._context.interval  # more, and this process was suspended itself
        silent_for = self._neighbour.silence(rank, read_sign(self._store, rank), min(seconds, longest))
        if not self._neighbour.beat or silent_for <= self._silence:  # without a beat, it is not watching
            return None
        last_seen = self._neighbour.beat.partition(" ")[2]
        return FailureRecord.silent(self._context.peers[rank], silent_for, last_seen=last_seen)

    def _publish(self, record: FailureRecord) -> FailureRecord:
        """Make a failure known to all, and return the first one, which counts."""
        first = record.publish(self._store)
        self._store.add(protocol.NEWS, 1)
        self._store.add(protocol.FAILURE_SEEN, 1)
        return first


@dataclasses.dataclass
class _Neighbour:
    """The next rank's signs of life, on this rank's clock: a rank that was itself suspended accuses nobody."""

    rank: int = -1
    beat: str = ""
    seconds: float = 0.0

    def silence(self, rank: int, beat: str, seconds: float) -> float:
        """Return for how long the beat has not changed, ``seconds`` after the look before."""
        if (rank, beat) != (self.rank, self.beat):
            self.rank, self.beat, self.seconds = rank, beat, 0.0
        else:
            self.seconds += seconds
        return self.seconds


def give_sign(store: Store, rank: int) -> None:
    """Say that a rank is alive, and what it waits in."""
    store.set(protocol.beat(rank), f"{time.time()} {tracking.describe_here()}")


def read_sign(store: Store, rank: int) -> str:
    """Return the last sign of life of a rank; empty where it is not watching."""
    key = protocol.beat(rank)
    return store.get(key).decode() if store.check([key]) else ""
