"""One thread at a time starts or ends the job."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class OneAtATime:
    """Lets one thread at a time start or end the job.

    A thread that waits here can be interrupted, by Ctrl-C or by the failure of another rank: waits for locks let signal
    handlers run.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, in a forked child: it has none of the threads that were at it."""
        self._lock = threading.RLock()  # a signal may come between its acquisition and the note of its owner
        self._owner: int | None = None

    @property
    def is_here(self) -> bool:
        """Whether this thread is at it already: a signal handler asks, or the destructor of an object."""
        return self._owner == threading.get_ident()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other thread starts or ends the job, and let none begin."""
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None
