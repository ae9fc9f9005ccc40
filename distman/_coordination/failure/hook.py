"""The end of a process by an error or a failure elsewhere: it is printed, told to whom it concerns, and bounded."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import logging
import mmap
import multiprocessing.process
import multiprocessing.util
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NoReturn

from distman._base import timing
from distman._base.process_state import puts_back
from distman._coordination.failure.delivery import Delivery, Stage, ends_block, errors_in, is_program_over
from distman._coordination.failure.pending_work import complete_all, is_anything_left
from distman._coordination.failure.record import FailureRecord
from distman._coordination.failure.short_traceback import show
from distman._coordination.failure.starter import has_told_of_another, is_shown_by_starter, write_error_file
from distman._coordination.timeouts import keep_threads, leave, run_with_timeout
from distman.errors import JobFailed, _on_acknowledgement

_ONLY_A_THREAD = (
    "The other ranks are not told, and the program goes on, as Python programs do. To end the job instead, call "
    "initialize(fail_with_threads=True)."
)
_ADVICE = (
    f"The job has failed, and this rank ends with exit code {JobFailed.EXIT_CODE}. To save something first: `except "
    "distman.JobFailed: save(..., local=True); raise`, or `finally`. To go on: `with distman.surviving_failure():`. "
    "`except RankFailedError` and `except Exception` let it pass."
)
_RESERVE = 64 << 20
"""Bytes of addresses that nothing is written to, given back when an error is told: memory may be out. A thread takes an
eighth of them for its stack: those that tell, print, look whether it is printed, serve the others and answer them."""


_IMPORTED_IN = os.getpid()

_LAST = -101
"""Priority of a finalizer of ``multiprocessing`` that ends the process. What its queues still hold is sent before, by
one of -5; the last of its own, which remove folders, have -100."""

_MARK = "_distman_reporter"
"""Attribute of an error during which the rank left its job."""

Reporter = Callable[[BaseException], Callable[[], object] | None]
"""Tells the other ranks of an error, and returns what is left to do when it is printed, if anything is."""


class _Exit(SystemExit):
    """What ``sys.exit`` raises. Its end can be seen: where it leaves the program, nothing else tells the code."""


_Exit.__name__ = _Exit.__qualname__ = SystemExit.__name__
_Exit.__module__ = SystemExit.__module__


class _Hook:
    """The exception hook: a reporter tells the other ranks, and the hook before this one prints the traceback."""

    def __init__(self) -> None:
        self.previous: Callable[..., Any] = sys.excepthook
        self.previous_in_threads: Callable[[threading.ExceptHookArgs], Any] = threading.excepthook
        self.previous_exit: Callable[..., NoReturn] = sys.exit
        self.thread_reporter: Callable[[BaseException], None] | None = None
        self.reporter: Reporter | None = None
        self.pid = os.getpid()
        self.actions: list[Callable[[], None]] = []
        self.deliveries: list[Delivery] = []
        self.survived: list[JobFailed] = []
        self.exits: list[weakref.ref[SystemExit]] = []
        self.fine_codes: set[object] = {None, 0}
        self.has_failed = False
        self.is_bounded = False
        self.is_at_last = threading.Event()
        self.exit_code: int | None = None
        self.is_at_exit = threading.Event()
        self.reserve = mmap.mmap(-1, _RESERVE)

    def __call__(self, error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.reserve.close()
        is_told = threading.Event()
        leave(lambda: self.end_if_printing(is_told))
        has_heard = has_told_of_another()
        try:
            self.tell(
                error, lambda: self.show(error_type, error, trace, is_late=has_heard and not has_told_of_another())
            )
        finally:
            is_told.set()

    def tell(self, error: BaseException, show: Callable[[], None] = lambda: None) -> None:
        """Tell the other ranks of an error, and show it here: in this order, since to show it may block, or raise."""
        self.has_failed = True
        self.reserve.close()
        self.bound_end(1)
        reporter, self.reporter = self.reporter, None
        finish: Callable[[], object] | None = None
        try:
            if reporter is not None and os.getpid() == self.pid:
                finish = reporter(error)
        finally:  # memory may be out, say
            try:
                run_with_timeout(_flush, timing.WRITE)
                show()
            finally:
                if finish is not None:
                    finish()

    def in_thread(self, args: threading.ExceptHookArgs) -> None:
        """Show an error that ended another thread, and let it end the job where the program wants that."""
        is_of_rank = self.reporter is not None and os.getpid() == self.pid
        error = args.exc_value if is_of_rank and not issubclass(args.exc_type, SystemExit) else None
        if error is not None and self.thread_reporter is not None:
            self.thread_reporter(error)
        self.previous_in_threads(args)
        if error is not None and self.thread_reporter is None:
            write(f"distman: {args.exc_type.__name__} ended a thread of this rank. {_ONLY_A_THREAD}")

    def show(
        self, error_type: type[BaseException], error: BaseException, trace: TracebackType | None, *, is_late: bool
    ) -> None:
        """Print an error by the hook before this one; without one, standard error may be blocked.

        One that came late, after another rank's failure, has only a line in what the starter shows.
        """
        if is_shown_by_starter() and not is_late:
            return
        is_plain = self.previous is sys.__excepthook__ or getattr(self.previous, "__module__", "") == "distman._startup"
        if not is_plain:
            self.previous(error_type, error, trace)
        elif not run_with_timeout(lambda: show(error_type, error, trace, self.previous), timing.PRINT):
            self.exit_code = 1  # the end of the interpreter would wait for the same lock

    def exit(self, status: object = None, /) -> NoReturn:
        """Stand in for ``sys.exit``: a code other than 0 is a failure; so is any while the job has failed."""
        if threading.current_thread() is not threading.main_thread() or os.getpid() != self.pid:
            self.previous_exit(status)
        is_failing = self.unsurvived() is not None
        error = _Exit(JobFailed.EXIT_CODE if is_failing else status)
        is_fine = isinstance(status, int | None) and status in self.fine_codes
        if not (is_failing or is_fine):
            record = FailureRecord.of(sys.exc_info()[1] or error, -1)  # an error in hand is the reason
            marks = vars(error)  # cleanup() notes there which ranks are to be told
            self.exits.append(weakref.ref(error, lambda _: self.tell_of_exit(record, marks)))
        elif is_failing:
            self.exits.append(weakref.ref(error, lambda _: self.leave()))
        try:
            raise error
        finally:
            del error  # else its traceback would hold this frame, and the frame the error

    def tell_of_exit(self, record: FailureRecord, marks: Mapping[str, object]) -> None:
        """Tell of an exit code, where the interpreter drops what ``sys.exit`` raised: the program has ended with it."""
        if sys._getframe(1).f_back is None and not self.has_failed and os.getpid() == self.pid:
            failure = record.to_failure()
            vars(failure).update(marks)
            self.tell(failure)

    def leave(self) -> None:
        if sys._getframe(1).f_back is None:
            for delivery in self.deliveries:
                delivery.leave()

    def unsurvived(self) -> Delivery | None:
        return next((one for one in self.deliveries if one.stage is not Stage.SURVIVED), None)

    def report_unsurvived(self) -> None:
        """Let the process end with an error unless its program survives another rank's failure."""
        for delivery in self.deliveries:
            delivery.settle()
        failed = self.unsurvived()
        if failed is not None and not self.has_failed and os.getpid() == self.pid:
            if failed.stage is not Stage.LEFT:
                end_with(JobFailed.EXIT_CODE)
            self.tell(failed.record.to_failure())

    def bound_end(self, code: int) -> None:
        if not self.is_bounded:
            self.is_bounded = True
            leave(lambda: self.end_in_time(code))

    def end_in_time(self, code: int) -> None:
        while not is_program_over():
            if _hook is not self:
                return
            time.sleep(timing.END_EVERY)
        if not self.has_failed and self.unsurvived() is None:
            return
        if _may_use_faulthandler():
            with contextlib.suppress(Exception):  # standard error has no descriptor, say
                faulthandler.dump_traceback_later(timing.END_OF_PROCESS + timing.END_MARGIN, exit=True)
            if self.is_at_last.is_set():
                faulthandler.cancel_dump_traceback_later()
        if self.is_at_last.wait(timing.END_OF_PROCESS / 2):
            return
        _end_children()
        if self.is_at_last.wait(timing.END_OF_PROCESS / 2):
            return
        from distman._coordination.tracking import stacks  # here: it needs torch, which a rank may fail without

        write(
            f"distman: this process is cut off: {timing.END_OF_PROCESS:g} s after its program it still runs\n{stacks()}"
        )
        exit_now(code)

    def end_if_printing(self, is_told: threading.Event) -> None:
        """End the process if torch's hook, which wraps this one, still prints an error long after it was told."""
        is_told.wait()
        if self.is_at_exit.wait(timing.PRINT):
            return
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            if str(frame.f_globals.get("__name__")).startswith("torch.") and "excepthook" in frame.f_code.co_name:
                exit_now(1)
            frame = frame.f_back

    def at_exit(self) -> None:
        self.is_at_exit.set()
        self.report_unsurvived()
        if os.getpid() != self.pid or not (self.actions or self.exit_code is not None):
            return
        is_child = multiprocessing.process.parent_process() is not None
        if is_child and not multiprocessing.util.is_exiting():  # from 3.13 on, its finalizers come after exit handlers
            multiprocessing.util.Finalize(None, self.at_exit, exitpriority=_LAST)
            return
        run_with_timeout(logging.shutdown, timing.PRINT)
        if self.exit_code is not None:
            exit_now(self.exit_code)
        run_with_timeout(_flush_all, timing.PRINT)
        _end_children()
        self.abort_job()

    def end_if_swallowed(self) -> None:
        """End a process of ``multiprocessing``; one that ends with an error may still have to print it."""
        self.report_unsurvived()
        if self.exit_code == JobFailed.EXIT_CODE:
            self.at_exit()

    def abort_job(self) -> None:
        """Do what is left to do for the others, which has limits of its own."""
        actions, self.actions = self.actions, []
        if actions:
            self.is_at_last.set()
            if _may_use_faulthandler():
                faulthandler.cancel_dump_traceback_later()
        for action in actions:
            action()


class _Outermost:
    """The outermost exception hook: a program that the failure of another rank has broken ends with the code for that.

    What a hook raises is all that changes the code, and the end is Python's own. If ours raised it, torch's hook, which
    wraps ours, would not print what it has collected. The interpreter keeps the error then, and with it the frames that
    it came through; they are cleared here, so that their files are closed.
    """

    def __init__(self, hook: _Hook) -> None:
        self.hook = hook
        self.previous = sys.excepthook

    @ends_block  # the signal of a failure that came while the main thread waited arrives here
    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.hook.has_failed = True
        self.previous(kind, error, trace)
        if self.hook.exit_code == JobFailed.EXIT_CODE and sys.excepthook is self:
            self.hook.exit_code = None
            for one in errors_in(error):
                traceback.clear_frames(one.__traceback__)
            raise SystemExit(JobFailed.EXIT_CODE)


_hook: _Hook | None = None


def _may_use_faulthandler() -> bool:
    """Return whether this process was not forked: there a thread that is gone may hold the lock of faulthandler."""
    return os.getpid() == _IMPORTED_IN and multiprocessing.process.parent_process() is None


def install(reporter: Reporter) -> None:
    """Put the hook in place at import, so that an early failure is told, and other exit handlers come first."""
    global _hook
    if _hook is None:
        _hook = _Hook()
        sys.excepthook = _hook
        threading.excepthook = _hook.in_thread
        sys.exit = _hook.exit
        atexit.register(_hook.at_exit)
    _hook.reporter = reporter


@puts_back
def uninstall() -> None:
    """Take the hook away. Where another one has wrapped it, it stays, but tells nobody."""
    global _hook
    if _hook is not None:
        if isinstance(sys.excepthook, _Outermost):
            sys.excepthook = sys.excepthook.previous
        if sys.excepthook is _hook:
            sys.excepthook = _hook.previous
        if threading.excepthook == _hook.in_thread:
            threading.excepthook = _hook.previous_in_threads
        if sys.exit == _hook.exit:
            sys.exit = _hook.previous_exit
        atexit.unregister(_hook.at_exit)
        _hook.reporter = None
        _hook = None


def set_reporter(reporter: Reporter | None) -> None:
    """Let another reporter serve from now on, None tells nobody; the launcher may be known only after the import."""
    if reporter is not None:
        keep_threads()  # while there is memory for them
    if _hook is not None:
        _hook.reporter = reporter
    elif reporter is not None:
        install(reporter)


def be_outermost() -> None:
    """Let the hook be around that of torch, which making a process group has put around it."""
    if _hook is not None and not isinstance(sys.excepthook, _Outermost):
        sys.excepthook = _Outermost(_hook)


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


def expect_exits(*codes: int) -> None:
    """Take exit codes for none of a failure from now on, such as that of a stop which all ranks have agreed on."""
    if _hook is not None:
        _hook.fine_codes.update(codes)


def end_with(code: int) -> None:
    """Let this process end with a code, whatever its program ends with.

    The last exit handler ends it: nothing else in Python changes the code of a program that has ended.
    """
    if _hook is not None and _hook.exit_code is None:
        _hook.exit_code = code


def has_failed() -> bool:
    """Return whether an exception that nothing caught is ending this process."""
    return _hook is not None and _hook.has_failed


def require_end(delivery: Delivery) -> None:
    """Let the process end with an error unless its program survives a failure."""
    if _hook is not None:
        if any(map(delivery.record.is_told_by, _hook.survived)):
            delivery.stage = Stage.SURVIVED
        _hook.deliveries.append(delivery)
        _hook.bound_end(JobFailed.EXIT_CODE)
        if multiprocessing.process.parent_process() is not None:  # before Python 3.13 no exit handler
            multiprocessing.util.Finalize(None, _hook.end_if_swallowed, exitpriority=_LAST)


def required_end_by(error: JobFailed) -> JobFailed:
    """Do the same with a failure that a call raises where nobody watches the ranks, show it, and return it."""
    if _hook is not None and not any(one.record.is_told_by(error) for one in _hook.deliveries):
        delivery = Delivery(FailureRecord.of(error, error.rank))
        delivery.note(error, sys._getframe())
        require_end(delivery)
        announce(delivery.record, -1)
    return error


@_on_acknowledgement
def survive(error: JobFailed) -> None:
    if _hook is not None:
        _hook.survived.append(FailureRecord.of(error, error.rank).to_failure())
        for delivery in _hook.deliveries:
            if delivery.record.is_told_by(error):
                delivery.stage = Stage.SURVIVED


def announce(record: FailureRecord, rank: int) -> None:
    """Show a failure of another rank, since Python prints nothing where its error leaves the program."""
    write_error_file(rank, record, record)
    if not is_shown_by_starter():
        write(f"distman: {_ADVICE}\n\nJobFailed: {record.to_failure()}")


def told_again(record: FailureRecord) -> str:
    """Return a failure in words; in one line where it has been shown whole."""
    is_shown = _hook is not None and any(delivery.record == record for delivery in _hook.deliveries)
    return record.headline if is_shown else str(record.to_failure())


def end_job_at_exit(action: Callable[[], None]) -> None:
    """Let something end the job, or a part of it, after the exit handlers, where the launcher would not do so."""
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
        run_with_timeout(_flush_all, timing.PRINT)
        _end_children()
        if is_anything_left() and not run_with_timeout(complete_all, timing.END_OF_WORK):
            write(f"distman: what is being saved was not done in {timing.END_OF_WORK:g} s")
        if _hook is not None:
            _hook.abort_job()
    finally:
        os._exit(code)


def _end_children() -> None:
    """End the processes of ``multiprocessing``, whose parent ends: one may hold a launcher's pipe."""
    for child in multiprocessing.process.active_children():
        child.terminate()


def report_at_end() -> None:
    """At the end of the program, do what the hook would have done if the program had not replaced or evaded it."""
    if _hook is None:
        return
    error = getattr(sys, "last_value", None)
    if not _hook.has_failed and isinstance(error, BaseException) and not hasattr(sys, "ps1"):
        _hook.tell(error)
    _hook.report_unsurvived()


def write(text: str) -> None:
    """Print to standard error, whatever state it is in: closed, None, or a pipe that nobody reads."""
    run_with_timeout(lambda: _write(f"\n{text.rstrip()}\n"), timing.WRITE)


def _write(text: str) -> None:
    with contextlib.suppress(Exception):  # a program's own stream may raise anything
        sys.stderr.write(text)
    _flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # None, closed, a full disk, or a program's own
            stream.flush()


def _flush_all() -> None:
    """Write what the files of this process hold back, which the end of the interpreter would do."""
    _flush()
    for one in gc.get_objects():
        with contextlib.suppress(Exception):  # closed, a full disk, or a program's own class
            if issubclass(type(one), io.IOBase) and not one.closed:
                one.flush()
