"""A connection as the process sees it that serves a store: two bounded buffers, and how far its client has come."""

from __future__ import annotations

from select import EPOLLIN, EPOLLOUT

from distman._store import frames
from distman._store.transport import FEW_BYTES, MANY_BYTES

TYPE_CHECKING = False  # typing takes longer to load than the process that serves a store takes to start
if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Sequence
    from select import epoll

    from distman._store.handshake import Hello, ServerSide
    from distman._store.table import Wait, Will


class Peer:
    """One connection."""

    __slots__ = (
        "_poll",
        "_unsent",
        "error",
        "hello",
        "is_behind",
        "number",
        "received",
        "side",
        "socket",
        "wait",
        "will",
    )

    def __init__(self, socket: socket, poll: epoll) -> None:
        self.socket = socket
        self.number = socket.fileno()  # the number under which that is polled
        self.side: ServerSide | None = None  # its handshake, once it has begun
        self.hello: Hello | None = None  # who it is, once it has proved that; None for a guest
        self.wait: Wait | None = None  # the wait that it has not been answered yet
        self.will: Will | None = None  # what is to be done at its end; None for nothing
        self.received = bytearray()  # what has come of a message that is not complete
        self.is_behind = False  # whether it has yet to take what was sent; until then nothing more is read from it
        self.error: OSError | None = None  # how sending failed; kept until the end of the connection is read
        self._unsent: list[memoryview] = []
        self._poll = poll
        poll.register(self.number, EPOLLIN)

    def send(self, *pieces: bytes) -> None:
        """Send a message, now or when the connection takes it; a broken one is found when it is next read."""
        if self.is_behind:
            self._unsent += map(memoryview, pieces)
            return
        num_sent = self._send(pieces)
        if num_sent < sum(map(len, pieces)):
            self._unsent = _after(num_sent, pieces)
            self.is_behind = True
            self._poll.modify(self.number, EPOLLOUT)

    def flush(self) -> None:
        """Send what was left over."""
        self._unsent = _after(self._send(self._unsent), self._unsent)
        if not self._unsent:
            self.is_behind = False
            self._poll.modify(self.number, EPOLLIN)

    def receive(self) -> bytes | None:
        """Return what has come; nothing at the end of the connection, None if nothing has come yet."""
        if self.error is not None:
            raise self.error
        num_bytes = FEW_BYTES
        if self.received and self.hello is not None:
            num_bytes = min(max(frames.num_missing(self.received), FEW_BYTES), MANY_BYTES)
        try:
            return self.socket.recv(num_bytes)
        except BlockingIOError:
            return None

    def close(self) -> None:
        self._poll.unregister(self.number)
        self.socket.close()

    def _send(self, pieces: Sequence[bytes | memoryview]) -> int:
        """Return how much was sent."""
        # An error is kept until the end of the connection is read: the sender may be in the middle of telling many.
        try:
            return self.socket.send(pieces[0]) if len(pieces) == 1 else self.socket.sendmsg(pieces)
        except BlockingIOError:
            return 0
        except OSError as error:
            self.error = error
            return sum(map(len, pieces))


def _after(num_bytes: int, pieces: Sequence[bytes | memoryview]) -> list[memoryview]:
    """Return what is left of pieces after so many bytes."""
    left = []
    for piece in pieces:
        if num_bytes < len(piece):
            left.append(memoryview(piece)[num_bytes:])
        num_bytes = max(0, num_bytes - len(piece))
    return left
