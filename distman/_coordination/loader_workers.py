"""The workers of data loaders: a stop concerns the rank, which still needs them; they end with it."""

from __future__ import annotations

import _thread
import functools
import multiprocessing.process
import multiprocessing.util
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from distman._process_state import puts_back
from distman._torch_internals import WORKER_NAME, prepare_workers

_PAUSE = 0.1  # seconds between two looks whether the rank is still there, once a signal has come

_undo: list[Callable[[], None]] = []


def protect_workers(signals: Sequence[int]) -> None:
    """Let the workers that loaders start from now on ignore signals, and end with this process.

    Schedulers send a signal to every process of a job. Other children of this process mean by it what they always did.

    Args:
        signals: The numbers of the signals.
    """
    unprotect_workers()
    _undo.append(prepare_workers(functools.partial(_ignore, tuple(signals))))
    _end_workers_at_exit(os.getpid())


@puts_back
def unprotect_workers() -> None:
    """Let workers that start from now on be what torch makes them."""
    while _undo:
        _undo.pop()()


def _ignore(signals: Sequence[int]) -> None:
    """Prepare this process, a worker."""
    for number in signals:
        signal.signal(number, functools.partial(_watch_parent, os.getppid()))
    Path("/proc/self/comm").write_text(WORKER_NAME)  # as torch does itself, but not every loader made after torch's


def _watch_parent(parent: int, _number: int, _frame: FrameType | None) -> None:
    """Handle a signal: it may end the parent, too, which an idle worker would notice after seconds only."""
    _thread.start_new_thread(_end_with, (parent,))  # threading takes a lock, which may be taken here already


def _end_with(parent: int) -> None:
    rank = multiprocessing.process.parent_process()  # whose child a server of forks may be in between
    while os.getppid() == parent and (rank is None or rank.is_alive()):
        time.sleep(_PAUSE)
    os._exit(0)


@functools.cache
def _end_workers_at_exit(pid: int) -> None:
    """Keep ``multiprocessing`` from waiting, at the end of a process, for workers that ignore its SIGTERM."""
    multiprocessing.util.Finalize(None, _end_workers, args=(pid,), exitpriority=0)


def _end_workers(pid: int) -> None:
    if os.getpid() != pid:
        return
    workers = [child for child in multiprocessing.process.active_children() if _is_worker(child.pid)]
    if workers and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise that a worker was killed
    for child in workers:
        child.kill()


def _is_worker(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == WORKER_NAME
    except OSError:  # it has just ended
        return False
