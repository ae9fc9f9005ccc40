"""How keeper and server come to be: forked from the program where that is sound, else started afresh.

A fork is sound if the program has a single thread and no driver open, which the kernel says. No other thread can then
have held a lock that nobody opens in the copy. A fresh start imports torch again, which takes a second or two.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

from distman.executor import _supervisor
from distman.executor._channel import open_line

_CLOSE_SECONDS = 5.0
_PROGRAM = """
import json, sys
search_path, *arguments = json.loads(sys.argv[1])
sys.path[:] = search_path
from distman.executor._supervisor import main
main(*arguments)
"""
_HARMLESS = re.compile(r"/dev/(null|zero|full|u?random|tty|console|ptmx|pts/\d+|shm/.*)")
_GO = b"go"
_OMP_PAUSE_SOFT = 1


class ServerProcess:
    """The server and its keeper as seen from the program.

    Args:
        needs_driver: Whether its workers compute on an accelerator.

    Attributes:
        control: The server's requests go there; readable when the server has ended.
        was_forked: Whether the two are forks of the program.
        pid: Process id of the keeper.
    """

    def __init__(self, *, needs_driver: bool) -> None:
        self.control, theirs = open_line()
        with theirs:
            started = None if needs_driver or not may_fork() else _fork(theirs)
            self.was_forked = started is not None
            self.pid, self._wait = started or _spawn(theirs)

    @property
    def has_ended(self) -> bool:
        """Whether it is gone, and its workers with it."""
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        """End the server and its workers.

        Blocks until they are gone.
        """
        with contextlib.suppress(OSError):  # it has ended already
            self.control.shutdown(socket.SHUT_WR)
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        if not poller.poll(_CLOSE_SECONDS * 1000):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.control.close()
        self._wait()


def may_fork() -> bool:
    """Return whether nothing in this process but perhaps idle threads of OpenMP and BLAS speaks against a fork."""
    return threading.active_count() == 1 and "mpi4py.MPI" not in sys.modules and not _open_drivers()


def _open_drivers() -> list[str]:
    """Return the device files that this process has open: drivers of accelerators and networks forbid a fork."""
    targets = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - the listing's own descriptor is gone by then
        with contextlib.suppress(OSError):
            targets.append(str(Path("/proc/self/fd", name).readlink()))
    return [target for target in targets if target.startswith("/dev/") and not _HARMLESS.fullmatch(target)]


def _fork(control: socket.socket) -> tuple[int, Callable[[], None]] | None:
    """Fork the keeper; None if there turn out to be other threads."""
    _end_idle_threads()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            stream.flush()
    ctypes.CDLL(None).fflush(None)
    gate, opener = open_line()
    program = os.getpid()
    # The modes that the program is in belong to its thread, and must not be those of the workers.
    with gate, opener, torch.inference_mode(mode=False), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, about the threads counted below
        pid = os.fork()
        if pid == 0:
            opener.close()
            _become_supervisor(gate, control, program)
        if _count_threads() == 1:
            opener.send(_GO)
            return pid, lambda: _wait_for(pid)
        os.kill(pid, signal.SIGKILL)
        _wait_for(pid)
    return None


def _end_idle_threads() -> None:
    """Let the OpenMP libraries end the threads they keep for the next parallel loop, where they know how to."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    for library in {line.split()[-1] for line in maps.splitlines() if re.search(r"/lib(g|i)?omp5?[-.]", line)}:
        pause = getattr(ctypes.CDLL(library), "omp_pause_resource_all", None)
        if pause is not None:
            pause(_OMP_PAUSE_SOFT)


def _count_threads() -> int:
    """Return the number of threads of this process; just after a fork, BLAS has ended its own."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - names only


def _become_supervisor(gate: socket.socket, control: socket.socket, program: int) -> NoReturn:
    exit_code = 1
    try:
        if gate.recv(len(_GO)) == _GO:
            os.setsid()
            _forget_program(control.fileno())
            _supervisor.main(control.detach(), program)
        exit_code = 0
    finally:
        if exit_code:
            traceback.print_exc()
        os._exit(exit_code)


def _forget_program(control: int) -> None:
    """Give back in the copy what belongs to the program: its files, streams, signal handlers and modes."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names only
        descriptor = int(name)
        # The numbers stay taken: objects of the program may still close them.
        if descriptor > 2 and descriptor not in (control, null):
            with contextlib.suppress(OSError):
                os.fstat(descriptor)
                os.dup2(null, descriptor, inheritable=False)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - it stays open, as the next two
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    torch.set_default_device(None)


def _spawn(control: socket.socket) -> tuple[int, Callable[[], None]]:
    arguments = [[path for path in sys.path if isinstance(path, str)], control.fileno(), os.getpid()]
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, json.dumps(arguments)],
        stdin=subprocess.DEVNULL,
        pass_fds=[control.fileno()],
        start_new_session=True,
    )

    def wait() -> None:
        process.wait()

    return process.pid, wait


def _wait_for(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # a signal handler of the program may have waited for it
        os.waitpid(pid, 0)
