"""Memory of this rank that others of its host map, for pieces that are too large to be copied through a socket.

New memory costs more than a copy, since the system hands it out page by page; so segments are used again. While this
rank makes one exchange, the others may still read what it has sent in the one before. They answer before they send
anything in the next one: so a group has two segments, and nobody waits for one.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence

import torch

from distman._base.log import logger

VARIABLE = "DISTMAN_SHARED_MEMORY"
THRESHOLD = 2**17
"""Size in bytes of the smallest piece that goes this way: smaller ones are faster within the message."""
_NUM_SEGMENTS = 2
_LEAST_BYTES = 2**20  # of a segment, so that exchanges of sizes that vary a little share it
_MOST_BYTES = 2**27  # of a segment, which a group keeps
_ALIGNMENT = 64  # bytes: a cache line, and a multiple of the size of any dtype
_NAME = "distman-exchange"


class Segment:
    """Memory that this rank writes to; a reader that maps another one of its slot drops this one."""

    def __init__(self, slot: int, size: int) -> None:
        self.slot, self.size = slot, size
        self.descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, size)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.memory = mapped(self.descriptor)
        self.offsets: dict[int, int] = {}  # where the piece for a rank of the group begins
        self.readers: set[int] = set()  # ranks that may still read a piece
        self.known_to: set[int] = set()  # ranks that have its descriptor
        self.is_held = False  # by a writer

    def is_free(self) -> bool:
        return not self.readers and not self.is_held

    def tensor(self, rank: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the memory of the piece for a rank as a tensor."""
        return as_tensor(self.memory, dtype, shape, self.offsets[rank])


class Segments:
    def __init__(self) -> None:
        self.made: dict[int, Segment] = {}
        self._lock = threading.Lock()
        self._can_grow = hasattr(os, "memfd_create")

    def readers(self) -> set[int]:
        """Return the ranks of the group that have not answered."""
        return set().union(*(segment.readers for segment in tuple(self.made.values())))

    def take(self, pieces: Mapping[int, tuple[int, int]]) -> Segment | None:
        """Return a segment that no rank reads or writes, for the caller to write to; None if all are in use.

        Each rank of the group is to read a piece: a number, alike where it is the same piece, and its size in bytes.
        """
        starts: dict[int, int] = {}  # a tensor for several ranks is written once
        end = 0
        for number, num_bytes in pieces.values():
            if number not in starts:
                starts[number] = end
                end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            segment = self._find(end)
            if segment is not None:
                segment.is_held = True
                segment.offsets = {rank: starts[number] for rank, (number, _) in pieces.items()}
            return segment

    def _find(self, num_bytes: int) -> Segment | None:
        free = [slot for slot in range(_NUM_SEGMENTS) if slot not in self.made or self.made[slot].is_free()]
        fitting = [slot for slot in free if slot in self.made and self.made[slot].size >= num_bytes]
        if fitting:
            return self.made[fitting[0]]
        if not free or num_bytes > _MOST_BYTES or not self._can_grow:
            return None
        try:
            self.made[free[0]] = Segment(free[0], max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length()))
        except OSError as error:
            self._can_grow = False
            logger.warning("ranks of this host exchange over sockets: no shared memory: %s", error)
            return None
        return self.made[free[0]]


def is_wanted() -> bool:
    """Return whether this rank may use sockets and memory of its host."""
    return os.environ.get(VARIABLE, "1") != "0"


def as_tensor(memory: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    return memory[offset : offset + size].view(dtype).view(torch.Size(shape))


def mapped(descriptor: int) -> torch.Tensor:
    if sys.version_info >= (3, 13):
        memory = mmap.mmap(descriptor, 0, trackfd=False)
    else:  # it keeps a descriptor of its own
        memory = mmap.mmap(descriptor, 0)
    with torch.inference_mode(mode=False):  # else nobody could write to it outside
        return torch.frombuffer(memory, dtype=torch.uint8)
