"""Writing in a thread while the program goes on: one write to each location at a time, and no error is lost."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - it must register its end before the last line here does
import os
import threading
from collections.abc import Callable

from distman._base.log import logger
from distman._base.process_state import puts_back
from distman._coordination.failure.pending_work import register
from distman._coordination.time_limit import saves
from distman.checkpoint._location import Location
from distman.errors import CheckpointError

_writes: dict[Location, BackgroundWrite] = {}
"""The last write to each location, unless it succeeded or its error was raised."""


class BackgroundWrite:
    """One write in a thread, to a location or into a folder where none is under way; the interpreter's end waits."""

    def __init__(self, location: Location, work: Callable[[], None]) -> None:
        self._location, self._work = location, work
        self.error: BaseException | None = None
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="distman-checkpoint", daemon=False)
        self._unregister = register(self.end)
        _writes[location] = self
        try:
            self._thread.start()
        except BaseException:
            self.forget()
            raise

    def join(self) -> None:
        """Wait for the thread, however it ends; a process forked from the one that writes does not wait."""
        if os.getpid() == self._pid:
            self._thread.join()

    def wait(self) -> None:
        """Wait until everything is written; raise the error of the write."""
        self.join()
        if self.error is not None:
            self.forget()
            raise self.error

    def forget(self) -> None:
        """Forget the write: it succeeded, or the program has got its error."""
        if _writes.get(self._location) is self:
            del _writes[self._location]
        self._unregister()

    def end(self) -> None:
        """At the end of the process, wait for the write, and log an error that nobody has seen."""
        self.join()
        if self.error is not None and os.getpid() == self._pid:
            self.forget()
            logger.error(
                "the background save to %s failed: %r. The previous one is still there", self._location, self.error
            )

    def _run(self) -> None:
        try:
            with saves().timed(in_background=True):
                self._work()
            self.forget()
        except BaseException as error:  # noqa: BLE001 - it is raised where the program waits, or logged at the end
            self.error = error


def join(location: Location) -> None:
    """Wait for the last write to a location, however it ends."""
    if write := _writes.get(location):
        write.join()


def wait(location: Location) -> None:
    """Wait for the last write to a location; raise its error if that has not been raised yet."""
    if write := _writes.get(location):
        write.wait()


def finish_before_reading(location: Location) -> None:
    """Wait for the writes to a location and the folders it is in; an error not raised yet is a CheckpointError."""
    for written, write in list(_writes.items()):
        if written.storage is location.storage and f"{location.place}/".startswith(f"{written.place}/"):
            write.join()
    _raise_error(location, "What is there was saved before: load again to get it, or save again.")


def refuse_after_failure(location: Location) -> None:
    """Wait for the last write to a location, as the next one has to; an error not raised yet is a CheckpointError."""
    join(location)
    _raise_error(location, "Nothing was saved this time either: remove the cause and save again.")


def _raise_error(location: Location, consequence: str) -> None:
    write = _writes.get(location)
    if write is not None and write.error is not None:
        write.forget()
        raise CheckpointError(
            f"the previous background save to {location} failed: {type(write.error).__name__}: {write.error}. "
            f"{consequence}"
        ) from write.error


@puts_back
@atexit.register  # for what other threads began to save after the main one had ended
def _tell_at_exit() -> None:
    for write in list(_writes.values()):
        write.end()


# Before concurrent.futures takes no more work, which a file system may need to write: callbacks run in reverse order.
threading._register_atexit(_tell_at_exit)  # type: ignore[attr-defined]
