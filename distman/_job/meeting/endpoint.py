"""Where the store of a job is found: at a name that only this host knows, or at a port of the host where ranks meet.

Whatever listens there has to prove that it is this job's store. What does not is passed by, and named if it stays in
the way. It needs no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from distman._base import timing
from distman._base.log import logger
from distman._base.text import printable
from distman._coordination import protocol
from distman._coordination.failure.record import Here
from distman._job.meeting.job_store import JobStore, has_left
from distman._job.meeting.munge import CredentialError
from distman._job.meeting.secret import NO_PROTECTION, Protection
from distman._job.meeting.sockets import bracketed
from distman._store.client import Client
from distman._store.dialing import CrowdedError, Door, ForeignServiceError
from distman._store.handshake import MEMBER
from distman._store.process import StoreStartError, start_store
from distman.errors import RendezvousError

if TYPE_CHECKING:
    from distman._store.transport import Address

_MOST_LISTED = 8  # places in a message; a job tries as many ports, and other users may listen at any number of names
UNIX = "unix:"
"""How the URL of a store begins that ranks on this host find without a network."""
_STARTED, _LEFT, _FAILURE = (
    protocol.in_job(key).encode() for key in (protocol.STARTED, protocol.LEFT, protocol.FAILURE)
)


class StillOpenError(Exception):
    """A store of an earlier start of this job serves others yet."""


def nothing() -> None:
    """Do nothing meanwhile."""


@dataclasses.dataclass(frozen=True)
class Endpoint(ABC):
    """A place that all ranks know, where one opens the store of the job and the others find it."""

    job_id: str  # name of the job, the same on all its ranks
    addresses: tuple[str, ...]  # to try, in order; they are names of one host
    ports: tuple[int, ...]  # to try, in order; empty takes any, to be announced by other means
    source: str  # where address and port came from, for messages
    is_host: bool  # whether this rank opens the store
    opener: str = "rank 0"  # the rank that opens it, for messages
    protection: Protection = NO_PROTECTION  # what keeps others out
    unreachable_after: float = (
        timing.UNREACHABLE_UNWATCHED
    )  # seconds after which a host is given up that acknowledges nothing

    alike = " with the same secret"  # what else to see about ranks that do not meet

    @property
    @abstractmethod
    def url(self) -> str:
        """The endpoint in one word, for messages."""

    @abstractmethod
    def places(self) -> list[Address]:
        """Return where the store may be."""

    @abstractmethod
    def start_or_enter(self, rank: int, timeout: float, meanwhile: Callable[[], None] = nothing) -> tuple[Client, bool]:
        """Start the store of the job, or enter that of another process of it; return also whether it was started."""

    def open(self, rank: int, timeout: float, meanwhile: Callable[[], None] = nothing) -> JobStore:
        """Start the store of the job; where another process has done so already, enter it: this rank came twice."""
        client, is_own = self.start_or_enter(rank, timeout, meanwhile)
        shown = url_of(client.door.address)
        if not is_own:
            return JobStore.entered(client, shown, timeout)
        if not isinstance(client.door.address, str):  # it has dialled itself
            shown = url_of((self.addresses[0], client.door.address[1]))
        opened = JobStore(client, shown, timeout, is_opened_here=True)
        # Before anybody is told where it is: a rank that enters waits for this one, which may die before it has joined.
        part, event = opened.store.part(protocol.job()), protocol.MEMBERSHIP_EVENT
        opened.leave_will(part, Here(rank), protocol.EARLY_FAILURE, event, unless=protocol.VERDICT)
        return opened

    def find(self, rank: int, timeout: float) -> JobStore:
        """Find the store of the job, as soon as it is opened."""
        client = self.find_client(rank, timeout)
        return JobStore.entered(client, url_of(client.door.address), timeout)

    def find_client(self, rank: int, timeout: float, *, role: int = MEMBER) -> Client:
        """Try every place until the job's store answers."""
        started = time.monotonic()
        deadline = started + timeout
        pause, is_said, in_the_way = timing.FIND_FIRST_PAUSE, False, dict[str, str]()
        while True:
            patience = min(max(deadline - time.monotonic(), timing.DIAL_SHORTEST), timing.DIAL)
            client, reasons, others = self.try_all(rank, patience, role=role)
            if client is not None:
                return client
            is_last = time.monotonic() + pause > deadline
            is_quiet = not is_said and time.monotonic() - started > timing.FIND_QUIET
            if is_last or is_quiet:  # seldom: the table of names may be long
                others |= self.of_other_users()
            in_the_way |= others
            if others and is_quiet:
                is_said = True
                logger.warning("waiting for %s at %s: %s", self.opener, self.url, listed(reasons | others))
            if is_last:
                raise RendezvousError(self._opener_missing(timeout, reasons | in_the_way))
            time.sleep(pause)
            pause = min(2 * pause, timing.FIND_LONGEST_PAUSE)

    def try_all(
        self, rank: int, patience: float, *, role: int = MEMBER
    ) -> tuple[Client | None, dict[str, str], dict[str, str]]:
        """Try every place once: a connection or None, why there is none, and what else listens there."""
        # Those come last where one would have to stand in line, and share the patience: another user's process may
        # listen at any number of names of this job's, and let nobody pass. What else listens may be the store of an
        # earlier start.
        reasons: dict[str, str] = {}
        in_the_way: dict[str, str] = {}
        places, in_line = self.places(), 0.0
        while places:
            crowded = []
            for address in places:
                try:
                    door = dataclasses.replace(self.door_at(address, patience), in_line=in_line)
                    return enter(door, role, rank), {}, {}
                except (OSError, ForeignServiceError, StillOpenError) as error:
                    reasons[show(address)] = explain(error)
                    if isinstance(error, ForeignServiceError | StillOpenError | CrowdedError):
                        in_the_way[show(address)] = explain(error)
                    if isinstance(error, CrowdedError) and not in_line:
                        crowded.append(address)
            places, in_line = crowded, patience / max(len(crowded), 1)
        return None, reasons, in_the_way

    def of_other_users(self) -> dict[str, str]:
        """Return where other users listen for a job of this name, and what is wrong with that."""
        return {}

    def door_at(self, address: Address, patience: float = timing.DIAL) -> Door:
        """Return the door of this job's store at an address, for a process that has not opened it."""
        protection = self.protection

        def read(credential: bytes) -> bytes | None:
            try:
                return protection.read(self.job_id, credential)
            except CredentialError as error:
                raise ForeignServiceError(str(error)) from error

        return Door(
            address=address,
            # without a secret, of this user alone; users have other numbers elsewhere
            job=self.job_id if protection.has_secret else f"{self.job_id}/{os.geteuid()}",
            secret=None,
            asks_kernel=protection.asks_kernel,
            unreachable_after=self.unreachable_after,
            patience=patience,
            read=read,
        )

    @contextlib.contextmanager
    def started(
        self,
        listener: socket.socket,
        address: Address,
        rank: int,
        timeout: float,
        meanwhile: Callable[[], None],
    ) -> Iterator[Door]:
        """Start the process of the store, and yield its door; if anything fails until the end of the block, end it."""
        door = self.door_at(address)
        drawn = self.protection.draw(self.job_id)
        try:
            process = start_store(
                listener,
                job=door.job,
                secret=drawn.key,
                credential=drawn.credential,
                opener=rank,
                entry_limit=timeout + timing.OPEN_ENTRY,
                unreachable_after=door.unreachable_after,
            )
            try:
                meanwhile()
                process.wait_until_up(timeout)
                yield dataclasses.replace(door, secret=drawn.key, read=None)
            except BaseException:  # Ctrl-C too: nobody would ever enter it
                process.end()
                raise
        except StoreStartError as error:
            raise RendezvousError(f"{error} [{self.source}].") from error

    def enter_own(self, door: Door, rank: int) -> Client:
        """Enter a store that was started here."""
        try:
            return Client(door, rank=rank)
        except (OSError, ForeignServiceError) as error:
            raise RendezvousError(
                f"{self.opener} must reach the store of the job, which it has just started, at "
                f"{url_of(door.address)}, got {explain(error)} [{self.source}]. See whether something has ended its "
                "process, such as the kernel for want of memory, or keeps this host from reaching itself."
            ) from error

    def _opener_missing(self, timeout: float, reasons: Mapping[str, str]) -> str:
        tried = f"Tried {listed(reasons)}. " if reasons else ""
        return (
            f"{self.opener} must open the job's store at {self.url} within {timeout:g} s, got no answer from it "
            f"[{self.source}]. {tried}See whether {self.opener} started{self.alike}, runs on "
            f"{self.addresses[0]} and reached DistributedManager.initialize(); set rendezvous_timeout for slow starts."
        )


def enter(door: Door, role: int, rank: int, *, shuts: bool = False) -> Client:
    """Return a connection to the store behind a door, or raise StillOpenError, or what :func:`dial` raises."""
    # A job that has started, and in which a rank has left or failed since, is over for one that arrives now. Its store
    # stays as long as one of its ranks does, which saves something, or is stopped. With ``shuts``, it lets nobody in
    # any more, and leaves its place.
    client = Client(door, role, rank)
    try:
        is_over = client.check([_STARTED, _LEFT]) or client.check([_STARTED, _FAILURE])
        if not is_over and not has_left(client.session):
            return client
        if is_over and shuts and not has_left(client.session):
            client.shut()
    except BaseException:  # Ctrl-C too: a connection that is left open would count as a member
        client.close()
        raise
    client.close()
    raise StillOpenError("the store of an earlier start is still open")


def show(address: Address) -> str:
    """Return an address for messages, such as ``n1:23145``; a name of this host's own begins with ``@``."""
    if isinstance(address, str):
        return printable(address.replace("\0", "@"))  # anybody may have given it
    return printable(f"{bracketed(address[0])}:{address[1]}")


def url_of(address: Address) -> str:
    """Return an address as a URL, such as ``tcp://n1:23145`` or ``unix:@distman/1000/...``."""
    return f"{UNIX if isinstance(address, str) else 'tcp://'}{show(address)}"


def explain(error: Exception) -> str:
    """Return why something could not be reached, in words."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__


def listed(reasons: Mapping[str, str]) -> str:
    """Return for messages why the store was at none of the places."""
    every = [f"{place}: {reason}" for place, reason in reasons.items()]
    more = [f"and {len(every) - _MOST_LISTED} more"] if len(every) > _MOST_LISTED else []
    return "; ".join([*every[:_MOST_LISTED], *more])
