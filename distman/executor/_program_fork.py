"""A fork server that is a fork of the program itself, where that is sound.

It is sound if the program has a single thread and no driver open, which the kernel says. No other thread can then have
held a lock that is never released in the copy. A new interpreter would import torch again, which takes a second or two.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

import torch

from distman._workers import supervisor
from distman._workers.output import flush_output
from distman._workers.server_process import ServerProcess
from distman._workers.sockets import socket_pair
from distman.manager import DistributedManager

_HARMLESS = re.compile(r"/dev/(null|zero|full|u?random|tty|console|ptmx|pts/\d+|shm/.*)")
_GO = b"go"
_OMP_PAUSE_SOFT = 1  # of omp.h


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


def fork_server(entry: str) -> ServerProcess | None:
    """Fork supervisor and server from the program; None if there turn out to be other threads."""
    _end_idle_threads()
    flush_output()
    control, theirs = socket_pair()
    gate, opener = socket_pair()
    program = os.getpid()
    # The modes that the program is in belong to its thread, and must not be those of the workers.
    with theirs, gate, opener, torch.inference_mode(mode=False), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, about the threads counted below
        pid = os.fork()
        if pid == 0:
            opener.close()
            _become_supervisor(gate.fileno(), theirs.detach(), program, entry)
        if _count_threads() == 1:
            opener.send(_GO)
            return ServerProcess(control, pid, lambda: _wait_for(pid))
        os.kill(pid, signal.SIGKILL)
        _wait_for(pid)
    control.close()
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


def _become_supervisor(gate: int, control: int, program: int, entry: str) -> NoReturn:
    exit_code = 1
    try:
        if os.read(gate, len(_GO)) == _GO:
            os.setsid()
            _forget_program(control)
            supervisor.main(control, program, entry, [])
        exit_code = 0
    finally:
        if exit_code:
            traceback.print_exc()
        os._exit(exit_code)


def _forget_program(control: int) -> None:
    """Give back in the copy what belongs to the program: its place in a job, files, streams, signal handlers, modes."""
    DistributedManager.cleanup()  # a worker asks its own manager, as it does in a new interpreter
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


def _wait_for(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # a signal handler of the program may have waited for it
        os.waitpid(pid, 0)
