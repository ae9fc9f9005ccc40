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
from distman._coordination.messages import (
    Addresses,
    MalformedMessageError,
    Port,
    decode,
)
from distman._job.meeting import mpi
from distman._job.meeting.endpoint import nothing, url_of
from distman._job.meeting.job_store import JobStore
from distman._job.meeting.places import AtPorts
from distman._job.meeting.secret import Protection, Source
from distman._job.meeting.sockets import means_loopback, own_addresses
from distman.environments import LaunchEnvironment
from distman.errors import RendezvousError

ADOPTED = "the process group that existed before"
"""Where such ranks meet, for messages."""


@dataclasses.dataclass(frozen=True)
class Announcement:
    """Where the store is."""

    addresses: Addresses
    port: Port
    job: str  # the name that the rank that opened it has given to this start

    def endpoint(self, point: AtPorts, secret: bytes | None = None) -> AtPorts:
        """Return where to look for the store of a job that would meet at ``point``."""
        protection = dataclasses.replace(point.protection, key=secret) if secret else point.protection
        place = dataclasses.replace(point, addresses=self.addresses, ports=(self.port,), is_host=False)
        return dataclasses.replace(place, job_id=self.job, protection=protection)


def useful_elsewhere(addresses: list[str]) -> tuple[str, ...]:
    """Return the addresses of a host without those that mean every other host itself, unless there are no others."""
    # There, another user's program may listen, and pass on what it hears.
    return tuple(address for address in addresses if not means_loopback(address)) or tuple(addresses)


def _open_anywhere(
    point: AtPorts, rank: int, timeout: float, meanwhile: Callable[[], None] = nothing
) -> tuple[JobStore, Announcement]:
    """Open the store at any free port, and return it and what the other ranks have to know."""
    name = f"{point.job_id}/{secrets.token_hex(8)}"
    here = dataclasses.replace(point, job_id=name, addresses=("0.0.0.0",), ports=())  # noqa: S104 - for all nodes
    opened = here.open(rank, timeout, meanwhile)
    addresses = useful_elsewhere(own_addresses())
    announcement = Announcement(addresses, urlsplit(opened.url).port or 0, name)
    opened.url = url_of((addresses[0], announcement.port))
    return opened, announcement


Told = tuple[Announcement, bytes | None]
"""Where the store is, and its secret."""


class Announced:
    """Rank 0 opens the store at any free port, and a broadcast tells the others of it.

    ``broadcast`` returns on all ranks what a function returns on rank 0, within some seconds.
    """

    def __init__(
        self,
        name: str,
        source: str,
        protection: Protection,
        unreachable_after: float,
        broadcast: Callable[[Callable[[], Told], float], Told],
        *,
        is_host: bool,
    ) -> None:
        self.source = source
        self.is_host = is_host
        self._broadcast = broadcast
        self._point = AtPorts(name, (), (), source, is_host, "rank 0", protection, unreachable_after)

    def open(self, rank: int, timeout: float, meanwhile: Callable[[], None] = nothing) -> JobStore:
        """Take part in the broadcast, by which the other ranks find the store."""
        opened: list[JobStore] = []

        def open_here() -> Told:
            job_store, announcement = _open_anywhere(self._point, rank, timeout, meanwhile)
            opened.append(job_store)
            return announcement, job_store.secret

        try:
            announcement, secret = self._broadcast(open_here, timeout)
        except BaseException:  # Ctrl-C too: a connection that is left open would count as a member
            for job_store in opened:
                job_store.close()
            raise
        if opened:
            return opened[0]
        return announcement.endpoint(self._point, secret).find(rank, min(timeout, timing.ANNOUNCED_OPEN))

    find = open


def over_mpi(environment: LaunchEnvironment, protection: Protection, unreachable_after: float) -> Announced:
    name, source = environment.job_id or environment.launcher, "address and port from rank 0 over MPI"
    broadcast = functools.partial(mpi.broadcast_from_rank_zero, environment)
    return Announced(name, source, protection, unreachable_after, broadcast, is_host=environment.rank == 0)


def over_group(store: dist.Store, job: str, rank: int, unreachable_after: float) -> Announced:
    """Return how ranks meet whose process group other code has made; a process that reads its store is let in."""
    broadcast = functools.partial(_broadcast_over, store, protocol.store_beside(job), rank)
    return Announced(job, ADOPTED, Protection(Source.GROUP), unreachable_after, broadcast, is_host=rank == 0)


@dataclasses.dataclass(frozen=True)
class _Beside:
    """What rank 0 tells the others over the store of their process group."""

    place: Announcement | None = None
    secret: str = ""  # hexadecimal
    failure: FailureRecord | None = None  # why it could not open the store

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def _broadcast_over(store: dist.Store, key: str, rank: int, make: Callable[[], Told], timeout: float) -> Told:
    try:
        if rank != 0:
            return _read_beside(store, key, timeout)
        try:
            place, secret = make()
        except BaseException as error:  # Ctrl-C too: the others would wait for it
            store.set(key, _Beside(failure=FailureRecord.of(error, rank)).to_json())
            raise
        store.set(key, _Beside(place, (secret or b"").hex()).to_json())
    except dist.DistError as error:
        raise RendezvousError(
            f"joining failed: the store of the process group was lost: {str(error).splitlines()[0]} [{ADOPTED}]. See "
            "what ended the process that serves it, which is mostly rank 0."
        ) from error
    return place, secret


def _read_beside(store: dist.Store, key: str, timeout: float) -> Told:
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
    beside = decode(store.get(key), _Beside, "where the job's store is, in that of the group")
    if beside.failure is not None:
        raise beside.failure.to_failure()
    if beside.place is None:
        raise MalformedMessageError(key, "it tells no place")
    try:
        return beside.place, bytes.fromhex(beside.secret)
    except ValueError as error:
        raise MalformedMessageError("the secret of the job's store", str(error)) from None
