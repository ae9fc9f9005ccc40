"""How the ranks of a job meet: at a name that only this host knows, at a port of a host, or over what announces it.

Whatever listens at such a place has to prove that it is this job's store. What does not is passed by, and named if it
stays in the way. It needs no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from distman._base import timing
from distman._base.log import logger
from distman._base.text import listed, printable
from distman._coordination import protocol
from distman._coordination.failure.record import Here
from distman._job.meeting.address import (
    addresses_of,
    bind_listener,
    bracketed,
    derived_ports,
    find_address,
    find_ports,
    given_address,
    is_on_one_host,
    is_own,
    is_sent_over_mpi,
    job_name,
)
from distman._job.meeting.job_store import JobStore, has_left
from distman._job.meeting.munge import CredentialError
from distman._job.meeting.secret import NO_PROTECTION, Protection
from distman._store.client import Client
from distman._store.dialing import CrowdedError, Door, ForeignServiceError
from distman._store.handshake import MEMBER, VISITOR
from distman._store.process import StoreStartError, listen_on_this_host, start_store
from distman.environments import LAUNCHERS, LaunchEnvironment
from distman.errors import RendezvousError

if TYPE_CHECKING:
    from distman._job.meeting.announced import Announced
    from distman._store.transport import Address

_MOST_LISTED = 8  # places in a message; a job tries as many ports, and other users may listen at any number of names
UNIX = "unix:"
"""How the URL of a store begins that ranks on this host find without a network."""
_DRAWN_BYTES = 8
_LISTENS = "00010000"  # among the flags of /proc/net/unix, as __SO_ACCEPTCON in the kernel's linux/net.h
_ANY_PORT = 0  # the system picks one
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
    # seconds after which a host is given up that acknowledges nothing
    unreachable_after: float = timing.UNREACHABLE_UNWATCHED

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
        early, event = protocol.EARLY_FAILURE, protocol.MEMBERSHIP_EVENT
        opened.leave_will(Here(rank), early, event, unless=protocol.VERDICT)
        return opened

    def find(self, rank: int, timeout: float) -> JobStore:
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
            in_the_way |= others
            if others and not is_said and time.monotonic() - started > timing.FIND_QUIET:
                is_said = True
                logger.warning("waiting for %s at %s: %s", self.opener, self.url, _reasons(reasons))
            if time.monotonic() + pause > deadline:
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
        self, listener: socket.socket, address: Address, rank: int, timeout: float, meanwhile: Callable[[], None]
    ) -> Iterator[Door]:
        """Start the process of the store, and yield its door; if anything fails until the end of the block, end it."""
        door = self.door_at(address)
        secret, credential = self.protection.draw(self.job_id)
        try:
            process = start_store(
                listener,
                job=door.job,
                secret=secret,
                credential=credential,
                opener=rank,
                entry_limit=timeout + timing.OPEN_ENTRY,
                unreachable_after=door.unreachable_after,
            )
            try:
                meanwhile()
                process.wait_until_up(timeout)
                yield dataclasses.replace(door, secret=secret, read=None)
            except BaseException:  # Ctrl-C too: nobody would ever enter it
                process.end()
                raise
        except StoreStartError as error:
            raise RendezvousError(f"{error} [{self.source}].") from error

    def enter_own(self, door: Door, rank: int) -> Client:
        try:
            return Client(door, rank=rank)
        except (OSError, ForeignServiceError) as error:
            raise RendezvousError(
                f"{self.opener} must reach the store of the job, which it has just started, at "
                f"{url_of(door.address)}, got {explain(error)} [{self.source}]. See whether something has ended its "
                "process, such as the kernel for want of memory, or keeps this host from reaching itself."
            ) from error

    def _opener_missing(self, timeout: float, reasons: Mapping[str, str]) -> str:
        tried = f"Tried {_reasons(reasons)}. " if reasons else ""
        return (
            f"{self.opener} must open the job's store at {self.url} within {timeout:g} s, got no answer from it "
            f"[{self.source}]. {tried}See whether {self.opener} started{self.alike}, runs on "
            f"{self.addresses[0]} and reached DistributedManager.initialize(); set rendezvous_timeout for slow starts."
        )


class OnThisHost(Endpoint):
    """All ranks are on this host, and meet at a name that only it knows, without a network."""

    alike = ""  # the name does not depend on the secret

    @property
    def prefix(self) -> str:
        """How the names begin at which its store may listen; other ports mean another job."""
        job = json.dumps([self.job_id, self.ports]).encode(errors="surrogateescape")
        return f"\0distman/{os.geteuid()}/{hashlib.sha256(job).hexdigest()[:16]}."

    @property
    def url(self) -> str:
        """Such as ``unix:@distman/1000/5f0c81d2a9e4b377.*``."""
        return f"{UNIX}{show(self.prefix)}*"

    def places(self) -> list[Address]:
        """Return the names at which a process listens for this job, be it another user's."""
        names = _names()
        if names is None:  # the system does not show them: there is one
            return [f"{self.prefix}0"]
        return [name for name in names if name.startswith(self.prefix)]

    def new_name(self) -> str:
        """Return a name at which a store of this job may listen, and that nobody could take beforehand."""
        return self.prefix + (secrets.token_hex(_DRAWN_BYTES) if _names() is not None else "0")

    def start_or_enter(self, rank: int, timeout: float, meanwhile: Callable[[], None] = nothing) -> tuple[Client, bool]:
        with self._alone():
            client, _, _ = self.try_all(rank, timing.OPEN_LOOK)
            if client is not None:
                return client, False
            name = self.new_name()
            try:
                listener = listen_on_this_host(name)
            except OSError as error:
                raise RendezvousError(
                    f"{self.opener} must be able to listen at {show(name)}, got {explain(error)} [{self.source}]. "
                    "Give the job a name of its own with DISTMAN_JOB_ID."
                ) from error
        with self.started(listener, name, rank, timeout, meanwhile) as door:
            return self.enter_own(door, rank), True

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Let one process at a time look whether the store is open, and open it; a stranger cannot prevent it."""
        name = f"{self.prefix}turn"
        until = time.monotonic() + timing.OPEN_LOOK
        with socket.socket(socket.AF_UNIX) as turn:
            while True:
                try:
                    turn.bind(name)
                    break
                except OSError as error:
                    if time.monotonic() > until:
                        logger.warning(
                            "opening the job's store without a look at who else does: some process holds %s for %g s "
                            "(%s), and none of this job should",
                            show(name),
                            timing.OPEN_LOOK,
                            explain(error),
                        )
                        break
                    time.sleep(timing.OPEN_PAUSE)
            yield


class AtPorts(Endpoint):
    """The ranks meet at a port of a host, of several that they try in turn."""

    @property
    def url(self) -> str:
        """Such as ``tcp://n1:23145``."""
        return url_of((self.addresses[0], self.ports[0]))

    def places(self) -> list[Address]:
        return [(address, port) for address in self.addresses for port in self.ports]

    def start_or_enter(self, rank: int, timeout: float, meanwhile: Callable[[], None] = nothing) -> tuple[Client, bool]:
        started = time.monotonic()
        while True:
            seconds = time.monotonic() - started
            taken: dict[int, Exception] = {}
            for port in self.ports or (_ANY_PORT,):
                listener = self._listen(port)
                if listener is not None:
                    return self._start_behind(listener, rank, timeout, meanwhile), True
                try:
                    return enter(
                        self.door_at((self.addresses[0], port)), MEMBER, rank, shuts=seconds > timing.OPEN_ENDING
                    ), False
                except (OSError, ForeignServiceError, StillOpenError) as error:
                    taken[port] = error
            is_open = any(isinstance(error, StillOpenError) for error in taken.values())
            is_closing = any(isinstance(error, ConnectionError) for error in taken.values())
            if seconds > timeout or not (is_open or (is_closing and seconds < timing.OPEN_ENDING)):
                raise RendezvousError(self._no_port(taken))
            time.sleep(timing.OPEN_PAUSE)

    def _listen(self, port: int) -> socket.socket | None:
        """Return a socket that listens at a port of the endpoint's host, or None if it is taken."""
        try:
            try:
                return bind_listener(self.addresses[0], port)
            except socket.gaierror:
                return bind_listener("0.0.0.0", port)  # noqa: S104 - the name is known to others only
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            raise RendezvousError(
                f"{self.opener} must be able to listen at {self.addresses[0]}:{port}, got {explain(error)} "
                f"[{self.source}]. Correct MASTER_ADDR or MASTER_PORT, or unset them to have them derived."
            ) from error

    def _start_behind(
        self, listener: socket.socket, rank: int, timeout: float, meanwhile: Callable[[], None]
    ) -> Client:
        host, port = listener.getsockname()[:2]
        here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not listened to
        with self.started(listener, (here, port), rank, timeout, meanwhile) as door:
            self._check_is_found(port)
            return self.enter_own(door, rank)

    def _check_is_found(self, port: int) -> None:
        """Refuse to wait for ranks that look for the store on another host."""
        # An address that is not this host's own may lead here all the same, through a translation of addresses: so it
        # is tried. A name that this host does not know is left to the others.
        address = self.addresses[0]
        try:
            addresses = addresses_of(address)
        except OSError:
            return
        if any(map(is_own, addresses)):
            return
        with contextlib.suppress(OSError, ForeignServiceError):  # nobody is there, or somebody else
            Client(self.door_at((address, port)), VISITOR).close()
            return
        named = "" if addresses == [address] else f" ({', '.join(addresses)})"
        raise RendezvousError(
            f"{self.opener} must run on the host at which the ranks meet, got {address}{named}, which is not this "
            f"host, {socket.gethostname()} [{self.source}]. Set MASTER_ADDR to {socket.gethostname()} on all ranks, or "
            f"start {self.opener} on {address}."
        )

    def _no_port(self, taken: Mapping[int, Exception]) -> str:
        ports = ", ".join(f"{port} ({explain(error)})" for port, error in taken.items())
        return (
            f"opening the store of the job failed: no port is free on this host: {ports} [{self.source}]. Set "
            "MASTER_PORT to a free port on all ranks, or unset it to have one derived."
        )


def _names() -> Iterator[str] | None:
    """Return the names, of no file, at which sockets of this host listen; None where the system does not show them."""
    # Source: proc(5), /proc/net/unix: the fourth word has the flags, the eighth is the name, whose first byte is
    # shown as @.
    try:
        table = Path("/proc/self/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    rows = (row.split(maxsplit=7) for row in table)
    return (row[7].replace("@", "\0", 1) for row in rows if len(row) == 8 and row[3] == _LISTENS)


def find_meeting(
    environment: LaunchEnvironment,
    environ: Mapping[str, str],
    protection: Protection = NO_PROTECTION,
    unreachable_after: float = timing.UNREACHABLE_UNWATCHED,
) -> Endpoint | Announced:
    """Return how the ranks of a job meet, as the variables tell every rank alike."""
    if is_sent_over_mpi(environment, environ):
        from distman._job.meeting.announced import over_mpi  # here: a rank without torch does not get so far

        return over_mpi(environment, protection, unreachable_after)
    launcher = LAUNCHERS[environment.launcher]
    is_here = is_on_one_host(environment, environ)
    job_id = job_name(environment)
    host, host_source = find_address(environment, environ)
    if launcher.agent is not None and launcher.agent.is_serving(environ):  # at the port that MASTER_PORT says
        restart = environ.get(launcher.agent.restart_count, "0")  # each agent counts restarts for itself
        job_id = "/".join([job_id, environ.get("MASTER_PORT", ""), *([restart] if is_here else [])])
        ports, port_source = derived_ports(job_id, protection.key)
    else:
        ports, port_source = find_ports(environ, job_id, protection.key)
    place = environment.node_rank, environment.local_rank
    by_place = launcher.meets_on_first_node and given_address(environ) is None and None not in place
    kind = OnThisHost if is_here else AtPorts
    return kind(
        job_id=job_id,
        addresses=(host,),
        ports=ports,
        source=f"address from {host_source}, port {port_source}",
        is_host=place == (0, 0) if by_place else environment.rank == 0,
        opener="the first task of the first node" if by_place and not environment.is_on_one_node else "rank 0",
        protection=protection,
        unreachable_after=unreachable_after,
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
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__


def _reasons(reasons: Mapping[str, str]) -> str:
    return listed((f"{place}: {reason}" for place, reason in reasons.items()), _MOST_LISTED, "; ")
