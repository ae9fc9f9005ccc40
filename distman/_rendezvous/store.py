"""The job's TCPStore: opened behind a handshake server by one rank, found by the others.

Under torchrun the agent's store is joined instead.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from distman._coordination.failure.record import FailureRecord
from distman._coordination.monitor.peer_connection import own_addresses
from distman._rendezvous import mpi
from distman._rendezvous.address import Endpoint
from distman._rendezvous.handshake import (
    ForeignServiceError,
    HandshakeServer,
    Identity,
    explain,
    find_server,
    probe,
)
from distman._rendezvous.sockets import addresses_of, bind_listener, is_listened_to_here, is_own
from distman.environments import LaunchEnvironment
from distman.errors import RendezvousError

_ANY_PORT = 0  # the system picks one

_left: set[str] = set()
"""Sessions of handshake servers that this process has left; a new start must find a new one."""


@dataclasses.dataclass
class JobStore:
    """This process's connection to the store of its job.

    Attributes:
        store: The connection.
        url: Where the ranks met, such as ``tcp://n1:23145``.
        server: The handshake server of the job, in the process that opened the store; None elsewhere.
        session: Name of this opening of the server; None where there is none, or it is here.
        store_rank: The rank for which ``is_host`` is true, once the verdict has told the others; None where it is none,
            but a launcher's agent, say.
        is_adopted_here: Whether other code of this process serves the store.
    """

    store: dist.Store
    url: str
    server: HandshakeServer | None = None
    session: str | None = None
    store_rank: int | None = None
    is_adopted_here: bool = False

    @property
    def is_host(self) -> bool:
        """Whether this process serves the store to the others."""
        return self.server is not None or self.is_adopted_here

    def close(self) -> None:
        """Close the handshake server, if it is here, or never use it again; the store goes with its last user."""
        if self.session is not None:
            _left.add(self.session)
        if self.server is not None:
            self.server.close()
            self.server = None


def adopt_store(store: dist.Store) -> JobStore:
    """Return the store of a process group that other code made."""
    origin = store
    while isinstance(origin, dist.PrefixStore):
        origin = origin.underlying_store
    if not isinstance(origin, dist.TCPStore):
        return JobStore(store, "the store of the process group")
    return JobStore(store, f"tcp://{origin.host}:{origin.port}", is_adopted_here=is_listened_to_here(origin.port))


def open_or_join(point: Endpoint, timeout: float) -> JobStore:
    """Return the store of the job that meets at this point.

    Collective.

    Raises:
        RendezvousError: No port could be opened, or the host of the store did not appear within ``timeout``
            seconds.
    """
    if point.has_agent:
        return join_agent(point, timeout)
    return open_store(point, timeout) if point.is_host else join_store(point, timeout)


def join_agent(point: Endpoint, timeout: float) -> JobStore:
    """Connect to the store that a launcher's agent serves.

    Raises:
        RendezvousError: The store cannot be reached.
    """
    store = _connect(point.addresses[0], point.ports[0], timeout, point.source)
    return JobStore(store, point.url)


def open_store(point: Endpoint, timeout: float) -> JobStore:
    """Open the store of the job behind a handshake server at the first free port of the endpoint.

    Where another process of the same job is already there, join it: the verdict will say that
    this rank came twice.

    Raises:
        RendezvousError: The port that the user named is taken, or the others look for it on another host.
    """
    identity = Identity.of(point.job_id)
    taken = []
    for port in point.ports or (_ANY_PORT,):
        try:
            listener = bind_listener(point.addresses[0], port, is_on_one_host=point.is_on_one_host)
        except socket.gaierror:
            listener = bind_listener("0.0.0.0", port)  # noqa: S104 - the name is known to others only
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise RendezvousError(_cannot_listen(point, port, error)) from error
            try:
                answer = probe(point.addresses[0], port, identity)
            except (OSError, ForeignServiceError) as reason:
                taken.append(f"{port} ({explain(reason)})")
                continue
            if answer["session"] in _left:
                return join_store(point, timeout)
            return _join_behind(point.addresses[0], port, answer, point, timeout)
        job_store = _open_behind(listener, identity, point, timeout)
        _check_is_found(point, identity, job_store)
        return job_store
    raise RendezvousError(
        f"opening the store of the job failed: no port is free on this host: {', '.join(taken)} "
        f"[{point.source}]. Set MASTER_PORT to a free port on all ranks, or unset it to have one derived."
    )


def join_store(point: Endpoint, timeout: float) -> JobStore:
    """Find the handshake server of the job and connect to the store behind it, as soon as its host opens it.

    Collective.

    Raises:
        RendezvousError: The host of the store did not appear within ``timeout`` seconds.
        RankFailedError: It failed on its way here.
    """
    return _join_behind(*find_server(point, timeout, left=_left), point, timeout)


def tell_over_mpi(environment: LaunchEnvironment, job_id: str, timeout: float) -> JobStore:
    """Open the store on rank 0, at any free port, and tell the others over MPI where it is.

    Collective.

    Raises:
        RendezvousError: MPI cannot be used, or the store cannot be reached.
    """
    opened: list[JobStore] = []

    def open_here() -> tuple[tuple[str, ...], int, str]:
        name = f"{job_id}/{os.urandom(8).hex()}"
        point = Endpoint(name, ("0.0.0.0",), (), "MPI", is_host=True)  # noqa: S104 - for all nodes
        opened.append(open_store(point, timeout))
        server = opened[0].server
        return tuple(own_addresses()), server.port if server else 0, name

    addresses, port, name = mpi.broadcast_from_rank_zero(environment, open_here, timeout)
    if opened:
        return dataclasses.replace(opened[0], url=f"tcp://{addresses[0]}:{port}")
    point = Endpoint(name, addresses, (port,), "address and port from rank 0 over MPI", is_host=False)
    return join_store(point, timeout)


def _open_behind(listener: socket.socket, identity: Identity, point: Endpoint, timeout: float) -> JobStore:
    host = listener.getsockname()[0]
    store_listener = bind_listener(host, _ANY_PORT)
    loopback = "::1" if store_listener.family == socket.AF_INET6 else "127.0.0.1"
    store_port = store_listener.getsockname()[1]
    store = dist.TCPStore(
        loopback if host in ("0.0.0.0", "::") else host,  # noqa: S104 - compared, not listened to
        store_port,
        None,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=store_listener.detach(),
    )
    server = HandshakeServer(listener, identity, store_port=store_port)
    return JobStore(store, f"tcp://{point.addresses[0]}:{server.port}", server=server)


def _join_behind(address: str, port: int, answer: dict[str, Any], point: Endpoint, timeout: float) -> JobStore:
    if answer.get("failure"):
        raise FailureRecord.told(answer["failure"]).to_error()
    store = _connect(address, answer["store_port"], timeout, point.source)
    return JobStore(store, f"tcp://{address}:{port}", session=answer["session"])


def _check_is_found(point: Endpoint, identity: Identity, job_store: JobStore) -> None:
    """Refuse to wait for ranks that look for the store on another host.

    An address that is not this host's own may lead here all the same, through a translation of addresses: so it is
    tried. A name that this host does not know is left to the others.
    """
    address, server = point.addresses[0], job_store.server
    try:
        addresses = addresses_of(address)
    except OSError:
        return
    if server is None or any(map(is_own, addresses)):
        return
    try:
        if probe(address, server.port, identity)["session"] == server.session:
            return
    except (OSError, ForeignServiceError):
        pass  # nobody is there, or somebody else
    job_store.close()
    named = "" if addresses == [address] else f" ({', '.join(addresses)})"
    raise RendezvousError(
        f"{point.host} must run on the host at which the ranks meet, got {address}{named}, which is not this host, "
        f"{socket.gethostname()} [{point.source}]. Set MASTER_ADDR to {socket.gethostname()} on all ranks, or start "
        f"{point.host} on {address}."
    )


def _connect(address: str, port: int, timeout: float, source: str) -> dist.TCPStore:
    try:
        return dist.TCPStore(
            address,
            port,
            None,
            is_master=False,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except dist.DistError as error:
        raise RendezvousError(
            f"the store at tcp://{address}:{port} could not be reached from this host within {timeout:g} s: "
            f"{_first_line(error)} [{source}]. See that no firewall closes the port and the name is right."
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _cannot_listen(point: Endpoint, port: int, error: OSError) -> str:
    return (
        f"{point.host} must be able to listen at {point.addresses[0]}:{port}, got {explain(error)} "
        f"[{point.source}]. Correct MASTER_ADDR or MASTER_PORT, or unset them to have them derived."
    )
