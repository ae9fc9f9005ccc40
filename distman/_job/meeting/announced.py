"""Stores whose address nobody knows beforehand: the rank that has started one announces it over what all ranks share.

That is MPI, or the store of a process group which other code has made.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import torch.distributed as dist

from distman._base import timing
from distman._base.text import printable
from distman._coordination import protocol
from distman._coordination.failure.record import FailureRecord, Here
from distman._coordination.messages import (
    Addresses,
    MalformedMessageError,
    Port,
    decode,
    decode_text,
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


class OverMpi:
    """Rank 0 opens the store, and a broadcast over MPI says where it is, and what its secret is."""

    source = "address and port from rank 0 over MPI"

    def __init__(self, environment: LaunchEnvironment, protection: Protection, unreachable_after: float) -> None:
        self.is_host = environment.rank == 0
        self._environment = environment
        name = environment.job_id or environment.launcher
        self._point = AtPorts(name, (), (), self.source, self.is_host, "rank 0", protection, unreachable_after)

    def open(self, rank: int, timeout: float, meanwhile: Callable[[], None] = nothing) -> JobStore:
        """Take part in the broadcast, by which the other ranks find the store."""
        opened: list[JobStore] = []

        def open_here() -> tuple[Announcement, bytes | None]:
            job_store, announcement = _open_anywhere(self._point, rank, timeout, meanwhile)
            opened.append(job_store)
            return announcement, job_store.secret

        try:
            announcement, secret = mpi.broadcast_from_rank_zero(self._environment, open_here, timeout)
        except BaseException:  # Ctrl-C too: a connection that is left open would count as a member
            for job_store in opened:
                job_store.close()
            raise
        return opened[0] if opened else announcement.endpoint(self._point, secret).find(rank, timeout)

    find = open


@dataclasses.dataclass(frozen=True)
class _Beside:
    """What the rank that opens the store beside a group of other code tells the others."""

    place: Announcement | None = None
    secret: str = ""  # hexadecimal
    failure: FailureRecord | None = None  # why it could not

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def open_beside(
    group_store: dist.Store,
    job: str,
    rank: int,
    timeout: float,
    unreachable_after: float = timing.UNREACHABLE_UNWATCHED,
) -> JobStore:
    """Open the store of a job whose process group other code has made, and tell the others over that group's store."""
    # The first rank to come opens it. A process that reads the group's store is let in.
    try:
        return _open_beside(group_store, job, rank, timeout, unreachable_after)
    except dist.DistError as error:
        raise RendezvousError(
            f"joining failed: the store of the process group was lost: {str(error).splitlines()[0]} [{ADOPTED}]. See "
            "what ended the process that serves it, which is mostly rank 0."
        ) from error


def _open_beside(group_store: dist.Store, job: str, rank: int, timeout: float, unreachable_after: float) -> JobStore:
    me, key = str(Here(rank)), protocol.store_beside(job)
    protection = Protection(Source.GROUP)
    point = AtPorts(job, (), (), ADOPTED, is_host=False, protection=protection, unreachable_after=unreachable_after)
    opener = decode_text(group_store.compare_set(protocol.opener_beside(job), "", me))
    if opener == me:
        try:
            opened, place = _open_anywhere(point, rank, timeout)
        except BaseException as error:  # Ctrl-C too: the others would wait for it
            group_store.set(key, _Beside(failure=FailureRecord.of(error, rank)).to_json())
            raise
        try:
            group_store.set(key, _Beside(place, (opened.secret or b"").hex()).to_json())
        except BaseException:  # Ctrl-C too: it would keep the store, where no rank can find it
            opened.close()
            raise
        return opened
    beside = _read_beside(group_store, key, printable(opener), timeout)
    if beside.failure is not None:
        raise beside.failure.to_failure()
    if beside.place is None:
        raise MalformedMessageError(key, "it tells no place")
    try:
        secret = bytes.fromhex(beside.secret)
    except ValueError as error:
        raise MalformedMessageError("the secret of the job's store", str(error)) from None
    return beside.place.endpoint(point, secret).find(rank, min(timeout, timing.ANNOUNCED_OPEN))


def _read_beside(group_store: dist.Store, key: str, opener: str, timeout: float) -> _Beside:
    until, pause = time.monotonic() + timeout, timing.ANNOUNCED_PAUSE
    while not group_store.check([key]):  # torch's stores have no wait that Ctrl-C interrupts
        if time.monotonic() > until:
            raise RendezvousError(
                f"{opener}, the first to call DistributedManager.initialize(), must tell where it has opened the job's "
                f"store within {timeout:g} s, got nothing in the store of the process group [{ADOPTED}]. See its "
                "error; set rendezvous_timeout for slow starts."
            )
        time.sleep(pause)
        pause = min(2 * pause, timing.ANNOUNCED_LONGEST_PAUSE)
    return decode(group_store.get(key), _Beside, "where the job's store is, in that of the group")
