"""Ending what the main thread does when another rank has failed: by an exception, or by the end of the process."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from distman._coordination.failure import hook
from distman._coordination.failure.record import FailureRecord
from distman._coordination.tracking import stacks

EXIT_CODE = 76
"""Exit code of a process that another rank's failure found in code that cannot be interrupted.

Source:
    ``EX_PROTOCOL`` of sysexits.h: a remote error.
"""

_SIGNAL = signal.SIGURG  # ignored by default: harmless where it meets nobody
_GRACE = 3.0  # seconds; a main thread that runs Python comes to a signal at once, after a busy call of numpy say


class Interruption:
    """Raises ``RankFailedError`` in the main thread from another thread.

    A signal handler of Python's does it, so calls of the system that wait come back. Code of C or C++ that does not
    return to the interpreter, such as a wait of gloo or CUDA, cannot be interrupted so: after some seconds the
    process says why, and ends.

    Args:
        abort_job: Makes the launcher end the job after an error, where it would not do so by itself.
        is_over: Set when this rank leaves the job: then nothing has to be interrupted.
        grace: Seconds within which the main thread must have come back to the interpreter.
    """

    def __init__(
        self, abort_job: Callable[[BaseException], None], is_over: threading.Event, *, grace: float = _GRACE
    ) -> None:
        self._abort_job = abort_job
        self._is_over = is_over
        self._grace = grace
        self._record: FailureRecord | None = None
        self._is_delivered = threading.Event()
        self._is_awaited = False
        self._previous: Callable[[int, FrameType | None], Any] | int | None = None
        self._is_installed = threading.current_thread() is threading.main_thread()
        if self._is_installed:
            self._previous = signal.signal(_SIGNAL, self._handle)

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """For the length of a ``with`` block, raise nothing: the main thread waits for the record, and will see it."""
        self._is_awaited = threading.current_thread() is threading.main_thread()
        try:
            yield
        finally:
            self._is_awaited = False

    def restore(self) -> None:
        """Put the signal handler back that was there before."""
        if self._is_installed and threading.current_thread() is threading.main_thread():
            signal.signal(_SIGNAL, self._previous if self._previous is not None else signal.SIG_DFL)
        self._is_installed = False

    def deliver(self, record: FailureRecord) -> None:
        """Make the main thread raise what the record says, or end the process.

        Blocking. Not for the main thread.
        """
        self._record = record
        main = threading.main_thread().ident
        if self._is_installed and main is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pthread_kill(main, _SIGNAL)
        if self._is_delivered.wait(self._grace) or self._is_over.is_set() or hook.has_failed():
            return
        self._exit(record)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        record, self._record = self._record, None
        if record is not None:
            self._is_delivered.set()
            if not (hook.has_failed() or self._is_awaited or self._is_over.is_set()):
                raise record.to_error()
        elif callable(self._previous):
            self._previous(number, frame)

    def _exit(self, record: FailureRecord) -> None:
        text = f"distman: {record.to_error()}\n\nThis process could not be interrupted:\n{stacks()}"
        hook.write(text)
        self._abort_job(record.to_error())
        hook.exit_now(EXIT_CODE)
