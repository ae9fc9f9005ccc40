"""The process that forks the workers and tells the program how each of them ended.

It has one thread and touches no accelerator, so that its forks are sound whatever the program does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import struct
import traceback
from typing import NoReturn

from distman.executor._channel import receive_descriptors
from distman.executor._worker import STACK_SIGNAL, Settings, serve

PID = struct.Struct("<q")
STATUS = struct.Struct("<q")
SHOW_STACKS = b"show stacks"
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.5


def serve_requests(control: int, supervisor: int) -> None:
    """Fork a worker for every request until the program closes the control line or the keeper is gone.

    Blocks. The workers and what they started are left to the caller.

    Args:
        control: File descriptor of the control line.
        supervisor: Process id of the keeper.
    """
    gc.freeze()
    with socket.socket(fileno=control) as line:
        _Server(line).serve(supervisor)


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._lives: dict[int, socket.socket] = {}
        self._wake, self._waker = socket.socketpair()
        self._wake.settimeout(0)
        self._waker.settimeout(0)
        self._selector = selectors.DefaultSelector()

    def serve(self, supervisor: int) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        try:
            while os.getppid() == supervisor and self._attend():
                self._reap()
        finally:
            signal.set_wakeup_fd(-1)

    def _attend(self) -> bool:
        """Do what the program asks for within a while; False if it closed the line."""
        for key, _ in self._selector.select(_POLL_SECONDS):
            if key.fileobj is self._control:
                if not self._answer():
                    return False
            elif key.data in self._lives:
                self._obey(key.data)
        return True

    def _answer(self) -> bool:
        """Fork one worker; False if the program closed the line."""
        try:
            message, descriptors = receive_descriptors(self._control, 4096, 3)
        except ConnectionResetError:
            return False
        if not message:
            return False
        line, life, stacks = descriptors
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(life)
            self._become_worker(line, stacks, Settings(**json.loads(message)), server)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)
        os.close(line)
        os.close(stacks)
        self._lives[pid] = socket.socket(fileno=life)
        self._selector.register(life, selectors.EVENT_READ, pid)
        self._tell(pid, PID.pack(pid))
        return True

    def _become_worker(self, line: int, stacks: int, settings: Settings, server: int) -> NoReturn:
        exit_code = 1
        try:
            os.setpgid(0, 0)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == server:
                self._shed()
                with socket.socket(fileno=line) as connection, contextlib.suppress(ConnectionError):
                    serve(connection, stacks, settings)
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
        self._selector.close()
        for end in (self._control, self._wake, self._waker, *self._lives.values()):
            end.close()
        self._lives.clear()

    def _obey(self, pid: int) -> None:
        """Do what the program wants of a worker: its stacks, or its end."""
        try:
            wish = self._lives[pid].recv(64)
        except ConnectionResetError:
            wish = b""
        if wish == SHOW_STACKS:
            os.kill(pid, STACK_SIGNAL)
            return
        self._selector.unregister(self._lives[pid])
        _end_group(pid)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                self._bury(ended.si_pid)

    def _bury(self, pid: int) -> None:
        """Wait for an ended child; with a worker ends what it started."""
        if pid in self._lives:
            _end_group(pid)
        _, status = os.waitpid(pid, 0)
        if pid not in self._lives:
            return
        self._tell(pid, STATUS.pack(os.waitstatus_to_exitcode(status)))
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._lives[pid])
        self._lives.pop(pid).close()

    def _tell(self, pid: int, message: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._lives[pid].send(message)


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
