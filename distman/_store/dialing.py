"""How a process gets a connection to the store of its job, and from nobody else."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import select
import socket
import time
from typing import TYPE_CHECKING

from distman._base import timing
from distman._store import transport
from distman._store.connection import Connection, is_of_a_handler, new_socket
from distman._store.frames import LENGTH, MalformedError
from distman._store.handshake import (
    MAC_BYTES,
    MOST_ANSWER_BYTES,
    MOST_CREDENTIAL_BYTES,
    NONCE_BYTES,
    Answer,
    ClientSide,
    HandshakeError,
    Hello,
    door_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from distman._store.transport import Address


_MICROSECONDS = 1_000_000


class ForeignServiceError(Exception):
    """Something listens there, but it is not the store of this job."""


class CrowdedError(TimeoutError):
    """So many stand in line there that this process did not get its turn."""


@dataclasses.dataclass(frozen=True)
class Door:
    """Where the store of a job is, and what lets in there."""

    address: Address  # a name of this host's own, which begins with a zero byte, or host and port
    job: str
    secret: bytes | None = dataclasses.field(repr=False)  # its secret; None where there is none, or it has to be read
    unreachable_after: float  # seconds after which the store's host is given up when it acknowledges nothing
    patience: float = timing.DIAL  # seconds for a connection to be made and proved
    # seconds, of these, to stand in line at a name of this host, where strangers may let nobody pass; None is all
    in_line: float | None = None
    asks_kernel: bool = True  # the kernel tells, at a name of this host, if another user listens there
    # returns the secret from what the store sends before any proof; None where it is known. It raises
    # ForeignServiceError where this cannot be the store of this job
    read: Callable[[bytes], bytes | None] | None = None


def dial(door: Door, hello: Hello) -> tuple[Connection, bytes | None]:
    """Return a connection to the store of a job, once both sides have proved what they know, and its secret."""
    # ForeignServiceError: what listens there is not that store. OSError: nothing listens there, or it cannot be
    # reached, or it sends everybody away at the moment.
    deadline = time.monotonic() + door.patience
    connected = _connect(door.address, door.patience, door.patience if door.in_line is None else door.in_line)
    try:
        transport.prepare(connected, door.unreachable_after)
        if door.asks_kernel and connected.family == socket.AF_UNIX and not transport.is_of_this_user(connected):
            raise ForeignServiceError("a program of another user listens there")
        answer, secret = _shake_hands(connected, door, hello, deadline)
        connected.settimeout(None)
        return Connection(connected, answer), secret
    except (HandshakeError, MalformedError) as error:
        connected.close()
        raise ForeignServiceError(f"another program listens there: {error}") from error
    except BaseException:  # what a signal's handler raises too: the socket belongs to nobody yet
        connected.close()
        raise


def _connect_to_port(host: str, port: int, timeout: float) -> socket.socket:
    """Return a connection by IPv4 where the host has it, as the store listens to that; else by IPv6."""
    # Another user's program may listen to the other one, at the same port. An address that does not answer holds the
    # next one up for a moment only. Each of the two may take ``timeout`` seconds.
    name = host.encode() if host.isascii() else host  # for a text, Python loads the codec of other alphabets: 3 ms
    found: dict[int, list[Any]] = {}
    for family, _, _, _, place in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM):
        found.setdefault(family, []).append(place)
    error: OSError = OSError(errno.EADDRNOTAVAIL, "it has no address")
    for version in sorted(found, key=lambda version: version != socket.AF_INET):
        try:
            return _connect_to_first(version, found[version], timeout)
        except OSError as one:
            if is_of_a_handler(one):
                raise
            error = one
    raise error


def _connect_to_first(family: int, places: Sequence[Any], timeout: float) -> socket.socket:
    """Return a connection to the first place that answers; each one but the first has to wait for its turn."""
    # Source: RFC 8305, "Happy Eyeballs Version 2", section 5.
    deadline, begins_at = time.monotonic() + timeout, 0.0
    waiting, begun, poll = list(places), dict[int, socket.socket](), select.poll()
    error: OSError = TimeoutError("timed out")
    try:
        while waiting or begun:
            now = time.monotonic()
            if waiting and (not begun or now >= begins_at):
                one = new_socket(family)
                begun[one.fileno()] = one
                one.settimeout(0)
                failed = one.connect_ex(waiting.pop(0))
                if failed not in (0, errno.EINPROGRESS):
                    begun.pop(one.fileno()).close()
                    error = OSError(failed, os.strerror(failed))
                    continue
                poll.register(one, select.POLLOUT)
                begins_at = now + timing.DIAL_NEXT_ADDRESS
            until = min(begins_at, deadline) if waiting else deadline
            for number, _ in poll.poll(max(until - time.monotonic(), 0.0) * 1000):
                poll.unregister(number)
                one = begun.pop(number)
                failed = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if not failed:
                    one.settimeout(timeout)
                    return one
                one.close()
                error = OSError(failed, os.strerror(failed))
            if time.monotonic() >= deadline:
                break
    finally:
        for one in begun.values():
            one.close()
    raise error


def _connect(address: Address, patience: float, in_line: float) -> socket.socket:
    if not isinstance(address, str):
        return _connect_to_port(*address, patience)
    connected = new_socket(socket.AF_UNIX)
    try:
        _stand_in_line(connected, address, in_line)
    except BlockingIOError as error:
        connected.close()
        raise CrowdedError(error.errno, "it has too many visitors") from error
    except BaseException:  # what a signal's handler raises too: the socket belongs to nobody yet
        connected.close()
        raise
    return connected


def _stand_in_line(connected: socket.socket, name: str, seconds: float) -> None:
    """Connect to a name of this host within a time."""
    # A limit of Python's would make the connection fail at once while a flood of strangers stands in the queue. And
    # Python takes a connect that a signal has interrupted for one that goes on, which it does not at such a name.
    connected.settimeout(None if seconds > 0 else 0)
    deadline = time.monotonic() + seconds
    while not _is_connected(connected):
        left = max(deadline - time.monotonic(), timing.SOCKET_SHORTEST)
        limit = divmod(math.ceil(left * _MICROSECONDS), _MICROSECONDS)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, transport.TIME.pack(*limit))
        connected.connect(name)
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, transport.TIME.pack(0, 0))


def _is_connected(connected: socket.socket) -> bool:
    try:
        connected.getpeername()
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise
        return False
    return True


def _shake_hands(connected: socket.socket, door: Door, hello: Hello, deadline: float) -> tuple[Answer, bytes | None]:
    found = [door.secret]

    def find_key(credential: bytes) -> bytes:
        if door.read is not None:
            found[0] = door.read(credential)
        return door_key(found[0], door.job.encode())

    side = ClientSide(b"", transport.other_place(connected), find_key)
    connected.sendall(side.opening())
    nonce = _read(connected, NONCE_BYTES, deadline)
    credential = _read_sized(connected, MOST_CREDENTIAL_BYTES, deadline)
    challenge = nonce + LENGTH.pack(len(credential)) + credential + _read(connected, MAC_BYTES, deadline)
    connected.sendall(side.proof(challenge, hello))
    proof = _read(connected, MAC_BYTES, deadline)
    return side.answer(proof, _read_sized(connected, MOST_ANSWER_BYTES, deadline)), found[0]


def _read_sized(connected: socket.socket, most: int, deadline: float) -> bytes:
    (length,) = LENGTH.unpack(_read(connected, LENGTH.size, deadline))
    if length > most:
        raise MalformedError(f"a message of {length} bytes")
    return _read(connected, length, deadline)


def _read(connected: socket.socket, num_bytes: int, deadline: float) -> bytes:
    received = b""
    while len(received) < num_bytes:
        connected.settimeout(max(deadline - time.monotonic(), timing.SOCKET_SHORTEST))
        piece = connected.recv(num_bytes - len(received))
        if not piece:
            raise ConnectionResetError("it closed the connection without an answer")
        received += piece
    return received
