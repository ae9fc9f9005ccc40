"""An object as a pickle, with the contents of its tensors and arrays beside it, to be copied into shared memory.

The memory has no name, so no process that dies leaves any of it in the file system.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from distman._workers.tensor_pickling import StoragePickler

# A socket takes messages of up to some 200 KB by default, and below this size a copy costs less than a mapping.
INLINE_BYTES = 64 * 1024
# Below this size a copy into the pickle costs less than a buffer of its own.
_OUT_OF_BAND_BYTES = 16 * 1024
_ALIGNMENT = 64  # bytes; the cache line, and what vector instructions want at most
_PLAIN_TYPES = frozenset({type(None), bool, int, float, str})


@dataclass(frozen=True)
class Payload:
    stream: bytes  # its pickle
    # what the pickle refers to: the memory of large tensors and arrays, not yet copied
    buffers: tuple[memoryview, ...] = ()

    @property
    def is_inline(self) -> bool:
        return not self.buffers and len(self.stream) <= INLINE_BYTES

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
    def in_shared_memory(self) -> Iterator[int]:
        """Write it into new shared memory of ``total_bytes``, and lend the file descriptor."""
        descriptor = create_shared_memory(self.total_bytes)
        try:
            self.write(map_shared_memory(descriptor, self.total_bytes))
            yield descriptor
        finally:
            os.close(descriptor)


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

    file = io.BytesIO()
    StoragePickler(file, protocol=5, buffer_callback=is_in_stream).dump(value)
    return Payload(file.getvalue(), tuple(buffers))


def unpack(memory: memoryview, stream_bytes: int, num_buffers: int) -> Any:
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


def create_shared_memory(num_bytes: int) -> int:
    """Return the file descriptor of new shared memory of at least one byte, whatever the size of ``/dev/shm``."""
    descriptor = os.memfd_create("distman-executor")
    try:
        os.ftruncate(descriptor, num_bytes)
    except BaseException:  # Ctrl-C too: nothing else refers to this memory
        os.close(descriptor)
        raise
    return descriptor


def map_shared_memory(descriptor: int, num_bytes: int, *, is_private: bool = False) -> npt.NDArray[np.uint8]:
    """Return the memory behind a file descriptor, which may be closed afterwards.

    The mapping lasts as long as the array and its views. What is written to a private one stays unseen by the other
    processes.
    """
    # torch maps without keeping a descriptor open; Python's mmap keeps one for each mapping.
    storage: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{descriptor}", not is_private, num_bytes)
    array: npt.NDArray[np.uint8] = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
    return array
