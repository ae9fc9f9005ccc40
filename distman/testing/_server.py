"""The process from which workers are forked: torch is loaded once, and a new worker is there in an instant.

It is a process of its own, not ``multiprocessing``'s fork server: that one is shared with the tests
themselves, and runs the main script again in every child. It ends when the pytest process does, however that
happens, and takes all workers and the processes that those started with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import traceback
from multiprocessing.connection import Connection
from typing import NoReturn

PRELOADED = ("numpy", "cloudpickle", "torch.distributed", "distman.manager", "distman.testing._worker")
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.5


def main(control: int, parent: int, store_directory: str, verbosity: int) -> None:
    """Fork a worker for every request until the pytest process closes the control socket or is gone.

    Blocks.

    Args:
        control: File descriptor of the control socket.
        parent: Process id of the pytest process.
        store_directory: The directory of the stores, removed at the end.
        verbosity: pytest's ``-v`` count.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in PRELOADED:
        # What is missing or broken is reported by the tests that need it.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    from distman.testing._tracebacks import explained_assertions

    gc.freeze()
    with explained_assertions(verbosity), socket.socket(fileno=control) as connection:
        server = _Server(connection)
        try:
            server.serve(parent)
        finally:
            server.end_all()
            shutil.rmtree(store_directory, ignore_errors=True)


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: set[int] = set()
        self._wake, self._waker = socket.socketpair()
        self._wake.settimeout(0)
        self._waker.settimeout(0)

    def serve(self, parent: int) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while os.getppid() == parent:
                ready = [key.fileobj for key, _ in selector.select(_POLL_SECONDS)]
                if self._control in ready and not self._answer():
                    return
                self._report_ended()

    def _answer(self) -> bool:
        """Fork one worker; False if the pytest process closed the socket."""
        message, descriptors, _, _ = socket.recv_fds(self._control, 64, 4)
        if not message:
            return False
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(descriptors, server)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)
        self._children.add(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        self._send({"started": pid})
        return True

    def _become_worker(self, descriptors: list[int], server: int) -> NoReturn:
        exit_code = 1
        try:
            os.setpgid(0, 0)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == server:
                self._shed()
                _work(*descriptors)
            exit_code = 0
        finally:
            if exit_code:
                traceback.print_exc()
            os._exit(exit_code)

    def _shed(self) -> None:
        """Close and reset in a new worker what belongs to the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for end in (self._control, self._wake, self._waker):
            end.close()

    def _report_ended(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        for pid in list(self._children):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self._children.remove(pid)
                self._send({"ended": pid, "status": _end_group(pid)})

    def _send(self, message: dict[str, int]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._control.send(json.dumps(message).encode())

    def end_all(self) -> None:
        for pid in self._children:
            _end_group(pid)


def _end_group(pid: int) -> int:
    """End a worker and all that it started, and return its exit code or minus the number of its signal."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _work(connection: int, stdout: int, stderr: int, stacks: int) -> None:
    from distman.testing._worker import serve

    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    serve(Connection(connection), stacks)
