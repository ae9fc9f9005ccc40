"""The two kinds of endpoint: a name that only this host knows, and a port of the host where the ranks meet."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from distman._base import timing
from distman._base.log import logger
from distman._job.meeting.endpoint import UNIX, Endpoint, StillOpenError, enter, explain, nothing, show, url_of
from distman._job.meeting.sockets import addresses_of, bind_listener, is_own
from distman._store.client import Client
from distman._store.dialing import ForeignServiceError
from distman._store.handshake import MEMBER, VISITOR
from distman._store.process import listen_on_this_host
from distman.errors import RendezvousError

if TYPE_CHECKING:
    from distman._store.transport import Address

_DRAWN_BYTES = 8
_LISTENS = "00010000"  # among the flags of /proc/net/unix, as __SO_ACCEPTCON in the kernel's linux/net.h
_ANY_PORT = 0  # the system picks one


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

    def of_other_users(self) -> dict[str, str]:
        start, me, job = self.prefix.split("/")
        found = {}
        for name in _names() or ():
            parts = name.split("/")
            if len(parts) == 3 and parts[0] == start and parts[1] != me and parts[2].startswith(job):
                found[show(name)] = f"it is of uid {parts[1]}, and this rank of uid {me}; all ranks must be one user's"
        return found

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
