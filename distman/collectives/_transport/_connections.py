"""The connections of a group to its other ranks on this host, for any number of threads.

Both sides of a connection write what has room, and read, in every wait, so full buffers block nobody; a thread writes
the rest where the program goes on. A wait looks some times and then sleeps in ``poll``, in which a signal handler can
raise. A group is closed where a call ends by an error, whatever it is: a part of a message may be lost.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import errno
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from struct import Struct
from typing import NamedTuple

import torch

from distman._base import timing
from distman.collectives._transport._segments import Segment, Segments, mapped

PIECE, IN_SEGMENT, IN_NEW_SEGMENT, WAS_READ = range(1, 5)
"""What a head is about: data follow; they are in a segment; in one whose descriptor comes along; a piece was read."""
_HEAD = Struct("=BBIQQ")
_ROOM_FOR_DESCRIPTOR = socket.CMSG_SPACE(array.array("i").itemsize)
_READ_FLAGS = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
_WRITE_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_ENDED = (errno.ECONNRESET, errno.EPIPE)  # the former: with something unread
_LOOKS = 30  # before a wait sleeps, each of which gives the core away: a reply takes some tens of microseconds
_SHORT_SLEEP = 0.001  # the same where another thread waits, too

_all: weakref.WeakSet[Connections] = weakref.WeakSet()


class Frame(NamedTuple):
    """The head of a message, which data may follow: calls that differ have other tags."""

    kind: int
    slot: int = 0
    tag: int = 0
    size: int = 0
    offset: int = 0


@dataclasses.dataclass(eq=False, slots=True)
class Incoming:
    """A message from another process, which is done when it is here."""

    is_asked: bool  # before it came
    room: memoryview | None = None  # for its data; made for a piece that turns out not to be in a segment
    memory: torch.Tensor | None = None  # where it is, as bytes; None where it is in a room that was given
    slot: int | None = None  # of the segment where it is
    is_done: bool = False

    def __str__(self) -> str:
        return "sent what this rank waits for"


class Outgoing:
    """A message to another process, whose data stay as they are until all of it is on its way."""

    __slots__ = ("ancillary", "is_done", "parts")

    def __init__(self, frame: Frame, data: memoryview | None, descriptor: int | None) -> None:
        self.parts = [memoryview(_HEAD.pack(*frame)), *([data] if data else [])]
        descriptors = [] if descriptor is None else [array.array("i", [descriptor])]
        self.ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, one) for one in descriptors]
        self.is_done = False

    def advance(self, num_bytes: int) -> None:
        self.ancillary = []
        while self.parts and num_bytes >= len(self.parts[0]):
            num_bytes -= len(self.parts.pop(0))
        if self.parts:
            self.parts[0] = self.parts[0][num_bytes:]
        self.is_done = not self.parts

    def __str__(self) -> str:
        return "read what this rank sends"


Message = Incoming | Outgoing


class Link:
    """One end of a connection to a rank of the group, which one thread at a time may use."""

    def __init__(self, connected: socket.socket, rank: int, segments: Segments) -> None:
        self.socket, self.rank, self._segments = connected, rank, segments
        self.pending: deque[Outgoing] = deque()  # what has not found room yet
        self.has_ended = self.is_deaf = False  # whether nothing comes any more; whether nothing goes out
        self._mapped: dict[int, torch.Tensor] = {}  # segments of the other, by place
        self._queues: dict[tuple[int, int], deque[Incoming]] = {}  # by tag and size: asked for, or come
        self._descriptors: deque[int] = deque()
        self._head = memoryview(bytearray(_HEAD.size))
        self._missing = self._head  # room for what comes next
        self._arriving: Incoming | None = None  # whose data that is; None for a head

    def send(self, frame: Frame, data: memoryview | None = None, segment: Segment | None = None) -> Outgoing:
        """Begin to send a message, and a segment's descriptor unless the other has it."""
        descriptor = None
        if segment is not None:
            segment.readers.add(self.rank)
            if self.rank not in segment.known_to:
                frame, descriptor = frame._replace(kind=IN_NEW_SEGMENT), segment.descriptor
                segment.known_to.add(self.rank)
        message = Outgoing(frame, data, descriptor)
        self.pending.append(message)
        self.flush()
        return message

    def flush(self) -> None:
        while self.pending:
            message = self.pending[0]
            try:
                message.advance(self.socket.sendmsg(message.parts, message.ancillary, _WRITE_FLAGS))
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ETOOMANYREFS, *_ENDED):  # that of a signal handler, say
                    raise
                self.is_deaf = error.errno in _ENDED
                if self.is_deaf:
                    self.pending.clear()
                return
            if message.is_done:
                self.pending.popleft()

    def match(self, tag: int, size: int, room: memoryview | None = None, *, is_asked: bool) -> Incoming:
        """Return the next message of a tag and size that has come if it is asked for now, or the other way round.

        Its memory is another than the room if it came before.
        """
        queue = self._queues.setdefault((tag, size), deque())
        if not queue or queue[0].is_asked == is_asked:
            queue.append(Incoming(is_asked, room))
            return queue[-1]
        message = queue.popleft()
        if not queue:
            del self._queues[tag, size]
        return message

    def read(self) -> bool:
        """Take some of what has come, and return whether something has."""
        try:
            num_bytes = self._read_head() if self._arriving is None else self.socket.recv_into(self._missing)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return False
            if error.errno not in _ENDED:  # that of a signal handler, say
                raise
            num_bytes = 0
        self.has_ended = num_bytes == 0
        self._missing = self._missing[num_bytes:]
        if not self._missing:
            arrived, self._arriving, self._missing = self._arriving, None, self._head
            if arrived is not None:
                arrived.is_done = True
            else:
                self._begin(Frame(*_HEAD.unpack(self._head)))
        return num_bytes > 0

    def _read_head(self) -> int:
        num_bytes, ancillary, _, _ = self.socket.recvmsg_into([self._missing], _ROOM_FOR_DESCRIPTOR, _READ_FLAGS)
        for _, _, packed in ancillary:
            self._descriptors.extend(array.array("i", packed))
        return num_bytes

    def _begin(self, frame: Frame) -> None:
        if frame.kind == WAS_READ:
            self._segments.made[frame.slot].readers.discard(self.rank)
            return
        message = self.match(frame.tag, frame.size, is_asked=False)
        if frame.kind == PIECE:
            if message.room is None:
                message.room = memoryview(bytearray(frame.size))
                message.memory = torch.frombuffer(message.room, dtype=torch.uint8)
            self._arriving, self._missing = message, message.room
        elif frame.kind in (IN_SEGMENT, IN_NEW_SEGMENT):
            if frame.kind == IN_NEW_SEGMENT:
                self._map(frame.slot)
            message.memory = self._mapped[frame.slot][frame.offset : frame.offset + frame.size]
            message.slot, message.is_done = frame.slot, True
        else:
            raise RuntimeError(f"rank {self.rank} of the group must send what this rank knows, got kind {frame.kind}")

    def _map(self, slot: int) -> None:
        if not self._descriptors:
            raise OSError(errno.EMFILE, "no file could be opened for the memory of another rank; see ulimit -n")
        descriptor = self._descriptors.popleft()
        try:
            self._mapped[slot] = mapped(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close the socket, and what has come over it and was not used."""
        self.socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())


class Connections:
    """Connections to other processes of this host, by rank in the group; they end with the group or before."""

    def __init__(self, sockets: Mapping[int, socket.socket], segments: Segments, timeout: float) -> None:
        self.links = {rank: Link(one, rank, segments) for rank, one in sockets.items()}
        self._by_descriptor = {one.fileno(): self.links[rank] for rank, one in sockets.items()}
        self._timeout = timeout
        self._lock = threading.Lock()
        self._num_asleep = 0
        self.is_closed = self._is_flushing = False
        weakref.finalize(self, _close_all, [*self.links.values()])
        _all.add(self)

    def send(self, rank: int, frame: Frame, data: memoryview | None = None, segment: Segment | None = None) -> Outgoing:
        """Begin to send a message, whose data stay as they are until it is done; raises as :meth:`wait`."""
        link = self.links[rank]
        with self._lock:
            if frame.kind != WAS_READ:  # of which a rank that has left need not know
                self._check(link, None)
            return link.send(frame, data, segment)

    def ask(self, rank: int, tag: int, size: int, room: memoryview | None) -> Incoming:
        """Return a message that is to come; those of one tag and size come in the order in which they are asked for."""
        with self._lock:
            return self.links[rank].match(tag, size, room, is_asked=True)

    def wait(self, rank: int, message: Message) -> None:
        """Wait until a message is done; it is a RuntimeError if one of both has closed its end, or it took too long."""
        if message.is_done:
            return
        link, looks, deadline = self.links[rank], _LOOKS, time.monotonic() + self._timeout
        while not self._advance(link, message):
            self._check(link, message)
            if looks:
                looks -= 1
                os.sched_yield()
            elif time.monotonic() < deadline:
                self._sleep(deadline)
            else:
                what = f"rank {link.rank} of the group has not {message}"
                raise RuntimeError(f"Connection timed out after {self._timeout:g} s: {what}")

    def look(self, ranks: Iterable[int]) -> None:
        with self._lock:
            for link in [self.links[rank] for rank in ranks]:
                while link.read():
                    pass

    def flush_later(self) -> None:
        """Let a thread write what waits for room, though the program waits for something else from now on."""
        if any(link.pending for link in self.links.values()) and not self._is_flushing:
            self._is_flushing = True
            threading.Thread(target=self._flush_all, name="distman-transport", daemon=True).start()

    def close(self) -> None:
        """End what this process waits for here, and what others wait for from it; it is good for nothing afterwards.

        In any thread at any time, since a finalizer calls it: so it waits for no lock.
        """
        if not self.is_closed:
            self.is_closed = True
            for link in self.links.values():
                with contextlib.suppress(OSError):  # it has ended
                    link.socket.shutdown(socket.SHUT_RDWR)

    def _advance(self, link: Link, message: Message) -> bool:
        """Write and read what there is, and return whether a message is done."""
        with self._lock:
            for one in self.links.values():
                if one.pending:
                    one.flush()
            while not message.is_done and link.read():
                pass
            return message.is_done

    def _check(self, link: Link, message: Message | None) -> None:
        """Raise what ends the wait for a message, or keeps this rank from sending one."""
        if self.is_closed:
            raise RuntimeError("Connection closed: this rank has given up the group")
        if link.has_ended if isinstance(message, Incoming) else link.is_deaf:
            raise RuntimeError(f"Connection closed by peer: rank {link.rank} of the group has left it or ended")

    def _sleep(self, deadline: float) -> None:
        """Sleep until there is something to read or room to write, and read and write it."""
        poll = select.poll()
        with self._lock:
            self._num_asleep += 1
            for link in self.links.values():
                if not link.has_ended:
                    poll.register(link.socket, select.POLLIN | (select.POLLOUT if link.pending else 0))
        try:
            longest = timing.TRANSPORT_SLEEP if self._num_asleep == 1 else _SHORT_SLEEP
            events = poll.poll(1000 * max(0.0, min(longest, deadline - time.monotonic())))
        finally:
            with self._lock:
                self._num_asleep -= 1
        with self._lock:
            for descriptor, _ in events:
                self._by_descriptor[descriptor].flush()
                self._by_descriptor[descriptor].read()

    def _flush_all(self) -> None:
        try:
            while True:
                with self._lock:
                    left = [(link.rank, link.pending[-1]) for link in self.links.values() if link.pending]
                    self._is_flushing = bool(left)
                if not left:
                    return
                for rank, message in left:
                    self.wait(rank, message)
        except RuntimeError:  # others find the same
            self.close()


def _close_all(links: Iterable[Link]) -> None:
    for link in links:
        link.close()


def _close_in_child() -> None:
    """Close a forked process's copies, which must not outlive its parent; the parent's go on."""
    for connections in tuple(_all):
        connections.is_closed = True
        _close_all(connections.links.values())


os.register_at_fork(after_in_child=_close_in_child)
