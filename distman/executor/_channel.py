"""Messages between the program and a worker: small payloads whole, large ones as shared memory.

The memory of results is used again, since new memory costs more than the copy.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from distman._workers.sockets import receive_with_descriptors
from distman.executor._payload import INLINE_BYTES, Payload, create_shared_memory, map_shared_memory

NOT_POOLED = 255  # the largest number that the header's byte can hold
_HEADER = struct.Struct("<BBBQQQ")
_NUM_BUFFERS = 2  # the result in use, and the one that replaces it
# A worker keeps twice this for as long as it lives; of larger results, new memory is a small part of the work.
_MOST_BYTES = 256 * 1024**2


class Kind(IntEnum):
    TASK = 0
    VALUE = 1
    FAILURE = 2


@dataclass
class Message:
    kind: Kind
    buffer_index: int  # of the worker's pool, or ``NOT_POOLED``
    free_buffers: int  # to a worker: the buffers of its pool that the program has stopped reading, one bit each
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

    def load_inline(self) -> Any:
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


@dataclass
class PooledBuffer:
    """A buffer as its worker sees it."""

    index: int  # its place in the pool
    memory: npt.NDArray[np.uint8]
    unsent: int | None  # the descriptor, for as long as the program has not got it
    is_read: bool = False  # whether the program holds tensors that are in it

    def was_sent(self) -> None:
        """Note that the program now has it."""
        self.is_read = True
        if self.unsent is not None:
            os.close(self.unsent)
            self.unsent = None


class BufferPool:
    """The worker's side: buffers to write results into."""

    def __init__(self) -> None:
        self._buffers: dict[int, PooledBuffer] = {}

    def release(self, free_buffers: int) -> None:
        """Note which buffers the program has stopped reading, one bit each."""
        for index, buffer in self._buffers.items():
            if free_buffers >> index & 1:
                buffer.is_read = False

    def take(self, num_bytes: int) -> PooledBuffer | None:
        """Return a buffer of at least that size; None if all are in use, or the result is too large."""
        if num_bytes > _MOST_BYTES:
            return None
        free = [buffer for buffer in self._buffers.values() if not buffer.is_read]
        fitting = [buffer for buffer in free if buffer.memory.nbytes >= num_bytes]
        if fitting:
            return min(fitting, key=lambda buffer: buffer.memory.nbytes)
        unused = [index for index in range(_NUM_BUFFERS) if index not in self._buffers]
        indices = unused or [buffer.index for buffer in free]
        return self._create(indices[0], num_bytes) if indices else None

    def _create(self, index: int, num_bytes: int) -> PooledBuffer:
        descriptor = create_shared_memory(num_bytes)
        buffer = PooledBuffer(index, map_shared_memory(descriptor, num_bytes), descriptor)
        self._buffers[index] = buffer
        return buffer


class MappedBuffers:
    """The program's side: the buffers that it has mapped, and those that it has stopped reading."""

    def __init__(self) -> None:
        self._mapped: dict[int, npt.NDArray[np.uint8]] = {}
        self._freed: list[int] = []

    def open(self, message: Message) -> memoryview:
        """Return the memory that a message refers to; when its last reader is gone it is free again."""
        with message.new_memory() as descriptor:
            if descriptor is not None:
                memory = map_shared_memory(descriptor, message.shared_bytes)
                if message.buffer_index == NOT_POOLED:
                    return memory.data
                self._mapped[message.buffer_index] = memory
        reading = self._mapped[message.buffer_index].view()
        # A memoryview and its slices keep this very array alive, not the one it is a view of.
        weakref.finalize(reading, self._freed.append, message.buffer_index).atexit = False
        return reading.data

    def take_freed(self) -> int:
        """Return the buffers that were freed since the last call, one bit each."""
        mask = 0
        while self._freed:
            mask |= 1 << self._freed.pop()
        return mask
