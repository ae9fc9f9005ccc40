"""Interpreters that have imported torch already: `bin/python`, which a launcher starts in the place of ``python``.

Importing torch takes two seconds of a core, and the tests of launchers start thousands of processes. So one process for
each process of pytest (`server`) imports torch, and forks for whoever asks. What a launcher starts is `bin/python`: it
hands arguments, environment, folder, namespaces and open files to a fork, passes signals on, and ends as the fork ends.
The fork is another process than the one that the launcher started, and its parent is the server: where that matters
(who is killed by whom, process ids, parents, groups of processes), a test starts the interpreter.

What a test starts itself is the fork, without anything in between: see `Fork`.
"""

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

BIN = Path(__file__).parent / "bin"
PYTHON = BIN / "python"
SERVER = "TEST_DISTMAN_PRELOADED"  # its socket
START = """
import server
try:
    server.main()
except BaseException as error:  # of the program in the fork, however it ends
    server.hide_server(error)
    raise
"""
ROOM = 100_000  # bytes for the arguments, and for the environment, of a fork as /proc shows them


def server_variables() -> dict[str, str]:
    """Return what `PYTHON` needs; torchrun and distman run, if preloaded, then start preloaded ranks."""
    return {SERVER: _server().path, "PYTHON_EXEC": str(PYTHON)}


def variables() -> dict[str, str]:
    """Return what makes the commands ``python``, ``torchrun`` and ``distman`` preloaded too."""
    return {**server_variables(), "PATH": f"{BIN}:{Path(sys.executable).parent}:{os.environ['PATH']}"}


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Let `distman.run` start preloaded ranks from this process; whatever else starts the interpreter cannot."""
    for name, value in server_variables().items():
        patch.setenv(name, value)
    patch.setattr(sys, "executable", str(PYTHON))  # after the start of the server


def python_with(variables: Mapping[str, str]) -> Path:
    """Return a `PYTHON` that brings variables with it, to hosts to which its launcher hands none; set ones win."""
    defaults = {**server_variables(), **variables}
    exports = [f'export {name}="${{{name}-{value}}}"\n' for name, value in defaults.items()]
    folder = Path(tempfile.mkdtemp(dir=Path(_server().path).parent))
    folder.chmod(0o755)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\n{"".join(exports)}exec {PYTHON} "$@"\n')
    python.chmod(0o755)
    return python


class Fork:
    """A preloaded interpreter that this process starts; to be used as a `subprocess.Popen`."""

    def __init__(
        self, arguments: Sequence[str], env: Mapping[str, str], cwd: Path | None, files: Sequence[int]
    ) -> None:
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(_server().path)
        folder = str(cwd or Path.cwd())
        request = {"arguments": arguments, "environment": dict(env), "folder": folder, "files": [0, 1, 2]}
        message = json.dumps(request).encode()
        socket.send_fds(self._connection, [len(message).to_bytes(8, "big")], files)
        self._connection.sendall(message)
        self._answers = self._connection.makefile("r")
        self.pid = int(self._answers.readline())

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        """Return the exit code when the process has ended."""
        if self.returncode is None:
            self.returncode = int(self._answers.readline())
            self._answers.close()
            self._connection.close()
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, 15)

    def kill(self) -> None:
        """Send SIGKILL."""
        if self.poll() is None:
            os.kill(self.pid, 9)


class Server:
    """The process that has imported torch; it ends when this one does."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="distman-preloaded-")
        Path(self._folder.name).chmod(0o755)
        self.path = f"{self._folder.name}/socket"
        padding = "x" * ROOM
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.path)
            listener.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, str(listener.fileno()), padding],
                cwd=Path(__file__).parent,
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env={**kept, "OMP_NUM_THREADS": "1", "PADDING": padding},
                start_new_session=True,
            )
        atexit.register(self._end)

    def _end(self) -> None:
        self._process.communicate()  # the end of its standard input is its end
        self._folder.cleanup()


@cache
def _server() -> Server:
    return Server()
