"""Writing in a thread while the program goes on: one write to each location at a time, and no error is lost."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable

from distman._coordination.failure.pending_work import register
from distman._log import logger
from distman._process_state import puts_back
from distman.checkpoint._location import Location
from distman.errors import CheckpointError

_writes: dict[Location, BackgroundWrite] = {}
"""The last write to each place, unless it succeeded or its error was raised."""


class BackgroundWrite:
    """One write in a thread; the end of the interpreter waits for it.

    Args:
        place: What is written, or the folder that it is written into.
        work: Writes it.

    Attributes:
        error: Why it failed; None if it did not, or is not over.
    """

    def __init__(self, place: Location, work: Callable[[], None]) -> None:
        self._place = place
        self.error: BaseException | None = None
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, args=(work,), name="distman-checkpoint", daemon=False)
        self._forget = register(self.end)

    def start(self) -> None:
        """Begin to write."""
        _writes[self._place] = self
        try:
            self._thread.start()
        except BaseException:
            self.settle()
            raise

    def join(self) -> None:
        """Wait until it is over, whatever came of it.

        Blocking. A process forked from the one that writes does not wait.
        """
        if os.getpid() == self._pid:
            self._thread.join()

    def wait(self) -> None:
        """Wait until it is written.

        Blocking.

        Raises:
            Exception: It failed.
        """
        self.join()
        if self.error is not None:
            self.settle()
            raise self.error

    def settle(self) -> None:
        """Forget the write: it succeeded, or the program has got its error."""
        if _writes.get(self._place) is self:
            del _writes[self._place]
        self._forget()

    def end(self) -> None:
        """At the end of the process, wait until it is over, and log an error that nobody has seen.

        Blocking.
        """
        self.join()
        if self.error is not None and os.getpid() == self._pid:
            self.settle()
            logger.error(
                "the background save to %s failed: %r. The previous one is still there", self._place, self.error
            )

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
            self.settle()
        except BaseException as error:  # noqa: BLE001 - it is raised where the program waits, or logged at the end
            self.error = error


def start(place: Location, work: Callable[[], None]) -> BackgroundWrite:
    """Begin to write in the background, where nothing else is being written.

    Args:
        place: What is written, or the folder that it is written into.
        work: Writes it.
    """
    write = BackgroundWrite(place, work)
    write.start()
    return write


def join(place: Location) -> None:
    """Wait until nothing is being written to a place any more.

    Blocking.
    """
    if place in _writes:
        _writes[place].join()


def settle(place: Location) -> None:
    """Wait until nothing is being written to a place any more.

    Blocking.

    Raises:
        Exception: The last write failed, and this was not raised before.
    """
    write = _writes.get(place)
    if write is not None:
        write.wait()


def refuse_after_failure(place: Location) -> None:
    """Wait until nothing is being written to a place any more, as the next write to it has to.

    Blocking.

    Raises:
        CheckpointError: The last write failed, and this was not raised before.
    """
    write = _writes.get(place)
    if write is None:
        return
    write.join()
    if write.error is not None:
        write.settle()
        raise CheckpointError(
            f"the previous background save to {place} failed: {type(write.error).__name__}: {write.error}. Nothing was "
            "saved this time either: remove the cause and save again."
        ) from write.error


@puts_back
@atexit.register
def _tell_at_exit() -> None:
    for write in list(_writes.values()):
        write.end()
