"""The end of a job: the ranks part in such a way that none of them takes another one's leaving for its death."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from distman._base import timing
from distman._base.log import logger
from distman._base.process_state import puts_back
from distman._base.process_tree import stat_of
from distman._coordination import protocol
from distman._coordination.failure import hook
from distman._coordination.failure.record import FailureRecord
from distman._coordination.messages import count
from distman._coordination.monitor.context import late_after
from distman._coordination.monitor.watcher import State, Watcher
from distman._coordination.timeouts import begin, run_with_timeout, wait_for_work
from distman._job.device import wait_for
from distman._job.job import Job
from distman._job.meeting.job_store import JobStore
from distman._job.network import forget_interface
from distman._store.torch_store import TorchStore
from distman._torch_internals import GLOO_THREADS, abort_backends, all_groups, end_group, waits_at_end

_GROWTH = 1.5  # by which that pause grows while others go on with their work

_kept: list[tuple[int, JobStore]] = []
"""Stores of jobs that this process has left while an exception was under way, with its process id."""


def leave(job: Job, watcher: Watcher | None) -> None:
    """Tell the others, destroy the process group, unless other code made it, and close the store."""
    # It waits some seconds at most for ranks that are still starting: they connect to this one, and would take it for
    # dead. A rank that holds the store waits as long for the others to leave, unless one of them fails, or an exception
    # ends the program.
    rendezvous, is_failing = job.rendezvous, sys.exc_info()[1] is not None
    if rendezvous is None:
        if dist.is_initialized() and job.backend is not None and not job.is_adopted:
            end_groups(None, job.device, aborts=is_failing)
            wait_for_gloo()
        return
    stays = job.holds_store and not is_failing
    if watcher is not None and not stays:
        watcher.stop()
    try:
        if watcher is None or watcher.state is not State.CLOSED:
            _say_farewell(job, rendezvous.store, watcher, stays=stays)
        if watcher is not None:
            watcher.leave()
        if dist.is_initialized() and not job.is_adopted:
            end_groups(None, job.device, aborts=is_failing or (watcher is not None and watcher.record is not None))
        if stays and watcher is not None:
            _wait_until_all_left(job, rendezvous.store, watcher)
    finally:  # the handler of a signal raised, say: the others must not take this rank for dead
        if stays:
            _announce_closing(job, rendezvous.store, watcher)
    if not job.is_adopted:
        wait_for_gloo()
        forget_interface()
    if is_failing:
        _kept.append((os.getpid(), rendezvous))  # to tell the others what ends the program
    else:
        rendezvous.close()


@puts_back
def close_kept() -> None:
    """Close the stores of jobs that this process has left, and can still reach: it is to join another job."""
    while _kept:
        pid, job_store = _kept.pop()
        if pid == os.getpid():
            job_store.close()


def abandon(watcher: Watcher | None) -> None:
    """Watch no longer, at the end of a program that an uncaught exception ended; wait for nobody."""
    if watcher is not None:
        watcher.stop()
    wait_for_gloo()


def _say_farewell(job: Job, store: TorchStore, watcher: Watcher | None, *, stays: bool) -> None:
    """Tell the others that this rank leaves, and wait until all of them have started."""
    all_started = threading.Event()
    failures: list[FailureRecord] = []

    def tell() -> None:
        try:
            store.set(protocol.left(job.peer.rank), "yes")  # first: it needs no answer
            is_counted_as_knowing = watcher is not None and watcher.knows_from_others
            if watcher is not None and (record := FailureRecord.read(store)) is not None:
                watcher.learn(record)
                failures.append(record)
            store.append(protocol.LEFT, f"{job.peer.rank},")
            if is_counted_as_knowing:
                count(store, protocol.FAILURE_SEEN, -1)  # it is counted among those that are gone instead
            count(store, protocol.GONE, 0 if watcher is None or stays else 1)
            if count(store, protocol.STARTED) >= job.world_size:
                all_started.set()
        except dist.DistError as error:
            if watcher is not None:  # else it may have been closed in order
                watcher.learn(watcher.lost_store(error))

    is_told = run_with_timeout(tell, timing.FAREWELL)  # its process may be suspended
    if is_told and watcher is not None and failures:  # it may have ended a wait before the watcher came to know
        watcher.look_after_others(failures[0])
    is_waited_for = stays or (is_told and not hook.has_failed())
    is_asked = is_waited_for and not all_started.is_set()  # to ask once more might take long: the store may be stopped
    if is_asked and not job.is_adopted:
        _wait_for_all_at(store, protocol.STARTED, job.world_size, timing.START_OF_OTHERS)


def _announce_closing(job: Job, store: TorchStore, watcher: Watcher | None) -> None:
    try:
        if watcher is not None:
            watcher.stop()
    finally:  # as above
        store.set(protocol.CLOSING, "yes")
        count(store, protocol.NEWS, 1)
    _wait_for_all_at(store, protocol.GONE, job.world_size - 1 + (watcher is None), late_after(job.world_size))


def _wait_until_all_left(job: Job, store: TorchStore, watcher: Watcher) -> None:
    """Wait for ranks that come late to the end, while none of them has failed and somebody would notice."""
    until, pause = time.monotonic() + timing.STAY, timing.LEAVE_PAUSE
    while watcher.is_on_watch and count(store, protocol.GONE) < job.world_size - 1 and time.monotonic() < until:
        time.sleep(pause)
        pause = min(_GROWTH * pause, timing.LEAVE_LONGEST_PAUSE)
    if watcher.record is not None:
        watcher.wait_until_known()
        watcher.look_after_others(watcher.record)
    if watcher.record is not None and watcher.state is State.LEFT:
        error = watcher.record.to_failure()
        hook.write(f"distman: {error}\n\nThis rank had left the job, and only served the store to the others.")


def _wait_for_all_at(store: TorchStore, counter: str, number: int, limit: float) -> None:
    def wait() -> None:
        until = time.monotonic() + limit
        with contextlib.suppress(dist.DistError):  # the process that served the store may be gone
            while count(store, counter) < number and time.monotonic() < until:
                time.sleep(timing.LEAVE_PAUSE)

    run_with_timeout(wait, limit)


def wait_for_gloo() -> None:
    """Wait until gloo's threads have released the last collectives' tensors, and ours the groups; not for long."""
    wait_for_work(timing.GLOO)
    # They do so some time after the collective is over, and need the interpreter for it: if it is already shutting
    # down, the process is aborted. A thread that sleeps at two looks in a row, with the interpreter free in between, is
    # done.
    until = time.monotonic() + timing.GLOO
    num_asleep = 0
    while num_asleep < 2 and time.monotonic() < until:
        time.sleep(timing.GLOO_PAUSE)
        num_asleep = num_asleep + 1 if all(_gloo_threads_sleep()) else 0


def _gloo_threads_sleep() -> Iterator[bool]:
    for thread in Path("/proc/self/task").glob("*"):  # none where /proc is hidden
        with contextlib.suppress(OSError):  # a thread may end while we look
            name, fields = stat_of(thread)
            if name.startswith(GLOO_THREADS):
                yield fields[0] == "S"


def end_groups(process_groups: Sequence[dist.ProcessGroup] | None, device: torch.device, *, aborts: bool) -> None:
    """Destroy process groups, and wait for nobody for long."""
    # NCCL first waits for what this rank has begun there, and then for the other ranks of the host, where it aborts,
    # too.
    is_late = threading.Event()

    def end(*, aborts: bool) -> None:
        for one in [None] if process_groups is None else process_groups:
            end_group(one, aborts=aborts)

    def abort() -> None:
        for one in waiting:
            abort_backends(one)

    def wait_and_end() -> None:
        try:
            wait_for(device)  # before NCCL takes the locks that an abort needs
        except BaseException:  # a kernel has failed, or Ctrl-C: the group ends all the same
            end(aborts=True)
            raise
        end(aborts=is_late.is_set())

    waiting = [one for one in (all_groups() if process_groups is None else process_groups) if waits_at_end(one)]
    if not waiting:
        end(aborts=aborts)
        return
    has_ended = begin((lambda: end(aborts=True)) if aborts else wait_and_end)
    if has_ended(timing.GROUPS_END):
        return
    is_late.set()
    logger.warning(
        "%d process groups have not ended for %.0f s and are aborted: a collective is outstanding there in which other "
        "ranks take no part, or they have not left yet. Let all ranks take the same way to the end",
        len(waiting),
        timing.GROUPS_END,
    )
    begin(abort)(timing.GROUPS_END)
    has_ended(timing.GROUPS_END)
