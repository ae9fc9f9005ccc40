"""The thread that keeps an eye on the other ranks, over a store connection of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch.distributed as dist

from distman._coordination import tracking
from distman._coordination.failure import hook
from distman._coordination.failure.interruption import Interruption
from distman._coordination.failure.record import FailureRecord
from distman._coordination.monitor.context import WatchContext
from distman._coordination.monitor.hang_watch import HangWatch
from distman._coordination.monitor.peer_connection import PeerConnection
from distman._coordination.monitor.stack_query import StackQueries
from distman._coordination.monitor.watchdog import Watchdog
from distman._log import logger
from distman._process_state import puts_back
from distman._torch_internals import is_lost_connection

if TYPE_CHECKING:
    from torch.distributed import Store


_SHORTEST_INTERVAL = 0.2
_LONGEST_INTERVAL = 4.0
_INTERVAL_PER_RANK = 0.4e-3
INTERVALS_PER_BEAT = 5
"""A rank says that it is alive at every so many looks into the store."""

NO_ANSWER = "which does not answer"
"""How :meth:`Watcher.locate` begins to tell of a rank whose process stands still, or is gone."""

_ANSWER_PATIENCE = 1.0
_CAUSE_PATIENCE = 1.0
_JOIN_PATIENCE = 2.0
_PAUSE = 0.01

_current: Watcher | None = None


def interval(world_size: int) -> float:
    """Return the seconds between two looks into the store: longer for many ranks, which ask one store."""
    return min(max(_SHORTEST_INTERVAL, _INTERVAL_PER_RANK * world_size), _LONGEST_INTERVAL)


def late_after(world_size: int) -> float:
    """Return the seconds after which a look into the store is late: the process that serves it may be gone then."""
    return 1.0 + 2 * interval(world_size)


@dataclasses.dataclass(frozen=True)
class WatchLimits:
    """How long to wait, in seconds.

    Attributes:
        silence: For a sign of life of another rank.
        hang: For a collective of the package before all ranks are asked for their stacks; None never asks.
    """

    silence: float
    hang: float | None = None


class Watcher:
    """Learns of failures on other ranks, and ends this one's work with them.

    Every so often it looks into the store whether something happened, and says that this rank is alive. A
    connection to the next rank breaks when that process dies; its silence is noticed too.

    Args:
        context: What to watch from.
        limits: How long to wait.
        abort_job: Makes the launcher end the job after an error, where it would not do so by itself.

    Attributes:
        record: What failed; None as long as nothing did.
        has_let_go: Whether the rank that serves the store left, and this one knows, or was kept from knowing by foreign
            code that held the interpreter while the store went.
        is_counted: Whether the rank that serves the store does not wait for this one any more.
    """

    def __init__(self, context: WatchContext, limits: WatchLimits, abort_job: Callable[[BaseException], None]) -> None:
        self.record: FailureRecord | None = None
        self.has_let_go = False
        self.is_counted = False
        self._context = context
        self._limits = limits
        self._is_stuck = False
        self._interval = interval(len(context.peers))
        self._noticed = threading.Event()
        self._is_stopping = threading.Event()
        self._interruption = Interruption(abort_job, self._is_stopping)
        self._num_news = 0
        self._neighbour = _Neighbour()
        self._last_beat = -math.inf
        self._asked_at = self._last_look = time.monotonic()
        self._hangs = HangWatch(context, limits.hang, self._patience) if limits.hang is not None else None
        self._peer_connection: PeerConnection | None = None
        self._watchdog = None if context.is_store_rank else Watchdog(limits.silence, self._store_rank_is_silent)
        self._thread = threading.Thread(target=self._run, name="distman-watcher", daemon=True)

    def start(self) -> None:
        """Begin to watch.

        The first sign of life is there when it returns: from then on this rank is missed if it falls silent.
        """
        global _current
        _current = self
        self._say_alive(self._context.store)
        self._thread.start()
        if self._watchdog is not None:
            self._watchdog.start()

    def stop(self) -> None:
        """Watch no longer.

        Blocks until the threads have ended, for milliseconds; one that waits for a silent store is left.
        """
        global _current
        _current = None
        self._is_stopping.set()
        if self._peer_connection is not None:
            self._peer_connection.wake()
        if self._watchdog is not None:
            self._watchdog.stop()
        self._thread.join(0 if self._is_stuck else _JOIN_PATIENCE)
        self._interruption.restore()
        if self._is_stuck and hook.has_failed():
            # The thread would come back from the store, when that process is ended, into an interpreter that is gone.
            hook.end_job_at_exit(functools.partial(os._exit, 1))

    def close(self) -> None:
        """Let go of the connections, once the other ranks have been told."""
        if self._peer_connection is not None and not self.has_let_go:
            self._peer_connection.close()

    def _await_record(self, patience: float) -> FailureRecord | None:
        """Return what failed, if it becomes known within so many seconds.

        Blocking.
        """
        with self._interruption.awaited():
            self._noticed.wait(patience)
        return self.record

    def explain(self, error: BaseException, operation: str) -> FailureRecord | None:
        """Return because of whom a connection broke: a rank that failed, or left, or served the store.

        Blocking, for a second at most.
        """
        record = self._await_record(_CAUSE_PATIENCE)
        if record is not None:
            return record
        if self.has_let_go:
            return self._context.store_rank_has_left(operation)
        try:
            store, others = (
                self._context.store,
                (peer for peer in self._context.peers if peer.rank != self._context.rank),
            )
            if store.add("left", 0):
                left = (peer for peer in others if store.check([f"left/{peer.rank}"]))
                return next((FailureRecord.left(peer, operation) for peer in left), None)
        except dist.DistError:
            return self._context.store_rank_is_gone()
        return self._context.store_rank_is_gone() if isinstance(error, dist.DistError) else None

    @property
    def _patience(self) -> float:
        """Seconds within which a watcher answers a question."""
        return 2 * self._interval + _ANSWER_PATIENCE

    def locate(self, occasion: str, ranks: Sequence[int]) -> dict[int, str]:
        """Return where ranks are, such as ``in all_gather_v at train.py:31 for 12 s``, as far as they answer.

        Blocking. Of all ranks that want to know on one occasion, one asks.

        Args:
            occasion: Why they are asked for: the same on all ranks, and used once.
            ranks: Whom to look for.
        """
        store, me = self._context.store, str(self._context.rank)
        if store.compare_set(f"{occasion}/asker", "", me).decode() == me:
            answers = StackQueries(store, self._context.rank).ask(ranks, self._patience)
            places = {rank: answers[rank].place if rank in answers else self._last_seen(rank) for rank in ranks}
            store.set(f"{occasion}/places", json.dumps(list(places.items())))
            return places
        until = time.monotonic() + self._patience + _ANSWER_PATIENCE
        while not store.check([f"{occasion}/places"]) and time.monotonic() < until:
            time.sleep(_PAUSE)
        return dict(json.loads(store.get(f"{occasion}/places"))) if store.check([f"{occasion}/places"]) else {}

    def _last_seen(self, rank: int) -> str:
        text = _beat(self._context.store, rank).partition(" ")[2]
        return NO_ANSWER + (f", last seen {text}" if text else "")

    def _run(self) -> None:
        try:
            with self._calling():
                store: Store = self._context.store.clone()  # type: ignore[attr-defined]  # torch's stub lacks it
                self._stack_queries = StackQueries(store, self._context.rank)
                connection = PeerConnection(
                    store, self._context.rank, self._context.peers, is_one_host=self._context.is_one_host
                )
        except (dist.DistError, OSError) as error:  # too many open files, say
            self._give_up(error)
            return
        self._peer_connection = connection
        try:
            while not self._is_stopping.is_set():
                with self._calling():
                    if self._is_over(store, connection):
                        break
        except dist.DistError:
            self.has_let_go = self._asked_at - self._last_look > late_after(len(self._context.peers))
            if not self.has_let_go and not self._is_stopping.is_set():
                self._act(self._context.store_rank_is_gone())
        except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on without the watcher
            self._give_up(error)
        if self.has_let_go and self._peer_connection is not None:
            self._peer_connection.close()

    def _calling(self) -> AbstractContextManager[None]:
        """For the length of a ``with`` block, the store has to answer; if this process serves it, it does."""
        return self._watchdog.calling() if self._watchdog is not None else contextlib.nullcontext()

    def _give_up(self, error: Exception) -> None:
        """Watch no more, and give no sign of life that others could miss; unless it is the store that is gone."""
        try:
            announce_unwatched(self._context.store, self._context.rank)
        except dist.DistError:
            if not self._is_stopping.is_set():
                self._act(self._context.store_rank_is_gone())
            return
        self.is_counted = True
        logger.warning("the other ranks are not watched any more: %r. DISTMAN_WATCH=0 switches this off", error)

    def _is_over(self, store: Store, connection: PeerConnection) -> bool:
        """Look around once, wait a while, and return whether there is nothing to watch any more."""
        self._asked_at = time.monotonic()
        num_news = store.add("news", 0)
        self._last_look = self._asked_at
        if num_news != self._num_news:
            self._num_news = num_news
            if self._read_news(store):
                return True
        now = time.monotonic()
        if now - self._last_beat > INTERVALS_PER_BEAT * self._interval:
            self._beat(store, now - self._last_beat)
            self._last_beat = now
        if self._hangs is not None:
            self._hangs.look(self._stack_queries)
        died = connection.wait(self._interval) if self.record is None else None
        if died is not None and not self._is_stopping.is_set():
            if died.rank == self._context.store_rank:
                self._act(self._context.store_rank_is_gone())  # the store went with it
            else:
                self._tell(store, FailureRecord.died(died))
        return self.record is not None

    def _read_news(self, store: Store) -> bool:
        record = FailureRecord.read(store)
        if record is not None:
            store.add("failure_seen", 1)
            self._act(record)
            return True
        self._stack_queries.answer()
        if store.check(["closing"]):
            self.has_let_go = True
            store.add("gone", 1)
            return True
        return False

    def _beat(self, store: Store, seconds: float) -> None:
        """Give a sign of life, and look for that of the next rank."""
        self._say_alive(store)
        rank = self._peer_connection.watched if self._peer_connection is not None else None
        if rank is None:
            return
        silent_for = self._neighbour.silence(
            rank, _beat(store, rank), min(seconds, 2 * INTERVALS_PER_BEAT * self._interval)
        )
        if self._neighbour.beat and silent_for > self._limits.silence:  # without a beat, it is not watching
            last_seen = self._neighbour.beat.partition(" ")[2]
            self._tell(store, FailureRecord.silent(self._context.peers[rank], silent_for, last_seen=last_seen))

    def _say_alive(self, store: Store) -> None:
        store.set(f"beat/{self._context.rank}", f"{time.time()} {tracking.describe_here()}")

    def _store_rank_is_silent(self, seconds: float) -> None:
        if self.record is None and not self._is_stopping.is_set():
            self._is_stuck = True
            self._act(self._context.store_rank_is_silent(seconds))

    def _tell(self, store: Store, record: FailureRecord) -> None:
        """Make a failure known to all, this rank too."""
        first = record.publish(store)
        store.add("news", 1)
        store.add("failure_seen", 1)
        self._act(first)

    def _act(self, record: FailureRecord) -> None:
        self.record = record
        self._noticed.set()
        if record.rank != self._context.rank or not record.traceback_text:
            self._interruption.deliver(record)


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


def announce_unwatched(store: Store, rank: int) -> None:
    """Say that a rank has no watcher: it gives no signs of life, and lets nobody wait for it at the end."""
    store.delete_key(f"beat/{rank}")
    store.add("gone", 1)


@puts_back
def _stop_current() -> None:
    watcher = _current
    if watcher is not None:
        watcher.stop()
        watcher.close()


def is_watching() -> bool:
    """Return whether this process has a watcher."""
    return _current is not None


def failure_behind(error: BaseException, operation: str = "a collective") -> FailureRecord | None:
    """Return the failure on another rank because of which a connection of this one broke, as far as it is known.

    Blocking, for a second at most.

    Args:
        error: The error of the connection.
        operation: What this rank was doing.
    """
    watcher = _current
    return watcher.explain(error, operation) if watcher is not None and is_lost_connection(error) else None


def _beat(store: Store, rank: int) -> str:
    key = f"beat/{rank}"
    return store.get(key).decode() if store.check([key]) else ""
