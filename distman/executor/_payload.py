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
_HEADER = struct.Struct("<BQQQ")
_PLAIN_TYPES = frozenset({type(None), bool, int, float, str})


@dataclass(frozen=True)
class Payload:
    stream: bytes  # its pickle
    # what the pickle refers to: the memory of large tensors and arrays, not yet copied
    buffers: tuple[memoryview, ...] = ()

    @property
    def total_bytes(self) -> int:
        """What ``write`` needs."""
        head = 8 * len(self.buffers) + len(self.stream)
        return _aligned(head) + sum(_aligned(buffer.nbytes) for buffer in self.buffers)

    def write(self, memory: npt.NDArray[np.uint8]) -> None:
        """Write it into memory of ``total_bytes`` or more: the sizes of the buffers, the pickle, the buffers."""
        head = struct.pack(f"<{len(self.buffers)}Q", *(buffer.nbytes for buffer in self.buffers)) + self.stream
        memory[: len(head)] = np.frombuffer(head, np.uint8)
        start = _aligned(len(head))
        for buffer in self.buffers:
            memory[start : start + buffer.nbytes] = np.frombuffer(buffer, np.uint8)
            start += _aligned(buffer.nbytes)

    @contextlib.contextmanager
    def in_shared_memory(self) -> Iterator[int | None]:
        """Write it into new shared memory of ``total_bytes``, and lend the file descriptor; None if it is inline."""
        if not self.buffers and len(self.stream) <= _INLINE_BYTES:
            yield None
            return
        descriptor = os.memfd_create("distman-executor")  # of any size, whatever that of /dev/shm
        try:
            os.ftruncate(descriptor, self.total_bytes)
            self.write(_map_shared_memory(descriptor, self.total_bytes))
            yield descriptor
        finally:
            os.close(descriptor)


class Kind(IntEnum):
    TASK = 0
    VALUE = 1
    FAILURE = 2


@dataclass
class Message:
    kind: Kind
    num_buffers: int  # beside the pickle
    stream_bytes: int  # length of the pickle
    shared_bytes: int  # size of the shared memory; 0 if the pickle is here
    stream: bytes  # the pickle, if it is here
    descriptor: int | None  # the shared memory; ``contents`` closes it

    def contents(self, *, is_private: bool = False) -> Any:
        """Return the object; what a receiver writes to private memory stays unseen by the other processes."""
        if self.descriptor is None:
            return pickle.loads(self.stream)  # noqa: S301 - written by a process of ours
        try:
            memory = _map_shared_memory(self.descriptor, self.shared_bytes, is_private=is_private).data
        finally:
            os.close(self.descriptor)
            self.descriptor = None
        return _unpack(memory, self.stream_bytes, self.num_buffers)


def send(connection: socket.socket, kind: Kind, payload: Payload, descriptor: int | None) -> None:
    """Send a payload, or in which shared memory it has been written; does not block if what came before was read."""
    shared_bytes = 0 if descriptor is None else payload.total_bytes
    header = _HEADER.pack(kind, len(payload.buffers), len(payload.stream), shared_bytes)
    if descriptor is None:
        connection.send(header + payload.stream)
    else:
        socket.send_fds(connection, [header], [descriptor])


def receive(connection: socket.socket, *, waits: bool = True) -> Message | None:
    """Return the next message, or None if the other side has hung up, or has sent none and this does not wait."""
    size = _HEADER.size + _INLINE_BYTES
    try:
        data, descriptors = receive_with_descriptors(connection, size, 1, 0 if waits else socket.MSG_DONTWAIT)
    except (ConnectionResetError, BlockingIOError):
        return None
    if not data:
        return None
    kind, num_buffers, stream_bytes, shared_bytes = _HEADER.unpack_from(data)
    descriptor = descriptors[0] if descriptors else None
    return Message(Kind(kind), num_buffers, stream_bytes, shared_bytes, data[_HEADER.size :], descriptor)


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


def _unpack(memory: memoryview, stream_bytes: int, num_buffers: int) -> Any:
    """Return the object that ``Payload.write`` wrote there; its tensors and arrays live in that memory."""
    sizes = struct.unpack_from(f"<{num_buffers}Q", memory)
    start = 8 * num_buffers
    stream = memory[start : start + stream_bytes]
    start = _aligned(start + stream_bytes)
    buffers = []
    for size in sizes:
        buffers.append(memory[start : start + size])
        start += _aligned(size)
    return pickle.loads(stream, buffers=buffers)  # noqa: S301 - written by a process of ours


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _map_shared_memory(descriptor: int, num_bytes: int, *, is_private: bool = False) -> npt.NDArray[np.uint8]:
    """Return the memory behind a file descriptor, which may be closed before the array and its views are gone."""
    # torch maps without keeping a descriptor open; Python's mmap keeps one for each mapping.
    storage: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{descriptor}", not is_private, num_bytes)
    array: npt.NDArray[np.uint8] = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
    return array
