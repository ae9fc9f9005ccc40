"""One thread at a time starts or ends the job."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from distman._coordination.tracking import call_site
from distman.errors import DistmanError


class _Start:
    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.is_over = threading.Event()
        self.error: BaseException | None = None


class OneAtATime:
    """Lets one thread at a time start or end the job; who wants to start it meanwhile shares the outcome.

    Whoever waits here can be interrupted, by Ctrl-C or by the failure of another rank: waits for locks and events let
    signal handlers run.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, in a forked child: it has none of the threads that were at it."""
        self._lock = threading.RLock()  # a signal may come between its acquisition and the note of its owner
        self._owner: int | None = None
        self._starts: dict[str, _Start] = {}

    @property
    def is_here(self) -> bool:
        """Whether this thread is at it already: a signal handler asks, or the destructor of an object."""
        return self._owner == threading.get_ident()

    @contextlib.contextmanager
    def start(self) -> Iterator[bool]:
        """Yield True, or False where another thread has just started the job while this one waited.

        The error of a thread that tried to start it meanwhile is raised here too.
        """
        queued = self._starts.get("")
        if self.is_here or (queued is not None and queued.thread == threading.get_ident()):
            raise DistmanError(
                f"initialize() must not be called while this thread starts or ends the job, got a call at "
                f"{call_site()}. Move it out of the signal handler or destructor."
            )
        mine = _Start()
        try:
            under_way = self._starts.setdefault("", mine)  # in one step, whatever other threads do
            if under_way is mine:
                with self.end():
                    yield True
            else:
                under_way.is_over.wait()
                if under_way.error is not None:
                    raise under_way.error
                yield False
        except BaseException as error:
            mine.error = error
            raise
        finally:
            if self._starts.get("") is mine:
                del self._starts[""]
            mine.is_over.set()

    @contextlib.contextmanager
    def end(self) -> Iterator[None]:
        """Wait until no other thread starts or ends the job, and let none begin."""
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None
