"""Signals that a command hears of while it waits for files, without an exception in the middle of something."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH)


@contextmanager
def heard(more: Iterable[int] = ()) -> Iterator[socket.socket]:
    """Yield a socket with the number of each signal that arrives meanwhile, as a byte; it has no other effect."""
    wake, waker = socket.socketpair()
    with wake, waker:
        for end in (wake, waker):
            end.settimeout(0)
        previous_fd = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        # SIGHUP stays ignored where it is, as under ``nohup``.
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        numbers = {*_HEARD, *more} - ignored
        previous = {number: signal.signal(number, lambda _number, _frame: None) for number in numbers}
        try:
            yield wake
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_fd)


def received(signals: socket.socket) -> bytes:
    """Return the numbers of the signals that have arrived since the last call."""
    try:
        return signals.recv(4096)
    except BlockingIOError:
        return b""


def is_from_terminal() -> bool:
    """Return whether Ctrl-C may have been pressed: then the terminal has told all processes of this group."""
    for descriptor in (0, 1, 2):
        try:
            return os.tcgetpgrp(descriptor) == os.getpgrp()
        except OSError:
            continue
    return False
