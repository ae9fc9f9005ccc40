"""Signals that a program hears of while it waits for files, without an exception in the middle of something."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any

_HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH)
"""Those that are heard whatever a program asks for."""


class HeardSignals:
    """Keeps signals for who asks, those that end a program and ``more``, in a ``with`` block of the main thread.

    ``wake`` is readable when there may be some.
    """

    def __init__(self, more: Iterable[int] = ()) -> None:
        self._heard = {*_HEARD, *more}
        self.wake, self._waker = socket.socketpair()
        self._received: list[int] = []
        self._previous: dict[int, Any] = {}
        self._previous_fd = -1

    def __enter__(self) -> HeardSignals:
        for end in (self.wake, self._waker):
            end.settimeout(0)
        self._previous_fd = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, self._hear) for number in self._heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self.wake.close()
        self._waker.close()

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self._received.append(number)

    def take(self) -> list[int]:
        """Return those that came since the last call."""
        try:
            self.wake.recv(4096)
        except BlockingIOError:
            return []
        received, self._received = self._received, []
        return received


def is_from_terminal() -> bool:
    """Return whether Ctrl-C may have been pressed: then the terminal has told all processes of this group."""
    for descriptor in (0, 1, 2):
        try:
            return os.tcgetpgrp(descriptor) == os.getpgrp()
        except OSError:
            continue
    return False
