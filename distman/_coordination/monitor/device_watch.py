"""Waits for a GPU: calls of NCCL return at once, and a program hangs where it wants a number of its GPU later."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from distman._coordination import tracking
from distman._coordination.timeouts import begin


@dataclasses.dataclass(eq=False)
class DeviceWait:
    """The main thread waits for its GPU."""

    place: str  # in the user's program
    since: float  # when it was seen there first

    def __str__(self) -> str:
        return f"work of its GPU at {self.place}"


class DeviceWatch:
    """Finds out that the main thread waits for a GPU which comes to no end.

    A program that is slow is found at one place look after look, too. So once it was at one for half of the limit,
    another thread waits for all that the GPU was given by then: a GPU that works comes to the end of that. Nothing is
    asked of the GPU sooner, since another thread must not do so while CUDA records a graph.
    """

    def __init__(self, limit: float, wait_for_device: Callable[[], None]) -> None:
        self._limit = limit  # seconds that a wait may last
        self._wait_for_device = wait_for_device
        self._has_device_come: Callable[[float | None], bool] | None = None
        self._wait = DeviceWait("", 0.0)

    def look(self) -> DeviceWait | None:
        """Return what the main thread, not this one, seems to wait for; only its length proves that it does."""
        place, now = tracking.line_of_main_thread(), time.monotonic()
        if place != self._wait.place or self._is_device_done():
            self._wait = DeviceWait(place, now)
        elif now - self._wait.since > self._limit / 2:
            self._has_device_come = self._has_device_come or begin(self._wait_for_device)
            return self._wait
        return None

    def _is_device_done(self) -> bool:
        try:
            is_done = self._has_device_come is not None and self._has_device_come(0)
        except RuntimeError:  # a kernel has failed, which the program hears of itself
            is_done = True
        if is_done:
            self._has_device_come = None
        return is_done
