"""Messages between the program and a worker: a pickle, with the contents of tensors and arrays beside it.

Small ones are sent whole, large ones as shared memory, which has no name: no process that dies leaves any of it in the
file system.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from distman._workers.sockets import receive_with_descriptors
from distman._workers.tensor_pickling import StoragePickler

# A socket takes messages of up to some 200 KB by default, and below this size a copy costs less than a mapping.
_INLINE_BYTES = 64 * 1024
# Below this size a copy into the pickle costs less than a buffer of its own.
_OUT_OF_BAND_BYTES = 16 * 1024
_ALIGNMENT = 64  # bytes; the cache line, and what vector instructions want at most
_HEADER = struct.Struct("<BQ")
_PLAIN_TYPES = frozenset({type(None), bool, int, float, str})


@dataclass(frozen=True)
class Payload:
    stream: bytes  # its pickle
    # what the pickle refers to: the memory of large tensors and arrays, not yet copied
    buffers: tuple[memoryview, ...] = ()

    @contextlib.contextmanager
    def in_shared_memory(self) -> Iterator[tuple[int, int] | None]:
        """Write it into new shared memory: the pickle with the sizes of the buffers, then these.

        Lends the file descriptor, with the length of the former; None if all is to be sent in the message.
        """
        if not self.buffers and len(self.stream) <= _INLINE_BYTES:
            yield None
            return
        head = pickle.dumps((self.stream, [buffer.nbytes for buffer in self.buffers]))
        parts = [memoryview(head), *self.buffers]
        descriptor = os.memfd_create("distman-executor")  # of any size, whatever that of /dev/shm
        try:
            os.ftruncate(descriptor, sum(_aligned(part.nbytes) for part in parts))
            memory, start = _map_shared_memory(descriptor), 0
            for part in parts:
                memory[start : start + part.nbytes] = np.frombuffer(part, np.uint8)
                start += _aligned(part.nbytes)
            yield descriptor, len(head)
        finally:
            os.close(descriptor)


class Kind(IntEnum):
    TASK = 0
    VALUE = 1
    FAILURE = 2


@dataclass
class Message:
    kind: Kind
    head_bytes: int  # of the shared memory; 0 if the pickle is here
    stream: bytes  # the pickle, if it is here
    descriptor: int | None  # the shared memory; ``contents`` closes it

    def contents(self, *, is_private: bool = False) -> Any:
        """Return the object; what a receiver writes to private memory stays unseen by the other processes."""
        if self.descriptor is None:
            return pickle.loads(self.stream)  # noqa: S301 - written by a process of ours
        try:
            memory = _map_shared_memory(self.descriptor, is_private=is_private).data
        finally:
            os.close(self.descriptor)
            self.descriptor = None
        stream, sizes = pickle.loads(memory)  # noqa: S301 - written by a process of ours
        buffers, start = [], _aligned(self.head_bytes)
        for size in sizes:
            buffers.append(memory[start : start + size])  # in which its tensors and arrays live
            start += _aligned(size)
        return pickle.loads(stream, buffers=buffers)  # noqa: S301 - the same


def send(connection: socket.socket, kind: Kind, payload: Payload, shared: tuple[int, int] | None) -> None:
    """Send a payload, or in which shared memory it has been written; does not block if what came before was read."""
    if shared is None:
        connection.send(_HEADER.pack(kind, 0) + payload.stream)
    else:
        descriptor, head_bytes = shared
        socket.send_fds(connection, [_HEADER.pack(kind, head_bytes)], [descriptor])


def receive(connection: socket.socket, *, waits: bool = True) -> Message | None:
    """Return the next message, or None if the other side has hung up, or has sent none and this does not wait."""
    size = _HEADER.size + _INLINE_BYTES
    try:
        data, descriptors = receive_with_descriptors(connection, size, 1, 0 if waits else socket.MSG_DONTWAIT)
    except (ConnectionResetError, BlockingIOError):
        return None
    if not data:
        return None
    kind, head_bytes = _HEADER.unpack_from(data)
    return Message(Kind(kind), head_bytes, data[_HEADER.size :], descriptors[0] if descriptors else None)


def pack(value: object) -> Payload:
    """Return the object as a payload; it must not change before that is written. Tensors come out on the CPU."""
    if type(value) in _PLAIN_TYPES:
        return Payload(pickle.dumps(value))
    buffers: list[memoryview] = []

    def is_in_stream(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _OUT_OF_BAND_BYTES:
            return True
        buffers.append(raw)
        return False

    stream = StoragePickler.dumps(value, protocol=5, buffer_callback=is_in_stream)
    return Payload(stream, tuple(buffers))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _map_shared_memory(descriptor: int, *, is_private: bool = False) -> npt.NDArray[np.uint8]:
    """Return the memory behind a file descriptor, which may be closed before the array and its views are gone."""
    # torch maps without keeping a descriptor open; Python's mmap keeps one for each mapping.
    num_bytes = os.fstat(descriptor).st_size
    storage: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{descriptor}", not is_private, num_bytes)
    array: npt.NDArray[np.uint8] = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
    return array
