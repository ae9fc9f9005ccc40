"""A connection from each rank to the next one: it breaks when that process ends, whatever ended it.

Neighbours tell each other over it why the job fails, for those that lose the store before they read it there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import secrets
import selectors
import socket
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distman._base.process_state import puts_back
from distman._base.text import shortened
from distman._coordination import protocol
from distman._coordination.failure.record import FailureRecord, Place
from distman._coordination.messages import Addresses, Port, decode, unless_malformed
from distman._store.transport import LONGEST_PAUSE

if TYPE_CHECKING:
    from distman._store.torch_store import TorchStore


_PATIENCE = 2.0  # seconds; a host that needs longer to connect is cut off or behind a firewall
_NUM_PROBES = 4  # that stay unanswered, as many seconds apart as a connection may be idle before the first one
_MAX_GUESTS = 64  # one is the rank before; more only while ranks leave, or from port scanners, which have to go
_RETRY_EVERY = 10.0  # seconds; each try may block a look for as long as the patience
_MAX_NOTICE = 5_000  # characters of each text: a notice must fit into an idle connection at once
_MAX_BYTES = 1_000_000  # more than any notice
_PAUSE = 0.01  # seconds between two looks for a notice, and for guests where there are many
_GUESTS_AT_ONCE = 16
_OUTSIDE = "192.0.2.1"  # an address of no host, to which the way leads out
_LOOPBACK = ("127.", "::1")  # how such addresses begin

_connections: weakref.WeakSet[PeerConnection] = weakref.WeakSet()


class PeerConnection:
    """This rank's ends of the connections: one to the next rank, and those of ranks that watch over this one.

    The system closes them when a process dies; one that leaves says so in the store first. A host that is gone is
    found by the system's keep-alive probes, which it answers for a process that is stopped or busy.
    """

    def __init__(
        self,
        store: TorchStore,
        rank: int,
        peers: Sequence[Place],
        *,
        is_one_host: bool,  # then no other host can connect
        patience: float,  # seconds for which a host may leave probes unanswered
        towards: str | None = None,  # where all hosts of the job have met, if known
    ) -> None:
        self.is_unanswered = False  # the next rank's host did not answer the probes, nor anything since
        self.notice: FailureRecord | None = None  # why the job fails, as a neighbour told
        self._probe_every = max(1, round(min(patience / (1 + _NUM_PROBES), LONGEST_PAUSE)))
        self._store = store
        self._is_one_host = is_one_host
        self._rank = rank
        self._peers = peers
        self._step = 1
        self._next_try = 0.0
        self._connection: socket.socket | None = None
        self._guests: list[socket.socket] = []
        self._received: weakref.WeakKeyDictionary[socket.socket, bytes] = weakref.WeakKeyDictionary()
        self._members: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # guests that have said the word
        self._word = secrets.token_hex(8)  # who knows it has read the store; a port scanner has not
        self._selector = selectors.DefaultSelector()
        self._wake_end, self._woken_end = socket.socketpair()
        self._woken_end.settimeout(0)
        self._selector.register(self._woken_end, selectors.EVENT_READ)
        self._listener = socket.create_server(("127.0.0.1" if is_one_host else "", 0), backlog=_MAX_GUESTS)
        self._listener.settimeout(0)
        self._selector.register(self._listener, selectors.EVENT_READ)
        addresses = ["127.0.0.1"] if is_one_host else own_addresses(towards)
        store.set(protocol.peer_address(rank), json.dumps([addresses, self._listener.getsockname()[1], self._word]))
        _connections.add(self)

    @property
    def watched(self) -> int | None:
        """The rank that this one watches over; None where all others have left."""
        rank = (self._rank + self._step) % len(self._peers)
        return rank if rank != self._rank else None

    def use(self, store: TorchStore) -> None:
        self._store = store

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_end.send(b"!")

    def wait(self, seconds: float) -> Place | None:
        """Wait for so many seconds, or until :meth:`wake`, and return the rank that died meanwhile, if one did."""
        if self._connection is None and not self._connect() and self.watched is not None:
            return self._peers[self.watched]
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._woken_end:
                self._woken_end.recv(64)
            elif key.fileobj is self._listener:
                if not self._admit():
                    self._wait_for_the_rest(seconds)
                elif len(self._guests) == _MAX_GUESTS:  # a flood of strangers must not take this rank's time
                    all(self._admit() for _ in range(_GUESTS_AT_ONCE))
                    self._wait_for_the_rest(min(seconds, _PAUSE))
            elif key.fileobj is self._connection and self._connection is not None:
                died = self._read(self._connection)
                if died is not None:
                    return died
        return None

    def _wait_for_the_rest(self, seconds: float) -> None:
        """Wait, but not for who cannot be let in: out of open files, the system announces a guest again and again."""
        self._selector.unregister(self._listener)
        self._selector.select(seconds)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def tell(self, record: FailureRecord) -> None:
        record = dataclasses.replace(
            record,
            error_text=shortened(record.error_text, _MAX_NOTICE),
            traceback_text=shortened(record.traceback_text, _MAX_NOTICE),
        )
        while self._admit():
            pass
        for end in (self._connection, *itertools.filterfalse(self._is_stranger, self._guests)):
            if end is not None:
                with contextlib.suppress(OSError):  # who is gone needs no notice
                    end.send(record.to_json().encode() + b"\n")

    def hear(self, seconds: float) -> FailureRecord | None:
        """Return why the job fails, as a neighbour tells in time; the connections are not used after it."""
        until = time.monotonic() + seconds
        while self.notice is None and time.monotonic() < until:
            while self._admit():
                pass
            for end in (self._connection, *self._guests):
                if end is not None:
                    with contextlib.suppress(OSError):  # its process is gone; what it told before has come
                        self._take_notice(end, self._word if end is not self._connection else None)
            time.sleep(_PAUSE)
        return self.notice

    def close(self) -> None:
        for end in (*self._guests, self._listener, self._connection, self._wake_end, self._woken_end):
            if end is not None:
                end.close()
        self._selector.close()

    def _connect(self) -> bool:
        """Connect to the next rank, as soon as it says where; return False if it must be dead."""
        rank = self.watched
        # Only a host that refuses to connect to itself is proof of a death: elsewhere a firewall may be the reason.
        if rank is None or time.monotonic() < self._next_try or not self._store.check([protocol.peer_address(rank)]):
            return True
        address = unless_malformed(lambda: read_address(self._store.get(protocol.peer_address(rank)), rank))
        if address is None:
            self._next_try = time.monotonic() + _RETRY_EVERY
            return True
        addresses, port, word = address
        try:
            self._connection = connect(addresses, port, is_one_host=self._is_one_host)
        except OSError as error:
            is_refused = isinstance(error, ConnectionRefusedError)
            has_left = self._has_left(rank)
            self._step += has_left
            self.is_unanswered = self.is_unanswered and not has_left and not is_refused
            self._next_try = 0.0 if has_left else time.monotonic() + _RETRY_EVERY
            return has_left or not (self._is_one_host and is_refused)
        self.is_unanswered = False
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        every = self._probe_every
        for option, value in {"TCP_KEEPIDLE": every, "TCP_KEEPINTVL": every, "TCP_KEEPCNT": _NUM_PROBES}.items():
            if hasattr(socket, option):
                self._connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._connection.settimeout(0)
        with contextlib.suppress(OSError):  # what broke is found by reading
            self._connection.send(f"{word}\n".encode())
        self._selector.register(self._connection, selectors.EVENT_READ)
        return True

    def _admit(self) -> bool:
        """Accept a connection, and return whether there was one."""
        try:
            guest, _ = self._listener.accept()
        except OSError:
            return False
        guest.settimeout(0)
        self._guests.append(guest)
        if len(self._guests) > _MAX_GUESTS:
            useless = (other for other in self._guests if self._is_stranger(other) or _is_closed(other))
            oldest = next(useless, self._guests[0])
            self._guests.remove(oldest)
            oldest.close()
        return True

    def _is_stranger(self, guest: socket.socket) -> bool:
        """Return whether a guest has not said the word; a rank does so at once."""
        try:
            coming = guest.recv(len(self._word) + 1, socket.MSG_PEEK)
        except OSError:
            coming = b""
        said = self._received.get(guest, b"") + coming
        return guest not in self._members and not said.startswith(f"{self._word}\n".encode())

    def _read(self, connection: socket.socket) -> Place | None:
        """Return the watched rank if its end is closed and it did not leave."""
        rank = self.watched
        try:
            is_closed = not self._take_notice(connection, None)
        except ConnectionError:
            is_closed = True
        except OSError:  # timed out, or no way there: no proof; it is connected to again, and its silence decides
            is_closed = False
            self.is_unanswered = True
            self._let_go()
        if not is_closed or rank is None:
            return None
        self._let_go()
        if not self._has_left(rank):
            return self._peers[rank]
        self._step += 1
        return None

    def _take_notice(self, end: socket.socket, word: str | None) -> bool:
        """Read what has come, and return False at its end. A notice counts after the word, where one is asked for."""
        try:
            data = end.recv(_MAX_BYTES)
        except BlockingIOError:
            return True
        *lines, rest = (self._received.get(end, b"") + data).split(b"\n")
        self._received[end] = rest[:_MAX_BYTES]
        for line in lines:
            if word is not None and end not in self._members:
                self._members |= {end} if line == word.encode() else set()
                continue
            whose = f"rank {self.watched}" if word is None else "a rank that watches this one"
            read = functools.partial(FailureRecord.decoded, line, f"the notice of {whose}")
            self.notice = self.notice or unless_malformed(read)
        return bool(data)

    def _has_left(self, rank: int) -> bool:
        """Return whether a rank left of its own accord, or let go because the rank that serves the store does."""
        return bool(self._store.check([protocol.left(rank)]) or self._store.check([protocol.CLOSING]))

    def _let_go(self) -> None:
        if self._connection is not None:
            self._selector.unregister(self._connection)
            self._connection.close()
            self._connection = None

    def close_in_child(self) -> None:
        """Close this process's copies of the connections after a fork: they must not outlive its parent."""
        for end in (self._listener, self._connection, *self._guests):
            if end is not None:
                end.close()


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK)  # a notice stays, for when it is wanted
    except BlockingIOError:
        return False
    except OSError:
        return True


def read_address(message: bytes, rank: int) -> tuple[Addresses, Port, str]:
    """Return the names and addresses of a rank's host, the port there, and the word that opens it."""
    return decode(message, tuple[Addresses, Port, str], f"the address of rank {rank}")


def connect(addresses: Sequence[str], port: int, *, is_one_host: bool) -> socket.socket:
    """Return a connection to a rank, by the first of its addresses that answers within two seconds.

    Raises:
        ConnectionRefusedError: It is not there any more, or a firewall says so.
        OSError: Nobody answers.
    """
    # Two seconds in all: a watcher that is held up for longer would itself be missed.
    refused = OSError("it has no address that other hosts may use")
    # The loopback would be this host's own, which says nothing of the other one.
    usable = [address for address in addresses if is_one_host or not address.startswith(_LOOPBACK)]
    for address in usable:
        try:
            # Bytes: for a text, Python loads the codec of other alphabets, which takes 3 ms.
            place: Any = (address.encode(), port)
            return socket.create_connection(place, timeout=_PATIENCE / len(usable))
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
    for connection in list(_connections):
        connection.close()
    _connections.clear()


def _close_all_in_child() -> None:
    for connection in list(_connections):
        connection.close_in_child()
    _connections.clear()


os.register_at_fork(after_in_child=_close_all_in_child)
