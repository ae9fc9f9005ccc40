"""How a process gets a connection to the store of its job, and from nobody else."""

from __future__ import annotations

import dataclasses
import math
import socket
import struct
import time
from typing import TYPE_CHECKING

from distman._store import transport
from distman._store.connection import Connection
from distman._store.frames import LENGTH, MalformedError
from distman._store.handshake import (
    CHALLENGE_BYTES,
    MAC_BYTES,
    MOST_ANSWER_BYTES,
    Answer,
    ClientSide,
    HandshakeError,
    Hello,
    door_key,
)

if TYPE_CHECKING:
    from distman._store.transport import Address

_TIME = struct.Struct("ll")  # seconds and microseconds
_SHORTEST_PATIENCE = 0.001  # seconds: a limit of zero would mean to a socket that it must not wait


class ForeignServiceError(Exception):
    """Something listens there, but it is not the store of this job."""


@dataclasses.dataclass(frozen=True)
class Door:
    """Where the store of a job is, and what lets in there.

    Attributes:
        address: A name of this host's own, which begins with a zero byte, or host and port.
        job: Name of the job.
        secret: Its secret; None where there is none.
        unreachable_after: Seconds after which the store's host is given up when it acknowledges nothing.
        patience: Seconds for a connection to be made and proved: a foreign service may accept and never answer, a
            store takes milliseconds.
    """

    address: Address
    job: str
    secret: bytes | None = dataclasses.field(repr=False)
    unreachable_after: float
    patience: float = 3.0


def dial(door: Door, hello: Hello) -> Connection:
    """Return a connection to the store of a job, once both sides have proved what they know.

    Blocking.

    Raises:
        ForeignServiceError: What listens there is not the store of this job.
        OSError: Nothing listens there, or it cannot be reached, or it sends everybody away at the moment.
    """
    deadline = time.monotonic() + door.patience
    connected = _connect(door.address, door.patience)
    try:
        transport.prepare(connected, door.unreachable_after)
        if not (door.secret and transport.is_nobody()):
            _ask_kernel(connected)
        side = ClientSide(door_key(door.secret, door.job.encode()), transport.place_of(door.address))
        answer = _shake_hands(connected, side, hello, deadline)
        connected.settimeout(None)
        return Connection(connected, answer)
    except (HandshakeError, MalformedError) as error:
        connected.close()
        raise ForeignServiceError(f"another program listens there: {error}") from error
    except BaseException:
        connected.close()
        raise


def _connect(address: Address, patience: float) -> socket.socket:
    if not isinstance(address, str):
        return socket.create_connection(address, timeout=patience)
    connected = socket.socket(socket.AF_UNIX)
    try:
        # A limit of Python's would make the connection fail at once while a flood of strangers stands in the queue.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(math.ceil(patience), 0))
        connected.connect(address)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(0, 0))
    except BlockingIOError as error:
        connected.close()
        raise TimeoutError(error.errno, "it has too many visitors") from error
    except BaseException:
        connected.close()
        raise
    return connected


def _ask_kernel(connected: socket.socket) -> None:
    if connected.family == socket.AF_UNIX and not transport.is_of_this_user(connected):
        raise ForeignServiceError("a program of another user listens there")


def _shake_hands(connected: socket.socket, side: ClientSide, hello: Hello, deadline: float) -> Answer:
    connected.sendall(side.opening())
    challenge = _read(connected, CHALLENGE_BYTES, deadline)
    connected.sendall(side.proof(challenge, hello))
    proof = _read(connected, MAC_BYTES, deadline)
    (length,) = LENGTH.unpack(_read(connected, LENGTH.size, deadline))
    if length > MOST_ANSWER_BYTES:
        raise MalformedError(f"an answer of {length} bytes")
    return side.answer(proof, _read(connected, length, deadline))


def _read(connected: socket.socket, num_bytes: int, deadline: float) -> bytes:
    received = b""
    while len(received) < num_bytes:
        connected.settimeout(max(deadline - time.monotonic(), _SHORTEST_PATIENCE))
        piece = connected.recv(num_bytes - len(received))
        if not piece:
            raise ConnectionResetError("it closed the connection without an answer")
        received += piece
    return received
