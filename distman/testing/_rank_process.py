"""One worker of the test kit as seen from the pytest process."""

from __future__ import annotations

import os
import socket
import tempfile
from multiprocessing.connection import Connection
from typing import IO

from distman._workers.output import append_only, read_output
from distman._workers.server_process import ServerProcess
from distman._workers.worker_process import WorkerProcess


class RankProcess(WorkerProcess):
    """A worker process that runs one rank of a test after another; one that was killed must not get another task."""

    def __init__(self, server: ServerProcess) -> None:
        ours, theirs = socket.socketpair()
        self.connection: Connection[object, object] = Connection(ours.detach())
        self._stdout, self._stderr = open_log(), open_log()
        self.was_killed = False
        with theirs:
            super().__init__(server, {}, theirs.fileno(), self._stdout.fileno(), self._stderr.fileno())

    @property
    def stdout(self) -> str:
        """What it wrote to standard output since ``forget_output``."""
        return read_output(self._stdout.fileno())

    @property
    def stderr(self) -> str:
        return read_output(self._stderr.fileno())

    def forget_output(self) -> None:
        self.forget_stacks()
        for file in (self._stdout, self._stderr):
            os.ftruncate(file.fileno(), 0)

    def kill(self) -> None:
        """Have it ended, with the processes that it started."""
        self.was_killed = True
        super().kill()

    def close(self) -> None:
        super().close()
        self.connection.close()
        self._stdout.close()
        self._stderr.close()


def open_log() -> IO[bytes]:
    """Return a file without a name, to which processes append; on disk, since tests may write much."""
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed with its process
    append_only(file.fileno())
    return file
