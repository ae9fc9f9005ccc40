"""Starting the process that serves a job's store, where no other process of the job has done so. It needs no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from distman._base.log import logger
from distman._job.meeting.address import Endpoint
from distman._job.meeting.door import StillOpenError, door_at, enter, explain, new_name, show, try_all, url_of
from distman._job.meeting.secret import DoorSecret
from distman._job.meeting.sockets import addresses_of, bind_listener, is_own
from distman._store.client import Client
from distman._store.dialing import PATIENCE, Door, ForeignServiceError
from distman._store.handshake import MEMBER, VISITOR
from distman._store.process import StoreStartError, listen_on_this_host, start_store
from distman.errors import RendezvousError

if TYPE_CHECKING:
    from distman._store.transport import Address

_ANY_PORT = 0  # the system picks one
_PAUSE = 0.01  # seconds between two tries for a place: a store takes milliseconds to start, and to end
_ENDING = 2.0  # seconds for a store to end, or a service that closes connections; then it is in the way
_ENTRY_GRACE = 10.0  # seconds longer than the ranks try to come: then nobody does


@dataclasses.dataclass(frozen=True)
class _Opening:
    """What belongs to opening the store, beside the place."""

    timeout: float  # seconds for the process to start
    left: Collection[str]  # sessions that this process has taken part in before: those stores are about to close
    failure: bytes  # what all who come are told, if this process starts it
    meanwhile: Callable[[], None]  # does what else takes milliseconds, while the process starts


def nothing() -> None:
    """Do nothing meanwhile."""


def start_or_enter(
    point: Endpoint,
    rank: int,
    timeout: float,
    *,
    left: Collection[str] = (),
    failure: bytes = b"",
    meanwhile: Callable[[], None] = nothing,
) -> tuple[Client, bool]:
    """Start the store of the job, or enter that of another process of it; return also whether it was started here."""
    opening = _Opening(timeout, left, failure, meanwhile)
    return _open_on_this_host(point, rank, opening) if point.is_on_one_host else _open_at_port(point, rank, opening)


def _open_on_this_host(point: Endpoint, rank: int, opening: _Opening) -> tuple[Client, bool]:
    with _alone(point):
        client, _, _ = try_all(point, rank, PATIENCE, left=opening.left)
        if client is not None:
            return client, False
        name = new_name(point)
        try:
            listener = listen_on_this_host(name)
        except OSError as error:
            raise RendezvousError(
                f"{point.host} must be able to listen at {show(name)}, got {explain(error)} [{point.source}]. Give the "
                "job a name of its own with DISTMAN_JOB_ID."
            ) from error
    with _started(listener, name, point, rank, opening) as door:
        return _enter_own(door, point, rank), True


@contextlib.contextmanager
def _alone(point: Endpoint) -> Iterator[None]:
    """Let one process at a time look whether the store is open, and open it; who holds this up cannot prevent it."""
    name = f"{point.local_name}turn"
    until = time.monotonic() + PATIENCE
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
                        PATIENCE,
                        explain(error),
                    )
                    break
                time.sleep(_PAUSE)
        yield


def _open_at_port(point: Endpoint, rank: int, opening: _Opening) -> tuple[Client, bool]:
    started = time.monotonic()
    while True:
        seconds = time.monotonic() - started
        taken: dict[int, Exception] = {}
        for port in point.ports or (_ANY_PORT,):
            listener = _listen(point, port)
            if listener is not None:
                return _open_behind(listener, point, rank, opening), True
            found = door_at((point.addresses[0], port), point)
            try:
                return enter(found, MEMBER, rank, opening.left, shuts=seconds > _ENDING), False
            except (OSError, ForeignServiceError, StillOpenError) as error:
                taken[port] = error
        is_open = any(isinstance(error, StillOpenError) for error in taken.values())
        is_closing = any(isinstance(error, ConnectionError) for error in taken.values())
        if seconds > opening.timeout or not (is_open or (is_closing and seconds < _ENDING)):
            raise RendezvousError(_no_port(point, taken))
        time.sleep(_PAUSE)


def _listen(point: Endpoint, port: int) -> socket.socket | None:
    """Return a socket that listens at a port of the endpoint's host, or None if it is taken."""
    try:
        try:
            return bind_listener(point.addresses[0], port)
        except socket.gaierror:
            return bind_listener("0.0.0.0", port)  # noqa: S104 - the name is known to others only
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise RendezvousError(
            f"{point.host} must be able to listen at {point.addresses[0]}:{port}, got {explain(error)} "
            f"[{point.source}]. Correct MASTER_ADDR or MASTER_PORT, or unset them to have them derived."
        ) from error


def _open_behind(listener: socket.socket, point: Endpoint, rank: int, opening: _Opening) -> Client:
    host, port = listener.getsockname()[:2]
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not listened to
    with _started(listener, (here, port), point, rank, opening) as door:
        _check_is_found(point, port)
        return _enter_own(door, point, rank)


@contextlib.contextmanager
def _started(
    listener: socket.socket, address: Address, point: Endpoint, rank: int, opening: _Opening
) -> Iterator[Door]:
    """Start the process of the store, and yield its door; if anything fails until the end of the block, end it."""
    found = door_at(address, point)
    drawn = point.protection.draw(point.job_id) if point.protection is not None else DoorSecret(None)
    try:
        process = start_store(
            listener,
            job=found.job,
            secret=drawn.key,
            credential=drawn.credential,
            opener=rank,
            entry_limit=opening.timeout + _ENTRY_GRACE,
            unreachable_after=found.unreachable_after,
            failure=opening.failure,
        )
        try:
            opening.meanwhile()
            process.wait_until_up(opening.timeout)
            yield dataclasses.replace(found, secret=drawn.key, read=None)
        except BaseException:  # Ctrl-C too: nobody would ever enter it
            process.end()
            raise
    except StoreStartError as error:
        raise RendezvousError(f"{error} [{point.source}].") from error


def _enter_own(door: Door, point: Endpoint, rank: int) -> Client:
    """Enter a store that was started here."""
    try:
        return Client(door, rank=rank)
    except (OSError, ForeignServiceError) as error:
        raise RendezvousError(
            f"{point.host} must reach the store of the job, which it has just started, at {url_of(door.address)}, got "
            f"{explain(error)} [{point.source}]. See whether something has ended its process, such as the kernel for "
            "want of memory, or keeps this host from reaching itself."
        ) from error


def _check_is_found(point: Endpoint, port: int) -> None:
    """Refuse to wait for ranks that look for the store on another host."""
    # An address that is not this host's own may lead here all the same, through a translation of addresses: so it is
    # tried. A name that this host does not know is left to the others.
    address = point.addresses[0]
    try:
        addresses = addresses_of(address)
    except OSError:
        return
    if any(map(is_own, addresses)):
        return
    with contextlib.suppress(OSError, ForeignServiceError):  # nobody is there, or somebody else
        Client(door_at((address, port), point), VISITOR).close()
        return
    named = "" if addresses == [address] else f" ({', '.join(addresses)})"
    raise RendezvousError(
        f"{point.host} must run on the host at which the ranks meet, got {address}{named}, which is not this host, "
        f"{socket.gethostname()} [{point.source}]. Set MASTER_ADDR to {socket.gethostname()} on all ranks, or start "
        f"{point.host} on {address}."
    )


def _no_port(point: Endpoint, taken: Mapping[int, Exception]) -> str:
    listed = ", ".join(f"{port} ({explain(error)})" for port, error in taken.items())
    return (
        f"opening the store of the job failed: no port is free on this host: {listed} [{point.source}]. Set "
        "MASTER_PORT to a free port on all ranks, or unset it to have one derived."
    )
