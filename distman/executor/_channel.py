"""Messages between the program and a worker: small ones whole, large ones as shared memory."""

from __future__ import annotations

import array
import contextlib
import os
import pickle
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from distman.executor._payload import INLINE_BYTES, Parcel

NO_SLOT = 255
_HEADER = struct.Struct("<BBBQQQ")


class Kind(IntEnum):
    """What a message holds."""

    TASK = 0
    VALUE = 1
    FAILURE = 2


@dataclass
class Message:
    """A message as it arrived.

    Attributes:
        kind: What it holds.
        slot: Which of the worker's resident regions it lies in, or ``NO_SLOT``.
        free_slots: To a worker: its regions that nobody reads any more, one bit each.
        num_buffers: Number of buffers beside the pickle.
        stream_bytes: Length of the pickle.
        region_bytes: Size of the shared memory; 0 if the pickle is here.
        stream: The pickle, if it is here.
        descriptor: The shared memory, if it is new; the receiver closes it.
    """

    kind: Kind
    slot: int
    free_slots: int
    num_buffers: int
    stream_bytes: int
    region_bytes: int
    stream: bytes
    descriptor: int | None

    @contextlib.contextmanager
    def new_region(self) -> Iterator[int | None]:
        """Lend the file descriptor, and close it."""
        try:
            yield self.descriptor
        finally:
            if self.descriptor is not None:
                os.close(self.descriptor)
                self.descriptor = None

    def load_inline(self) -> object:
        """Return the object of a message without shared memory."""
        return pickle.loads(self.stream)  # noqa: S301 - written by a process of ours


def open_line() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that keep messages apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(
    line: socket.socket,
    kind: Kind,
    parcel: Parcel,
    region_bytes: int = 0,
    descriptor: int | None = None,
    *,
    slot: int = NO_SLOT,
    free_slots: int = 0,
) -> None:
    """Send a parcel: as it is, or the news where in shared memory it lies.

    Does not block if the other side has read what came before.

    Args:
        line: The connection.
        kind: What the parcel holds.
        parcel: Already written where it is not inline.
        region_bytes: Size of the shared memory, 0 for an inline parcel.
        descriptor: The shared memory, if the other side does not have it.
        slot: Which of the worker's resident regions this is.
        free_slots: Regions of the worker that nobody reads any more, one bit each.
    """
    counts = (len(parcel.buffers), len(parcel.stream), region_bytes)
    data = _HEADER.pack(kind, slot, free_slots, *counts) + (b"" if region_bytes else parcel.stream)
    if descriptor is None:
        line.send(data)
    else:
        socket.send_fds(line, [data], [descriptor])


def receive_descriptors(line: socket.socket, size: int, most: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """Return a message and the file descriptors with it, which programs started here do not inherit.

    Blocks, unless the flags say otherwise. ``socket.recv_fds`` of Python 3.11 ignores its flags.

    Args:
        line: The connection.
        size: The most bytes to take.
        most: The most file descriptors to take.
        flags: As for ``recv``.
    """
    descriptors = array.array("i")
    room = socket.CMSG_SPACE(most * descriptors.itemsize)
    data, ancillary, _, _ = line.recvmsg(size, room, flags | socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return data, list(descriptors)


def receive(line: socket.socket, *, waits: bool = True) -> Message | None:
    """Return the next message, or None if the other side has hung up.

    Blocks if it waits.

    Args:
        line: The connection.
        waits: Whether to wait for a message; otherwise None if there is none.
    """
    size = _HEADER.size + INLINE_BYTES
    try:
        data, descriptors = receive_descriptors(line, size, 1, 0 if waits else socket.MSG_DONTWAIT)
    except (ConnectionResetError, BlockingIOError):
        return None
    if not data:
        return None
    kind, slot, free_slots, num_buffers, stream_bytes, region_bytes = _HEADER.unpack_from(data)
    return Message(
        kind=Kind(kind),
        slot=slot,
        free_slots=free_slots,
        num_buffers=num_buffers,
        stream_bytes=stream_bytes,
        region_bytes=region_bytes,
        stream=data[_HEADER.size :],
        descriptor=descriptors[0] if descriptors else None,
    )
