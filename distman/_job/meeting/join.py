"""From what a launcher says to a job whose ranks have met: store, membership, and every rank's place."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
from collections.abc import Callable, Mapping

import torch

from distman._base.log import logger
from distman._base.process_tree import boot_id, start_time
from distman._base.text import printable
from distman._coordination.timeouts import keep_threads
from distman._job.device import is_sharing_allowed, visible_devices
from distman._job.meeting.job_store import JobStore
from distman._job.meeting.membership import establish_membership
from distman._job.meeting.peers import JoinRecord, Peer
from distman._job.meeting.places import find_meeting, nothing
from distman._job.meeting.secret import Protection, find_protection, learn_protection
from distman._store.server import descriptors_for
from distman._version import VERSION
from distman.environments import LAUNCHERS, LaunchEnvironment
from distman.errors import DistmanError

_FILES_PER_RANK = 2  # collectives open one or two connections to each rank; those to the store are a few in all
_CONNECTIONS_PER_RANK = 2  # to the store: of the program, and of what watches the other ranks
_MAX_COMMAND = 60  # characters: a message has several
_FILES_BESIDE = 512  # for data, libraries and the program itself


def join(
    environment: LaunchEnvironment,
    environ: Mapping[str, str],
    me: JoinRecord,
    timeout: float,
    unreachable_after: float,
    on_meeting: Callable[[], None],
) -> tuple[JobStore, tuple[Peer, ...]]:
    """Meet the other ranks of the job, and return all of them in rank order."""
    # ``on_meeting`` is called when this rank can be heard: from then on it is done here to tell the others of a
    # failure.
    allow_open_files(_FILES_PER_RANK * environment.world_size + _FILES_BESIDE)
    protection = find_protection(environment, environ)
    if environment.rank == 0:
        warn_of_strangers(protection, environment, environ)
    meeting = find_meeting(environment, environ, protection, unreachable_after)
    if meeting.is_host:
        check_room(environment.world_size, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        job_store = meeting.open(environment.rank, timeout, keep_threads)
    else:
        keep_threads()
        job_store = meeting.find(environment.rank, timeout)
    return join_at(job_store, me, timeout=timeout, source=meeting.source, environ=environ, on_meeting=on_meeting)


def warn_of_strangers(protection: Protection, environment: LaunchEnvironment, environ: Mapping[str, str]) -> None:
    for sentence in learn_protection(protection, environment, environ).warnings:
        logger.warning(sentence)


def allow_open_files(number: int) -> None:
    """Let this process open so many files, as far as its hard limit goes: groups connect to all their ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= number:
        return
    wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
    with contextlib.suppress(OSError, ValueError):  # the kernel has a limit of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_room(world_size: int, most: int) -> None:
    """Raise if the process of the store may not open files enough for the connections of all ranks."""
    needed = descriptors_for(_CONNECTIONS_PER_RANK * world_size)
    if most != resource.RLIM_INFINITY and most < needed:
        raise DistmanError(  # no RendezvousError, of which the others would know
            f"the process that serves the job's store must be allowed to open {needed} files for {world_size} ranks, "
            f"got {most}, the hard limit on this host. Raise it (ulimit -Hn {needed}) before the launcher starts."
        )


def join_at(
    job_store: JobStore,
    me: JoinRecord,
    *,
    timeout: float,
    source: str,
    environ: Mapping[str, str],
    on_meeting: Callable[[], None] = nothing,
) -> tuple[JobStore, tuple[Peer, ...]]:
    """Exchange join records over a store that every rank has already reached; close it if that fails."""
    try:
        on_meeting()
        expected = dict(enumerate(LAUNCHERS[me.launcher].expected_hosts(environ)))
        return job_store, establish_membership(job_store, me, timeout=timeout, source=source, expected=expected)
    except BaseException:  # Ctrl-C too: a connection that is left open would count as a member
        job_store.close()
        raise


def join_record_of(
    environment: LaunchEnvironment, environ: Mapping[str, str], device: torch.device | None, backend: str | None
) -> JoinRecord:
    device_type, visible = visible_devices(device.type if device else None)
    command = printable(" ".join(sys.argv))
    return JoinRecord(
        rank=environment.rank,
        world_size=environment.world_size,
        local_rank=environment.local_rank,
        local_world_size=environment.local_world_size,
        node_rank=environment.node_rank,
        num_nodes=environment.num_nodes,
        host=printable(socket.gethostname()),
        boot_id=boot_id(),
        pid=os.getpid(),
        launcher=environment.launcher,
        backend=backend or device_type,
        device_type=device_type,
        device=str(device) if device else None,
        visible=visible,
        has_own_devices=LAUNCHERS[environment.launcher].has_own_gpus(environ),
        is_sharing_allowed=is_sharing_allowed(environ),
        torch=str(torch.__version__),
        distman=VERSION,
        started=start_time(),
        command=command if len(command) <= _MAX_COMMAND else f"{command[:_MAX_COMMAND]} ...",
    )
