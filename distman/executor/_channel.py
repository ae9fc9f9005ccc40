"""Messages between the program and a worker: small payloads whole, large ones as shared memory."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from distman._workers.sockets import receive_with_descriptors
from distman.executor._payload import INLINE_BYTES, Payload

NOT_POOLED = 255  # the largest number that the header's byte can hold
_HEADER = struct.Struct("<BBBQQQ")


class Kind(IntEnum):
    TASK = 0
    VALUE = 1
    FAILURE = 2


@dataclass
class Message:
    kind: Kind
    buffer_index: int  # of the worker's pool, or ``NOT_POOLED``
    free_buffers: int  # to a worker: the buffers of its pool that nobody reads any more, one bit each
    num_buffers: int  # beside the pickle
    stream_bytes: int  # length of the pickle
    shared_bytes: int  # size of the shared memory; 0 if the pickle is here
    stream: bytes  # the pickle, if it is here
    descriptor: int | None  # the shared memory, if it is new; the receiver closes it

    @contextlib.contextmanager
    def new_memory(self) -> Iterator[int | None]:
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


def send(
    connection: socket.socket,
    kind: Kind,
    payload: Payload,
    shared_bytes: int = 0,
    descriptor: int | None = None,
    *,
    buffer_index: int = NOT_POOLED,
    free_buffers: int = 0,
) -> None:
    """Send a payload, or in which shared memory it has been written; does not block if what came before was read."""
    counts = (len(payload.buffers), len(payload.stream), shared_bytes)
    header = _HEADER.pack(kind, buffer_index, free_buffers, *counts)
    data = header + (b"" if shared_bytes else payload.stream)
    if descriptor is None:
        connection.send(data)
    else:
        socket.send_fds(connection, [data], [descriptor])


def receive(connection: socket.socket, *, waits: bool = True) -> Message | None:
    """Return the next message, or None if the other side has hung up, or has sent none and this does not wait."""
    size = _HEADER.size + INLINE_BYTES
    try:
        data, descriptors = receive_with_descriptors(connection, size, 1, 0 if waits else socket.MSG_DONTWAIT)
    except (ConnectionResetError, BlockingIOError):
        return None
    if not data:
        return None
    kind, buffer_index, free_buffers, num_buffers, stream_bytes, shared_bytes = _HEADER.unpack_from(data)
    return Message(
        kind=Kind(kind),
        buffer_index=buffer_index,
        free_buffers=free_buffers,
        num_buffers=num_buffers,
        stream_bytes=stream_bytes,
        shared_bytes=shared_bytes,
        stream=data[_HEADER.size :],
        descriptor=descriptors[0] if descriptors else None,
    )
