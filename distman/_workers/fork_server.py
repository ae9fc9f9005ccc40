"""The process that forks the workers and tells the program how each of them ended.

It has one thread and touches no accelerator, so that its forks are sound whatever the program does. A request is a
JSON object, the worker's settings, with the worker's file descriptors. The first descriptor is a socket that stands for
the worker's life: over it the server sends the process id and later the exit code, and the program asks for the
worker's stacks, or for its end by shutting it down.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from distman._base import timing
from distman._base.process_tree import adopt_orphans, end_descendants, end_with_parent
from distman._workers.output import whole_process
from distman._workers.sockets import receive_with_descriptors

# What a worker calls with its settings and its file descriptors; the first of these is for its stacks.
Work = Callable[[dict[str, Any], Sequence[int]], None]

NUMBER = struct.Struct("<q")  # a process id, or an exit code
SHOW_STACKS = b"show stacks"
# Of the real-time signals, which no library claims; two below the last one, which some debuggers take.
STACK_SIGNAL = int(signal.SIGRTMAX) - 2
_REQUEST_BYTES = 4096  # settings are a handful of numbers and names
_MOST_DESCRIPTORS = 8


class _ForkServer:
    def __init__(self, control: socket.socket, work: Work) -> None:
        self._control = control
        self._work = work
        self._lives: dict[int, socket.socket] = {}
        self._wake, self._waker = socket.socketpair()
        self._wake.settimeout(0)
        self._waker.settimeout(0)
        self._selector = selectors.DefaultSelector()

    def serve(self, supervisor: int) -> None:
        """Fork a worker for every request until the program closes the control socket or the supervisor is gone."""
        gc.freeze()  # a collection in a worker would write to, and so copy, every page that it shares with the server
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
        """Do what the program asks for within a while; False if it closed the control socket."""
        for key, _ in self._selector.select(timing.WORKER_POLL):
            if key.fileobj is self._control:
                if not self._start_worker():
                    return False
            elif key.data in self._lives:
                self._obey(key.data)
        return True

    def _start_worker(self) -> bool:
        """Fork one worker; False if the program closed the control socket."""
        try:
            request, descriptors = receive_with_descriptors(self._control, _REQUEST_BYTES, _MOST_DESCRIPTORS)
        except ConnectionResetError:
            return False
        if not request:
            return False
        life, *others = descriptors
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            with whole_process():
                os.close(life)
                os.setpgid(0, 0)
                if end_with_parent(signal.SIGKILL, server):
                    self._shed()
                    self._work(json.loads(request), others)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or done it itself
            os.setpgid(pid, pid)
        for descriptor in others:
            os.close(descriptor)
        self._lives[pid] = socket.socket(fileno=life)
        self._selector.register(life, selectors.EVENT_READ, pid)
        self._tell(pid, pid)
        return True

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
            wish = self._lives[pid].recv(len(SHOW_STACKS))
        except ConnectionResetError:
            wish = b""
        if wish == SHOW_STACKS:
            os.kill(pid, STACK_SIGNAL)
            return
        self._selector.unregister(self._lives[pid])
        _end_group(pid)

    def _reap(self) -> None:
        """Wait for the children that have ended."""
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                self._wait_for(ended.si_pid)

    def _wait_for(self, pid: int) -> None:
        """Wait for one that has ended; what a worker started ends with it."""
        if pid in self._lives:
            _end_group(pid)
        _, status = os.waitpid(pid, 0)
        if pid not in self._lives:
            return
        self._tell(pid, os.waitstatus_to_exitcode(status))
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._lives[pid])
        self._lives.pop(pid).close()

    def _tell(self, pid: int, number: int) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._lives[pid].send(NUMBER.pack(number))


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def main(control: int, program: int, entry: str, options: Sequence[object]) -> None:
    """Start the fork server, and wait until it has ended or the program is gone."""
    # The caller has one thread, and ends when this returns. The entry is imported here, since a fork ends the threads
    # that an import may start.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    module, _, name = entry.partition(":")
    prepare: Callable[..., AbstractContextManager[Work]] = getattr(importlib.import_module(module), name)
    adopt_orphans()
    supervisor = os.getpid()
    server = os.fork()
    if server == 0:
        with whole_process():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            adopt_orphans()
            with prepare(*options) as work:
                try:
                    with socket.socket(fileno=control) as connection:
                        _ForkServer(connection, work).serve(supervisor)
                finally:
                    end_descendants()
    os.close(control)
    while (is_running := _is_running(server)) and os.getppid() == program:
        signal.sigtimedwait({signal.SIGCHLD}, timing.WORKER_POLL)
    if is_running:  # the server too notices that the program is gone, and removes what it has made
        signal.sigtimedwait({signal.SIGCHLD}, timing.SERVER_END)
    end_descendants()


def _is_running(server: int) -> bool:
    """Wait for all children that have ended; False if the server is one of them."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)) is not None:
        if ended.si_pid == server:
            return False
    return True
