"""What processes write: their stacks, their last words, and how they ended."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import sys

# Enough for the stacks of a hundred threads, and still readable in an error message or a test report.
_SHOWN_BYTES = 100_000


def open_stacks() -> int:
    """Return the file descriptor of a file in memory, to which a worker's stacks are appended."""
    descriptor = os.memfd_create("distman-stacks")
    append_only(descriptor)
    return descriptor


def append_only(descriptor: int) -> None:
    """Let writing processes append, also after the file was emptied."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_RDWR | os.O_APPEND)


def read_output(descriptor: int) -> str:
    """Return what was written to a file; of very much, the end."""
    size = os.fstat(descriptor).st_size
    skipped = max(0, size - _SHOWN_BYTES)
    text = os.pread(descriptor, size - skipped, skipped).decode(errors="backslashreplace")
    return f"[{skipped} bytes before this are left out]\n{text}" if skipped else text


def flush_output() -> None:
    """Write out what Python and C libraries hold back: this process may be ended at any time."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError, AttributeError):  # closed, broken, or none at all
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def describe_exit(exit_code: int | None) -> str:
    """Return how a process ended, such as ``"died of SIGKILL"``.

    Args:
        exit_code: Its exit code, or minus the number of a signal; None if its server was killed.
    """
    if exit_code is None:
        return "was killed with its server"
    if exit_code >= 0:
        return f"died with exit code {exit_code}"
    try:
        return f"died of {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"died of signal {-exit_code}"
