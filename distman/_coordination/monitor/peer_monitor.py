"""One look at the other ranks: at news in the store, at signs of life, and at the connection to the next rank."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from distman._coordination import protocol, tracking
from distman._coordination.failure.record import FailureRecord
from distman._coordination.messages import count, read_at_once
from distman._coordination.monitor.context import WatchContext, WatchLimits, late_after
from distman._coordination.monitor.deadlocks import DeadlockWatch
from distman._coordination.monitor.hang import HangWatch, StackQueries
from distman._coordination.monitor.peer_connection import PeerConnection
from distman._coordination.monitor.refusals import RefusalWatch

if TYPE_CHECKING:
    from distman._store.torch_store import TorchStore


_PATIENCE = 0.5  # seconds for neighbours to tell, who have lost the store at the same moment
_PAUSE = 0.02  # seconds between two looks whether the others know: short beside their own interval


class PeerMonitor:
    """Finds out what happened to the other ranks, as often as it is asked to look."""

    def __init__(
        self,
        store: TorchStore,
        context: WatchContext,
        limits: WatchLimits,
        hangs: HangWatch | None,
        is_stopping: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_closing = False  # the rank that holds the store leaves, so that nobody can be watched any more
        self._store = store
        self._context = context
        self._limits = limits
        self._hangs = hangs
        self._is_stopping = is_stopping  # set when this rank leaves: then no other one is said to have failed
        self._clock = clock
        self._stack_queries = StackQueries(store, context.rank)
        self._connection = PeerConnection(
            store,
            context.rank,
            context.peers,
            is_one_host=context.is_one_host,
            patience=limits.unreachable,
            towards=urlsplit(context.url).hostname,
        )
        self._deadlocks = DeadlockWatch(context.rank, context.peers)
        self._refusals = RefusalWatch(context.rank)
        self._neighbour = _Neighbour()
        self._num_news = 0
        self._last_beat = -math.inf

    def use(self, store: TorchStore) -> None:
        """Look over a connection to the store of the caller's own from now on: that of others may be waiting."""
        self._store = store
        self._stack_queries = StackQueries(store, self._context.rank)
        self._connection.use(store)

    def look(self) -> FailureRecord | None:
        """Look around once, wait for an interval, news or :meth:`wake`, and return what failed, if something did."""
        num_news = count(self._store, protocol.NEWS)
        is_news = num_news != self._num_news
        if is_news:
            self._num_news = num_news
            record = self._read_news()
            if record is not None or self.is_closing:
                return record
        now = self._clock()
        if now - self._last_beat > self._context.beat_every:
            record = self._beat(now - self._last_beat)
            self._last_beat = now
            if record is not None:
                return self._publish(record)
        self._refusals.look(self._store, is_news=is_news)
        self._deadlocks.look(self._store, is_news=is_news)
        if self._hangs is not None:
            self._hangs.look(self._stack_queries, self._deadlocks.in_torch)
        died = self._connection.wait(self._context.interval)
        if self._is_stopping.is_set():
            return None
        verdict = FailureRecord.died(died) if died is not None else self._connection.notice
        if verdict is None:
            return None
        return self._publish(verdict)

    def first_cause(self, verdict: FailureRecord) -> FailureRecord:
        """Return why the job fails where the store cannot be asked: a neighbour's notice, or else the verdict."""
        return self._connection.hear(_PATIENCE) or verdict

    def tell(self, record: FailureRecord) -> None:
        """Tell the neighbours why the job fails, in case that they lose the store."""
        self._connection.tell(record)

    def wait_until_others_know(self) -> None:
        """Wait until all other ranks that can know why the job fails do, or have had the time to look."""
        num_others, until = len(self._context.peers) - 1, self._clock() + late_after(len(self._context.peers))
        while self._clock() < until and not self._is_stopping.is_set():
            if count(self._store, protocol.FAILURE_SEEN) + count(self._store, protocol.GONE) >= num_others:
                return
            self._is_stopping.wait(_PAUSE)

    def retire(self) -> None:
        """Let other ranks do what this one did for them: it does not look any more."""
        if self._hangs is not None:
            self._hangs.let_others_report(self._store)

    def wake(self) -> None:
        self._connection.wake()

    def close(self) -> None:
        self._connection.close()

    def _read_news(self) -> FailureRecord | None:
        record = FailureRecord.read(self._store)
        if record is not None:
            return self._seen(record)
        self._stack_queries.answer()
        if self._store.check([protocol.CLOSING]):
            self.is_closing = True
            count(self._store, protocol.GONE, 1)
        return None

    def _beat(self, seconds: float) -> FailureRecord | None:
        """Give a sign of life, and return the next rank's failure to give one, if it has been silent for too long."""
        longest = 2 * self._context.beat_every  # more, and this process was suspended itself
        give_sign(self._store, self._context.rank)
        rank = self._connection.watched
        if rank is None:
            return None
        silent_for = self._neighbour.silence(rank, read_sign(self._store, rank), min(seconds, longest))
        is_unanswered = self._connection.is_unanswered
        limit = self._context.silence_limit(self._limits, is_unanswered=is_unanswered)
        if not self._neighbour.beat or silent_for <= limit:  # without a beat, it is not watching
            return None
        make = FailureRecord.unreachable if is_unanswered else FailureRecord.silent
        return make(self._context.peers[rank], silent_for, last_seen=self._neighbour.beat.partition(" ")[2])

    def _publish(self, record: FailureRecord) -> FailureRecord:
        """Make a failure known to all, and return the first one, which counts."""
        first = record.publish(self._store)
        count(self._store, protocol.NEWS, 1)
        return self._seen(first)

    def _seen(self, record: FailureRecord) -> FailureRecord:
        if record.rank != self._context.rank:
            self._store.delete_key(protocol.beat(self._context.rank))
            count(self._store, protocol.FAILURE_SEEN, 1)
        return record


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


def give_sign(store: TorchStore, rank: int) -> None:
    """Say that a rank is alive, and what it waits in."""
    sign = f"{time.time()} {tracking.describe_here()}"
    store.set(protocol.beat(rank), sign.encode(errors="backslashreplace"))


def read_sign(store: TorchStore, rank: int) -> str:
    """Return the last sign of life of a rank; empty where it is not watching."""
    return read_at_once(store, protocol.beat(rank)) or ""
