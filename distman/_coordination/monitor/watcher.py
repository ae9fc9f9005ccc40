"""The thread that watches the other ranks and ends this one's work when one of them fails."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from distman._base.log import logger
from distman._base.process_state import puts_back
from distman._base.text import Line, printable
from distman._coordination import protocol
from distman._coordination.failure import hook
from distman._coordination.failure.delivery import Delivery
from distman._coordination.failure.interruption import Interruption
from distman._coordination.failure.record import DIED, EXITED, LEFT, FailureRecord
from distman._coordination.messages import (
    MalformedMessageError,
    claim_rank,
    count,
    decode,
    decode_index,
    drop,
    unless_malformed,
)
from distman._coordination.monitor.context import WatchContext, WatchLimits, late_after
from distman._coordination.monitor.current_watcher import (
    current,
    leave_collectives_alone,
    set_current,
    watch_collectives,
)
from distman._coordination.monitor.hang import HangWatch, StackQueries
from distman._coordination.monitor.host_mates import HostMates
from distman._coordination.monitor.left_behind import LeftBehind
from distman._coordination.monitor.peer_monitor import PeerMonitor, give_sign, read_sign
from distman._coordination.monitor.watchdog import Watchdog
from distman._coordination.timeouts import run_with_timeout
from distman._torch_internals import is_unreachable
from distman.errors import JobFailed

if TYPE_CHECKING:
    from distman._store.torch_store import TorchStore


NO_ANSWER = "which does not answer"
"""How :meth:`Watcher.locate` begins to tell of a rank whose process stands still, or is gone."""

_PATIENCE = 1.0  # seconds for a failure to become known, and for a watcher to answer: far more than a free host needs
_JOIN_PATIENCE = 2.0  # seconds for the threads to end, which takes milliseconds unless the store is stuck
_PAUSE = 0.01  # seconds between two looks for an answer that another rank, or thread, is about to write
_MAX_ERRORS = 10  # looks that fail for no known reason; one may be bad luck, and to be watched is worth another try


class Watcher:
    """Learns of failures on other ranks several times a second, in a thread, and ends this one's work with them."""

    def __init__(
        self,
        context: WatchContext,
        limits: WatchLimits,
        abort_job: Callable[[BaseException], None],
        *,
        end_job: Callable[[], None] | None = None,  # where the launcher would wait for a rank that does nothing
        awaits_dead: bool = False,  # the ends of the ranks wait for one that died, too
        patience: float = _PATIENCE,  # seconds for a failure to become known, and for another watcher to answer
    ) -> None:
        self.record: FailureRecord | None = None  # what failed
        self.untold: FailureRecord | None = None  # the same, if the program had left, and had to hear of nothing
        self.has_let_go = False  # the rank that holds the store said that it closes it
        self.is_counted = False  # the rank that holds the store does not wait for this one any more
        self._context = context
        self._limits = limits
        self._patience = patience
        self._end_job = end_job
        self._awaits_dead = awaits_dead
        self._last_raised: FailureRecord | None = None
        self._is_looking_after = False
        self._is_stuck = False
        self._has_failed_thread = False
        self._is_known = threading.Event()
        self._is_stopping = threading.Event()
        self._is_program_done = threading.Event()
        self._has_left = False
        self._abort_job = abort_job
        self._interruption = Interruption(self._announce, self._end_with, self._is_program_done, limits.patience)
        self._monitor: PeerMonitor | None = None
        self._watchdog = Watchdog(limits.silence, self._store_is_silent)
        self._thread = threading.Thread(target=self._run, name="distman-watcher", daemon=True)

    @property
    def rank(self) -> int:
        return self._context.rank

    def start(self) -> None:
        """Begin to watch: from now on this rank gives signs of life, and is missed if it falls silent or dies."""
        set_current(self)
        watch_collectives()
        give_sign(self._context.store, self._context.rank)
        self._watchdog.start()
        with contextlib.suppress(dist.DistError, OSError):  # the thread tries again, and knows what to do about it
            self._monitor = self._make_monitor()
        self._thread.start()  # last, since a failure may be raised here at once

    def let_program_be(self) -> None:
        """Watch on, but interrupt the program only by failures that were known before: it leaves the job."""
        self._is_program_done.set()

    def leave(self) -> None:
        """Watch on for the others, now that the program has left the job."""
        self._has_left = True

    def learn(self, record: FailureRecord) -> None:
        """Take note of a failure on record that the program has not heard of, though it was known when it left."""
        if self.record is not None:
            return
        if record.rank != self.rank and (self._last_raised is None or record.rank != self._last_raised.rank):
            self.record = record
            hook.require_end(Delivery(record))
            self._announce(record)

    @property
    def knows_from_others(self) -> bool:
        """Whether a failure of another rank is known."""
        return self.record is not None and self.record.rank != self.rank

    @property
    def is_on_watch(self) -> bool:
        """Whether a failure of another rank would still be found, since none was yet."""
        return self.record is None and self._thread.is_alive()

    def stop(self) -> None:
        """Watch no longer, and wait for the threads' ends; one that waits for a silent store is left."""
        set_current()
        leave_collectives_alone()
        self._is_program_done.set()
        self._is_stopping.set()
        try:
            if self._monitor is not None:
                self._monitor.wake()
            self._watchdog.stop()
            if self._thread.ident is not None:  # else the store was lost before the thread could start
                patience = _JOIN_PATIENCE + self._is_looking_after * late_after(len(self._context.peers))
                self._thread.join(0 if self._is_stuck else patience)
        finally:
            self._interruption.restore()
        if self._is_stuck and hook.has_failed():
            # The thread would come back from the store, when that process is ended, into an interpreter that is gone.
            code = JobFailed.EXIT_CODE if self.knows_from_others else 1
            hook.end_job_at_exit(functools.partial(os._exit, code))

    def close(self) -> None:
        """Let go of the connections, once the other ranks have been told."""
        if self._monitor is not None and not self.has_let_go and not self._thread.is_alive():
            self._monitor.close()  # a thread that the store holds up still uses them: they go with it

    def explain(self, error: BaseException, operation: str) -> FailureRecord | None:
        """Return because of whom a connection broke: a rank that failed, or left, or held the store."""
        with self._interruption.awaited():
            self._is_known.wait(self._patience)
            verdict = self.record or self._verdict(error)
            if verdict is not None:
                self.wait_until_known()
        if self.record is None and self.has_let_go:
            return self._context.store_has_left(operation)
        return self.record or verdict or self._departure(operation)

    def wait_until_known(self) -> None:
        """Wait until the watcher, which has to learn of a failure now, lets this rank act on it."""
        until = time.monotonic() + 2 * late_after(len(self._context.peers))
        while self._thread.is_alive() and time.monotonic() < until and not self._is_known.wait(_PAUSE):
            pass

    def _verdict(self, error: BaseException) -> FailureRecord | None:
        """Return the failure on record; where the store cannot be asked, who served it; else None."""
        if self.has_let_go:
            return None
        try:
            record = FailureRecord.read(self._context.store)
        except dist.DistError as lost:
            return self.lost_store(lost)
        return self.lost_store(error) if record is None and isinstance(error, dist.DistNetworkError) else record

    def _departure(self, operation: str) -> FailureRecord | None:
        """Return that a rank left the job, if one did: the first, after which others may have had to."""
        store, first = self._context.store, protocol.FIRST_TO_LEAVE
        try:
            found = store.get(first) if store.check([first]) else None
        except dist.DistError as lost:
            return self.lost_store(lost)
        peers = self._context.peers
        rank = unless_malformed(lambda: decode_index(found, len(peers), "the first to leave")) if found else None
        return FailureRecord.left(peers[rank], operation) if rank not in (None, self._context.rank) else None

    def lost_store(self, error: BaseException) -> FailureRecord:
        """Return because of whom the store cannot be reached any more."""
        if is_unreachable(error):
            return self._context.store_is_unreachable(self._limits.unreachable)
        return self._context.store_is_gone()

    @property
    def holds_store(self) -> bool:
        """Whether the store may end with this process."""
        return self._context.holds_store

    def look_after_others(self, record: FailureRecord) -> None:
        """At the end of this process, end the job if a rank that does nothing would keep the launcher waiting."""
        if self._end_job is None or self._is_looking_after:
            return
        self._is_looking_after = True
        is_awaited = self._awaits_dead and record.error_type == DIED
        left_behind = LeftBehind(self._context, record, self._limits.silence, self._end_job, is_awaited=is_awaited)
        if self._is_stuck:
            hook.end_job_at_exit(left_behind.end_job_unseen)
            return

        def look() -> None:
            if self._context.takes_care() and left_behind.find(self._context.store):
                hook.end_job_at_exit(left_behind.end_job_without)

        limit = 2 * late_after(len(self._context.peers))  # the store may be silent by now, which nobody else would see
        with contextlib.suppress(dist.DistError, MalformedMessageError):
            run_with_timeout(look, limit)

    def look_after_mates(self, record: FailureRecord) -> None:
        """At the end of this process, end ranks of its host that do not react, where no launcher does."""
        has_exited = record.rank == self.rank and record.error_type == EXITED  # as a handler of SIGTERM does
        if self._context.mates and not (self._is_stuck or has_exited):
            HostMates(self._context, record, self._limits.patience.to_come).look_after()

    def fail(self, error: BaseException) -> None:
        """Let an error that ended another thread end the job, and the main thread of this rank with it."""
        self._has_failed_thread = True
        self._publish(FailureRecord.of(error, self._context.rank))

    def waits_of(self, ranks: Sequence[int]) -> list[float]:
        """Return for how many seconds ranks have been waiting for others, of those that answer."""
        answers = StackQueries(self._context.store, self._context.rank).ask(ranks, self._answer_patience)
        return [answer.seconds for answer in answers.values()]

    def _publish(self, record: FailureRecord) -> None:
        with contextlib.suppress(dist.DistError):  # the store is gone, and the watcher will say so
            record.publish(self._context.store)
            count(self._context.store, protocol.NEWS, 1)

    def _announce(self, record: FailureRecord) -> None:
        hook.announce(record, self.rank)

    def _end_with(self, error: BaseException) -> None:
        """Leave word of why this process ends, and make the launcher end the job; the end itself would count else."""
        record = FailureRecord.of(error, self.rank)
        if record.error_type == LEFT:  # all others are on record, or the store is gone
            run_with_timeout(lambda: self._publish(record), self._patience)
        self._abort_job(error)

    def note(self, error: JobFailed) -> None:
        """Take note of an error that a wait raises because the job has failed, or a rank has left it too early."""
        record = self._last_raised = FailureRecord.of(error, error.rank)
        if record.rank == self.rank:
            return  # its own error ends the program
        self._interruption.note(error)
        if record.error_type == LEFT:
            self._interruption.insist()  # the others may not miss that rank: nobody else raises it again

    @property
    def store(self) -> TorchStore:
        return self._context.store

    @property
    def _answer_patience(self) -> float:
        """Seconds within which another watcher answers: one look may be under way, the next one answers."""
        return 2 * self._context.interval + self._patience

    def locate(self, operation: str, ranks: Sequence[int]) -> dict[int, str]:
        """Return where ranks are, such as ``in all_gather_v at train.py:31 for 12 s``; one rank asks for all."""
        store, me, found = self._context.store, self._context.rank, protocol.places(operation)
        size, what = len(self._context.peers), f"who asks and what it found out at {operation}"
        if me == claim_rank(store, protocol.asker(operation), me, size, what):
            answers = StackQueries(store, self._context.rank).ask(ranks, self._answer_patience)
            places = {rank: answers[rank].place if rank in answers else self._last_seen(rank) for rank in ranks}
            store.set(found, json.dumps(list(places.items())))
            return places
        until = time.monotonic() + self._answer_patience + self._patience
        while not store.check([found]) and time.monotonic() < until:
            time.sleep(_PAUSE)
        if not store.check([found]):
            return {}
        return dict(unless_malformed(lambda: decode(store.get(found), list[tuple[int, Line]], what)) or ())

    def _last_seen(self, rank: int) -> str:
        text = printable(read_sign(self._context.store, rank).partition(" ")[2])
        return NO_ANSWER + (f", last seen {text}" if text else "")

    def _run(self) -> None:
        try:
            with self._watchdog.calling():
                self._monitor = monitor = self._monitor or self._make_monitor()
                monitor.use(self._context.store.clone())  # another thread may wait for an answer over the first
        except (dist.DistError, OSError) as error:  # too many open files, say
            self._give_up(error)
            return
        try:
            self._watch(monitor)
        except dist.DistError as error:
            if not self._is_stopping.is_set():
                self._act(monitor.first_cause(self.lost_store(error)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on without the watcher
            self._give_up(error)
        if self.has_let_go:
            monitor.close()

    def _watch(self, monitor: PeerMonitor) -> None:
        num_errors = 0
        while not self._is_stopping.is_set() and self.record is None and not monitor.is_closing:
            try:
                with self._watchdog.calling():
                    record = monitor.look()
                if record is not None:
                    self._act(record)
            except dist.DistError:
                raise
            except MalformedMessageError as error:
                drop(error)
                self._is_stopping.wait(self._context.interval)
            except Exception:
                num_errors += 1
                if num_errors > _MAX_ERRORS:
                    raise
                logger.warning("a look at the other ranks failed; they are watched on", exc_info=True)
                self._is_stopping.wait(self._context.interval)
        self.has_let_go = monitor.is_closing
        if self._is_stopping.is_set():
            monitor.retire()

    def _make_monitor(self) -> PeerMonitor:
        context, limits = self._context, self._limits
        hangs = HangWatch(context, limits.hang, self._answer_patience) if limits.hang is not None else None
        return PeerMonitor(context.store, context, limits, hangs, self._is_stopping)

    def _give_up(self, error: Exception) -> None:
        """Watch no more, and give no sign of life that others could miss; unless it is the store that is gone."""
        try:
            if self._monitor is not None:
                self._monitor.retire()
            announce_unwatched(self._context.store, self._context.rank)
        except dist.DistError as lost:
            if not self._is_stopping.is_set():
                self._act(self.lost_store(lost))
            return
        self.is_counted = True
        logger.warning(
            "the other ranks are not watched any more: %r. This rank hears of failures only where it waits for others, "
            "and nobody misses the next one if that falls silent. DISTMAN_WATCH=0 switches this off",
            error,
        )

    def _store_is_silent(self, seconds: float) -> None:
        if self.record is None and not self._is_stopping.is_set():
            self._is_stuck = True
            verdict = self._context.store_is_silent(seconds)
            self._act(self._monitor.first_cause(verdict) if self._monitor is not None else verdict)

    def _act(self, record: FailureRecord) -> None:
        """End this rank's work, once others do not take its end for the cause."""
        if self.record is not None:
            return
        self.untold = record if self._has_left else None
        self.record = record
        if self._monitor is not None:
            self._monitor.tell(record)
            if self.holds_store:
                with contextlib.suppress(dist.DistError):
                    self._monitor.wait_until_others_know()
        self._is_known.set()
        self.look_after_others(record)
        is_told = bool(record.traceback_text) or hook.has_failed()
        is_from_here = record.rank == self._context.rank and is_told and not self._has_failed_thread
        if self.untold is None and not is_from_here:
            self._interruption.deliver(record)


def announce_unwatched(store: TorchStore, rank: int) -> None:
    """Say that a rank has no watcher: it gives no signs of life, and lets nobody wait for it at the end."""
    store.delete_key(protocol.beat(rank))
    count(store, protocol.GONE, 1)


@puts_back
def _stop_current() -> None:
    watcher = current()
    if watcher is not None:
        watcher.stop()
        watcher.close()
