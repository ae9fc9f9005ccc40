"""What processes write: their stacks, their last words, and how they ended."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import NoReturn

# Enough for the stacks of a hundred threads, and still readable in an error message or a test report.
_SHOWN_BYTES = 100_000
_LIBC = ctypes.CDLL(None)  # once: it takes as long as a whole call of an executor


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
    _LIBC.fflush(None)


def exit_code_of(error: BaseException | None) -> int:
    """Return the exit code of a process in which nobody catches this error."""
    code = error.code if isinstance(error, SystemExit) else error
    return code & 0xFF if isinstance(code, int) else int(code is not None)


@contextlib.contextmanager
def only_this_process() -> Iterator[None]:
    """End a copy of this process that the code inside makes with ``os.fork`` and does not end: it must not answer."""
    pid = os.getpid()
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        if os.getpid() != pid:
            _end(error)


@contextlib.contextmanager
def whole_process() -> Iterator[None]:
    """End this process after a ``with`` block, as an interpreter ends after its program."""
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:  # noqa: BLE001 - nobody above would see it
        error = raised
    finally:
        _end(error)


def _end(error: BaseException | None) -> NoReturn:
    """End this process at once, with the output and the exit code that an interpreter would have after this error."""
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int | None):
            sys.stderr.write(f"{error.code}\n")
    elif error is not None:
        traceback.print_exception(error)
    flush_output()
    os._exit(exit_code_of(error))


def describe_exit(exit_code: int | None) -> str:
    """Return how a process ended, such as ``"died of SIGKILL"``; the exit code is None if its server was killed."""
    if exit_code is None:
        return "was killed with its server"
    if exit_code >= 0:
        return f"died with exit code {exit_code}"
    try:
        return f"died of {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"died of signal {-exit_code}"
