"""A second thread that looks after the first: a call into the store of a stopped process never comes back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

_LONGEST_TICK = 1.0  # seconds; nobody needs to know sooner, and a tick costs nothing
_TICKS_PER_LIMIT = 4  # so a short limit is overrun by a quarter of itself at most


class Watchdog:
    """Notices that another thread does not come back from a call."""

    def __init__(self, limit: float, on_silence: Callable[[float], None]) -> None:
        self._limit = limit
        self._on_silence = on_silence  # called once, with the seconds that passed
        self._tick = min(_LONGEST_TICK, limit / _TICKS_PER_LIMIT)
        # It counts its own ticks, not the time: when the whole process was suspended, nobody is late.
        self._num_changes = 0
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="distman-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer, and wait for the thread's end."""
        self._is_stopping.set()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """For the length of a ``with`` block, the thread is in a call that has to come back."""
        self._num_changes += 1
        try:
            yield
        finally:
            self._num_changes += 1

    def _run(self) -> None:
        seen, seconds = 0, 0.0
        while not self._is_stopping.wait(self._tick):
            is_calling = self._num_changes % 2 == 1
            seconds = seconds + self._tick if is_calling and self._num_changes == seen else 0.0
            seen = self._num_changes
            if seconds >= self._limit:
                self._on_silence(seconds)
                return
