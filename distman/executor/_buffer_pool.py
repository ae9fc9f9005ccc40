"""Resident regions: memory for results that is used again, since new memory costs more than the copy."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distman.executor._channel import NO_SLOT, Message
from distman.executor._shared_memory import create_region, map_region

_NUM_SLOTS = 2  # the result in use, and the one that replaces it
_RESIDENT_BYTES = 256 * 1024**2


@dataclass
class Region:
    """A resident region as its worker sees it.

    Attributes:
        slot: Its number.
        memory: The mapped memory.
        news: Its file descriptor as long as the program has not got it.
        is_read: Whether the program holds tensors that lie in it.
    """

    slot: int
    memory: npt.NDArray[np.uint8]
    news: int | None
    is_read: bool = False

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return self.memory.nbytes

    def was_sent(self) -> None:
        """Note that the program now has it."""
        self.is_read = True
        if self.news is not None:
            os.close(self.news)
            self.news = None


class WorkerSlots:
    """The worker's side."""

    def __init__(self) -> None:
        self._regions: dict[int, Region] = {}

    def release(self, free_slots: int) -> None:
        """Note which regions nobody reads any more.

        Args:
            free_slots: One bit for each slot.
        """
        for slot, region in self._regions.items():
            if free_slots >> slot & 1:
                region.is_read = False

    def take(self, num_bytes: int) -> Region | None:
        """Return a region of at least that size; None if there is none to spare, or the result is too large.

        Args:
            num_bytes: What the result needs.
        """
        if num_bytes > _RESIDENT_BYTES:
            return None
        free = [region for region in self._regions.values() if not region.is_read]
        fitting = [region for region in free if region.size >= num_bytes]
        if fitting:
            return min(fitting, key=lambda region: region.size)
        unused = [slot for slot in range(_NUM_SLOTS) if slot not in self._regions]
        slots = unused or [region.slot for region in free]
        return self._open(slots[0], num_bytes) if slots else None

    def _open(self, slot: int, num_bytes: int) -> Region:
        descriptor = create_region(num_bytes)
        region = Region(slot, map_region(descriptor, num_bytes), descriptor)
        self._regions[slot] = region
        return region


class ProgramSlots:
    """The program's side: what it has mapped, and what it has stopped reading."""

    def __init__(self) -> None:
        self._mapped: dict[int, npt.NDArray[np.uint8]] = {}
        self._freed: list[int] = []

    def open(self, message: Message) -> memoryview:
        """Return the memory that a message speaks of; when its last reader is gone it is free again.

        Args:
            message: One with a region.
        """
        with message.new_region() as descriptor:
            if descriptor is not None:
                memory = map_region(descriptor, message.region_bytes)
                if message.slot == NO_SLOT:
                    return memory.data
                self._mapped[message.slot] = memory
        reading = self._mapped[message.slot].view()
        # A memoryview and its slices keep this very array alive, not the one it is a view of.
        weakref.finalize(reading, self._freed.append, message.slot).atexit = False
        return reading.data

    def take_freed(self) -> int:
        """Return the regions that were freed since the last call, one bit each."""
        mask = 0
        while self._freed:
            mask |= 1 << self._freed.pop()
        return mask
