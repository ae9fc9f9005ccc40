"""The exception hook: an uncaught exception is printed, told to whom it concerns, and ends the job."""

from __future__ import annotations

import atexit
import contextlib
import logging
import mmap
import multiprocessing.process
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from distman._coordination.failure.catching import errors_in
from distman._coordination.failure.error_file import is_shown_by_starter
from distman._coordination.failure.pending_work import complete_all, is_anything_left
from distman._coordination.failure.record import FailureRecord
from distman._coordination.failure.short_traceback import show
from distman._coordination.timeouts import keep_threads, run_with_timeout
from distman._process_state import puts_back

EXIT_CODE = 76
"""Exit code of a process whose program cannot be ended by another rank's failure, or has swallowed it.

Source:
    ``EX_PROTOCOL`` of sysexits.h: a remote error.
"""

_PATIENCE = 1.0  # seconds; standard error may be a pipe that nobody reads
_PRINT_PATIENCE = 10.0  # seconds; a terminal over a slow line shows a long traceback in less
_ONLY_A_THREAD = (
    "The other ranks are not told, and the program goes on, as Python programs do. To end the job instead, call "
    "initialize(fail_with_threads=True)."
)
_SWALLOWED = (
    f"This rank's program ended without having handled that error, so its exit code is {EXIT_CODE}. To handle an error "
    "of another rank, catch RankFailedError by name."
)
_RESERVE = 64 << 20
"""Bytes of addresses that nothing is written to, given back when an error is told: memory may be out. A thread takes an
eighth of them for its stack: those that tell, print, look whether it is printed, serve the others and answer them."""

_WORK_PATIENCE = 60.0  # seconds; a large checkpoint may be half written, but a job must end

_LAST = -101
"""Priority of a finalizer of ``multiprocessing`` that ends the process. What its queues still hold is sent before, by
one of -5; the last of its own, which remove folders, have -100."""

_AS_PYTHON = {"distman._startup", "exceptiongroup._formatting"}
"""Modules of hooks, which this one may find in place, that print as Python does: the one in a process without other
ranks, and one for groups of exceptions, which pytest and others bring along with Python 3.10."""

_MARK = "_distman_reporter"
"""Attribute of an error during which the rank left its job."""

Reporter = Callable[[BaseException], Callable[[], object] | None]
"""Tells the other ranks of an error, and returns what is left to do when it is printed, if anything is."""


class Obligation(Protocol):
    """A failure of another rank that this program has to handle."""

    @property
    def record(self) -> FailureRecord:
        """What failed."""

    @property
    def is_handled(self) -> bool:
        """Whether the program has handled it."""

    def conclude(self) -> None:
        """Find out, at the end of the program, whether it has."""


class _Hook:
    """The exception hook: a reporter tells the other ranks, and the hook before this one prints the traceback."""

    def __init__(self) -> None:
        self.previous: Callable[..., Any] = sys.excepthook
        self.previous_in_threads: Callable[[threading.ExceptHookArgs], Any] = threading.excepthook
        self.thread_reporter: Callable[[BaseException], None] | None = None
        self.reporter: Reporter | None = None
        self.pid = os.getpid()
        self.actions: list[Callable[[], None]] = []
        self.obligations: list[Obligation] = []
        self.has_failed = False
        self.exit_code: int | None = None
        self.is_at_exit = threading.Event()
        self.reserve = mmap.mmap(-1, _RESERVE)

    def __call__(self, error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.reserve.close()
        is_told = threading.Event()
        with contextlib.suppress(RuntimeError, MemoryError):  # no thread can be had
            threading.Thread(target=self.end_if_printing, args=[is_told], name="distman-printing", daemon=True).start()
        try:
            self.tell(error, lambda: self.show(error_type, error, trace))
        finally:
            is_told.set()

    def tell(self, error: BaseException, show: Callable[[], None] = lambda: None) -> None:
        """Tell the other ranks of an error, and show it here: in this order, since to show it may block, or raise."""
        self.has_failed = True
        self.reserve.close()
        reporter, self.reporter = self.reporter, None
        finish: Callable[[], object] | None = None
        try:
            if reporter is not None and os.getpid() == self.pid:
                finish = reporter(error)
        finally:  # memory may be out, say
            try:
                _flush_in_time()
                show()
            finally:
                if finish is not None:
                    finish()

    def in_thread(self, args: threading.ExceptHookArgs) -> None:
        """Show an error that ended another thread, and let it end the job where the program wants that."""
        is_mine = self.reporter is not None and os.getpid() == self.pid
        if not is_mine or args.exc_value is None or issubclass(args.exc_type, SystemExit):
            self.previous_in_threads(args)
        elif self.thread_reporter is not None:
            self.thread_reporter(args.exc_value)
            self.previous_in_threads(args)
        else:
            self.previous_in_threads(args)
            write(f"distman: {args.exc_type.__name__} ended a thread of this rank. {_ONLY_A_THREAD}")

    def show(self, error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print an error by the hook before this one; without one, standard error may be blocked."""
        if is_shown_by_starter():
            return
        is_plain = self.previous is sys.__excepthook__ or getattr(self.previous, "__module__", "") in _AS_PYTHON
        if not is_plain:
            self.previous(error_type, error, trace)
        elif not run_with_timeout(lambda: show(error_type, error, trace, self.previous), _PRINT_PATIENCE):
            self.exit_code = 1  # the end of the interpreter would wait for the same lock

    def report_swallowed(self) -> None:
        """Let the process end with an error if its program has swallowed another rank's failure."""
        for obligation in self.obligations:
            obligation.conclude()
        swallowed = [obligation.record for obligation in self.obligations if not obligation.is_handled]
        if swallowed and not self.has_failed and os.getpid() == self.pid:
            self.exit_code = EXIT_CODE
            error = swallowed[0].to_error()
            self.tell(error, lambda: write(f"distman: {error}\n\n{_SWALLOWED}"))

    def end_if_printing(self, is_told: threading.Event) -> None:
        """End the process if torch still prints an error a while after it was told: nobody reads its standard error.

        The hook of torch wraps this one, and writes in the main thread what it has printed.
        """
        is_told.wait()
        if self.is_at_exit.wait(_PRINT_PATIENCE):
            return
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            if str(frame.f_globals.get("__name__")).startswith("torch.") and "excepthook" in frame.f_code.co_name:
                exit_now(1)
            frame = frame.f_back

    def at_exit(self) -> None:
        self.is_at_exit.set()
        self.report_swallowed()
        if os.getpid() != self.pid or not (self.actions or self.exit_code is not None):
            return
        if _has_finalizers():  # which Python calls after the exit handlers of such a process, from 3.13 on
            multiprocessing.util.Finalize(None, self.at_exit, exitpriority=_LAST)
            return
        run_with_timeout(logging.shutdown, _PRINT_PATIENCE)
        if self.exit_code is not None:
            exit_now(self.exit_code)
        _flush_in_time()
        self.abort_job()

    def end_if_swallowed(self) -> None:
        """End a process of ``multiprocessing``; one that ends with an error may still have to print it."""
        self.report_swallowed()
        if self.exit_code == EXIT_CODE:
            self.at_exit()

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
        threading.excepthook = _hook.in_thread
        atexit.register(_hook.at_exit)
    _hook.reporter = reporter


@puts_back
def uninstall() -> None:
    """Take the hook away. Where another one has wrapped it, it stays, but tells nobody."""
    global _hook
    if _hook is not None:
        if sys.excepthook is _hook:
            sys.excepthook = _hook.previous
        if threading.excepthook == _hook.in_thread:
            threading.excepthook = _hook.previous_in_threads
        atexit.unregister(_hook.at_exit)
        _hook.reporter = None
        _hook = None


def set_reporter(reporter: Reporter | None) -> None:
    """Let another reporter serve from now on; None tells nobody.

    The hook is put in place if it was not, since the launcher became known after the import.
    """
    if reporter is not None:
        keep_threads()  # while there is memory for them
    if _hook is not None:
        _hook.reporter = reporter
    elif reporter is not None:
        install(reporter)


def set_reporter_for(error: BaseException, reporter: Reporter) -> None:
    """Let a reporter serve for an error that is under way, should it end the program, and for no other."""
    mark = id(reporter)
    error.__dict__[_MARK] = mark  # to keep the error itself would keep the variables of the frames that it came through
    set_reporter(
        lambda last: reporter(last) if any(one.__dict__.get(_MARK) == mark for one in errors_in(last)) else None
    )


def set_thread_reporter(reporter: Callable[[BaseException], None] | None) -> None:
    """Let an error that ends another thread be told by somebody; None only says that it is not told."""
    if _hook is not None:
        _hook.thread_reporter = reporter


def end_without_destructors() -> None:
    """Let a program that an exception has ended end its process after the last exit handler, with exit code 1.

    The destructor of a process group would wait for collectives that nobody waits for any more, of a rank that is
    stopped, say, until the timeout of collectives. Ctrl-C ends a process in its own way.
    """
    if _hook is not None and _hook.exit_code is None and getattr(sys, "last_type", None) is not KeyboardInterrupt:
        _hook.exit_code = 1


def has_failed() -> bool:
    """Return whether an exception that nothing caught is ending this process."""
    return _hook is not None and _hook.has_failed


def require_handling(obligation: Obligation) -> None:
    """Let the process end with an error unless its program handles a failure."""
    if _hook is not None:
        _hook.obligations.append(obligation)
        if multiprocessing.process.parent_process() is not None:  # before Python 3.13 no exit handler
            multiprocessing.util.Finalize(None, _hook.end_if_swallowed, exitpriority=_LAST)


def _has_finalizers() -> bool:
    return multiprocessing.process.parent_process() is not None and not multiprocessing.util.is_exiting()


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
    if _hook is not None:
        _hook.has_failed = True
    try:
        _flush_in_time()
        _end_daemons()
        if is_anything_left() and not run_with_timeout(complete_all, _WORK_PATIENCE):
            write(f"distman: what is being saved was not done in {_WORK_PATIENCE:g} s")
        if _hook is not None:
            _hook.abort_job()
    finally:
        os._exit(code)


def _end_daemons() -> None:
    """End the daemonic processes of ``multiprocessing``, as the exit handlers would: one may hold a launcher's pipe."""
    for child in multiprocessing.process.active_children():
        if child.daemon:
            child.terminate()


def report_at_end() -> None:
    """At the end of the program, do what the hook would have done if the program had not replaced or evaded it."""
    if _hook is None:
        return
    error = getattr(sys, "last_value", None)
    if not _hook.has_failed and isinstance(error, BaseException) and not hasattr(sys, "ps1"):
        _hook.tell(error)
    _hook.report_swallowed()


def write(text: str) -> None:
    """Print to standard error, whatever state it is in: closed, None, or a pipe that nobody reads."""
    run_with_timeout(lambda: _write(f"\n{text.rstrip()}\n"), _PATIENCE)


def _write(text: str) -> None:
    with contextlib.suppress(Exception):  # a program's own stream may raise anything
        sys.stderr.write(text)
    _flush()


def _flush_in_time() -> None:
    run_with_timeout(_flush, _PATIENCE)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # None, closed, a full disk, or a program's own
            stream.flush()
