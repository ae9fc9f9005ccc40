"""A worker as seen from the program."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Mapping

from distman._base import timing
from distman._workers.fork_server import NUMBER, SHOW_STACKS
from distman._workers.output import open_stacks, read_output
from distman._workers.server_process import ServerProcess, WorkerStartError
from distman._workers.sockets import is_readable, socket_pair


class WorkerProcess:
    def __init__(self, server: ServerProcess, settings: Mapping[str, object], *descriptors: int) -> None:
        self.pid = 0
        # None while it lives, or if its server was killed; minus the number of a signal that ended it
        self.exit_code: int | None = None
        self._has_ended = False
        self._stacks = -1
        self.life, life = socket_pair()  # readable when the worker has ended
        try:
            with life, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._stacks = open_stacks()
                sent = [life.fileno(), self._stacks, *descriptors]
                socket.send_fds(server.control, [json.dumps(settings).encode()], sent)
            self._await_start(server)
        except BaseException:
            self.close()
            raise

    def _await_start(self, server: ServerProcess) -> None:
        if not is_readable(self.life, seconds=timing.WORKER_START):
            raise WorkerStartError(
                f"No worker started within {timing.WORKER_START:g} s.\n{server.read_output()}".rstrip()
            )
        pid = self._receive()
        if pid is None:
            raise WorkerStartError(f"The process that forks the workers ended.\n{server.read_output()}".rstrip())
        self.pid = pid

    def _receive(self) -> int | None:
        """Return the next number of the server, None if it was killed."""
        with contextlib.suppress(ConnectionResetError):
            if data := self.life.recv(NUMBER.size):
                return int(NUMBER.unpack(data)[0])
        return None

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Return whether it ends within that time; ``exit_code`` then says how."""
        if not self._has_ended and is_readable(self.life, seconds=seconds):
            self._has_ended = True
            self.exit_code = self._receive()
        return self._has_ended

    def request_stacks(self) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.life.send(SHOW_STACKS)

    def read_stacks(self) -> str:
        return read_output(self._stacks)

    def forget_stacks(self) -> None:
        os.ftruncate(self._stacks, 0)

    def kill(self) -> None:
        """Have it ended, with the processes that it started."""
        with contextlib.suppress(OSError):  # it has ended already
            self.life.shutdown(socket.SHUT_WR)

    def kill_here(self) -> None:
        """Kill it and what is in its process group without its server, which has not done it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close this side's ends, which ends the worker; a second call does nothing."""
        self.life.close()
        if self._stacks >= 0:
            os.close(self._stacks)
            self._stacks = -1
