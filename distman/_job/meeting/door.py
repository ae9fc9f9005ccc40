"""Where the store of a job is found: at a name that only this host knows, or at a port of the host where ranks meet.

Whatever listens there has to prove that it is this job's store. What does not is passed by, and named if it stays in
the way.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from distman._base.log import logger
from distman._base.text import printable
from distman._coordination import protocol
from distman._job.meeting.address import Endpoint
from distman._job.meeting.munge import CredentialError
from distman._job.meeting.sockets import bracketed
from distman._store.client import Client
from distman._store.dialing import PATIENCE, CrowdedError, Door, ForeignServiceError
from distman._store.handshake import MEMBER
from distman.errors import RendezvousError

if TYPE_CHECKING:
    from distman._store.transport import Address

_QUIET = 10.0  # seconds before a word on what else listens there, which may be about to end
_SHORTEST_PATIENCE = 0.2  # seconds, also where no time is left: a store on another host answers in milliseconds
_FIRST_PAUSE = 0.002  # seconds: ranks of one launch start within milliseconds of each other, and a start takes ten
_LONGEST_PAUSE = 0.5  # seconds: more would delay a job whose first rank starts late
_MOST_LISTED = 8  # places in a message; a job tries as many ports, and other users may listen at any number of names
_DRAWN_BYTES = 8
UNIX = "unix:"
"""How the URL of a store begins that ranks on this host find without a network."""
_LISTENS = "00010000"  # among the flags of /proc/net/unix, as __SO_ACCEPTCON in the kernel's linux/net.h
_STARTED, _LEFT, _FAILURE = (
    protocol.in_job(key).encode() for key in (protocol.STARTED, protocol.LEFT, protocol.FAILURE)
)
_SHOWN_AS = "@"  # the zero byte at the beginning of such a name, in that table


class StillOpenError(Exception):
    """A store of an earlier start of this job serves others yet."""


def new_name(point: Endpoint) -> str:
    """Return a name at which a store of this job may listen, and that nobody could take beforehand."""
    return point.local_name + (secrets.token_hex(_DRAWN_BYTES) if _names() is not None else "0")


def names_here(point: Endpoint) -> list[str]:
    """Return the names at which somebody on this host listens for this job, be it another user's process."""
    beginning, names = point.local_name, _names()
    if names is None:  # the system does not show them: there is one
        return [f"{beginning}0"]
    return [name for name in names if name.startswith(beginning)]


def _of_other_users(point: Endpoint) -> dict[str, str]:
    """Return the names on this host at which other users listen for a job of this name, and what is wrong with them."""
    if not point.is_on_one_host:
        return {}
    start, me, job = point.local_name.split("/")
    found = {}
    for name in _names() or ():
        parts = name.split("/")
        if len(parts) == 3 and parts[0] == start and parts[1] != me and parts[2].startswith(job):
            found[show(name)] = f"it is of uid {parts[1]}, and this rank of uid {me}; all ranks must be one user's"
    return found


def _names() -> Iterator[str] | None:
    """Return the names, of no file, at which sockets of this host listen; None where the system does not show them."""
    # Source: proc(5), /proc/net/unix: the fourth word has the flags, the eighth is the name.
    try:
        table = Path("/proc/self/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    rows = (row.split(maxsplit=7) for row in table)
    return (row[7].replace(_SHOWN_AS, "\0", 1) for row in rows if len(row) == 8 and row[3] == _LISTENS)


def door_at(address: Address, point: Endpoint, patience: float = PATIENCE) -> Door:
    """Return the door of this job's store at an address, as one finds it who has not opened it."""
    protection = point.protection
    has_secret = protection is not None and protection.has_secret

    def read(credential: bytes) -> bytes | None:
        try:
            return protection.read(point.job_id, credential) if protection is not None else None
        except CredentialError as error:
            raise ForeignServiceError(str(error)) from error

    return Door(
        address=address,
        job=point.job_id if has_secret else f"{point.job_id}/{os.geteuid()}",  # users have other numbers elsewhere
        secret=None,
        asks_kernel=protection is None or protection.asks_kernel,
        unreachable_after=point.unreachable_after,
        patience=patience,
        read=read,
    )


def find_store(point: Endpoint, rank: int, timeout: float, *, role: int = MEMBER, left: Collection[str] = ()) -> Client:
    """Try every place of the endpoint until the job's store answers."""
    # ``left`` has the sessions that this process has taken part in before: those stores are about to close.
    started = time.monotonic()
    deadline = started + timeout
    pause = _FIRST_PAUSE
    is_said = False
    others: dict[str, str] = {}
    while True:
        patience = min(max(deadline - time.monotonic(), _SHORTEST_PATIENCE), PATIENCE)
        client, reasons, in_the_way = try_all(point, rank, patience, role=role, left=left)
        if client is not None:
            return client
        is_last = time.monotonic() + pause > deadline
        is_quiet = not is_said and time.monotonic() - started > _QUIET
        if is_last or is_quiet:  # seldom: the table of names may be long
            in_the_way |= (found := _of_other_users(point))
            reasons |= found
        others |= in_the_way
        if in_the_way and is_quiet:
            is_said = True
            logger.warning("waiting for %s at %s: %s", point.host, point.url, listed(reasons))
        if is_last:
            raise RendezvousError(_host_missing(point, timeout, _with_earlier(reasons, others)))
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def enter(found: Door, role: int, rank: int, left: Collection[str], *, shuts: bool = False) -> Client:
    """Return a connection to the store behind a door; the arguments are those of :func:`find_store`."""
    # A job that has started, and in which a rank has left or failed since, is over for whoever comes now:
    # StillOpenError. Its store stays as long as one of its ranks does, which saves something, or is stopped. With
    # ``shuts``, it lets nobody in any more, and leaves its place. Other errors are ForeignServiceError and OSError, as
    # of :func:`dial`.
    client = Client(found, role, rank)
    try:
        is_over = client.check([_STARTED, _LEFT]) or client.check([_STARTED, _FAILURE])
        if not is_over and client.session not in left:
            return client
        if is_over and shuts and client.session not in left:
            client.shut()
    except BaseException:  # Ctrl-C too: a connection that is left open would count as a member
        client.close()
        raise
    client.close()
    raise StillOpenError("the store of an earlier start is still open")


def try_all(
    point: Endpoint, rank: int, patience: float, *, role: int = MEMBER, left: Collection[str] = ()
) -> tuple[Client | None, dict[str, str], dict[str, str]]:
    """Try every place of the endpoint once: a connection or None, why there is none, and what else listens there."""
    # Those come last where one would have to stand in line, and share the patience: another user's process may listen
    # at any number of names of this job's, and let nobody pass. What else listens may be the store of an earlier start.
    reasons: dict[str, str] = {}
    in_the_way: dict[str, str] = {}
    places, in_line = list(_places(point)), 0.0
    while places:
        crowded = []
        for address in places:
            shown = show(address)
            try:
                found = dataclasses.replace(door_at(address, point, patience), in_line=in_line)
                return enter(found, role, rank, left), {}, {}
            except (OSError, ForeignServiceError, StillOpenError) as error:
                reasons[shown] = explain(error)
                if isinstance(error, ForeignServiceError | StillOpenError | CrowdedError):
                    in_the_way[shown] = reasons[shown]
                if isinstance(error, CrowdedError) and not in_line:
                    crowded.append(address)
        places, in_line = crowded, patience / max(len(crowded), 1)
    return None, reasons, in_the_way


def _places(point: Endpoint) -> Iterator[Address]:
    if point.is_on_one_host:
        yield from names_here(point)
    else:
        yield from ((address, port) for address in point.addresses for port in point.ports)


def show(address: Address) -> str:
    """Return an address for messages, such as ``n1:23145``; a name of this host's own begins with ``@``."""
    if isinstance(address, str):
        return printable(address.replace("\0", _SHOWN_AS))  # anybody may have given it
    return printable(f"{bracketed(address[0])}:{address[1]}")


def url_of(address: Address) -> str:
    """Return an address as a URL, such as ``tcp://n1:23145`` or ``unix:@distman/1000/...``."""
    return f"{UNIX if isinstance(address, str) else 'tcp://'}{show(address)}"


def explain(error: Exception) -> str:
    """Return why something could not be reached, in words."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__


def _host_missing(point: Endpoint, timeout: float, reasons: Mapping[str, str]) -> str:
    tried = f"Tried {listed(reasons)}. " if reasons else ""
    return (
        f"{point.host} must open the job's store at {point.url} within {timeout:g} s, got no answer from it "
        f"[{point.source}]. {tried}See whether {point.host} started{alike(point)}, runs on {point.addresses[0]} "
        "and reached DistributedManager.initialize(); set rendezvous_timeout for slow starts."
    )


def alike(point: Endpoint) -> str:
    """Return what else to see about ranks that do not meet: ports may be derived from the secret."""
    return "" if point.is_on_one_host else " with the same secret"


def _with_earlier(reasons: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    """Add to the last try's reasons what earlier tries found to be in the way, and this one may have missed."""
    earlier = {place: f"{reasons[place]}; before, {found}" for place, found in others.items() if place in reasons}
    return {**reasons, **{place: both for place, both in earlier.items() if reasons[place] != others[place]}}


def listed(reasons: Mapping[str, str]) -> str:
    """Return for messages why each place was none."""
    listed = [f"{place}: {reason}" for place, reason in reasons.items()]
    more = [f"and {len(listed) - _MOST_LISTED} more"] if len(listed) > _MOST_LISTED else []
    return "; ".join([*listed[:_MOST_LISTED], *more])
