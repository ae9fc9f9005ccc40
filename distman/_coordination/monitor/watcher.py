"""The thread that watches the other ranks and ends this one's work when one of them fails."""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from distman._base import timing
from distman._base.log import logger
from distman._base.process_state import puts_back
from distman._base.text import printable
from distman._coordination import protocol
from distman._coordination.failure import hook
from distman._coordination.failure.interruption import Interruption
from distman._coordination.failure.record import EXITED, LEFT, FailureRecord
from distman._coordination.messages import count, read_numbers
from distman._coordination.monitor.context import WatchContext, WatchLimits, late_after, wait_until_known
from distman._coordination.monitor.hang import Answer, HangWatch, ask_where
from distman._coordination.monitor.peer_monitor import PeerMonitor, give_sign, read_sign
from distman._coordination.monitor.stragglers import end_job_without_stragglers, end_stragglers_here
from distman._coordination.timeouts import run_with_timeout
from distman._store.connection import StoreSilentError
from distman._torch_internals import is_unreachable
from distman.errors import JobFailed

if TYPE_CHECKING:
    from distman._store.torch_store import TorchStore


NO_ANSWER = "which does not answer"
"""How :meth:`Watcher.locate` begins to tell of a rank whose process stands still, or is gone."""

_MOST_WARNINGS = 10  # of looks that fail for no known reason

_current: Watcher | None = None


class State(enum.Enum):
    WATCHING = enum.auto()
    KNOWN = enum.auto()
    DELIVERED = enum.auto()
    LEFT = enum.auto()
    CLOSED = enum.auto()


class Watcher:
    """Learns of failures on other ranks several times a second, in a thread, and ends this one's work with them.

    :meth:`stop` ends its looks in any state::

        WATCHING --> KNOWN --> DELIVERED   a rank has failed: the other ranks hear of it first, where the store may end
            |                              with this process, and then the program does
            +------> LEFT                  the program has left the job: a failure is only noted
            +------> CLOSED                the rank that holds the store closes it: nobody can be watched any more
    """

    def __init__(
        self,
        context: WatchContext,
        limits: WatchLimits,
        abort_job: Callable[[BaseException], None],
        *,
        end_job: Callable[[], None] | None = None,  # where the launcher would wait for a rank that does nothing
        awaits_dead: bool = False,  # the ends of the ranks wait for one that died, too
        patience: float = timing.WATCH_ANSWER,
    ) -> None:
        self.state = State.WATCHING
        self.record: FailureRecord | None = None  # what failed
        self.has_warned = False  # of a wait for others in a handler of the failure
        self.context = context
        self._limits = limits
        self._patience = patience
        self._end_job = end_job
        self._awaits_dead = awaits_dead
        self._has_failed_thread = False
        self._may_act = threading.Event()  # on a failure
        self._is_stopping = threading.Event()
        self._is_program_done = threading.Event()
        self._abort_job = abort_job
        self._interruption = Interruption(
            lambda record: hook.announce(record, context.rank), self._end_with, self._is_program_done, limits.patience
        )
        self._thread = threading.Thread(target=self._run, name="distman-watcher", daemon=True)

    @property
    def store(self) -> TorchStore:
        return self.context.store

    @property
    def knows_from_others(self) -> bool:
        return self.record is not None and self.record.rank != self.context.rank

    @property
    def has_survived(self) -> bool:
        return self._interruption.has_survived

    @property
    def is_on_watch(self) -> bool:
        """Whether a failure of another rank would still be found, since none was yet."""
        return self.record is None and self._thread.is_alive()

    def start(self) -> None:
        """Begin to watch: from now on this rank sends heartbeats, and is missed if it falls silent or dies."""
        global _current
        _current = self
        give_sign(self.store, self.context.rank)
        self._thread.start()  # last, since a failure may be raised here at once

    def let_program_be(self) -> None:
        """Watch on, but interrupt the program only by failures that were known before: it leaves the job."""
        self._is_program_done.set()

    def leave(self) -> None:
        """Watch on for the others, now that the program has left the job."""
        if self.state is State.WATCHING:
            self.state = State.LEFT

    def learn(self, record: FailureRecord) -> None:
        """Take note of a failure on record that the program, which leaves the job, may not have heard of."""
        if self.record is None and record.rank != self.context.rank:
            self.record, self.state = record, State.DELIVERED
            self._interruption.deliver(record)

    def stop(self) -> None:
        """Watch no longer, and wait for the thread's end; one that waits for a silent store is left."""
        global _current
        _current = None
        self._is_program_done.set()
        self._is_stopping.set()
        try:
            if self._thread.ident is not None:  # else the store was lost before the thread could start
                self._thread.join(timing.WATCH_END + late_after(len(self.context.peers)))
        finally:
            self._interruption.restore()
        if self._thread.is_alive() and hook.has_failed():
            # The thread would come back from the store, when that process is ended, into an interpreter that is gone.
            code = JobFailed.EXIT_CODE if self.knows_from_others else 1
            hook.end_job_at_exit(functools.partial(os._exit, code))

    def explain(self, error: BaseException, operation: str) -> FailureRecord | None:
        """Return because of which rank a connection broke: one that failed, or left, or held the store."""
        with self._interruption.awaited():
            self._may_act.wait(self._patience)
            verdict = self.record or self._verdict(error)
            if verdict is not None:
                self.wait_until_known()
        if self.record is None and self.state is State.CLOSED:
            return self.context.store_has_left(operation)
        return self.record or verdict or self._departure(operation)

    def wait_until_known(self) -> None:
        """Wait until the watcher, which has to learn of a failure now, lets this rank act on it."""
        until = time.monotonic() + 2 * late_after(len(self.context.peers))
        while (
            self._thread.is_alive() and time.monotonic() < until and not self._may_act.wait(timing.WATCH_ANSWER_PAUSE)
        ):
            pass

    def _verdict(self, error: BaseException) -> FailureRecord | None:
        """Return the failure on record; where the store cannot be asked, the rank that served it; else None."""
        if self.state is State.CLOSED:
            return None
        try:
            record = FailureRecord.read(self.store)
        except dist.DistError as lost:
            return self.lost_store(lost)
        return self.lost_store(error) if record is None and isinstance(error, dist.DistNetworkError) else record

    def _departure(self, operation: str) -> FailureRecord | None:
        """Return that a rank left the job, if one did: the first, after which others may have had to."""
        try:
            left = read_numbers(self.store, protocol.LEFT)
        except dist.DistError as lost:
            return self.lost_store(lost)
        if not left or left[0] == self.context.rank:
            return None
        return FailureRecord.left(self.context.peers[left[0]], operation)

    def lost_store(self, error: BaseException) -> FailureRecord:
        if isinstance(error.__cause__, StoreSilentError):
            return self.context.store_is_silent(self._limits.silence)
        if is_unreachable(error):
            return self.context.store_is_unreachable(self._limits.unreachable)
        return self.context.store_is_gone()

    def look_after_others(self, record: FailureRecord) -> None:
        """At the end of this process, end the job if a rank that does nothing would keep the launcher waiting."""
        end_job, self._end_job = self._end_job, None
        if end_job is not None:
            end_job_without_stragglers(self.context, self._limits, record, end_job, awaits_dead=self._awaits_dead)

    def look_after_mates(self, record: FailureRecord) -> None:
        """At the end of this process, end ranks of its host that do not react, where no launcher does."""
        has_exited = record.rank == self.context.rank and record.error_type == EXITED  # as a handler of SIGTERM does
        if self.context.mates and not has_exited:
            end_stragglers_here(self.context, record, self._limits.patience.to_come)

    def fail(self, error: BaseException) -> None:
        """Let an error that ended another thread end the job, and the main thread of this rank with it."""
        self._has_failed_thread = True
        self._publish(FailureRecord.of(error, self.context.rank))
        if self.record is not None and self.record.rank == self.context.rank:
            self._interruption.insist(self.record)  # it was told while the thread waited for others in a handler

    def note(self, error: JobFailed) -> None:
        """Take note of an error that a wait raises because the job has failed, or a rank has left it too early."""
        if error.rank == self.context.rank:
            return  # its own error ends the program
        self._interruption.note(error)
        if error.error_type == LEFT:
            self._interruption.insist(
                FailureRecord.of(error, error.rank)
            )  # the others may not miss that rank: nobody else raises it again

    def waits_of(self, ranks: Sequence[int]) -> list[float]:
        """Return for how many seconds ranks have been waiting for others, of those that answer."""
        return [answer.seconds for answer in self._ask(ranks).values()]

    def locate(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return where ranks are, such as ``in all_gather_v at train.py:31 for 12 s``."""
        answers = self._ask(ranks)
        return {rank: answers[rank].place if rank in answers else self._last_seen(rank) for rank in ranks}

    def _ask(self, ranks: Sequence[int]) -> dict[int, Answer]:
        return ask_where(self.store, ranks, self._answer_patience)

    @property
    def _answer_patience(self) -> float:
        """Seconds within which another watcher answers: one look may be under way, the next one answers."""
        return 2 * self.context.interval + self._patience

    def _last_seen(self, rank: int) -> str:
        text = printable(read_sign(self.store, rank).partition(" ")[2])
        return NO_ANSWER + (f", last seen {text}" if text else "")

    def _publish(self, record: FailureRecord) -> None:
        with contextlib.suppress(dist.DistError):  # the store is gone, and the watcher will say so
            record.publish(self.store)
            count(self.store, protocol.NEWS, 1)

    def _end_with(self, error: BaseException) -> None:
        """Leave word of why this process ends, and make the launcher end the job; the end itself would count else."""
        record = FailureRecord.of(error, self.context.rank)
        if record.error_type == LEFT:  # all others are on record, or the store is gone
            run_with_timeout(lambda: self._publish(record), self._patience)
        self._abort_job(error)

    def _run(self) -> None:
        context, limits = self.context, self._limits
        store = self.store
        try:
            with contextlib.suppress(OSError):  # too many open files: then there is no limit for replies
                store = store.clone(limits.silence)
            hangs = HangWatch(context, limits.hang, self._answer_patience)
            self._watch(PeerMonitor(store, context, limits.silence, hangs), store)
        except dist.DistError as error:
            if not self._is_stopping.is_set():
                self._act(self.lost_store(error), store)

    def _watch(self, monitor: PeerMonitor, store: TorchStore) -> None:
        num_errors = 0
        while not self._is_stopping.is_set() and self.record is None:
            record = None
            try:
                record = monitor.look()
            except dist.DistError:
                raise
            except Exception:  # noqa: BLE001 - whatever it is, to be watched is worth another try
                num_errors += 1
                if num_errors <= _MOST_WARNINGS:
                    logger.warning("a look at the other ranks failed; they are watched on", exc_info=True)
            if record is not None:
                self._act(record, store)
            elif monitor.is_closing:
                self.state = State.CLOSED
                return
            else:
                self._is_stopping.wait(self.context.interval)

    def _act(self, record: FailureRecord, store: TorchStore) -> None:
        """End this rank's work, once others do not take its end for the cause."""
        if self.record is not None:
            return
        has_left = self.state is State.LEFT
        self.record = record
        if not has_left:
            self.state = State.KNOWN
        if self.context.holds_store:
            size = len(self.context.peers)
            wait_until_known(store, size - 1, late_after(size), self._is_stopping.is_set)
        if not has_left:
            self.state = State.DELIVERED
        self._may_act.set()
        self.look_after_others(record)
        is_told = bool(record.traceback_text) or record.error_type == EXITED or hook.has_failed()
        is_from_here = record.rank == self.context.rank and is_told and not self._has_failed_thread
        if not (has_left or is_from_here):
            self._interruption.deliver(record)


def current() -> Watcher | None:
    return _current


def is_watching() -> bool:
    return _current is not None


def announce_unwatched(store: TorchStore, rank: int) -> None:
    """Say that a rank has no watcher: it sends no heartbeats, and lets nobody wait for it at the end."""
    store.delete_key(protocol.beat(rank))
    count(store, protocol.GONE, 1)


@puts_back
def _stop_current() -> None:
    if _current is not None:
        _current.stop()
