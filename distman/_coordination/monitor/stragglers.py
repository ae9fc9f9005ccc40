"""Ranks that do nothing any more after a failure: they must not keep a launcher waiting, nor outlive the job."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch.distributed as dist

from distman._base import timing
from distman._base.process_tree import runs_same_program
from distman._coordination import protocol
from distman._coordination.failure import hook
from distman._coordination.failure.job_abort import seconds_before_turn
from distman._coordination.failure.record import DIED, SILENT, FailureRecord, Place
from distman._coordination.messages import is_first
from distman._coordination.monitor.context import WatchContext, WatchLimits, late_after
from distman._coordination.timeouts import run_with_timeout
from distman._store.connection import StoreLostError, StoreSilentError
from distman._store.handshake import WATCHER

if TYPE_CHECKING:
    from distman._store.client import Client
    from distman._store.torch_store import TorchStore


def end_job_without_stragglers(
    context: WatchContext, limits: WatchLimits, record: FailureRecord, end_job: Callable[[], None], *, awaits_dead: bool
) -> None:
    """Let this process, at its end, end the job if a rank that does nothing would keep the launcher waiting.

    One rank of the job does so, the first that asks. ``awaits_dead``: the ends of all ranks wait for one that died.
    """
    is_awaited = awaits_dead and record.error_type == DIED
    job = FailedJob(context, record, limits.silence, end_job, is_awaited=is_awaited)
    limit, has_looked = timing.STRAGGLERS_SLACK + 2 * late_after(len(context.peers)), threading.Event()

    def look() -> None:
        if is_first(context.store, protocol.JOB_ENDER, context.rank) and job.find_stragglers(context.store):
            hook.end_job_at_exit(job.end_without_stragglers)
        has_looked.set()

    def end_unseen() -> None:
        if not has_looked.is_set():
            job.end_unseen()

    with contextlib.suppress(dist.DistError, StoreLostError):
        if not run_with_timeout(look, limit):
            hook.end_job_at_exit(end_unseen)  # the store is silent, which nobody else would see


class FailedJob:
    """A job that has failed, at the end of one of its processes.

    A straggler is the rank that is silent, and one that has not read of the failure though it had the time to. Of the
    latter one may only be slow, so it gets the time for which a rank may be silent.

    It may outlive the job in this process, so it has a connection to the store of its own.
    """

    def __init__(
        self,
        context: WatchContext,
        record: FailureRecord,
        silence: float,
        end_job: Callable[[], None],
        *,
        is_awaited: bool = False,  # the rank that failed is gone, and the ends of all others wait for it nevertheless
    ) -> None:
        self._size = len(context.peers)
        self._others = {*range(self._size)} - {context.rank}
        self._turn = seconds_before_turn(context.rank, self._size)
        self._end_job = end_job
        self._failed = record.rank
        self._is_awaited = is_awaited
        self._silent = {record.rank} if record.error_type == SILENT else set[int]()
        self._late: set[int] = set()
        self._late_until = time.monotonic() + silence
        self._client: Client | None = None

    def find_stragglers(self, store: TorchStore) -> bool:
        """Find out which ranks do not react, and return whether there is one to wait for."""
        self._late = _unaware(store, self._others - {self._failed}, late_after(self._size))
        is_one = bool(self._silent or self._late or self._is_awaited)
        if is_one:
            self._client = store.client.again(WATCHER, timing.PUBLISH)
        return is_one

    def end_without_stragglers(self) -> None:
        """End the job once all others have ended or left it, if one is there that does nothing."""
        try:
            while there := self._there():
                late = there & self._late
                if not late and not there & self._silent and not self._is_awaited:
                    return
                if there <= self._silent | self._late and (not late or time.monotonic() > self._late_until):
                    break
                time.sleep(timing.STRAGGLERS_PAUSE)
            if there or self._is_awaited:
                self._end_job()
        except StoreSilentError:
            self.end_unseen()

    def end_unseen(self) -> None:
        """End the job where the store is silent too, after a minute: other ranks may be saving something."""
        if not hook.has_failed():
            time.sleep(timing.STRAGGLERS + self._turn)
            self._end_job()

    def _there(self) -> set[int]:
        try:
            return self._client.members() & self._others if self._client is not None else set()
        except StoreSilentError:
            raise
        except StoreLostError:  # it has ended with the last of them
            return set()


def end_stragglers_here(context: WatchContext, record: FailureRecord, seconds: float) -> None:
    """Let this process, at its end, end ranks of its host that do not react to a failure, where no launcher does.

    Native code may hold their interpreter, or they are stopped. One rank of each host does so, the first that asks.
    """
    mates = [context.peers[rank] for rank in context.mates if rank != context.rank]
    job_store, size = context.store, len(context.peers)
    until = time.monotonic() + seconds  # by when they must have come back to the interpreter

    def unaware(patience: float) -> list[Place]:
        there = {mate.rank: mate for mate in mates if runs_same_program(mate.pid)}
        stuck = {record.rank} & there.keys() if record.error_type == SILENT else set[int]()
        return [there[rank] for rank in stuck | _unaware(job_store, there.keys() - {record.rank}, patience)]

    def end() -> None:
        while (late := unaware(0.0)) and time.monotonic() < until:
            time.sleep(timing.STRAGGLERS_PAUSE)
        for mate in late:
            hook.write(f"distman: {mate} has not reacted to the failure of rank {record.rank}, and is ended")
            with contextlib.suppress(ProcessLookupError):
                os.kill(mate.pid, signal.SIGKILL)

    def look() -> None:
        key = protocol.straggler_ender(min(context.mates))
        if unaware(late_after(size)) and is_first(job_store, key, context.rank):
            hook.end_job_at_exit(end)

    with contextlib.suppress(dist.DistError):
        run_with_timeout(look, timing.STRAGGLERS_SLACK + 2 * late_after(size))


def _unaware(store: TorchStore, ranks: Iterable[int], patience: float) -> set[int]:
    """Return which ranks are in the job and have not read of its failure after a time.

    They would have deleted their heartbeat.
    """
    until, unaware = time.monotonic() + patience, set(ranks)
    while True:
        unaware = {
            rank for rank in unaware if store.check([protocol.beat(rank)]) and not store.check([protocol.left(rank)])
        }
        if not unaware or time.monotonic() >= until:
            return unaware
        time.sleep(timing.STRAGGLERS_PAUSE)
