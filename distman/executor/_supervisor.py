"""The process between the program and the server, which sees to it that nothing of an executor outlives either.

A process whose parent has ended becomes a child of the nearest ancestor that asked for such orphans. Server and keeper
both do, and each ends its descendants when the other, or the program, is gone: only who kills both by force at once can
leave behind what a worker started. The workers themselves end with the server in any case.
"""

from __future__ import annotations

import ctypes
import os
import signal
import traceback
from pathlib import Path
from typing import NoReturn

from distman.executor._server import serve_requests

_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.5


def main(control: int, program: int) -> None:
    """Start the server, and wait until it has ended or the program is gone.

    Blocks. The caller has one thread, and ends when this returns.

    Args:
        control: File descriptor on which the server gets its requests.
        program: Process id of the program.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    _adopt_orphans()
    supervisor = os.getpid()
    server = os.fork()
    if server == 0:
        _become_server(control, supervisor)
    os.close(control)
    while os.getppid() == program and _is_running(server):
        signal.sigtimedwait({signal.SIGCHLD}, _POLL_SECONDS)
    _end_descendants()


def _become_server(control: int, supervisor: int) -> NoReturn:
    exit_code = 1
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        _adopt_orphans()
        try:
            serve_requests(control, supervisor)
        finally:
            _end_descendants()
        exit_code = 0
    finally:
        if exit_code:
            traceback.print_exc()
        os._exit(exit_code)


def _adopt_orphans() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _is_running(server: int) -> bool:
    """Wait for all children that have ended; False if the server is one of them."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)) is not None:
        if ended.si_pid == server:
            return False
    return True


def _end_descendants() -> None:
    """End the children, then their children, which have become ours, then the children of those."""
    while True:
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    """Return the children of this process, among them those that have ended and are not waited for."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
