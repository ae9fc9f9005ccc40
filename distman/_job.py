"""The start and the end of a job: from a launch environment to a process group, and back."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from distman._coordination import protocol
from distman._coordination.failure import hook
from distman._coordination.failure.job_abort import abort_job_after
from distman._coordination.failure.reporter import JobReporter
from distman._coordination.monitor.context import WatchContext, late_after
from distman._coordination.monitor.watcher import Watcher, WatchLimits, announce_unwatched
from distman._coordination.sync import StoreGroup
from distman._coordination.timeouts import run_with_timeout
from distman._device import backend_for, is_pure_gloo, pick_device, resolve_device
from distman._rendezvous import mpi
from distman._rendezvous.join import Rendezvous, join, join_record_of, meet_at
from distman._rendezvous.peers import JoinRecord, Peer, Peers, complete
from distman._rendezvous.store import JobStore
from distman._torch_internals import GLOO_THREADS, counting_no_failed_group, make_gloo_default
from distman.environments import LaunchEnvironment
from distman.errors import DistmanError, RankFailedError, RendezvousError

_START_PATIENCE = 10.0
_FAREWELL_PATIENCE = 2.5
_PAUSE = 0.005
_REST_PATIENCE = 1.0
_REST_PAUSE = 0.001

_adoptions: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long to wait, in seconds.

    Attributes:
        collective: For a collective.
        rendezvous: For the ranks to come together.
    """

    collective: float
    rendezvous: float


@dataclasses.dataclass(frozen=True)
class DeviceWish:
    """Which device the program asked for.

    Attributes:
        device: This very device; None leaves the choice to the rank's place on its host.
    """

    device: torch.device | None

    @classmethod
    def of(cls, device: str | torch.device | None) -> DeviceWish:
        """Return the wish that a device specification stands for; an accelerator without index is none.

        Raises:
            TypeError: See :func:`distman.resolve_device`.
            ValueError: The same.
        """
        if device is None:
            return cls(None)
        resolved = resolve_device(device)
        return cls(None if resolved.type != "cpu" and resolved.index is None else resolved)


@dataclasses.dataclass(frozen=True)
class Job:
    """What is known of a job that is up.

    Attributes:
        peer: This rank.
        world_size: Number of ranks.
        device: Device of this rank.
        backend: Backend of the process group; None where there is none.
        limits: How long to wait.
        roll_call: All ranks, in rank order.
        environment: What the launcher said.
        rendezvous: Where the ranks met; None on one process without a group.
        is_adopted: Whether other code made the process group.
        barriers: Numbers of the barriers to come.
    """

    peer: Peer
    world_size: int
    device: torch.device
    backend: str | None
    limits: Limits
    roll_call: Peers
    environment: LaunchEnvironment
    rendezvous: Rendezvous | None = None
    is_adopted: bool = False
    barriers: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def store_group(self, ranks: Sequence[int] | None = None, store: dist.Store | None = None) -> StoreGroup | None:
        """Return ranks that talk over the store of the job; None on one process without a group.

        Args:
            ranks: Their ranks in the world, this one among them; None is all.
            store: The part of the store that belongs to them; None is that of the job.
        """
        if self.rendezvous is None:
            return None
        ranks = range(self.world_size) if ranks is None else ranks
        job_store = self.rendezvous.store
        return StoreGroup(job_store, store or job_store, ranks.index(self.peer.rank), ranks, self.roll_call)

    def end_after(self, error: BaseException) -> None:
        """Make the launcher end the job once this process ends, where it would not do so by itself."""
        _abort_job(self.environment, error)


def start(environment: LaunchEnvironment, backend: str | None, wish: DeviceWish, limits: Limits) -> Job:
    """Bring the ranks together and make the process group; on one process without a launcher, make none.

    Collective.

    Raises:
        RendezvousError: See :func:`distman._rendezvous.join.join`.
        RankFailedError: The same.
    """
    if not environment.is_launched:
        return _lone_job(environment, wish, limits)
    _keep_garbage_from_children()
    try:
        rendezvous = join(environment, os.environ, device=wish.device, backend=backend, timeout=limits.rendezvous)
    except (RendezvousError, RankFailedError):
        hook.set_reporter(functools.partial(_abort_job, environment))  # the others know: nobody needs to be told
        raise
    peer = rendezvous.peers[environment.rank]
    device = torch.device(peer.device)
    job = Job(
        peer=peer,
        world_size=environment.world_size,
        device=device,
        backend=backend or backend_for(device),
        limits=limits,
        roll_call=rendezvous.peers,
        rendezvous=rendezvous,
        environment=environment,
    )
    try:
        _make_process_group(job, rendezvous.store)
        rendezvous.store.add(protocol.STARTED, 1)
    except BaseException:
        rendezvous.job_store.close()
        raise
    hook.set_reporter(_reporter(job, rendezvous))
    return job


def adopt(environment: LaunchEnvironment, wish: DeviceWish, limits: Limits) -> Job:
    """Take over the default process group that other code made.

    Collective. The group says rank and size; the launcher is believed where it agrees with it.

    Raises:
        RendezvousError: See :func:`distman._rendezvous.join.join`.
    """
    _keep_garbage_from_children()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if not environment.is_launched or (environment.rank, environment.world_size) != (rank, world_size):
        environment = LaunchEnvironment.bare(rank, world_size)
    hook.set_reporter(functools.partial(_abort_job, environment))  # nobody waits at a door: the ranks have met
    backend = dist.get_backend_config()
    device = wish.device or (None if "nccl" in backend else torch.device("cpu"))
    me = join_record_of(environment, os.environ, device=device, backend=backend)
    rendezvous = None if dist.get_backend() == "fake" else _meet_in_group(me, limits)
    peers = rendezvous.peers if rendezvous else complete([me])
    peer = next(peer for peer in peers if peer.rank == rank)
    job = Job(
        peer=peer,
        world_size=world_size,
        device=torch.device(peer.device),
        backend=backend,
        limits=limits,
        roll_call=peers,
        rendezvous=rendezvous,
        is_adopted=True,
        environment=environment,
    )
    if rendezvous is not None:
        hook.set_reporter(_reporter(job, rendezvous))
    return job


def watch(job: Job, limits: WatchLimits | None) -> Watcher | None:
    """Begin to watch the other ranks; return None where there are none, or they shall not be watched."""
    if job.rendezvous is None or job.world_size == 1:
        return None
    if limits is None:
        announce_unwatched(job.rendezvous.store, job.peer.rank)
        return None
    context = WatchContext(
        store=job.rendezvous.store,
        url=job.rendezvous.job_store.url,
        store_rank=job.rendezvous.job_store.store_rank,
        rank=job.peer.rank,
        peers=job.roll_call,
        is_one_host=job.peer.num_nodes == 1,
    )
    watcher = Watcher(context, limits, job.end_after)
    watcher.start()
    return watcher


def leave(job: Job, watcher: Watcher | None) -> None:
    """Tell the others, destroy the process group, unless other code made it, and close the store.

    It waits for ranks that are still starting, some seconds at most: they connect to this one, which to them
    would be dead otherwise. Who serves the store waits until the others' watchers have let go of it, too.
    """
    if job.rendezvous is None:
        return
    if watcher is None or not watcher.has_let_go:
        _say_farewell(job, job.rendezvous, is_counted=watcher is None or watcher.is_counted)
    if job.is_adopted:
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    let_gloo_rest()
    job.rendezvous.job_store.close()


def _say_farewell(job: Job, rendezvous: Rendezvous, *, is_counted: bool) -> None:
    """Tell the others that this rank leaves; who serves the store waits until they need it no more."""
    store, is_host = rendezvous.store, rendezvous.job_store.is_host and not job.is_adopted
    all_started = threading.Event()

    def tell() -> None:
        with contextlib.suppress(dist.DistError):  # who served the store may have gone before
            store.set(protocol.left(job.peer.rank), "yes")
            store.add(protocol.LEFT, 1)
            store.add(protocol.GONE, 0 if is_counted else 1)
            if store.add(protocol.STARTED, 0) >= job.world_size:
                all_started.set()

    is_told = run_with_timeout(tell, _FAREWELL_PATIENCE)  # who serves the store may be stopped
    is_waited_for = is_host or (is_told and not job.is_adopted and not hook.has_failed())
    if is_waited_for and not all_started.is_set():  # to ask once more might take long: the store may be stopped by now
        _wait_for_all_at(store, protocol.STARTED, job.world_size, _START_PATIENCE)
    if is_host:
        store.set(protocol.CLOSING, "yes")
        store.add(protocol.NEWS, 1)
        _wait_for_all_at(store, protocol.GONE, job.world_size, late_after(job.world_size))


def _wait_for_all_at(store: dist.Store, counter: str, world_size: int, patience: float) -> None:
    def wait() -> None:
        until = time.monotonic() + patience
        with contextlib.suppress(dist.DistError):  # who served the store may have gone before
            while store.add(counter, 0) < world_size and time.monotonic() < until:
                time.sleep(_PAUSE)

    run_with_timeout(wait, patience)


def let_gloo_rest() -> None:
    """Wait until the threads of gloo have let go of the tensors of the last collectives, a second at most.

    Such a thread needs the interpreter for that, at a moment after the collective is over; if it comes
    when the interpreter is already ending, the process is aborted. A thread that sleeps twice in a row, with
    the interpreter free in between, is done.
    """
    until = time.monotonic() + _REST_PATIENCE
    num_quiet = 0
    while num_quiet < 2 and time.monotonic() < until:
        time.sleep(_REST_PAUSE)
        num_quiet = num_quiet + 1 if all(_gloo_threads_sleep()) else 0


def _gloo_threads_sleep() -> Iterator[bool]:
    for task in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # a thread may end while we look
            _, _, rest = task.read_text(encoding="utf-8").partition("(")
            name, _, state = rest.rpartition(") ")
            if name.startswith(GLOO_THREADS):
                yield state.startswith("S")


def _lone_job(environment: LaunchEnvironment, wish: DeviceWish, limits: Limits) -> Job:
    hook.set_reporter(None)  # no other rank has to hear of a failure
    device = wish.device or pick_device()
    peers = complete([join_record_of(environment, os.environ, device=device, backend=None)])
    return Job(peers[0], 1, device, None, limits, peers, environment)


@functools.cache
def _keep_garbage_from_children() -> None:
    """Let forked processes, such as the workers of a loader, never collect what is garbage when they are forked.

    The destructor of a process group, which a dropped DistributedDataParallel may be the last to hold, joins threads
    that the child does not have: it crashes, or hangs.
    """
    was_enabled = False

    def before() -> None:  # other modules' handlers in the child could set off a collection
        nonlocal was_enabled
        was_enabled = gc.isenabled()
        gc.disable()

    def in_parent() -> None:
        if was_enabled:
            gc.enable()

    def in_child() -> None:
        gc.freeze()
        in_parent()

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)


def _make_process_group(job: Job, store: dist.Store) -> None:
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)
    with counting_no_failed_group():
        dist.init_process_group(
            backend=job.backend,
            store=dist.PrefixStore(protocol.PROCESS_GROUP, store),
            rank=job.peer.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.limits.collective),
            device_id=job.device if job.device.type == "cuda" else None,
        )
    if job.backend is not None and is_pure_gloo(job.backend) and dist.group.WORLD is not None:
        make_gloo_default(dist.group.WORLD)


def _meet_in_group(me: JoinRecord, limits: Limits) -> Rendezvous:
    group = dist.group.WORLD
    if group is None:
        raise DistmanError("the default process group must exist to be adopted. Create it first.")
    number = next(_adoptions.setdefault(group, itertools.count()))
    store = dist.PrefixStore(protocol.job(number), group.get_group_store())
    job_store = JobStore(store, "the store of the process group")
    source = "the process group that was there"
    peers = meet_at(job_store, store, me, timeout=limits.rendezvous, source=source, environ=os.environ)
    return Rendezvous(job_store, store, peers)


def _reporter(job: Job, rendezvous: Rendezvous) -> JobReporter:
    job_store = rendezvous.job_store
    return JobReporter(
        rank=job.peer.rank,
        num_others=job.world_size - 1,
        store=rendezvous.store,
        store_host=f"the process that opened {job_store.url}",
        is_host=job_store.is_host,
        is_store_there=job_store.is_there,
        leave_group=dist.destroy_process_group,
        abort_job=job.end_after,
    )


def _abort_job(environment: LaunchEnvironment, error: BaseException) -> None:
    if environment.world_size > 1 and not mpi.abort_at_exit():
        abort_job_after(error, environment)
