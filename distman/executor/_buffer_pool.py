"""Shared memory for results that is used again, since new memory costs more than the copy."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distman.executor._channel import NOT_POOLED, Message
from distman.executor._payload import create_shared_memory, map_shared_memory

_NUM_BUFFERS = 2  # the result in use, and the one that replaces it
# A worker keeps twice this for as long as it lives; of larger results, new memory is a small part of the work.
_MOST_BYTES = 256 * 1024**2


@dataclass
class PooledBuffer:
    """A buffer as its worker sees it."""

    index: int  # its place in the pool
    memory: npt.NDArray[np.uint8]
    unsent: int | None  # the descriptor, for as long as the program has not got it
    is_read: bool = False  # whether the program holds tensors that are in it

    @property
    def size(self) -> int:
        return self.memory.nbytes

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
        """Note which buffers nobody reads any more, one bit each."""
        for index, buffer in self._buffers.items():
            if free_buffers >> index & 1:
                buffer.is_read = False

    def take(self, num_bytes: int) -> PooledBuffer | None:
        """Return a buffer of at least that size; None if all are in use, or the result is too large."""
        if num_bytes > _MOST_BYTES:
            return None
        free = [buffer for buffer in self._buffers.values() if not buffer.is_read]
        fitting = [buffer for buffer in free if buffer.size >= num_bytes]
        if fitting:
            return min(fitting, key=lambda buffer: buffer.size)
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
