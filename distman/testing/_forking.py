"""The pytest process's side of the fork server, and one worker as seen from there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

_SHOWN_BYTES = 100_000
_START_SECONDS = 120.0
_CLOSE_SECONDS = 5.0
_PROGRAM = """
import json, sys
search_path, *arguments = json.loads(sys.argv[1])
sys.path[:] = search_path
from distman.testing._server import main
main(*arguments)
"""


class WorkersUnavailableError(RuntimeError):
    """No workers can be started."""


def _open_capture() -> IO[bytes]:
    """Return a file without a name, to which a worker appends."""
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed with its worker
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_RDWR | os.O_APPEND)
    return file


@dataclass
class WorkerProcess:
    """A worker: its connection, and the files that keep what it writes even when it dies.

    Attributes:
        pid: Process id; also the id of its process group.
        connection: Tasks go there, outcomes come back.
        exit_code: None while it lives; then its exit code, or minus the number of the signal that ended it.
        is_ready: Whether it said that it waits for tasks.
        was_killed: Whether it must not get another task.
    """

    pid: int
    connection: Connection[object, object]
    stdout: IO[bytes] = field(default_factory=_open_capture)
    stderr: IO[bytes] = field(default_factory=_open_capture)
    stacks: IO[bytes] = field(default_factory=_open_capture)
    exit_code: int | None = None
    is_ready: bool = False
    was_killed: bool = False

    def forget_output(self) -> None:
        """Empty the files before a new test."""
        for file in (self.stdout, self.stderr, self.stacks):
            os.ftruncate(file.fileno(), 0)

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it lives."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process and those that it started."""
        self.was_killed = True
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close this side's ends."""
        self.connection.close()
        for file in (self.stdout, self.stderr, self.stacks):
            file.close()


def read_capture(file: IO[bytes]) -> str:
    """Return what a worker wrote to one of its files; of very much, the end."""
    size = os.fstat(file.fileno()).st_size
    skipped = max(0, size - _SHOWN_BYTES)
    text = os.pread(file.fileno(), size - skipped, skipped).decode(errors="backslashreplace")
    return f"[{skipped} bytes before this are left out]\n{text}" if skipped else text


class ForkServer:
    """Starts workers, and hears of their ends.

    Args:
        environ: Environment variables of the server and of new workers.
        verbosity: pytest's ``-v`` count.
    """

    def __init__(self, environ: dict[str, str], verbosity: int) -> None:
        self.store_directory = Path(tempfile.mkdtemp(prefix="distman-testing-"))
        self._log = _open_capture()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_START_SECONDS)
        self._workers: dict[int, WorkerProcess] = {}
        self.has_ended = False
        arguments = [sys.path, theirs.fileno(), os.getpid(), str(self.store_directory), verbosity]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _PROGRAM, json.dumps(arguments)],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def fileno(self) -> int:
        """Return a file descriptor that is readable when ``hear`` has something to note."""
        return self._control.fileno()

    def fork(self) -> WorkerProcess:
        """Start a worker; it says ``Ready`` over its connection.

        Blocks until the server has forked it.

        Raises:
            WorkersUnavailableError: The server has ended.
        """
        ours, theirs = socket.socketpair()
        worker = WorkerProcess(0, Connection(ours.detach()))
        with theirs:
            files = (worker.stdout, worker.stderr, worker.stacks)
            descriptors = [theirs.fileno(), *(file.fileno() for file in files)]
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._control, [b"fork"], descriptors)
            while worker.pid == 0 and not self.has_ended:
                self._take_message(worker)
        if self.has_ended:
            worker.close()
            raise WorkersUnavailableError(
                f"The process that forks the workers of @ranks ended. It wrote:\n{self.log()}"
            )
        return worker

    def hear(self) -> None:
        """Note one message about an ended worker, which sets its ``exit_code``.

        Blocks if there is none.
        """
        self._take_message(None)

    def _take_message(self, starting: WorkerProcess | None) -> None:
        data = self._receive()
        if not data:
            self._note_end()
            return
        message: dict[str, int] = json.loads(data)
        if "started" in message and starting is not None:
            starting.pid = message["started"]
            self._workers[starting.pid] = starting
        elif "ended" in message:
            self._workers.pop(message["ended"]).exit_code = message["status"]

    def _receive(self) -> bytes:
        try:
            return self._control.recv(4096)
        except ConnectionResetError:
            return b""

    def _note_end(self) -> None:
        """Without the server its workers are gone too: the kernel ends them."""
        self.has_ended = True
        for worker in self._workers.values():
            worker.exit_code = -signal.SIGKILL
        self._workers.clear()

    def log(self) -> str:
        """Return what the server itself wrote."""
        return read_capture(self._log)

    def close(self) -> None:
        """End the server and all workers.

        Blocks until the server is gone.
        """
        for worker in self._workers.values():
            worker.kill()
        self._control.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        shutil.rmtree(self.store_directory, ignore_errors=True)
