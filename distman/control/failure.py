"""An uncaught exception on one rank: printed, made known to the other ranks, and the end of the job."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from distman.errors import RankFailedError

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = [
    "DEAF_TO_EXIT_CODES",
    "FailureNotice",
    "JobReporter",
    "end_job_at_exit",
    "has_failed",
    "install",
    "set_reporter",
]

DEAF_TO_EXIT_CODES = ("hydra", "mvapich")
"""Launchers that take no notice of a rank which exits with an error."""

_PMI_ABORT = b"cmd=abort exitcode=1\n"
_FAREWELL = 1.5
_PAUSE = 0.02


@dataclasses.dataclass(frozen=True)
class FailureNotice:
    """What a rank that failed says to the others; its fields are those of ``RankFailedError``."""

    rank: int
    host: str
    pid: int
    error_type: str
    error_text: str
    traceback_text: str

    @classmethod
    def of(cls, error: BaseException, rank: int) -> FailureNotice:
        """Return the notice of an exception that this process raised.

        Local.
        """
        return cls(
            rank=rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            error_type=type(error).__name__,
            error_text=str(error),
            traceback_text="".join(traceback.format_exception(error)),
        )


Reporter = Callable[[BaseException], object]


class _Hook:
    """The exception hook: the one before it prints the traceback, then a reporter tells the other ranks."""

    def __init__(self) -> None:
        self.previous: Callable[..., Any] = sys.excepthook
        self.reporter: Reporter | None = None
        self.pid = os.getpid()
        self.ends_job = False
        self.has_failed = False

    def __call__(self, error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.has_failed = True
        self.previous(error_type, error, trace)
        _flush()
        reporter, self.reporter = self.reporter, None
        if reporter is not None and os.getpid() == self.pid:
            reporter(error)

    def at_exit(self) -> None:
        if not self.ends_job or os.getpid() != self.pid:
            return
        logging.shutdown()
        _flush()
        if not _abort_over_pmi():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


_hook: _Hook | None = None


def install(reporter: Reporter) -> None:
    """Put the hook in place, with the reporter that serves until the job is up.

    Local. It is done early, at the import of the package, so that a rank that fails on its way to
    ``initialize()`` leaves nobody waiting, and so that the end of the process comes after all other exit
    handlers.
    """
    global _hook
    if _hook is None:
        _hook = _Hook()
        sys.excepthook = _hook
        atexit.register(_hook.at_exit)
    _hook.reporter = reporter


def set_reporter(reporter: Reporter | None) -> None:
    """Let another reporter serve from now on; None tells nobody.

    Local. Nothing happens where :func:`install` did not put the hook in place.
    """
    if _hook is not None:
        _hook.reporter = reporter


def has_failed() -> bool:
    """Return whether an exception that nothing caught is ending this process.

    Local.
    """
    return _hook is not None and _hook.has_failed


def end_job_at_exit() -> None:
    """Make the launcher end the job once the exit handlers of this process have run.

    Local. For launchers that take no notice of a rank which exits with an error: they are told over PMI, or by
    a signal of which this process dies.
    """
    if _hook is not None:
        _hook.ends_job = True


@dataclasses.dataclass
class JobReporter:
    """Tells the other ranks of a running job, over its store, why this one ends.

    The first rank that fails leaves its notice. The others, whose collectives break when it goes, print that
    notice after their own traceback, so that the cause comes last. The rank that serves the store leaves its
    process group, so that nobody waits for it, and stays for a moment until the others have read.

    Attributes:
        rank: This process's rank.
        num_others: Number of ranks beside this one.
        store: The job's store.
        store_host: Who serves the store, for messages.
        is_host: Whether this process serves it.
        is_store_there: Tells whether the store still answers.
        leave_group: Closes this process's connections to the others.
        end_job: Makes the launcher end the job once this process ends, where it would not do so by itself.
    """

    rank: int
    num_others: int
    store: Store
    store_host: str
    is_host: bool
    is_store_there: Callable[[], bool]
    leave_group: Callable[[], None]
    end_job: Callable[[], None]

    def __call__(self, error: BaseException) -> None:
        """Tell of an exception that nothing caught.

        Local.
        """
        self.end_job()
        if isinstance(error, KeyboardInterrupt):
            return
        if not self.is_store_there():
            _write(f"distman: {self.store_host}, which served the job's store, is gone. See its error.")
            return
        first = self._first_notice(FailureNotice.of(error, self.rank))
        if first.rank != self.rank and not isinstance(error, RankFailedError):
            _write(f"distman: the job failed first elsewhere: {RankFailedError(**dataclasses.asdict(first))}")
        self.store.add("failure_seen", 1)
        if self.is_host:
            self._stay_until_seen()

    def _first_notice(self, mine: FailureNotice) -> FailureNotice:
        text = json.dumps(dataclasses.asdict(mine))
        return FailureNotice(**json.loads(self.store.compare_set("failure", "", text)))

    def _stay_until_seen(self) -> None:
        leaving = threading.Thread(target=self.leave_group, daemon=True)
        leaving.start()
        leaving.join(_FAREWELL)
        until = time.monotonic() + _FAREWELL
        while self.store.add("failure_seen", 0) <= self.num_others and time.monotonic() < until:
            time.sleep(_PAUSE)


def _abort_over_pmi() -> bool:
    """Ask the launcher to end the job, as ``MPI_Abort`` does, and return whether it could be asked.

    Source:
        PMI version 1, wire protocol, command ``abort``; the descriptor is handed over as ``PMI_FD``.
    """
    try:
        descriptor = int(os.environ.get("PMI_FD", ""))
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        os.write(descriptor, _PMI_ABORT)
    except (OSError, ValueError):
        return False
    return True


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"\n{text.rstrip()}\n")
    _flush()
