"""Stores whose address nobody knows beforehand: rank 0, which has opened one, announces it over what all ranks share.

That is MPI, or the store of a process group which other code has made.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import secrets
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import torch.distributed as dist

from distman._base import timing
from distman._coordination import protocol
from distman._coordination.failure.record import FailureRecord
from distman._coordination.messages import Addresses, MalformedMessageError, Port, decode
from distman._job.meeting import mpi
from distman._job.meeting.address import means_loopback, own_addresses
from distman._job.meeting.job_store import JobStore
from distman._job.meeting.places import AtPorts, nothing, url_of
from distman._job.meeting.secret import Protection, Source
from distman.environments import LaunchEnvironment
from distman.errors import RendezvousError

ADOPTED = "the process group that existed before"
"""Where such ranks meet, for messages."""


@dataclasses.dataclass(frozen=True)
class Announcement:
    """Where the store is, and what lets in there."""

    addresses: Addresses
    port: Port
    job: str  # the name that the rank that opened it has given to this start
    secret: str = dataclasses.field(repr=False)


def useful_elsewhere(addresses: list[str]) -> tuple[str, ...]:
    """Return the addresses of a host without those that mean every other host itself, unless there are no others."""
    # There, another user's program may listen, and pass on what it hears.
    return tuple(address for address in addresses if not means_loopback(address)) or tuple(addresses)


class Announced:
    """Rank 0 opens the store at any free port, and a broadcast tells the others of it.

    ``broadcast`` returns on all ranks what a function returns on rank 0, within some seconds.
    """

    def __init__(self, point: AtPorts, broadcast: Callable[[Callable[[], Announcement], float], Announcement]) -> None:
        self.source = point.source
        self.is_host = point.is_host
        self._point = point
        self._broadcast = broadcast

    def open(self, rank: int, timeout: float, meanwhile: Callable[[], None] = nothing) -> JobStore:
        """Take part in the broadcast, by which the other ranks find the store."""
        opened: list[JobStore] = []

        def open_here() -> Announcement:
            addresses, name = useful_elsewhere(own_addresses()), f"{self._point.job_id}/{secrets.token_hex(8)}"
            anywhere = dataclasses.replace(self._point, job_id=name, addresses=("0.0.0.0",))  # noqa: S104 - for all nodes
            opened.append(anywhere.open(rank, timeout, meanwhile))
            port = urlsplit(opened[0].url).port or 0
            opened[0].url = url_of((addresses[0], port))
            return Announcement(addresses, port, name, (opened[0].secret or b"").decode(errors="surrogateescape"))

        try:
            told = self._broadcast(open_here, timeout)
        except BaseException:  # Ctrl-C too: a connection that is left open would count as a member
            for job_store in opened:
                job_store.close()
            raise
        if opened:
            return opened[0]
        protection = dataclasses.replace(self._point.protection, key=told.secret.encode(errors="surrogateescape"))
        there = dataclasses.replace(self._point, job_id=told.job, addresses=told.addresses, ports=(told.port,))
        return dataclasses.replace(there, protection=protection).find(rank, min(timeout, timing.ANNOUNCED_OPEN))

    find = open


def over_mpi(environment: LaunchEnvironment, protection: Protection, unreachable_after: float) -> Announced:
    name, source = environment.job_id or environment.launcher, "address and port from rank 0 over MPI"
    point = AtPorts(name, (), (), source, environment.rank == 0, "rank 0", protection, unreachable_after)
    return Announced(point, functools.partial(mpi.broadcast_from_rank_zero, environment))


def over_group(store: dist.Store, job: str, rank: int, unreachable_after: float) -> Announced:
    """Return how ranks meet whose process group other code has made; a process that reads its store is let in."""
    point = AtPorts(job, (), (), ADOPTED, rank == 0, "rank 0", Protection(Source.GROUP), unreachable_after)
    return Announced(point, functools.partial(_broadcast_over, store, protocol.store_beside(job), rank))


def _broadcast_over(
    store: dist.Store, key: str, rank: int, make: Callable[[], Announcement], timeout: float
) -> Announcement:
    try:
        if rank != 0:
            return _read_beside(store, key, timeout)
        try:
            made = make()
        except BaseException as error:  # Ctrl-C too: the others would wait for it
            store.set(key, json.dumps([None, dataclasses.asdict(FailureRecord.of(error, rank))]))
            raise
        store.set(key, json.dumps([dataclasses.asdict(made), None]))
    except dist.DistError as error:
        raise RendezvousError(
            f"joining failed: the store of the process group was lost: {str(error).splitlines()[0]} [{ADOPTED}]. See "
            "what ended the process that serves it, which is mostly rank 0."
        ) from error
    return made


def _read_beside(store: dist.Store, key: str, timeout: float) -> Announcement:
    until, pause = time.monotonic() + timeout, timing.ANNOUNCED_PAUSE
    while not store.check([key]):  # torch's stores have no wait that Ctrl-C interrupts
        if time.monotonic() > until:
            raise RendezvousError(
                f"rank 0 must tell where it has opened the job's store within {timeout:g} s, got nothing in the store "
                f"of the process group [{ADOPTED}]. See whether it reached DistributedManager.initialize(); set "
                "rendezvous_timeout for slow starts."
            )
        time.sleep(pause)
        pause = min(2 * pause, timing.ANNOUNCED_LONGEST_PAUSE)
    what = "where the job's store is, in that of the group"
    told, failure = decode(store.get(key), tuple[Announcement | None, FailureRecord | None], what)
    if failure is not None:
        raise failure.to_failure()
    if told is None:
        raise MalformedMessageError(what, "it tells no place")
    return told
