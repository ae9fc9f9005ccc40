"""A port at which each rank listens and never answers: it closes when the process ends, whatever ended it."""

from __future__ import annotations

import json
import os
import socket
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distman._base import timing
from distman._base.process_state import puts_back
from distman._coordination import protocol
from distman._coordination.messages import Addresses, Port, decode

if TYPE_CHECKING:
    from distman._store.torch_store import TorchStore


_BACKLOG = 4096  # connections that the system holds for a rank, port scanners among them
_OUTSIDE = "192.0.2.1"  # an address of no host, to which the way leads out
_LOOPBACK = ("127.", "::1")  # how such addresses begin

_listeners: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def show_presence(store: TorchStore, rank: int, *, is_one_host: bool, towards: str | None) -> socket.socket:
    """Return a socket to which the others can connect as long as it is open, and tell them in the store where.

    From other hosts they connect unless all are on one; ``towards`` is where all hosts have met, if that is known.
    """
    listener = socket.create_server(("127.0.0.1" if is_one_host else "", 0), backlog=_BACKLOG)
    _listeners.add(listener)
    addresses = ["127.0.0.1"] if is_one_host else own_addresses(towards)
    store.set(protocol.peer_address(rank), json.dumps([addresses, listener.getsockname()[1]]))
    return listener


def is_present(connection: socket.socket) -> bool:
    """Return whether the process at the other end is there, and in the job; it says nothing."""
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except OSError:  # reset: that, too, is the end
        return False


def read_address(message: bytes, rank: int) -> tuple[Addresses, Port]:
    """Return the names and addresses of a rank's host, and the port there."""
    return decode(message, tuple[Addresses, Port], f"the address of rank {rank}")


def connect(addresses: Sequence[str], port: int, *, is_one_host: bool) -> socket.socket:
    """Return a connection to a rank, by the first of its addresses that answers within two seconds in all.

    Raises:
        ConnectionRefusedError: It is not there any more, or a firewall says so.
        OSError: Nobody answers.
    """
    refused = OSError("it has no address that other hosts may use")
    # The loopback would be this host's own, which says nothing of the other one.
    usable = [address for address in addresses if is_one_host or not address.startswith(_LOOPBACK)]
    for address in usable:
        try:
            # Bytes: for a text, Python loads the codec of other alphabets, which takes 3 ms.
            place: Any = (address.encode(), port)
            return socket.create_connection(place, timeout=timing.CONNECT / len(usable))
        except OSError as error:
            refused = error
    raise refused


def own_addresses(towards: str | None = None) -> list[str]:
    """Return names and addresses by which other hosts may reach this one, the likeliest first."""
    # The way to where all hosts of the job have met may be the only one that this host has.
    host = socket.gethostname()
    found = [host]
    try:
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except socket.gaierror:
        found.remove(host)
    found += [address for name in (towards, _OUTSIDE) if name and (address := _address_on_the_way_to(name))]
    return list(dict.fromkeys(found)) or ["127.0.0.1"]


def _address_on_the_way_to(name: str) -> str | None:
    try:
        family, _, _, _, place = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


@puts_back
def _close_all() -> None:
    """Close the sockets; a forked child must not show its parent present, either."""
    for listener in list(_listeners):
        listener.close()
    _listeners.clear()


os.register_at_fork(after_in_child=_close_all)
