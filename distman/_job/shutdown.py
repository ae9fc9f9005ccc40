"""The end of a job: the ranks part in such a way that none of them takes another one's leaving for its death."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from distman._coordination import protocol
from distman._coordination.failure import hook
from distman._coordination.monitor.context import late_after
from distman._coordination.monitor.watcher import Watcher
from distman._coordination.timeouts import run_with_timeout
from distman._job.interface import forget_interface
from distman._job.job import Job
from distman._rendezvous.join import Rendezvous
from distman._torch_internals import GLOO_THREADS

_START_LIMIT = 10.0
"""Seconds to wait for ranks that still make their process group: as long as a loaded machine needs to start one."""

_FAREWELL_LIMIT = 2.5
"""Seconds that telling the others may take: the process that serves the store may be suspended, or gone."""

_PAUSE = 0.005
"""Seconds between two looks at a counter in the store: short beside what a rank takes to start or to leave."""

_GLOO_LIMIT = 1.0
"""Seconds to wait for gloo's threads: they need milliseconds, unless another thread holds the interpreter."""

_GLOO_PAUSE = 0.001
"""Seconds in which the interpreter is free for gloo's threads between two looks at them."""


def leave(job: Job, watcher: Watcher | None) -> None:
    """Tell the others, destroy the process group, unless other code made it, and close the store.

    It waits some seconds at most for ranks that are still starting: they connect to this one, and would take it for
    dead. The rank that serves the store also waits until the others' watchers have disconnected from it.
    """
    if job.rendezvous is None:
        return
    if watcher is None or not watcher.has_let_go:
        _say_farewell(job, job.rendezvous, is_counted=watcher is None or watcher.is_counted)
    if job.is_adopted:
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    wait_for_gloo()
    forget_interface()
    job.rendezvous.job_store.close()


def _say_farewell(job: Job, rendezvous: Rendezvous, *, is_counted: bool) -> None:
    """Tell the others that this rank leaves; the one that serves the store waits until they no longer need it."""
    store, is_host = rendezvous.store, rendezvous.job_store.is_host and not job.is_adopted
    all_started = threading.Event()

    def tell() -> None:
        with contextlib.suppress(dist.DistError):  # the rank that served the store may be gone
            store.set(protocol.left(job.peer.rank), "yes")
            if store.add(protocol.LEFT, 1) == 1:
                store.set(protocol.FIRST_TO_LEAVE, str(job.peer.rank))
            store.add(protocol.GONE, 0 if is_counted else 1)
            if store.add(protocol.STARTED, 0) >= job.world_size:
                all_started.set()

    is_told = run_with_timeout(tell, _FAREWELL_LIMIT)  # its process may be suspended
    is_waited_for = is_host or (is_told and not job.is_adopted and not hook.has_failed())
    if is_waited_for and not all_started.is_set():  # to ask once more might take long: the store may be stopped by now
        _wait_for_all_at(store, protocol.STARTED, job.world_size, _START_LIMIT)
    if is_host:
        store.set(protocol.CLOSING, "yes")
        store.add(protocol.NEWS, 1)
        _wait_for_all_at(store, protocol.GONE, job.world_size, late_after(job.world_size))


def _wait_for_all_at(store: dist.Store, counter: str, world_size: int, limit: float) -> None:
    def wait() -> None:
        until = time.monotonic() + limit
        with contextlib.suppress(dist.DistError):  # the rank that served the store may be gone
            while store.add(counter, 0) < world_size and time.monotonic() < until:
                time.sleep(_PAUSE)

    run_with_timeout(wait, limit)


def wait_for_gloo() -> None:
    """Wait until gloo's threads have released the tensors of the last collectives, a second at most.

    They do so some time after the collective is over, and need the interpreter for it: if it is already shutting down,
    the process is aborted. A thread that sleeps at two looks in a row, with the interpreter free in between, is done.
    """
    until = time.monotonic() + _GLOO_LIMIT
    num_asleep = 0
    while num_asleep < 2 and time.monotonic() < until:
        time.sleep(_GLOO_PAUSE)
        num_asleep = num_asleep + 1 if all(_gloo_threads_sleep()) else 0


def _gloo_threads_sleep() -> Iterator[bool]:
    for task in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # a thread may end while we look
            _, _, rest = task.read_text(encoding="utf-8").partition("(")
            name, _, state = rest.rpartition(") ")
            if name.startswith(GLOO_THREADS):
                yield state.startswith("S")
