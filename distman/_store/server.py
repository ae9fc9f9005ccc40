"""The process that serves the store of a job: one thread, no torch, and no client gets in without proof.

Guests are strangers: a few bytes each, a bounded number at a time, and they have a few seconds in all. A flood of them
costs no thread, and members are served between any few of them.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # no stubs: signal's own module
import _socket  # socket itself loads enum and selectors, which takes longer than all the rest
import errno
import marshal
import posix
import resource
from select import EPOLLIN, EPOLLOUT, epoll
from time import monotonic

from distman._base import timing
from distman._store import frames, transport
from distman._store.frames import LENGTH, MalformedError
from distman._store.handshake import (
    MAC_BYTES,
    MEMBER,
    MOST_HELLO_BYTES,
    OPENING_BYTES,
    Answer,
    HandshakeError,
    ServerSide,
    door_key,
)
from distman._store.operations import Operations
from distman._store.table import Table
from distman._store.transport import FEW_BYTES, MANY_BYTES

TYPE_CHECKING = False  # typing takes longer to load than the process that serves a store takes to start
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from distman._store.handshake import Hello
    from distman._store.table import Wait, Will

_NOT_IGNORED = {
    *(_signal.SIGKILL, _signal.SIGSTOP),  # which cannot be
    *(_signal.SIGABRT, _signal.SIGBUS, _signal.SIGFPE, _signal.SIGILL, _signal.SIGQUIT),  # of crashes
    *(_signal.SIGSEGV, _signal.SIGSYS, _signal.SIGTRAP),
}
_MOST_GUESTS = 256  # the oldest goes first: a rank that was sent away by a flood dials again
_GUESTS_PER_ROUND = 16  # then members have their turn
_SPARE_DESCRIPTORS = 64  # kept back from connections, half of them at most: there is always one for the next guest
_MOST_DESCRIPTORS = 1 << 20  # where the host sets no limit, Linux does
_KEY_BYTES = 32  # of a key that is drawn: nobody guesses 256 bits
_SESSION_BYTES = 8  # of the name of an opening: it is no secret, and must not come twice
_MOST_REASON_BYTES = 200  # of the error that a message has caused: one line
UP = b"up"
"""What the process writes into a pipe of its own when it has read its settings: others write to standard error."""
_HEAD_BYTES = MAC_BYTES + LENGTH.size
_HOST_IS_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


class Peer:
    """One connection."""

    def __init__(self, socket: _socket.socket, poll: epoll) -> None:
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


class Server:
    """Serves one store until its last member is gone."""

    # ``secret`` is None where the kernel's word has to do. ``credential`` is sent to all clients, before any proof.
    # ``opener`` is rank and process that has started it and enters too: others may have come and gone before; None
    # waits for nobody. A first member must come within ``entry_limit`` seconds.

    def __init__(
        self,
        listener: _socket.socket,
        *,
        job: bytes,
        secret: bytes | None,
        credential: bytes,
        opener: tuple[int, int] | None,
        entry_limit: float,
        unreachable_after: float,
        most_descriptors: int,
    ) -> None:
        listener.settimeout(0)
        self._listener = listener
        is_local = listener.family == _socket.AF_UNIX
        self._asks_kernel = is_local and not (secret and transport.is_nobody())
        self._key = door_key(secret, job)
        self._credential = credential
        self._drawn_key = posix.urandom(_KEY_BYTES) if is_local and not secret else b""
        self._session = posix.urandom(_SESSION_BYTES).hex().encode()
        self._unreachable_after = unreachable_after
        self._poll = epoll()
        self._poll.register(listener.fileno(), EPOLLIN)
        self._door: int | None = listener.fileno()
        self._door_rests_until: float | None = None
        self._table = Table()
        self._operations = Operations(self._table, self._shut)
        self._peers: dict[int, Peer] = {}
        self._guests: dict[Peer, float] = {}
        self._num_members = 0
        self._awaited = opener
        self._entry_ends_at = monotonic() + entry_limit
        self._ends_at: float | None = self._entry_ends_at
        self._most_peers = most_descriptors - min(_SPARE_DESCRIPTORS, most_descriptors // 2)

    def serve(self) -> None:
        while (pause := self._pause()) is not None:
            for number, events in self._poll.poll(pause):
                if number == self._door:
                    self._welcome_guests()
                elif number in self._peers:
                    self._attend(self._peers[number], events)

    def _pause(self) -> float | None:
        """Do what is due, and return how long nothing will be, unless something comes; None at the end."""
        deadline = self._table.next_deadline()
        if deadline is None and not self._guests and self._ends_at is None and self._door_rests_until is None:
            return -1.0
        now = monotonic()
        if self._ends_at is not None and now >= self._ends_at:
            return None
        self._table.expire(now)
        while self._guests and next(iter(self._guests.values())) <= now:
            self._end(next(iter(self._guests)))
        if self._door_rests_until is not None and now >= self._door_rests_until:
            self._poll.register(self._listener.fileno(), EPOLLIN)
            self._door_rests_until = None
        guests_end = next(iter(self._guests.values()), None)
        times = [self._table.next_deadline(), self._ends_at, self._door_rests_until, guests_end]
        return min([timing.POLL_LONGEST, *[max(0.0, time - now) for time in times if time is not None]])

    def _welcome_guests(self) -> None:
        for _ in range(_GUESTS_PER_ROUND):
            try:
                number, _ = self._listener._accept()  # type: ignore[attr-defined]  # no stubs: accept() is Python
            except OSError as error:
                if error.errno in _HOST_IS_FULL:
                    self._poll.unregister(self._listener.fileno())
                    self._door_rests_until = monotonic() + timing.LISTENER_RESTS
                elif error.errno != errno.EAGAIN:  # the client has gone
                    continue
                return
            guest = _socket.socket(fileno=number)
            try:
                self._welcome(guest)
            except OSError:  # it has gone already, or the host has no room for another one
                guest.close()

    def _welcome(self, guest: _socket.socket) -> None:
        is_full = len(self._peers) >= self._most_peers
        is_refused = is_full and not self._guests
        if is_refused or (self._asks_kernel and not transport.is_of_this_user(guest)):
            guest.close()
            return
        if is_full or len(self._guests) >= _MOST_GUESTS:
            self._end(next(iter(self._guests)))
        guest.settimeout(0)
        transport.prepare(guest, self._unreachable_after)
        peer = Peer(guest, self._poll)
        self._peers[peer.number] = peer
        self._guests[peer] = monotonic() + timing.GUEST

    def _attend(self, peer: Peer, events: int) -> None:
        """Send what a connection has yet to take, or read what has come from it."""
        try:
            if events & EPOLLOUT:
                peer.flush()
                if not peer.is_behind and peer.received:
                    self._take(peer, b"")
                return
            received = peer.receive()
            if received:
                self._take(peer, received)
            elif received is not None:
                self._end(peer)
        except OSError as error:
            self._end(peer, is_unreachable=error.errno in _UNREACHABLE)
        except HandshakeError:
            self._end(peer)
        except MalformedError as error:
            self._refuse(peer, str(error).encode())
        except Exception as error:  # noqa: BLE001 - what one client asks for must not take the store from all others
            self._refuse(peer, repr(error)[:_MOST_REASON_BYTES].encode())

    def _take(self, peer: Peer, received: bytes | memoryview) -> None:
        """Go on with a handshake, or with requests, as far as they have come."""
        if peer.hello is None:
            peer.received += received
            self._greet(peer)
            return
        if peer.received:
            peer.received += received
            if frames.num_missing(peer.received) > 0:
                return
            received = memoryview(peer.received)  # of which each field is copied, and nothing else
        at = 0
        while not peer.is_behind and (found := frames.next_request(received, at)) is not None:
            number, operation, fields, at = found
            self._operations.carry_out(peer, number, operation, fields)
        if peer.received or at < len(received):
            peer.received = bytearray(received[at:])

    def _greet(self, guest: Peer) -> None:
        """Take the next step of a handshake, if all of it has come; a client never sends more than the next step."""
        received = bytes(guest.received)
        if guest.side is None:
            if len(received) >= OPENING_BYTES:
                guest.side = ServerSide(self._key, transport.own_place(guest.socket), received, self._credential)
                guest.send(guest.side.challenge())
                guest.received.clear()
            return
        length = LENGTH.unpack_from(received, MAC_BYTES)[0] if len(received) >= _HEAD_BYTES else 0
        if length > MOST_HELLO_BYTES or len(received) > _HEAD_BYTES + MOST_HELLO_BYTES:
            raise MalformedError("a hello that is too long")
        if length and len(received) >= _HEAD_BYTES + length:
            guest.hello = guest.side.hello(received[:MAC_BYTES], received[_HEAD_BYTES:])
            guest.received.clear()
            self._admit(guest, guest.side)

    def _admit(self, guest: Peer, side: ServerSide) -> None:
        del self._guests[guest]
        if guest.hello is not None and guest.hello.role == MEMBER:
            self._num_members += 1
            self._operations.members.append(guest.hello.rank)
            self._ends_at = None
            if (guest.hello.rank, guest.hello.pid) == self._awaited:
                self._awaited = None
        guest.send(side.welcome(Answer(self._session, posix.getpid(), self._drawn_key)))

    def _refuse(self, peer: Peer, reason: bytes) -> None:
        """End the connection of a member that sends nonsense, and tell it so; a guest hears nothing."""
        if peer.hello is not None:
            peer.send(*frames.reply(0, frames.MALFORMED, reason))
        self._end(peer)

    def _end(self, peer: Peer, *, is_unreachable: bool = False) -> None:
        """Close a connection, and do what its client wanted to be done in that case."""
        if peer.hello is None and peer.side is not None:
            self._operations.num_unproved += 1
        del self._peers[peer.number]
        self._guests.pop(peer, None)
        peer.close()
        if peer.wait is not None:
            self._table.cancel(peer.wait)
        if peer.will is not None:
            self._table.carry_out(peer.will, is_unreachable=is_unreachable)
        if peer.hello is not None and peer.hello.role == MEMBER:
            self._num_members -= 1
            if not is_unreachable:
                self._operations.members.remove(peer.hello.rank)
            if self._num_members == 0:
                is_opener_coming = self._awaited is not None and posix.getppid() == self._awaited[1]
                self._ends_at = self._entry_ends_at if is_opener_coming else monotonic()

    def _shut(self) -> None:
        """Let nobody in any more, and leave the place where they came to another store."""
        if self._door is not None:
            if self._door_rests_until is None:
                self._poll.unregister(self._door)
            self._door = self._door_rests_until = None
            self._listener.close()
        if self._num_members == 0:
            self._ends_at = monotonic()


def main() -> None:
    """Serve the store that standard input describes, in a process that holds nothing of the one that started it."""
    for number in _signal.valid_signals() - _NOT_IGNORED:  # ranks that a scheduler asks to stop still need the store
        _signal.signal(number, _signal.SIG_IGN)
    with open(0, "rb", closefd=False) as pipe:
        settings: dict[str, Any] = marshal.load(pipe)  # noqa: S302 - from the program that started this one
    up = settings.pop("up")
    posix.write(up, UP)
    posix.close(up)
    nothing = posix.open("/dev/null", posix.O_RDWR)
    for number in range(3):
        posix.dup2(nothing, number)
    listener = _socket.socket(fileno=settings.pop("listener"))
    Server(listener, most_descriptors=_raise_descriptor_limit(), **settings).serve()


def descriptors_for(num_connections: int) -> int:
    """Return how many descriptors the process needs to have room for so many connections."""
    return num_connections + min(_SPARE_DESCRIPTORS, num_connections)


def _raise_descriptor_limit() -> int:
    """Let the process have as many connections as the host allows, and return how many that are."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        most = _MOST_DESCRIPTORS
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most
