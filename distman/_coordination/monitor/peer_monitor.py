"""One look at the other ranks: at news in the store, and at heartbeats."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from distman._coordination import protocol, tracking
from distman._coordination.failure.record import FailureRecord
from distman._coordination.messages import count, read_at_once
from distman._coordination.monitor.context import WatchContext
from distman._coordination.monitor.deadlocks import DeadlockWatch
from distman._coordination.monitor.hang import HangWatch, StackQueries
from distman._coordination.monitor.refusals import RefusalWatch
from distman._coordination.monitor.slowness import SlownessWatch
from distman._coordination.tracking import LongWait

if TYPE_CHECKING:
    from distman._store.torch_store import TorchStore


_INTERVALS_PER_BEAT = 5  # looks: a heartbeat costs four calls into the store, a look costs one
_MISSED_BEATS = 3  # by a rank at least: two clocks and a late look alone let one or two seem to be missing


class PeerMonitor:
    """Finds out what happened to the other ranks, as often as it is asked to look."""

    def __init__(
        self,
        store: TorchStore,
        context: WatchContext,
        silence: float,
        hangs: HangWatch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_closing = False  # the rank that holds the store leaves, so that nobody can be watched any more
        self._store = store
        self._context = context
        self._beat_every = _INTERVALS_PER_BEAT * context.interval  # seconds
        self._silence = max(silence, _MISSED_BEATS * self._beat_every)  # seconds for which a rank may give no sign
        self._hangs = hangs
        self._clock = clock
        self._stack_queries = StackQueries(store, context.rank)
        self._deadlocks = DeadlockWatch(context.rank, context.peers)
        self._refusals = RefusalWatch(context.rank)
        self._slowness = SlownessWatch(context.rank, context.peers)
        self._num_news = 0
        self._last_beat = -math.inf
        # The next rank's heartbeat, on this rank's clock.
        self._watched = self._next(context.rank)
        self._sign = ""
        self._silent_for = 0.0

    def look(self) -> FailureRecord | None:
        num_news = count(self._store, protocol.NEWS)
        is_news = num_news != self._num_news
        if is_news:
            self._num_news = num_news
            record = self._read_news()
            if record is not None or self.is_closing:
                return record
        now = self._clock()
        if now - self._last_beat > self._beat_every:
            record = self._beat(now - self._last_beat)
            self._last_beat = now
            if record is not None:
                first = record.publish(self._store)
                count(self._store, protocol.NEWS, 1)
                return self._seen(first)
        self._refusals.look(self._store, is_news=is_news)
        self._deadlocks.look(self._store, is_news=is_news)
        self._slowness.look(self._store)
        self._hangs.look(self._store, self._deadlocks.in_torch)
        return None

    def _read_news(self) -> FailureRecord | None:
        record = FailureRecord.read(self._store)
        if record is not None:
            return self._seen(record)
        self._stack_queries.answer(self._hangs.in_torch)
        if self._store.check([protocol.CLOSING]):
            self.is_closing = True
            count(self._store, protocol.GONE, 1)
        return None

    def _beat(self, seconds: float) -> FailureRecord | None:
        """Send a heartbeat, and return the next rank's failure to send one, if it has been silent for too long."""
        give_sign(self._store, self._context.rank, self._hangs.in_torch)
        while self._watched != self._context.rank and self._store.check([protocol.left(self._watched)]):
            self._watched = self._next(self._watched)
            self._sign = ""
        sign = read_sign(self._store, self._watched)
        if self._watched == self._context.rank or not sign:  # all others have left, or it is not watching
            return None
        longest = 2 * self._beat_every  # more, and this process was suspended itself: it accuses nobody
        self._silent_for = self._silent_for + min(seconds, longest) if sign == self._sign else 0.0
        self._sign = sign
        if self._silent_for <= self._silence:
            return None
        return FailureRecord.silent(
            self._context.peers[self._watched], self._silent_for, last_seen=sign.partition(" ")[2]
        )

    def _next(self, rank: int) -> int:
        return (rank + 1) % len(self._context.peers)

    def _seen(self, record: FailureRecord) -> FailureRecord:
        if record.rank != self._context.rank:
            self._store.delete_key(protocol.beat(self._context.rank))
            count(self._store, protocol.FAILURE_SEEN, 1)
        return record


def give_sign(store: TorchStore, rank: int, more: Sequence[LongWait] = ()) -> None:
    """Say that a rank is alive, and what it waits in, beside what is tracked too."""
    sign = f"{time.time()} {tracking.describe_here(more)}"
    store.set(protocol.beat(rank), sign.encode(errors="backslashreplace"))


def read_sign(store: TorchStore, rank: int) -> str:
    """Return the last heartbeat of a rank; empty where it is not watching."""
    return read_at_once(store, protocol.beat(rank)) or ""
