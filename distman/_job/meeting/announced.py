"""Stores whose address nobody knows beforehand: the rank that has started one announces it over what all ranks share.

That is MPI, the store of a launcher's agent, or that of a process group which other code has made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import itertools
import json
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
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
    drop,
    read_at_once,
)
from distman._job.meeting import mpi
from distman._job.meeting.endpoint import listed, nothing, url_of
from distman._job.meeting.job_store import JobStore
from distman._job.meeting.places import AtPorts
from distman._job.meeting.secret import Protection, Source
from distman._job.meeting.sockets import leads_here, means_loopback, own_addresses
from distman._store.handshake import door_key, mac
from distman.environments import LaunchEnvironment
from distman.errors import RendezvousError

ADOPTED = "the process group that existed before"
"""Where such ranks meet, for messages."""

_starts = itertools.count()
"""How often this process has met others over the store of an agent, which remembers those before."""


class UnprovedError(Exception):
    """The writer of an announcement does not know the secret of the job."""


@dataclasses.dataclass(frozen=True)
class Announcement:
    """Where the store is."""

    addresses: Addresses
    port: Port
    job: str  # the name that the rank that opened it has given to this start

    def seal(self, key: str, secret: bytes | None) -> str:
        """Return it as a message for a key of a store where anybody can write."""
        # The handshake proves to which port a connection leads, and not to which host. So an announcement that is not
        # proved could lead to a program on another host that passes everything on.
        return json.dumps({"place": dataclasses.asdict(self), "proof": self._proof(key, secret)})

    @staticmethod
    def unseal(message: bytes, key: str, secret: bytes | None, what: str) -> Announcement:
        """Return what was announced; raise UnprovedError if a stranger wrote it, or MalformedMessageError."""
        sealed = decode(message, _Sealed, what)
        if not hmac.compare_digest(sealed.proof.encode(), sealed.place._proof(key, secret).encode()):
            raise UnprovedError
        return sealed.place

    def _proof(self, key: str, secret: bytes | None) -> str:
        text = json.dumps(dataclasses.asdict(self)).encode()
        return mac(door_key(secret, key.encode(errors="surrogateescape")), b"place", text).hex()

    def endpoint(self, point: AtPorts, secret: bytes | None = None) -> AtPorts:
        """Return where to look for the store of a job that would meet at ``point``."""
        protection = dataclasses.replace(point.protection, key=secret) if secret else point.protection
        place = dataclasses.replace(point, addresses=self.addresses, ports=(self.port,), is_host=False)
        return dataclasses.replace(place, job_id=self.job, protection=protection)


@dataclasses.dataclass(frozen=True)
class _Sealed:
    place: Announcement
    proof: str


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
    addresses = useful_elsewhere([*dict.fromkeys([*filter(leads_here, point.addresses), *own_addresses()])])
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


class OverAgent:
    """Rank 0 opens the store, and says where it is in that of the agent of the launcher."""

    # Anybody can write there. It leads a rank to a store, which has to prove that it is this job's, or ends the start.

    def __init__(self, point: AtPorts, restart: str) -> None:
        self.point = point  # of the agent's store
        self._failure_key = protocol.start_failure(point.job_id, restart)  # each agent counts restarts for itself

    @property
    def is_host(self) -> bool:
        return self.point.is_host

    @property
    def source(self) -> str:
        return self.point.source

    def open(self, rank: int, timeout: float, meanwhile: Callable[[], None] = nothing) -> JobStore:
        agent = self._connect(timeout)
        start = next(_starts)
        key = protocol.store_address(self.point.job_id, start)
        opened, announcement = _open_anywhere(self.point, rank, timeout, meanwhile)
        try:
            agent.set(key, announcement.seal(key, self.point.protection.key))
        except BaseException:  # Ctrl-C too: it would keep the store, where no rank can find it
            opened.close()
            raise
        opened.find_failure = lambda: self._failure_in(agent, start)
        return opened

    def find(self, rank: int, timeout: float) -> JobStore:
        """Find the store where rank 0 says that it is, in spite of what others say, or rank 0 said before a restart."""
        agent = self._connect(timeout)
        start = next(_starts)
        key = protocol.store_address(self.point.job_id, start)
        until, found, pause = time.monotonic() + timeout, "nothing", timing.ANNOUNCED_PAUSE
        while True:
            if agent.check([key]):
                try:
                    there = self._announced(agent.get(key), key)
                except UnprovedError:
                    found = "an answer of somebody who does not know this job's secret"
                except MalformedMessageError as error:
                    found = "a malformed answer"
                    drop(error)
                else:
                    client, reasons, _ = there.try_all(rank, timing.DIAL)
                    if client is not None:
                        return JobStore.entered(client, url_of(client.door.address), timeout)
                    found = f"a place without it ({listed(reasons)})"
                    pause = min(2 * pause, timing.ANNOUNCED_LONGEST_PAUSE)
            failure = self._failure_in(agent, start)
            if failure is not None:
                raise failure.to_failure()
            if time.monotonic() > until:
                raise RendezvousError(
                    f"{self.point.opener} must tell where it has opened the job's store within {timeout:g} s, got "
                    f"{found} in the agent's at {self.point.url} [{self.source}]. See whether {self.point.opener} "
                    f"started{self.point.alike} and reached DistributedManager.initialize(); set "
                    "rendezvous_timeout for slow starts."
                )
            time.sleep(pause)

    def leave_failure(self, failure: str, timeout: float) -> None:
        """Leave a failure of this rank on its way to the job's store with the agent."""
        agent = self._connect(timeout)
        with contextlib.suppress(dist.DistError):  # it has ended, and so do the others
            agent.compare_set(self._failure_key, "", failure)

    def _announced(self, message: bytes, key: str) -> AtPorts:
        what = f"where {self.point.opener} has opened the job's store, in the agent's at {self.point.url}"
        return Announcement.unseal(message, key, self.point.protection.key, what).endpoint(self.point)

    def _failure_in(self, agent: dist.Store, start: int) -> FailureRecord | None:
        """Return a failure that was left at the first start: later ones find what was left then."""
        found = read_at_once(agent, self._failure_key) if start == 0 else None
        return FailureRecord.told(found.encode()) if found is not None else None

    def _connect(self, timeout: float) -> dist.TCPStore:
        (address,), (port,) = self.point.addresses, self.point.ports
        limit = timedelta(seconds=timeout)
        try:
            return dist.TCPStore(address, port, None, is_master=False, timeout=limit, wait_for_workers=False)
        except dist.DistError as error:
            raise RendezvousError(
                f"the store of the launcher's agent at {self.point.url} could not be reached from this host within "
                f"{timeout:g} s: {str(error).splitlines()[0]} [{self.source}]. See that no firewall closes the port "
                "and the name is right."
            ) from error


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
