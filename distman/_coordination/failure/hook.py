"""The exception hook: an uncaught exception is printed, told to whom it concerns, and ends the job."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from distman._coordination.failure.pending_work import complete_all, is_anything_left
from distman._coordination.timeouts import run_with_timeout
from distman._process_state import puts_back

_PATIENCE = 1.0  # seconds; standard error may be a pipe that nobody reads
_WORK_PATIENCE = 60.0  # seconds; a large checkpoint may be half written, but a job must end

Reporter = Callable[[BaseException], object]


class _Hook:
    """The exception hook: the one before it prints the traceback, then a reporter tells the other ranks."""

    def __init__(self) -> None:
        self.previous: Callable[..., Any] = sys.excepthook
        self.reporter: Reporter | None = None
        self.pid = os.getpid()
        self.actions: list[Callable[[], None]] = []
        self.has_failed = False

    def __call__(self, error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.has_failed = True
        self.previous(error_type, error, trace)
        self.tell(error)

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks of an error that is already printed."""
        self.has_failed = True
        _flush()
        reporter, self.reporter = self.reporter, None
        if reporter is not None and os.getpid() == self.pid:
            reporter(error)

    def at_exit(self) -> None:
        if not self.actions or os.getpid() != self.pid:
            return
        logging.shutdown()
        _flush()
        self.abort_job()

    def abort_job(self) -> None:
        for action in self.actions:
            action()


_hook: _Hook | None = None


def install(reporter: Reporter) -> None:
    """Put the hook in place, with the reporter that serves until the job is up.

    It is done early, at the import of the package, so that a rank that fails on its way to
    ``initialize()`` leaves nobody waiting, and so that the end of the process comes after all other exit
    handlers.
    """
    global _hook
    if _hook is None:
        _hook = _Hook()
        sys.excepthook = _hook
        atexit.register(_hook.at_exit)
    _hook.reporter = reporter


@puts_back
def uninstall() -> None:
    """Take the hook away. Where another one has wrapped it, it stays, but tells nobody."""
    global _hook
    if _hook is not None:
        if sys.excepthook is _hook:
            sys.excepthook = _hook.previous
        atexit.unregister(_hook.at_exit)
        _hook.reporter = None
        _hook = None


def set_reporter(reporter: Reporter | None) -> None:
    """Let another reporter serve from now on; None tells nobody.

    The hook is put in place if it was not, since the launcher became known after the import.
    """
    if _hook is not None:
        _hook.reporter = reporter
    elif reporter is not None:
        install(reporter)


def has_failed() -> bool:
    """Return whether an exception that nothing caught is ending this process."""
    return _hook is not None and _hook.has_failed


def end_job_at_exit(action: Callable[[], None]) -> None:
    """Let something end the job, or a part of it, once the exit handlers of this process have run.

    For launchers that would not end it by themselves.
    """
    if _hook is not None:
        _hook.actions.append(action)


def exit_now(code: int) -> None:
    """End this process without its exit handlers, and the job if that was wanted at exit.

    It may be called from any thread, whatever locks the others hold. What is being saved in the background is
    waited for, a minute at most.
    """
    try:
        run_with_timeout(_flush, _PATIENCE)
        if is_anything_left() and not run_with_timeout(complete_all, _WORK_PATIENCE):
            run_with_timeout(
                lambda: write(f"distman: what is being saved was not done in {_WORK_PATIENCE:g} s"), _PATIENCE
            )
        if _hook is not None:
            _hook.abort_job()
    finally:
        os._exit(code)


def report_uncaught() -> None:
    """At the end of the program, do what the hook would have done, if the program replaced it."""
    error = getattr(sys, "last_value", None)
    if _hook is not None and not _hook.has_failed and isinstance(error, BaseException) and not hasattr(sys, "ps1"):
        _hook.tell(error)


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()


def write(text: str) -> None:
    """Print to standard error, whatever state it is in."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"\n{text.rstrip()}\n")
    _flush()
