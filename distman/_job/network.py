"""The network between hosts while a group is made: by which interface gloo goes, and whom it does not reach."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import torch.distributed as dist

from distman._base import timing
from distman._base.log import logger
from distman._base.process_state import puts_back
from distman._coordination import protocol
from distman._coordination.messages import Addresses, Port, decode
from distman._coordination.timeouts import run_with_timeout
from distman._job.job import Job
from distman._job.meeting.address import address_towards, addresses_of, means_loopback, own_addresses
from distman._store.torch_store import TorchStore
from distman._store.transport import BACKLOG
from distman.errors import RendezvousError

_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux, ``linux/sockios.h``: asks for the IPv4 address of an interface
_IFREQ_BYTES = 256  # more than the structure of that call has
_ADDRESS = slice(20, 24)  # where it holds the address

_LOOPBACK = "127.0.0.1"

_is_set = False


def choose_interface(others: Iterable[str]) -> None:
    """Let gloo use the interface towards the other hosts, where it would tell them an address of the loopback."""
    # gloo takes the address that this host's name has here. Debian gives it 127.0.1.1, at which every host finds
    # itself. A variable that is set already is left alone.
    if os.environ.get(_VARIABLE) or not _is_name_loopback():
        return
    own = next((address for address in map(address_towards, others) if address is not None), None)
    if own is not None:
        _use(interface_of(own))


def stay_on_this_host() -> None:
    """Let gloo listen where no other host reaches it: it does not ask who connects."""
    # Only for ranks that have met without a network, so that the loopback of all is one. A variable that is set already
    # is left alone.
    if not os.environ.get(_VARIABLE):
        _use(interface_of(_LOOPBACK))


def _use(name: str | None) -> None:
    global _is_set
    if name is not None:
        os.environ[_VARIABLE] = name
        _is_set = True


@puts_back
def forget_interface() -> None:
    global _is_set
    if _is_set:
        os.environ.pop(_VARIABLE, None)
        _is_set = False


def _is_name_loopback() -> bool:
    try:
        return all(map(means_loopback, addresses_of(socket.gethostname())))
    except OSError:
        return True  # gloo takes the loopback, too, where the name is not known


def interface_of(address: str) -> str | None:
    if ":" in address:
        return _interface_of_ipv6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as question:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_IFREQ_BYTES}s", name.encode())
            try:
                found = fcntl.ioctl(question, _SIOCGIFADDR, request)[_ADDRESS]
            except OSError:
                continue  # it has none
            if socket.inet_ntoa(found) == address:
                return name
    return None


def _interface_of_ipv6(address: str) -> str | None:
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    return next((line.split()[-1] for line in lines if line.startswith(wanted)), None)


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
    towards = urlsplit(job.rendezvous.url).hostname if job.rendezvous is not None else None
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
            others = [peer for peer in reversed(job.roll_call) if peer.machine != job.peer.machine]
            one_of_each_host = [*{peer.machine: peer.rank for peer in others}.values()]
            for rank in random.sample(one_of_each_host, min(_MOST_HOSTS, len(one_of_each_host))):
                reason = _wall_before(own, rank)
                if reason:
                    return f"{job.peer} cannot reach {job.roll_call[rank]} at {reason}. {_REMEDY}"
    return ""


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
