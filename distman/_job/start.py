"""The start of a job: from a launch environment to a process group in which all ranks watch each other."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import weakref
from collections.abc import Iterator
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from distman._base import timing
from distman._base.process_state import keep_garbage_from_children
from distman._coordination import protocol
from distman._coordination.failure import hook
from distman._coordination.failure.record import FailureRecord
from distman._coordination.failure.reporter import JobReporter
from distman._coordination.failure.starter import note_host, write_error_file
from distman._coordination.messages import count
from distman._coordination.monitor.context import WatchContext, WatchLimits
from distman._coordination.monitor.watcher import Watcher, announce_unwatched
from distman._coordination.wait_scope import failure_behind, look_after_others, watch_collectives
from distman._job.device import backend_for, is_pure_gloo, wait_for
from distman._job.job import Job, Limits, abort_job
from distman._job.meeting import mpi
from distman._job.meeting.announced import ADOPTED, over_group
from distman._job.meeting.job_store import JobStore
from distman._job.meeting.join import join, join_at, join_record_of, warn_of_strangers
from distman._job.meeting.peers import JoinRecord, Peer, complete
from distman._job.meeting.places import UNIX, nothing
from distman._job.meeting.secret import Protection, Source, check_adoption, find_agents
from distman._job.network import choose_interface, forget_interface, stay_on_this_host, within_rendezvous
from distman._job.shutdown import end_groups
from distman._torch_internals import (
    counting_no_failed_group,
    default_store,
    make_gloo_default,
    meeting_in_few_calls,
)
from distman.environments import BARE, LAUNCHERS, LaunchEnvironment, OnFailure
from distman.errors import DistmanError, JobFailed, RendezvousError

_adoptions: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()
"""Numbers of the adoptions of a group: part of the keys in its store, which remembers those before."""


def start(
    environment: LaunchEnvironment,
    backend: str | None,
    requested: torch.device | None,
    limits: Limits,
    watch_limits: WatchLimits | None,
) -> tuple[Job, Watcher | None]:
    """Bring the ranks together and make the process group; on one process without a launcher, make none."""
    # The ranks watch each other while they make it: each waits for all others then, in native code. Without
    # ``watch_limits`` they do not watch each other.
    if environment.world_size == 1:
        return _start_alone(environment, backend, requested, limits), None
    keep_garbage_from_children()

    leave_it_to_the_meeting = functools.partial(hook.set_reporter, functools.partial(abort_job, environment))
    try:
        me = join_record_of(environment, os.environ, requested, backend)  # first: if it fails, nobody waits here
        unreachable_after = watch_limits.unreachable if watch_limits else timing.UNREACHABLE_UNWATCHED
        on_meeting = leave_it_to_the_meeting
        job_store, peers = join(environment, os.environ, me, limits.rendezvous, unreachable_after, on_meeting)
    except (RendezvousError, JobFailed) as error:
        leave_it_to_the_meeting()  # the others know already, or cannot be found
        if isinstance(error, JobFailed):
            hook.required_end_by(error)
        raise
    job = _job_of(environment, peers, limits, backend or backend_for(peers[environment.rank].device), job_store)
    peer, watcher = job.peer, None
    try:
        hook.set_reporter(reporter_of(job, job_store))
        job_store.leave_will(peer, unless=protocol.left(peer.rank))
        watcher = watch(job, watch_limits)
        _meet_in_process_group(job, job_store)
        count(job_store.store, protocol.STARTED, 1)
        if peer.local_rank == 0:
            note_host([one.rank for one in peers if one.node_rank == peer.node_rank])
    except BaseException as error:  # Ctrl-C too: the others make their groups, and wait for this one
        record = failure_behind(error, "the start")
        undo(job, watcher, error, record)
        if record is not None:
            raise hook.required_end_by(record.to_failure()) from error
        raise
    return job, watcher


def undo(job: Job, watcher: Watcher | None, error: BaseException, cause: FailureRecord | None = None) -> None:
    """Tell the others why a start failed after all, and leave no trace of it; what other code made stays."""
    if job.rendezvous is None:
        if not job.is_adopted:
            _leave_group(job)
        return
    # The program may handle the error and start again: the launcher does nothing, and a group of other code stays.
    tell = dataclasses.replace(reporter_of(job, job.rendezvous, cause), abort_job=lambda _: None)
    if job.is_adopted:
        tell.leave_group = nothing
    tell(error)()
    if watcher is not None:
        watcher.stop()
    if not job.is_adopted:
        _leave_group(job)
        forget_interface()
    job.rendezvous.close()
    hook.set_reporter(functools.partial(abort_job, job.environment))


def adopt(
    environment: LaunchEnvironment,
    requested: torch.device | None,
    limits: Limits,
    watch_limits: WatchLimits | None,
) -> Job:
    """Take over the default process group that other code made."""
    # The group says rank and size; the launcher is believed where it agrees with the group.
    keep_garbage_from_children()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size > 1:
        check_adoption(os.environ)
    if not environment.is_launched or (environment.rank, environment.world_size) != (rank, world_size):
        environment = LaunchEnvironment(BARE.name, rank, world_size)
    hook.set_reporter(functools.partial(abort_job, environment))  # no rank waits for another one to arrive
    backend = dist.get_backend_config()
    world = dist.group.WORLD  # which takes tensors of no other device than the one it may be bound to
    bound = world.bound_device_id if isinstance(world, dist.ProcessGroup) else None
    device = requested or bound or (None if "nccl" in backend else torch.device("cpu"))
    me = join_record_of(environment, os.environ, device, backend)
    unreachable_after = watch_limits.unreachable if watch_limits else timing.UNREACHABLE_UNWATCHED
    is_alone = world_size == 1 or dist.get_backend() == "fake"
    job_store, peers = (None, complete([me])) if is_alone else _join_in_group(me, limits, unreachable_after)
    job = _job_of(environment, peers, limits, backend, job_store, is_adopted=True)
    _make_current(job.device)
    if job_store is not None:
        hook.set_reporter(reporter_of(job, job_store))
        job_store.leave_will(job.peer, unless=protocol.left(rank))
    elif world_size == 1:
        hook.set_reporter(_tell_starter)
    return job


def _job_of(
    environment: LaunchEnvironment,
    peers: tuple[Peer, ...],
    limits: Limits,
    backend: str | None,
    job_store: JobStore | None = None,
    *,
    is_adopted: bool = False,
) -> Job:
    peer = next(peer for peer in peers if peer.rank == environment.rank)  # beside a fake group it is the only one
    device, world_size = torch.device(peer.device), environment.world_size
    return Job(peer, world_size, device, backend, limits, peers, environment, job_store, is_adopted)


def _make_current(device: torch.device) -> None:
    """Let this process use a GPU for what does not name one: a plain "cuda", and NCCL's batches of messages."""
    if device.type in ("cuda", "xpu"):
        getattr(torch, device.type).set_device(device)


def watch(job: Job, limits: WatchLimits | None) -> Watcher | None:
    """Begin to watch the other ranks; return None where there are none, or watching is switched off."""
    if job.rendezvous is None:
        return None
    if limits is None:
        announce_unwatched(job.rendezvous.store, job.peer.rank)
        return None
    context = WatchContext(
        store=job.rendezvous.store,
        url=job.rendezvous.url,
        opener=job.rendezvous.opener or 0,
        rank=job.peer.rank,
        peers=job.roll_call,
        holds_store=job.holds_store,
        wait_for_device=functools.partial(wait_for, job.device) if job.device.type != "cpu" else None,
        mates=_left_to_themselves(job),
    )
    watcher = Watcher(context, limits, job.end_after, end_job=job.ending, awaits_dead=mpi.is_up())
    watch_collectives()
    try:
        watcher.start()
    except BaseException:  # Ctrl-C while a name is looked up, or no thread can be had
        watcher.stop()
        raise
    return watcher


def _left_to_themselves(job: Job) -> tuple[int, ...]:
    """Return the ranks of this host, where the launcher ends none of them after a failure."""
    launcher = LAUNCHERS[job.environment.launcher]
    is_left = launcher.on_failure is OnFailure.WAITS and not (launcher.ends_leftovers or launcher.cancel_command)
    return tuple(one.rank for one in job.roll_call if one.machine == job.peer.machine) if is_left else ()


def _start_alone(
    environment: LaunchEnvironment, backend: str | None, requested: torch.device | None, limits: Limits
) -> Job:
    """Return the job of a process that meets nobody. It has a process group where a launcher has started it."""
    peers = complete([join_record_of(environment, os.environ, requested, backend)])
    backend = backend or backend_for(peers[0].device)
    job = _job_of(environment, peers, limits, backend if environment.is_launched else None)
    _make_current(job.device)
    if not environment.is_launched:
        hook.set_reporter(None)  # nobody has to hear of a failure
        return job
    keep_garbage_from_children()
    hook.set_reporter(_tell_starter)
    protection = Protection(Source.KERNEL, agents=find_agents(environment, os.environ))  # it has no door
    warn_of_strangers(protection, environment, os.environ)
    with counting_no_failed_group(), meeting_in_few_calls():
        _init_process_group(job, dist.HashStore())
    note_host([0])
    return job


def _tell_starter(error: BaseException) -> None:
    record = FailureRecord.of(error, 0)
    write_error_file(0, record, record)


def _meet_in_process_group(job: Job, job_store: JobStore) -> None:
    store = job_store.store
    _make_current(job.device)
    if job_store.url.startswith(UNIX):
        stay_on_this_host()
    elif job.peer.num_nodes > 1:
        choose_interface(_other_hosts(job, job_store.url))
    with counting_no_failed_group(), meeting_in_few_calls():
        if job.peer.num_nodes == 1:
            _init_process_group(job, store)
        else:
            within_rendezvous(lambda: _init_process_group(job, store), job, store)


def _init_process_group(job: Job, store: dist.Store) -> None:
    _make_current(job.device)  # here, where another thread may make the group
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


def _other_hosts(job: Job, url: str) -> Iterator[str]:
    """Generate names of other hosts: where the ranks met, which all of them know, then those that ranks have."""
    yield urlsplit(url).hostname or ""
    for host, _ in itertools.groupby(peer.host for peer in job.roll_call):
        if host != job.peer.host:
            yield host


def _join_in_group(me: JoinRecord, limits: Limits, unreachable_after: float) -> tuple[JobStore, tuple[Peer, ...]]:
    group = dist.group.WORLD
    if group is None:
        raise DistmanError("the default process group must exist to be adopted, got none. Create it first.")
    name = protocol.job(next(_adoptions.setdefault(group, itertools.count())))
    job_store = over_group(default_store(), name, me.rank, unreachable_after).open(me.rank, limits.rendezvous)
    return join_at(job_store, me, timeout=limits.rendezvous, source=ADOPTED, environ=os.environ)


def _leave_group(job: Job) -> None:
    if dist.is_initialized():  # else it was not made yet, or the rank has left the job
        end_groups(None, job.device, aborts=True)


def reporter_of(
    job: Job, job_store: JobStore, cause: FailureRecord | None = None, watcher: Watcher | None = None
) -> JobReporter:
    """Return what tells the other ranks of an error that ends this one."""
    # The watcher is needed where this process has left the job; else it is the current one.
    return JobReporter(
        rank=job.peer.rank,
        num_others=job.world_size - 1,
        store=job_store.store,
        store_host=f"the process at {job_store.url}",
        leave_group=functools.partial(_leave_group, job),
        abort_job=job.end_after,
        cause=cause,
        look_after=look_after_others if watcher is None else watcher.look_after_others,
    )
