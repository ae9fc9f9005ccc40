"""Supervisor, fork server and workers as seen from the program."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TypeVar

from distman._base import timing
from distman._base.interpreter import environment, options as own_options, program
from distman._base.text import printable_lines
from distman._workers.fork_server import NUMBER, SHOW_STACKS
from distman._workers.output import append_only, read_output
from distman._workers.sockets import is_readable, socket_pair

W = TypeVar("W")

# The interpreter ends at once: to take torch apart, half a second, is of no use to anyone.
_PROGRAM = """
import json, os
from distman._workers.fork_server import main
main(*json.loads(sys.argv[1]))
os._exit(0)
"""


class WorkerStartError(RuntimeError):
    """A worker, or the server that should fork it, did not start."""


class ServerProcess:
    """The supervisor and its fork server, started in a new interpreter."""

    # ``entry`` is explained in the package's docstring; it takes ``options``, which JSON must be able to hold.
    # ``output`` takes what supervisor, server and workers write, and is closed with the server; None is where the
    # program writes.
    def __init__(
        self,
        entry: str,
        options: Sequence[object] = (),
        *,
        environ: Mapping[str, str] | None = None,
        output: IO[bytes] | None = None,
    ) -> None:
        self.control, theirs = socket_pair()  # for the server's requests
        self._output = output
        arguments = json.dumps([theirs.fileno(), os.getpid(), entry, options])
        with theirs:
            self.supervisor = subprocess.Popen(
                [sys.executable, *own_options(), *program(_PROGRAM), arguments],
                env=environment(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def has_ended(self) -> bool:
        """Whether the server is gone, and its workers with it."""
        return is_readable(self.control)

    def read_output(self) -> str:
        """Return what supervisor and server wrote, empty if that went to the program's own streams."""
        return printable_lines(read_output(self._output.fileno()), indent="") if self._output is not None else ""

    def close(self) -> None:
        """End the server and its workers, and wait until they are gone."""
        with contextlib.suppress(OSError):  # it has ended already
            self.control.shutdown(socket.SHUT_WR)
        if not is_readable(self.control, seconds=timing.SERVERS_END):
            self.supervisor.kill()
        self.control.close()
        self.supervisor.wait()
        if self._output is not None:
            self._output.close()


class ResidentServer:
    """A server that is started when it is needed, and replaced when it was killed; threads may share it."""

    def __init__(self, start: Callable[[], ServerProcess]) -> None:
        self._start = start
        self._lock = threading.RLock()
        self.process: ServerProcess | None = None

    def open(self) -> ServerProcess:
        """Return the server; start one if none is running."""
        with self._lock:
            if self.process is not None and self.process.has_ended:
                self.close()
            if self.process is None:
                self.process = self._start()
            return self.process

    def start_worker(self, make: Callable[[ServerProcess], W]) -> W:
        with self._lock:
            is_new = self.process is None
            try:
                return make(self.open())
            except WorkerStartError:
                if is_new:
                    raise
            # The server was killed a moment ago, and its sockets close one after the other.
            self.close()
            return make(self.open())

    def close(self) -> None:
        """End the server and its workers, and wait until they are gone; a second call does nothing."""
        with self._lock:
            server, self.process = self.process, None
            if server is not None:
                server.close()


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
                self._stacks = os.memfd_create("distman-stacks")
                append_only(self._stacks)
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

    def close(self) -> None:
        """Close this side's ends, which ends the worker; a second call does nothing."""
        self.life.close()
        if self._stacks >= 0:
            os.close(self._stacks)
            self._stacks = -1
