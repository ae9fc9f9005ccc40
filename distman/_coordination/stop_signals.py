"""The signals that ask a rank to stop: its handlers, and those of workers that it forks."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from distman._base import timing
from distman._base.log import logger

_VARIABLE = "DISTMAN_STOP_SIGNALS"

DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What Slurm, LSF, PBS and Kubernetes send, what ``mpirun`` hands on, and what submitit asks Slurm for."""

_NEVER = {"KILL", "STOP", "ABRT", "BUS", "FPE", "ILL", "QUIT", "SEGV", "SYS", "TRAP", "CHLD", "PIPE", "URG"}
"""Those that no program can handle, that mean a crash, or that Python, torch or the watcher needs."""


def stop_signals(environ: Mapping[str, str]) -> tuple[signal.Signals, ...]:
    """Return the signals that ask for a stop: those that a variable names, such as ``TERM,SIGHUP``, or the default."""
    text = environ.get(_VARIABLE)
    if not text:
        return DEFAULT_SIGNALS
    names = [name.strip().upper().removeprefix("SIG") for name in text.split(",")]
    known = {one.name.removeprefix("SIG"): one for one in signal.Signals}
    for name in names:
        if name not in known or name in _NEVER:
            raise ValueError(
                f"a stop signal must be one that a program can handle, got {name!r} from {_VARIABLE}. Name some "
                "of TERM, USR1, USR2, HUP, INT, separated by commas."
            )
    return tuple(dict.fromkeys(known[name] for name in names))


Handler = Callable[[int, FrameType | None], Any] | int | None


class StopSignals:
    def __init__(self, signals: Sequence[int], request: Callable[[str], None]) -> None:
        self._signals = signals
        self._request = request
        self._previous: dict[int, Handler] = {}
        self._is_over = False
        self._has_warned = False
        self._pid = os.getpid()
        multiprocessing.util.register_after_fork(self, StopSignals._spare_worker)  # while this object lives

    def _spare_worker(self) -> None:
        from distman._torch_internals import is_loader_worker  # here: `distman run` needs the names of signals only

        if not self._is_over and is_loader_worker(multiprocessing.current_process()):
            _leave_to_rank(self._signals)

    def listen(self) -> None:
        """Handle the signals; a handler that was there is called too, unless it would end this rank alone."""
        if self._previous:
            return
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: _handler_in_use(number) for number in self._signals}
            for number in self._signals:
                signal.signal(number, self._on_signal)
        elif not self._has_warned:
            self._has_warned = True
            logger.warning(
                "should_stop() cannot listen to signals in the thread %r: Python lets only the main thread do so, and "
                "%s would end this process. Call should_stop() in the main thread once, or request_stop() instead",
                threading.current_thread().name,
                ", ".join(signal.Signals(number).name for number in self._signals),
            )

    def restore(self) -> None:
        """Put the earlier handlers back, in the main thread; where this one stays, it hands each signal over."""
        self._is_over = True
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._on_signal and handler is not None:
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous[number]
        is_child = os.getpid() != self._pid  # to which the signal means what it always meant
        if not (self._is_over or is_child):
            self._request(f"{signal.Signals(number).name} of process {os.getpid()}")
        elif not (callable(previous) or previous == signal.SIG_IGN):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if callable(previous) and (self._is_over or is_child or not _ends_at_once(previous)):
            previous(number, frame)


def _ends_at_once(handler: Callable[..., Any]) -> bool:
    """Return whether a handler ends its rank by itself, before the ranks could stop together: Python's, submitit's."""
    is_of_submitit = str(getattr(handler, "__module__", "")).partition(".")[0] == "submitit"
    return handler is signal.default_int_handler or is_of_submitit


def _handler_in_use(number: int) -> Handler:
    """Return what handles a signal, or did before agreements that are over."""
    handler = signal.getsignal(number)
    while isinstance(stop_signals := getattr(handler, "__self__", None), StopSignals) and stop_signals._is_over:
        handler = stop_signals._previous[number]
    return handler


def _leave_to_rank(signals: Sequence[int]) -> None:
    """Let this worker of a loader, just forked, live through the signals that ask for a stop while its rank lives.

    Slurm sends them to every process of a step, but it is the rank that saves, and it may need its workers until then.
    It ends them by a SIGTERM of its own, which they know by its sender.
    """
    for number in signals:
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN, programs that the worker starts do not inherit it
    if signal.SIGTERM in signals:  # whose handler is torch's: it tells the rank from others, but ends by those
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # also in threads to come
        threading.Thread(target=_wait_for_rank, args=(os.getppid(),), name="distman-worker", daemon=True).start()


def _wait_for_rank(rank: int) -> None:
    found = None
    while os.getppid() == rank and (found is None or found.si_pid != rank):
        found = signal.sigtimedwait([signal.SIGTERM], timing.ORPHAN_EVERY)
    os._exit(os.EX_OK)  # as torch's own workers end by their rank's SIGTERM
