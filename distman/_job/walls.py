"""Hosts that cannot reach each other while a group is made: whatever makes it waits in silence."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import urlsplit

import torch.distributed as dist

from distman._base import timing
from distman._base.log import logger
from distman._coordination import protocol
from distman._coordination.messages import Addresses, Port, decode
from distman._coordination.timeouts import run_with_timeout
from distman._job.job import Job
from distman._job.meeting.sockets import means_loopback, own_addresses
from distman._store.torch_store import TorchStore
from distman._store.transport import BACKLOG
from distman.errors import RendezvousError

_MOST_HOSTS = 16  # tried by each rank, at two seconds each

_REMEDY = (
    "Ranks connect to each other at ports that the system chooses: open all ports between the hosts of the job, "
    "MASTER_PORT is not enough. Where hosts have several networks, GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME for GPUs) "
    "names the one to use."
)


def within_rendezvous(make: Callable[[], None], job: Job, store: TorchStore) -> None:
    """Make the group of all ranks, which are on several hosts, in another thread: whatever makes it has no limit."""
    # Say after a while which host cannot be reached. The ranks tell their addresses in ``store``.
    is_over, found = threading.Event(), list[str]()
    threading.Thread(target=_look, args=(job, store, is_over, found), name="distman-walls", daemon=True).start()
    with _reachable(job, store):
        try:
            if run_with_timeout(make, job.limits.rendezvous):
                return
        except RuntimeError as one:  # "connectFullMesh failed", say
            wall = found[0] if found else _find_wall(job, store)
            if not wall:
                raise
            raise RendezvousError(wall) from one
        finally:
            is_over.set()
    wall = found[0] if found else f"{job.peer} has not connected to all others. {_REMEDY}"
    limit = f"{job.limits.rendezvous:g} s (rendezvous_timeout)"
    raise RendezvousError(f"the group of all ranks must be made within {limit}: {wall}")


@contextlib.contextmanager
def _reachable(job: Job, store: TorchStore) -> Iterator[None]:
    """For the length of a ``with`` block, have a port at which the others try whether they can reach this rank."""
    towards = urlsplit(job.rendezvous.job_store.url).hostname if job.rendezvous is not None else None
    key = protocol.peer_address(job.peer.rank)
    with socket.create_server(("", 0), backlog=BACKLOG) as listener:
        store.set(key, json.dumps([own_addresses(towards), listener.getsockname()[1]]))
        try:
            yield
        finally:
            with contextlib.suppress(dist.DistError):  # the store is gone
                store.delete_key(key)


def _look(job: Job, store: TorchStore, is_over: threading.Event, found: list[str]) -> None:
    if is_over.wait(timing.WALLS_QUIET):
        return
    wall = _find_wall(job, store)
    if wall and not is_over.is_set():
        found.append(wall)
        if job.peer.local_rank == 0:
            logger.warning("the ranks have not connected after %.0f s: %s", timing.WALLS_QUIET, wall)


def _find_wall(job: Job, store: TorchStore) -> str:
    """Return in words which rank of another host cannot be reached, and where; nothing if none is found."""
    with contextlib.suppress(dist.DistError):  # the store is gone: the job has failed
        own = store.clone()
        with contextlib.closing(own):
            for rank in _one_of_each_host(job)[:_MOST_HOSTS]:
                reason = _wall_before(own, rank)
                if reason:
                    return f"{job.peer} cannot reach {job.roll_call[rank]} at {reason}. {_REMEDY}"
    return ""


def _one_of_each_host(job: Job) -> list[int]:
    first = {peer.machine: peer.rank for peer in reversed(job.roll_call) if peer.machine != job.peer.machine}
    return random.sample(ranks := [*first.values()], len(ranks))


def _wall_before(store: TorchStore, rank: int) -> str:
    """Return where a rank cannot be reached, and why; nothing where it can, or has not said where."""
    key = protocol.peer_address(rank)
    if not store.check([key]):
        return ""
    addresses, port = read_address(store.get(key), rank)
    try:
        _connect(addresses, port).close()
    except OSError as error:
        if not store.check([key]):
            return ""  # it has gone on meanwhile, or given up
        return f"port {port} of {' or '.join(addresses)}: {error.strerror or error}"
    return ""


def read_address(message: bytes, rank: int) -> tuple[Addresses, Port]:
    """Return the names and addresses of a rank's host, and the port there."""
    return decode(message, tuple[Addresses, Port], f"the address of rank {rank}")


def _connect(addresses: Sequence[str], port: int) -> socket.socket:
    """Return a connection to a rank, by the first of its addresses that answers within two seconds in all."""
    error = OSError("it has no address that other hosts may use")
    usable = [address for address in addresses if not means_loopback(address)]
    for address in usable:
        try:
            return socket.create_connection((address, port), timeout=timing.WALLS_CONNECT / len(usable))
        except OSError as one:
            error = one
    raise error
